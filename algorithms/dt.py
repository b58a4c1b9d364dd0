"""Decision Transformer: "Decision Transformer: Reinforcement Learning via Sequence Modeling" (Chen et al., 2021, arXiv 2106.01345)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offrl.actor import Actor
from offrl.algorithm import Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID
from offrl.data.samplers.transitions import Batch
from offrl.families.return_conditioned import TargetReturnSettings, fit_target_return
from offrl.families.sequence import SequenceModel, SequenceSettings, TargetReturnActor, masked_mean
from offrl.optim import Params
from offrl.registry import register


@dataclass
class DTConfig(TargetReturnSettings, SequenceSettings):
    """Settings of DT."""

    name: str = "dt"


@register("algo", "dt")
class DT(SequenceModel):
    """Imitate the data's actions given the last K steps and the return to go; act with a target return, less the rewards earned so far."""

    Config = DTConfig

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        return fit_target_return(super().fit_config(config, dataset, grid), dataset)

    def sizes(self) -> dict[str, int]:
        return {"return": 1, "observation": self.spec.observation_dim, "action": self.spec.encoded_action_dim}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        """(R_1, s_1, a_1, ..., R_K, s_K, a_K), the trajectory of section 3, R_t the return to go."""
        returns = batch[RETURNS] / self.config.return_scale
        return {"return": returns.unsqueeze(-1), "observation": batch["observations"], "action": self.spec.encode(batch["actions"])}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        """E |a_t - pi(R_1, s_1, a_1, ..., R_t, s_t)|^2, or -log pi(a_t | ...), the mean over all steps of the windows (algorithm 1)."""
        dist = self.apply("actor", actor, self.tokens(batch), batch[STEPS], batch[VALID], key)
        loss = masked_mean(self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        return self.descend(state, "actor", self.actor_loss, batch, key)

    def actor(self, state: TrainState) -> Actor:
        return TargetReturnActor(self, state)
