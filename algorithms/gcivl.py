"""Goal-conditioned implicit V-learning: OGBench (arXiv 2410.20092, appendix C; from arXiv 2307.11949), after IQL (arXiv
2110.06169).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.data.samplers.goals import ACTOR_GOALS, VALUE_GOALS
from offrl.families.goal_conditioned import (
    GoalConditioned,
    GoalStepSettings,
    awr_loss,
    concatenate,
    expectile_td_loss,
    goal_target,
    make_values,
)
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class GCIVLConfig(GoalStepSettings):
    """Settings of GCIVL; the defaults are OGBench's."""

    name: str = "gcivl"
    expectile: float = setting(
        0.9, "0.5 values the data's policy, 1.0 the best that happened in the data", low=0.0, high=1.0
    )
    temperature: float = setting(10.0, "multiplies the advantage in the exponent; larger is greedier", low=0.0)


@register("algo", "gcivl")
class GCIVL(GoalConditioned[GCIVLConfig]):
    """V(s, g) of a reward of -1 until the goal is reached, by expectile regression on (s, s') alone; a policy by
    weighted imitation.

    V of the best that happened is too high where the dynamics are random. The policy's advantage is V(s', g) - V(s, g).
    """

    traits = replace(GoalConditioned.traits, targets=("value",))
    subgoal_kind = "state"

    def modules(self) -> dict[str, nn.Module]:
        return {
            "actor": self.make_actor(),
            "value": make_values(self.config, 2, self.spec.observation_dim + self.goal_dim),
        }

    def v(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """Twin values [2, B]."""
        return self.apply("value", value, concatenate(observations, goals)).squeeze(-1)

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """E |tau - 1(A < 0)| (r + gamma V'(s', g) - V(s, g))^2 of both V, A = r + gamma min V'(s', g) - mean V'(s,
        g).
        """
        c, target = self.config, state.target["value"]
        observations, goals = batch["observations"], batch[VALUE_GOALS]
        step = goal_target(c, batch)
        v, target_v = self.v(value, observations, goals), self.v(target, observations, goals)
        next_v = self.v(target, step.observations, goals)
        loss = expectile_td_loss(v, target_v, next_v, step, c.expectile)
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min(exp(temperature A), 100) log pi(a | s, g), A = V(s', g) - V(s, g)."""
        value, goals = state.params["value"], batch[ACTOR_GOALS]
        advantage = (
            self.v(value, batch["next_observations"], goals) - self.v(value, batch["observations"], goals)
        ).mean(0)
        return awr_loss(self.imitation(actor, batch)[1], advantage, self.config.temperature)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        after, actor = self.descend(state, "actor", self.actor_loss, batch)
        after, value = self.descend(after, "value", self.value_loss, batch)
        return self.move_targets(state, after, "value"), {**value, **actor}

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        return -self.v(state.params["value"], observations, goals).mean(0)
