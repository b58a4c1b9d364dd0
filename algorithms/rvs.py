"""RvS: "RvS: What is Essential for Offline RL via Supervised Learning?" (Emmons et al., 2021, arXiv 2112.10751),
conditioned on returns (RvS-R). With `condition=to_go` it is the plain return-conditioned supervised learning that
MBRCSL (arXiv 2310.19308) calls RCSL."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from offrl.algorithm import Actor, Batch, Loss, Params, Sampler, TrainState, Traits, Update
from offrl.data.samplers.goals import ACTOR_GOALS, GoalSampler, Mix
from offrl.data.samplers.sequences import RETURNS, STEPS
from offrl.families.goal_conditioned import GoalActor, concatenate
from offrl.families.return_conditioned import OutcomeConditioned, OutcomeSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class RvSConfig(OutcomeSettings):
    """Settings of RvS; the defaults are the authors' for D4RL's locomotion tasks, but for smaller batches (theirs:
    16,384).
    """

    name: str = "rvs"
    condition: str = setting(
        "average",
        "average: the return to go divided by the steps that are left until `max_length`, and when acting a constant; "
        "to_go: the return that is left, less with every reward (RCSL); goal: a later state of the trajectory (RvS-G)",
        choices=("average", "to_go", "goal"),
    )


@register("algo", "rvs")
class RvS(OutcomeConditioned[RvSConfig]):
    """Behaviour cloning whose network also sees the average reward of what came after, and when acting the target
    return; or a state that came after, uniform over the rest of the trajectory, and when acting the goal."""

    @classmethod
    def traits_for(cls, config: RvSConfig) -> Traits:
        return replace(cls.traits, goal_conditioned=config.condition == "goal")

    @property
    def outcome_dim(self) -> int:
        return (self.spec.goal_dim or self.spec.observation_dim) if self.config.condition == "goal" else 1

    def sampler(self) -> Sampler:
        return (
            GoalSampler(actor=Mix(0.0, 1.0, 0.0, geometric=False))
            if self.config.condition == "goal"
            else super().sampler()
        )

    def actor(self, state: TrainState) -> Actor:
        return GoalActor(self, state) if self.config.condition == "goal" else super().actor(state)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """-E log pi(a | s, w), w the outcome of (s, a) in the data: the return to go, its average over the steps left
        (RvS-R), or a later state (RvS-G)."""
        if self.config.condition == "goal":
            x = concatenate(batch["observations"], batch[ACTOR_GOALS])
        else:
            x = self.inputs(batch["observations"], self.outcome(batch[RETURNS], batch[STEPS]))
        loss = self.policy.bc_loss(self.apply("actor", actor, x, key), batch["actions"]).mean()
        return loss, {"actor/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        if self.config.condition != "goal":
            batch = {name: column[:, 0] for name, column in batch.items()}  # windows of one step
        return self.descend(state, "actor", self.actor_loss, batch, key)
