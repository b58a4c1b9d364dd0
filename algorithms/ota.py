"""OTA: "Option-aware Temporally Abstracted Value for Offline Goal-Conditioned RL" (Ahn et al., 2025, arXiv
2505.12737).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Actor, Adam, Batch, Loss, Params, TrainState, Update
from offrl.data.samplers.adjacency import ANY_GOALS, NEAR_GOALS
from offrl.data.samplers.goals import (
    HIGH_GOALS,
    HIGH_TARGET_STATES,
    HIGH_TARGETS,
    LOW_GOALS,
    OPTION_GOALS,
    OPTION_STATES,
    OPTION_SUCCESSES,
    VALUE_GOALS,
    GoalSampler,
)
from offrl.families.goal_conditioned import GoalConditioned, GoalTarget, concatenate, goal_rewards, goal_target
from offrl.families.hierarchical import (
    ADJACENCY_OPTIMIZER,
    HierarchicalActor,
    SubgoalSettings,
    make_adjacency,
    make_goal_value,
    make_high_level,
    on_sphere,
    subgoal_sampler,
    value_targets,
)
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class OTAConfig(SubgoalSettings):
    """Settings of OTA."""

    name: str = "ota"
    option_steps: int = setting(
        5, "n: the high level's values look so many steps ahead at once (longer mazes: more)", low=1
    )


@register("algo", "ota")
class OTA(GoalConditioned):
    """HIQL whose high level has values of its own, that of options of n steps: one reward of -1 and one discount for
    each of them.

    A goal n times as far is then as far as before, so the order of far states is less blurred and the high level's
    advantage has its sign wrong less often. Modules "value" (V_l, V_h and their phi), "actor" (the low level pi_l),
    "high" (pi_h), and "adjacency" with adjacency_weight.
    """

    Config = OTAConfig
    traits = replace(GoalConditioned.traits, targets=("value",), policy_modules=("actor", "high"))
    subgoal_kind = "latent"

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        value = make_goal_value(c, s, self.goal_dim, ("low", "high"))
        modules = {
            "actor": self.make_actor(s.observation_dim + c.representation),
            "high": make_high_level(c, s, self.goal_dim),
            "value": value,
        }
        self.adjacency = make_adjacency(c, s)  # last: the others' first parameters are the same without it
        return modules if self.adjacency is None else {**modules, "adjacency": self.adjacency.network}

    def sampler(self) -> GoalSampler:
        return replace(subgoal_sampler(super().sampler(), self.config), option_steps=self.config.option_steps)

    def optimizer(self, name: str) -> Adam:
        return ADJACENCY_OPTIMIZER if name == "adjacency" else super().optimizer(name)

    def v(self, value: Params, observations: Tensor, goals: Tensor, head: str = "low") -> Tensor:
        """Twin V_l(s, phi(s, g)), or V_h with head "high": [2, B]."""
        return self.apply("value", value, head, observations, goals)

    def represent(self, value: Params, observations: Tensor, goals: Tensor) -> Tensor:
        """phi(s, g) [B, D]."""
        return self.apply("value", value, "represent", observations, goals)

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """HIQL's loss of V_l over one step, and of V_h over an option of n steps, with one reward and one discount for
        each.
        """
        option = GoalTarget(*goal_rewards(batch[OPTION_SUCCESSES]), self.config.discount, batch[OPTION_STATES])
        low, low_v = self.td_loss(value, state, batch, "low", goal_target(self.config, batch), batch[VALUE_GOALS])
        high, high_v = self.td_loss(value, state, batch, "high", option, batch[OPTION_GOALS])
        return low + high, {
            "value/loss": low,
            "value/v": low_v.mean(),
            "value/high_loss": high,
            "value/high_v": high_v.mean(),
        }

    def td_loss(
        self, value: Params, state: TrainState, batch: Batch, head: str, step: GoalTarget, goals: Tensor
    ) -> tuple[Tensor, Tensor]:
        """E |tau - 1(A < 0)| (r + gamma V'(s', g) - V(s, g))^2 of both V, A = r + gamma min V'(s', g) - mean V'(s, g);
        and V [2, B].
        """
        c, target, observations = self.config, value_targets(state), batch["observations"]
        v, target_v = self.v(value, observations, goals, head), self.v(target, observations, goals, head)
        next_v = self.v(target, step.observations, goals, head)
        advantage = losses.td_target(step.rewards, step.masks, step.discount, next_v.amin(0)) - target_v.mean(0)
        error = losses.td_target(step.rewards, step.masks, step.discount, next_v) - v
        return (losses.expectile_weight(advantage, c.expectile) * error.square()).mean(-1).sum(), v

    def low_loss(self, actor: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min(exp(beta A), 100) log pi_l(a | s, phi(s, w)), A = V_l(s', w) - V_l(s, w), w the state k steps
        ahead.
        """
        value, observations, subgoals = state.params["value"], batch["observations"], batch[LOW_GOALS]
        advantage = (self.v(value, batch["next_observations"], subgoals) - self.v(value, observations, subgoals)).mean(
            0
        )
        weight = losses.advantage_weight(advantage, self.config.low_temperature)
        dist = self.apply("actor", actor, concatenate(observations, self.represent(value, observations, subgoals)))
        loss = -(weight * self.policy.log_prob(dist, batch["actions"])).mean()
        return loss, {"low/loss": loss, "low/advantage": advantage.mean(), "low/weight": weight.mean()}

    def high_loss(self, high: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min(exp(beta A), 100) log pi_h(phi(s, w) | s, g), A = V_h(w, g) - V_h(s, g); with HRAC's penalty."""
        value, observations, goals = state.params["value"], batch["observations"], batch[HIGH_GOALS]
        advantage = (
            self.v(value, batch[HIGH_TARGET_STATES], goals, "high") - self.v(value, observations, goals, "high")
        ).mean(0)
        weight = losses.advantage_weight(advantage, self.config.high_temperature)
        subgoal = self.represent(value, observations, batch[HIGH_TARGETS])
        dist = self.apply("high", high, concatenate(observations, goals))
        loss = -(weight * self.networks["high"].log_prob(dist, subgoal)).mean()  # type: ignore[operator]
        metrics = {"high/loss": loss, "high/advantage": advantage.mean(), "high/weight": weight.mean()}
        if self.adjacency is None:
            return loss, metrics
        penalty = self.adjacency.penalty(state.params["adjacency"], observations, on_sphere(dist[0]))
        return loss + self.config.adjacency_weight * penalty, {**metrics, "high/far": penalty}

    def adjacency_loss(self, adjacency: Params, state: TrainState, batch: Batch) -> Loss:
        """HRAC's contrastive loss of which states are near, read from latents too (`offrl.families.adjacency`)."""
        assert self.adjacency is not None
        value, observations = state.params["value"], batch["observations"]
        near, other = (self.represent(value, observations, batch[goals]) for goals in (NEAR_GOALS, ANY_GOALS))
        return self.adjacency.loss(adjacency, batch, near, other)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        after, low = self.descend(state, "actor", self.low_loss, batch)
        after, high = self.descend(after, "high", self.high_loss, batch)
        if self.adjacency is not None:
            after, adjacency = self.descend(after, "adjacency", self.adjacency_loss, batch)
            high = {**high, **adjacency}
        after, value = self.descend(after, "value", self.value_loss, batch)
        return self.move_targets(state, after, "value"), {**value, **low, **high}

    def subgoals(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        """The latents [B, D] of the subgoals that the high level chooses, scaled back to the sphere on which phi
        lies.
        """
        return on_sphere(self.apply("high", state.params["high"], concatenate(observations, goals))[0])

    def actor(self, state: TrainState) -> Actor:
        return HierarchicalActor(self, state)

    def distances(self, state: TrainState, observations: Tensor, goals: Tensor) -> Tensor:
        return -self.v(state.params["value"], observations, goals, "high").mean(0)
