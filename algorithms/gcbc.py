"""Goal-conditioned behaviour cloning with hindsight goals (arXiv 1906.05838, 1912.06088), as in OGBench (arXiv
2410.20092).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.families.goal_conditioned import GoalConditioned, GoalSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class GCBCConfig(GoalSettings):
    """Settings of GCBC."""

    name: str = "gcbc"
    discount: float = setting(0.99, "with actor_geometric: of the distances of goals", high=1.0, shared=True)


@register("algo", "gcbc")
class GCBC(GoalConditioned[GCBCConfig]):
    """Minimise -log N(a; f(s, g), I), with g a later state of the trajectory. No trajectories are stitched together."""

    def modules(self) -> dict[str, nn.Module]:
        return {"actor": self.make_actor()}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """-E log pi(a | s, g)."""
        loss = -self.imitation(actor, batch)[1].mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "actor", self.actor_loss, batch)
