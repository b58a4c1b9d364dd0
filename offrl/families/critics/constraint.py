"""A limit on what an episode costs, as a part of algorithms that learn Q: critics of the costs, and a multiplier that
weighs costs against values.

Lagrangian relaxation; the multiplier is a PID controller's ("Responsive Safety in Reinforcement Learning by PID
Lagrangian Methods", Stooke et al., 2020, arXiv 2007.03964), with bounds, or dual ascent's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offrl.algorithm import Batch, DataSpec, Loss, Metrics, Params, TrainState
from offrl.data.samplers.transitions import FIRST, FIRST_WEIGHTS
from offrl.families.critics.costs import CostCritic, CostSettings, PolicyOf
from offrl.families.critics.value import Value
from offrl.settings.field import setting

GAINS = (0.1, 0.003, 0.001)  # of the error, its integral and its rise (OSRL's)
LOWEST, HIGHEST = -10.0, 100.0  # dual variable and multiplier


@dataclass
class ConstraintSettings(CostSettings):
    """Settings of algorithms whose policies weigh costs by a multiplier."""

    cost_states: str = setting(
        "all",
        "the states whose mean cost the multiplier holds at the threshold: all of the data's, or the first ones of "
        "episodes, which says more where episodes are short or end early",
        choices=("all", "first"),
    )
    multiplier: str = setting(
        "pid", "how costs are weighed against values: a PID controller, or dual ascent", choices=("pid", "dual")
    )
    multiplier_rate: float = setting(1e-3, "multiplier=dual: its step for each multiple of the threshold", low=0.0)


class Constraint(CostCritic):
    """Critics of costs, and the multiplier's state in `TrainState.extra`."""

    config: ConstraintSettings
    multiplier: ClassVar[str] = "multiplier"  # the entry of `TrainState.extra`

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by name."""
        return {self.module: self.network}

    @property
    def extra(self) -> tuple[str, ...]:
        """The columns of batches that it reads."""
        return ("costs",) if self.config.cost_states == "all" else ("costs", FIRST)

    def begin(self, state: TrainState) -> TrainState:
        zero = torch.zeros(())
        return state.with_extra(**{self.multiplier: {"value": zero, "integral": zero.clone(), "error": zero.clone()}})

    def first_cost(self, state: TrainState, batch: Batch, policy: PolicyOf) -> Tensor:
        """Costs [B] of the policy from the first observations of the batch's episodes."""
        actions = policy({**batch, "next_observations": batch[FIRST]})
        return self.cost(state.params[self.module], batch[FIRST], actions)

    # ---- the policy

    def excess(self, cost: Tensor) -> Tensor:
        """(Q_c - kappa) / unit of costs [B]."""
        return (cost - self.threshold) / self.unit

    def advantage(self, advantage: Tensor, state: TrainState, batch: Batch, baseline: Tensor) -> tuple[Tensor, Metrics]:
        """A - multiplier * E|A| * (Q_c(s, a) - baseline) / unit [B] at the data's actions. baseline [B]: the cost of
        the policy's own.
        """
        multiplier = state.extra[self.multiplier]["value"]
        cost = self.pessimistic(self.q(state.params[self.module], batch["observations"], batch["actions"]))
        weight = multiplier * advantage.abs().mean() / self.unit
        return advantage - weight * (cost - baseline), self.shown(baseline, multiplier)

    def shown(self, cost: Tensor, multiplier: Tensor) -> Metrics:
        """Metrics of the policy's costs [B], of which `adjusted` reads the excess."""
        return {
            f"{self.label}/policy": cost.mean(),
            f"{self.label}/excess": self.excess(cost.detach()).mean(),
            f"{self.label}/multiplier": multiplier,
        }

    def adjusted(self, state: TrainState, batch: Batch, policy: PolicyOf, excess: Tensor) -> TrainState:
        """The state with the multiplier after an excess [] of the policy's costs at the batch's states; `cost_states`
        may name others.
        """
        if self.config.cost_states == "first":
            excess = self.excess((batch[FIRST_WEIGHTS] * self.first_cost(state, batch, policy)).mean())
        step = pid if self.config.multiplier == "pid" else self.ascent
        return state.with_extra(**{self.multiplier: step(state.extra[self.multiplier], excess)})

    def ascent(self, multiplier: Mapping[str, Tensor], error: Tensor) -> dict[str, Tensor]:
        """Dual ascent: softplus(l), l += rate * error, l within the bounds of the multiplier; l is kept as the
        integral.
        """
        log = (multiplier["integral"] + self.config.multiplier_rate * error).clamp(LOWEST, HIGHEST)
        return {"value": nn.functional.softplus(log), "integral": log, "error": error}


def pid(multiplier: Mapping[str, Tensor], error: Tensor) -> dict[str, Tensor]:
    """A step of the PID controller: relu(K_P relu(e) + K_I I + K_D relu(e - e')), I the sum of errors, from 0 to where
    it alone is the highest multiplier.
    """
    proportional, integrated, risen = GAINS
    integral = (multiplier["integral"] + error).clamp(0.0, HIGHEST / integrated)
    rise = (error - multiplier["error"]).relu()
    value = proportional * error.relu() + integrated * integral + risen * rise
    return {"value": value.clamp(0.0, HIGHEST), "integral": integral, "error": error}


class InSampleConstraint(Constraint):
    """The same for policies that imitate weighted actions of the data: no other action is looked at.

    V_c(s) (the module "cost_value") is the mean of Q_c under those weights, which is the cost of the policy that
    imitates them.
    """

    def __init__(self, config: ConstraintSettings, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.value = Value(replace(config, value_head="scalar"), spec)

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {"cost_critic": self.network, "cost_value": self.value.network}

    def policy_cost(self, state: TrainState, observations: Tensor) -> Tensor:
        """V_c [B]."""
        return self.value(state.params["cost_value"], observations).mean

    def first_cost(self, state: TrainState, batch: Batch, policy: PolicyOf) -> Tensor:
        return self.policy_cost(state, batch[FIRST])

    def value_loss(self, params: Params, state: TrainState, batch: Batch, cost: Tensor, weight: Tensor) -> Loss:
        """E w (Q_c(s, a) - V_c(s))^2 / E w, for costs and weights [B] at the data's actions."""
        v = self.value(params, batch["observations"]).mean
        loss = (weight * (cost - v).square()).mean() / weight.mean().clamp(min=1e-8)
        return loss, {"cost/value_loss": loss}

    def learn(self, algorithm: Any, state: TrainState, batch: Batch, policy: PolicyOf) -> tuple[TrainState, Metrics]:
        """A step of V_c and of the critics of costs. policy: gives the weights [B] of the batch's actions."""
        cost = self.pessimistic(self.q(state.target["cost_critic"], batch["observations"], batch["actions"]))
        state, value = algorithm.descend(state, "cost_value", self.value_loss, batch, cost, policy(batch))
        next_cost = self.policy_cost(state, batch["next_observations"])
        state, metrics = algorithm.descend(state, "cost_critic", self.cost_loss, batch, next_cost)
        return algorithm.polyak(state, "cost_critic"), {**value, **metrics}
