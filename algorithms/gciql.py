"""Goal-conditioned implicit Q-learning: OGBench (arXiv 2410.20092, appendix C), after IQL (arXiv 2110.06169)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.goals import ACTOR_GOALS, SUCCESSES, VALUE_GOALS
from offrl.data.samplers.transitions import Batch
from offrl.families.goal_conditioned import GoalTargetSettings, GoalValued, goal_rewards, learner_field, together
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class GCIQLConfig(GoalTargetSettings):
    """Settings of GCIQL; the defaults are OGBench's for antmaze."""

    name: str = "gciql"
    expectile: float = setting(0.9, "0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0)
    learner: str = learner_field()
    bc_weight: float = setting(0.3, "ddpg_bc: weight of imitation (pointmaze 0.003, humanoidmaze 0.1, manipulation 1)", low=0.0)
    temperature: float = setting(3.0, "awr: multiplies the advantage in the exponent; larger is greedier", low=0.0)


@register("algo", "gciql")
class GCIQL(GoalValued):
    """V(s, g) is an expectile of the smaller of twin Q(s, g, a); Q regresses on -1 + discount V(s', g), until the goal is reached."""

    Config = GCIQLConfig
    traits = replace(GoalValued.traits, targets=("critic",))

    def modules(self) -> dict[str, nn.Module]:
        inputs = self.spec.observation_dim + self.goal_dim
        critic = self.make_values(2, inputs + self.spec.encoded_action_dim)
        return {"actor": self.make_actor(), "critic": critic, "value": self.make_net(inputs, 1)}

    def v(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """V(s, g) [B]."""
        return self.apply("value", value, together(observations, goals)).squeeze(-1)

    def both(self, critic: Params, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        """Twin Q(s, g, a) [2, B]."""
        return self.apply("critic", critic, together(observations, goals, self.spec.encode(actions))).squeeze(-1)

    def q(self, state: TrainState, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        return self.both(state.params["critic"], observations, goals, actions).amin(0)

    def advantage(self, state: TrainState, batch: Batch) -> Tensor:
        q = self.q(state, batch["observations"], batch[ACTOR_GOALS], batch["actions"])
        return q - self.v(state.params["value"], batch["observations"], batch[ACTOR_GOALS])

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        q = self.both(state.target["critic"], batch["observations"], batch[VALUE_GOALS], batch["actions"]).amin(0)
        v = self.v(value, batch["observations"], batch[VALUE_GOALS])
        loss = losses.expectile(q - v, self.config.expectile).mean()
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        rewards, masks = goal_rewards(batch[SUCCESSES])
        following = self.v(state.params["value"], batch["next_observations"], batch[VALUE_GOALS])
        target = losses.td_target(rewards, masks, self.config.discount, following)
        q = self.both(critic, batch["observations"], batch[VALUE_GOALS], batch["actions"])
        loss = (q - target).square().mean(-1).sum()
        return loss, {"critic/loss": loss, "critic/q": q.mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        state, actor = self.descend(state, "actor", self.actor_loss, batch)
        state, critic = self.descend(state, "critic", self.critic_loss, batch)
        state, value = self.descend(state, "value", self.value_loss, batch)
        return self.polyak(state, "critic", self.config.polyak), {**critic, **value, **actor}

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Any:
        return -self.v(state.params["value"], observations, goals)
