"""What both forms of ArCHer share: a critic of whole utterances above an actor that writes tokens (arXiv 2402.19446)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offrl.algorithm import TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.lm.algorithm import language_model
from offrl.lm.reference_policy import HeadSettings, head_of, ranged
from offrl.lm.sampler import DONE, IDS, KNOWN, NEXT, REWARD, VALID
from offrl.lm.utterances import EACH, CriticSettings, TurnAlgorithm, TurnCritic, action_of, first_of
from offrl.optim import Params
from offrl.settings.field import setting

QS, VS = ("q1", "q2"), ("v1", "v2")


@dataclass
class HierarchicalSettings(HeadSettings, CriticSettings):
    """Settings of both forms of ArCHer."""

    discount: float = setting(0.99, "discount factor, of each turn", low=0.0, high=1.0)
    polyak: float = setting(0.05, "rate at which the critic's target follows", low=0.0, high=1.0)


class Hierarchical(TurnAlgorithm):
    """A critic of whole utterances: two Qs and two Vs, with targets. Q_i -> r + discount (1 - d) Vbar_i(s')."""

    traits = replace(TurnAlgorithm.traits, targets=("critic",))
    rates: ClassVar[dict[str, tuple[float, float]]] = {"actor_learning_rate": (1e-5, 3e-4), "critic_learning_rate": (1e-4, 1e-3)}

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        return ranged(super().fit_config(config, dataset, grid), dataset)

    def modules(self) -> dict[str, nn.Module]:
        self.head = head_of(self.config)
        out = self.head.out_dim
        critic = TurnCritic(self.reader_lm(), dict.fromkeys(VS, out), dict.fromkeys(QS, out), self.config.value_layers)
        return {"policy": self.make_actor(), "critic": critic}

    def make_actor(self) -> nn.Module:
        """The actor, as it is built."""
        return language_model(self.config)

    def qs(self, critic: Params, batch: Batch, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(outputs of q1 and q2 [2, B, K] for a batch's states and actions, its states [B, D])."""
        if state is None:
            state = self.apply("critic", critic, "encode", batch[IDS], first_of(batch))
        action = self.apply("critic", critic, "encode", *action_of(batch))
        return torch.stack(self.apply("critic", critic, "judge", torch.cat([state, action], -1), *QS)), state

    def vs(self, critic: Params, state: Tensor) -> Tensor:
        """Outputs of v1 and v2 [2, B, K] for states [B, D]."""
        return torch.stack(self.apply("critic", critic, "judge", state, *VS))

    def target(self, state: TrainState, batch: Batch) -> Tensor:
        """r + discount (1 - d) Vbar_i(s') [2, B]."""
        bar = state.target["critic"]
        with torch.no_grad():
            later = self.apply("critic", bar, "encode", batch[NEXT + IDS], batch[NEXT + VALID].sum(-1))
            going = self.config.discount * (~batch[DONE]).float()
            return batch[REWARD] + going * self.head.mean(self.vs(bar, later))

    def bars(self, state: TrainState, batch: Batch) -> Tensor:
        """Qbar_i(s, a) [2, B]."""
        with torch.no_grad():
            return self.head.mean(self.qs(state.target["critic"], batch)[0])

    def advantage(self, state: TrainState, batch: Batch) -> Tensor:
        """min_i Q_i(s, a) - min_i V_i(s) [B]."""
        critic = state.params["critic"]
        with torch.no_grad():
            q, read = self.qs(critic, batch)
            return self.head.mean(q).amin(0) - self.head.mean(self.vs(critic, read)).amin(0)

    def q_loss(self, q: Tensor, state: TrainState, batch: Batch) -> Tensor:
        """Both Qs' distance to their targets, the mean over the turns whose target is known or not needed."""
        return (self.head.loss(q, self.target(state, batch)) * batch[KNOWN].float() * batch[EACH]).sum()
