"""ArCHer from data: "ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL" (Zhou et al., 2024, arXiv 2402.19446)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.lm.archer import Hierarchical, HierarchicalSettings
from offrl.lm.utterances import EACH, trim
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class ArCHerConfig(HierarchicalSettings):
    """Settings of offline ArCHer."""

    name: str = "archer"
    expectile: float = setting(0.9, "of V's fit to the targets of Q", low=0.5, high=1.0)
    temperature: float = setting(1.0, "inverse temperature of the actor's weights", low=0.0)
    largest_weight: float = setting(100.0, "cap of the actor's weights, which the authors' code does not have", low=0.0)
    critic_first: int = setting(0, "updates at the beginning in which the critic learns alone", low=0)


@register("algo", "archer")
class ArCHer(Hierarchical):
    """V_i is an expectile of Qbar_i at the data's action; the actor minimises -min(exp(temperature A), largest_weight) log pi(action), the
    whole utterance's, with A = min Q - min V (arXiv 2402.19446, section 4.3 and its offline form by the authors)."""

    Config = ArCHerConfig

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        q, read = self.qs(critic, batch)
        v, bar = self.vs(critic, read), self.bars(state, batch)
        fit = self.q_loss(q, state, batch)
        c, value, each = self.config, self.head.mean(v), batch[EACH]
        weight = torch.where(bar < value, 1.0 - c.expectile, c.expectile).detach()  # |expectile - 1[Qbar < V]|
        expectile = (weight * self.head.loss(v, bar) * each).sum()
        means = {"critic/q": (self.head.mean(q)[0] * each).sum(), "critic/v": (value[0] * each).sum()}
        return fit + expectile, {"critic/q_loss": fit, "critic/v_loss": expectile, **means}

    def actor_loss(self, policy: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        c, each = self.config, batch[EACH]
        advantage = self.advantage(state, batch)
        weight = (c.temperature * advantage).exp().clamp(max=c.largest_weight)
        likely = self.log_probs(policy, batch).sum(-1)
        loss = -(weight * likely * each).sum()
        means = {"actor/weight": weight, "actor/advantage": advantage, "actor/log_prob": likely}
        return loss, {"actor/loss": loss, **{name: (x * each).sum() for name, x in means.items()}}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        batch = trim(batch)
        state, metrics = self.descend(state, "critic", self.critic_loss, batch)
        state = self.polyak(state, "critic", self.config.polyak)
        if self.config.critic_first and int(state.step) < self.config.critic_first:
            return state, metrics
        state, more = self.descend(state, "policy", self.actor_loss, batch)
        return state, {**metrics, **more}
