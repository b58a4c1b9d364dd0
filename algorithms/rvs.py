"""RvS: "RvS: What is Essential for Offline RL via Supervised Learning?" (Emmons et al., 2021, arXiv 2112.10751), conditioned on returns
(RvS-R). With `condition=to_go` it is the plain return-conditioned supervised learning that MBRCSL (arXiv 2310.19308) calls RCSL."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.sequences import RETURNS, STEPS
from offrl.data.samplers.transitions import Batch
from offrl.families.return_conditioned import OutcomeConditioned, OutcomeSettings
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class RvSConfig(OutcomeSettings):
    """Settings of RvS; the defaults are the authors' for D4RL's locomotion tasks, but for smaller batches (theirs: 16,384)."""

    name: str = "rvs"
    condition: str = setting(
        "average",
        "average: the return to go divided by the steps that are left until `max_length`, and when acting a constant; to_go: the return "
        "that is left, less with every reward (RCSL)",
        choices=("average", "to_go"),
    )


@register("algo", "rvs")
class RvS(OutcomeConditioned):
    """Behaviour cloning whose network also sees the average reward of what came after, and when acting the target return."""

    Config = RvSConfig

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        """-E log pi(a | s, w), w the outcome of (s, a) in the data: the return to go, or its average over the steps left (RvS-R)."""
        x = self.inputs(batch["observations"], self.outcome(batch[RETURNS], batch[STEPS]))
        loss = self.policy.bc_loss(self.apply("actor", actor, x, key), batch["actions"]).mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        steps = {name: column[:, 0] for name, column in batch.items()}  # windows of one step
        return self.descend(state, "actor", self.actor_loss, steps, key)
