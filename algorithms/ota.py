"""OTA: "Option-aware Temporally Abstracted Value for Offline Goal-Conditioned RL" (Ahn et al., 2025, arXiv
2505.12737).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.data.samplers.goals import (
    HIGH_GOALS,
    HIGH_TARGET_STATES,
    HIGH_TARGETS,
    OPTION_GOALS,
    OPTION_STATES,
    OPTION_SUCCESSES,
    VALUE_GOALS,
    GoalSampler,
)
from offrl.families.goal_conditioned import (
    GoalConditioned,
    GoalTarget,
    awr_loss,
    concatenate,
    goal_rewards,
    goal_target,
)
from offrl.families.hierarchical import Hierarchical, SubgoalSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class OTAConfig(SubgoalSettings):
    """Settings of OTA."""

    name: str = "ota"
    high_temperature: float = setting(
        3.0, "beta of the high level: multiplies the advantage in the exponent (explore: 10)", low=0.0
    )
    option_steps: int = setting(
        5, "n: the high level's values look so many steps ahead at once (longer mazes: more)", low=1
    )


@register("algo", "ota")
class OTA(Hierarchical[OTAConfig], GoalConditioned[OTAConfig]):
    """HIQL whose high level has values of its own, that of options of n steps: one reward of -1 and one discount for
    each of them.

    A goal n times as far is then as far as before, so the order of far states is less blurred and the high level's
    advantage has its sign wrong less often. Modules "value" (V_l, V_h and their phi), "actor" (the low level pi_l),
    "high" (pi_h), and "adjacency" with adjacency_weight.
    """

    heads = ("low", "high")

    def sampler(self) -> GoalSampler:
        return replace(super().sampler(), option_steps=self.config.option_steps)

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

    def high_loss(self, high: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min(exp(beta A), 100) log pi_h(phi(s, w) | s, g), A = V_h(w, g) - V_h(s, g); with HRAC's penalty."""
        value, observations, goals = state.params["value"], batch["observations"], batch[HIGH_GOALS]
        advantage = (
            self.v(value, batch[HIGH_TARGET_STATES], goals, "high") - self.v(value, observations, goals, "high")
        ).mean(0)
        subgoal = self.represent(value, observations, batch[HIGH_TARGETS])
        dist = self.apply("high", high, concatenate(observations, goals))
        log_prob = self.networks["high"].log_prob(dist, subgoal)
        loss, metrics = awr_loss(log_prob, advantage, self.config.high_temperature, "high")
        return self.penalised(loss, metrics, state, batch, dist[0])
