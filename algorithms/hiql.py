"""HIQL: "Offline Goal-Conditioned RL with Latent States as Actions" (Park et al., 2023, arXiv 2307.11949), as in
OGBench (2410.20092).
"""

from __future__ import annotations

from dataclasses import dataclass

from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.data.samplers.goals import (
    HIGH_GOALS,
    HIGH_TARGET_STATES,
    HIGH_TARGETS,
    VALUE_GOALS,
)
from offrl.families.goal_conditioned import GoalConditioned, awr_loss, concatenate, goal_target
from offrl.families.hierarchical import Hierarchical, SubgoalSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class HIQLConfig(SubgoalSettings):
    """Settings of HIQL."""

    name: str = "hiql"
    high_temperature: float = setting(
        3.0, "beta of the high level: multiplies the advantage in the exponent (explore: 10)", low=0.0
    )


@register("algo", "hiql")
class HIQL(Hierarchical[HIQLConfig], GoalConditioned[HIQLConfig]):
    """One V for both levels: far goals have noisy values, but the difference over k steps stands out where that over
    one does not.

    Modules "value" (V and phi), "actor" (the low level pi_l), "high" (pi_h), and "adjacency" with adjacency_weight.
    """

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """E |tau - 1(A < 0)| (r + gamma V'(s', g) - V(s, g))^2 (equation 4) of both V, A = r + gamma min V'(s', g) -
        mean V'(s, g).
        """
        loss, v = self.td_loss(value, state, batch, "low", goal_target(self.config, batch), batch[VALUE_GOALS])
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def high_loss(self, high: Params, state: TrainState, batch: Batch) -> Loss:
        """-E min(exp(beta A), 100) log pi_h(phi(s, w) | s, g), A = V(w, g) - V(s, g) (equation 6); with HRAC's
        penalty.
        """
        value, observations, goals = state.params["value"], batch["observations"], batch[HIGH_GOALS]
        advantage = (self.v(value, batch[HIGH_TARGET_STATES], goals) - self.v(value, observations, goals)).mean(0)
        subgoal = self.represent(value, observations, batch[HIGH_TARGETS])
        dist = self.apply("high", high, concatenate(observations, goals))
        log_prob = self.networks["high"].log_prob(dist, subgoal)
        loss, metrics = awr_loss(log_prob, advantage, self.config.high_temperature, "high")
        return self.penalised(loss, metrics, state, batch, dist[0])
