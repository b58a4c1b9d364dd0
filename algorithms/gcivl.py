"""Goal-conditioned implicit V-learning: OGBench (arXiv 2410.20092, appendix C; from arXiv 2307.11949), after IQL (arXiv 2110.06169)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.goals import ACTOR_GOALS, SUCCESSES, VALUE_GOALS
from offrl.data.samplers.transitions import Batch
from offrl.families.goal_conditioned import GoalConditioned, GoalTargetSettings, together, value_loss
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class GCIVLConfig(GoalTargetSettings):
    """Settings of GCIVL; the defaults are OGBench's."""

    name: str = "gcivl"
    expectile: float = setting(0.9, "0.5 values the data's policy, 1.0 the best that happened in the data", low=0.0, high=1.0)
    temperature: float = setting(10.0, "multiplies the advantage in the exponent; larger is greedier", low=0.0)


@register("algo", "gcivl")
class GCIVL(GoalConditioned):
    """V(s, g) of a reward of -1 until the goal is reached, by expectile regression on (s, s') alone; a policy by weighted imitation.

    V of the best that happened is too high where the dynamics are random. The policy's advantage is V(s', g) - V(s, g).
    """

    Config = GCIVLConfig
    traits = replace(GoalConditioned.traits, targets=("value",))

    def modules(self) -> dict[str, nn.Module]:
        return {"actor": self.make_actor(), "value": self.make_values(2, self.spec.observation_dim + self.goal_dim)}

    def v(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """Twin values [2, B]."""
        return self.apply("value", value, together(observations, goals)).squeeze(-1)

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        observations, following, goals = batch["observations"], batch["next_observations"], batch[VALUE_GOALS]
        now, target, c = self.v(value, observations, goals), state.target["value"], self.config
        before, after = self.v(target, observations, goals), self.v(target, following, goals)
        loss = value_loss(now, before, after, batch[SUCCESSES], c.discount, c.expectile)
        return loss, {"value/loss": loss, "value/v": now.mean()}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        value, goals = state.params["value"], batch[ACTOR_GOALS]
        advantage = (self.v(value, batch["next_observations"], goals) - self.v(value, batch["observations"], goals)).mean(0)
        return self.weighted_loss(actor, batch, advantage)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        state, actor = self.descend(state, "actor", self.actor_loss, batch)
        state, value = self.descend(state, "value", self.value_loss, batch)
        return self.polyak(state, "value", self.config.polyak), {**value, **actor}

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor | None:
        return -self.v(state.params["value"], observations, goals).mean(0)
