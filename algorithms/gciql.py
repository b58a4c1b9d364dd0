"""Goal-conditioned implicit Q-learning: OGBench (arXiv 2410.20092, appendix C), after IQL (arXiv 2110.06169)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.data.samplers.goals import ACTOR_GOALS, VALUE_GOALS
from offrl.families.goal_conditioned import (
    GoalConditioned,
    GoalStepSettings,
    awr_loss,
    chosen_learner,
    concatenate,
    ddpg_bc_loss,
    goal_target,
    learner_field,
    make_net,
    make_values,
)
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class GCIQLConfig(GoalStepSettings):
    """Settings of GCIQL; the defaults are OGBench's for antmaze."""

    name: str = "gciql"
    expectile: float = setting(0.9, "0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0)
    learner: str = learner_field()
    bc_weight: float = setting(
        0.3, "ddpg_bc: weight of imitation (pointmaze 0.003, humanoidmaze 0.1, manipulation 1)", low=0.0
    )
    temperature: float = setting(3.0, "awr: multiplies the advantage in the exponent; larger is greedier", low=0.0)


@register("algo", "gciql")
class GCIQL(GoalConditioned[GCIQLConfig]):
    """V(s, g) is an expectile of the smaller of twin Q(s, g, a); Q regresses on -1 + discount V(s', g), until the goal
    is reached.
    """

    traits = replace(GoalConditioned.traits, targets=("critic",))
    subgoal_kind = "state"

    def modules(self) -> dict[str, nn.Module]:
        self.learner = chosen_learner(self.config, self.spec.discrete)
        inputs = self.spec.observation_dim + self.goal_dim
        critic = make_values(self.config, 2, inputs + self.spec.encoded_action_dim)
        return {"actor": self.make_actor(), "critic": critic, "value": make_net(self.config, inputs, 1)}

    def v(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """V(s, g) [B]."""
        return self.apply("value", value, concatenate(observations, goals)).squeeze(-1)

    def twin_q(self, critic: Params, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        """Twin Q(s, g, a) [2, B]."""
        return self.apply("critic", critic, concatenate(observations, goals, self.spec.encode(actions))).squeeze(-1)

    def q(self, state: TrainState, observations: Tensor, goals: Tensor, actions: Tensor) -> Tensor:
        """The smaller Q(s, g, a) [B]."""
        return self.twin_q(state.params["critic"], observations, goals, actions).amin(0)

    def advantage(self, state: TrainState, batch: Batch) -> Tensor:
        """Q(s, g, a) - V(s, g) [B] of the data's actions at the actor's goals."""
        q = self.q(state, batch["observations"], batch[ACTOR_GOALS], batch["actions"])
        return q - self.v(state.params["value"], batch["observations"], batch[ACTOR_GOALS])

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """E |tau - 1(Q' - V < 0)| (Q' - V)^2, Q' = min Q'(s, g, a)."""
        q = self.twin_q(state.target["critic"], batch["observations"], batch[VALUE_GOALS], batch["actions"]).amin(0)
        v = self.v(value, batch["observations"], batch[VALUE_GOALS])
        loss = losses.expectile(q - v, self.config.expectile).mean()
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> Loss:
        """E (r + gamma V(s', g) - Q(s, g, a))^2 of both Q."""
        step = goal_target(self.config, batch)
        next_v = self.v(state.params["value"], step.observations, batch[VALUE_GOALS])
        target = losses.td_target(step.rewards, step.masks, step.discount, next_v)
        q = self.twin_q(critic, batch["observations"], batch[VALUE_GOALS], batch["actions"])
        loss = (q - target).square().mean(-1).sum()
        return loss, {"critic/loss": loss, "critic/q": q.mean()}

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """ddpg_bc: -E Q(s, g, pi(s, g)) / E |Q| - bc_weight E log pi(a | s, g); awr: -E min(exp(temperature (Q - V)),
        100) log pi.
        """
        dist, log_prob = self.imitation(actor, batch)
        if self.learner == "awr":
            return awr_loss(log_prob, self.advantage(state, batch), self.config.temperature)
        q = self.q(state, batch["observations"], batch[ACTOR_GOALS], self.policy.mode(dist))
        return ddpg_bc_loss(q, log_prob, self.config.bc_weight)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        after, actor = self.descend(state, "actor", self.actor_loss, batch)
        after, critic = self.descend(after, "critic", self.critic_loss, batch)
        after, value = self.descend(after, "value", self.value_loss, batch)
        return self.move_targets(state, after, "critic"), {**critic, **value, **actor}

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        return -self.v(state.params["value"], observations, goals)
