"""Critics of what steps cost as a part that algorithms have, and the threshold that a limit on an episode's cost is to
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from offrl.algorithm import Batch, Dataset, DataSpec, Grid, Loss, Metrics, Params, TrainState
from offrl.data.costs import refuse_costless, refuse_unreached
from offrl.data.fit import refuse_streams
from offrl.data.raw.infer import step_limit
from offrl.data.samplers.transitions import SPAN, discounted
from offrl.families.critics.critic import Critic
from offrl.families.critics.value import CriticSettings, Target
from offrl.settings.field import setting

COSTS = 2  # critics of costs, whatever the number of the others

# of a batch: the policy's actions [B, A], or several [M, B, A], at its next observations; discrete: their log
# probabilities [B, K]
PolicyOf = Callable[[Batch], Tensor]


@dataclass
class LimitSettings:
    """Settings of algorithms that take a limit of costs."""

    cost_limit: float | None = setting(
        None, "limit of an episode's undiscounted cost; null: none, and no costs are looked at", low=0.0
    )
    cost_horizon: int | None = setting(
        None, "steps of an episode over which the limit is spread; null: the task's, else the data's longest", low=1
    )


@dataclass
class CostSettings(LimitSettings, CriticSettings):
    """Settings of algorithms with critics of costs."""

    cost_discount: float = setting(0.99, "discount factor of the costs", low=0.0, high=0.9999)
    cost_pessimism: str = setting(
        "max", "which of the two critics of costs counts; min: as OSRL, where the cheapest does", choices=("max", "min")
    )
    cost_after_end: str = setting(
        "zero",
        "what follows a terminal step: zero: no costs; hold: its own cost at every step for ever",
        choices=("zero", "hold"),
    )


def fit_limit(config: Any, dataset: Dataset, grid: Grid) -> Any:
    """`config` with a grid's limit and the horizon, where it has a limit; `config` itself where it has none.

    Raises UserError for data without costs, and for a limit below what any episode costs."""
    values: Any = (grid or {}).get("cost_limit", [getattr(config, "cost_limit", None)])
    if None in values:
        return config
    refuse_costless(dataset, "algo.cost_limit")
    if getattr(config, "cost_states", "") == "first":
        refuse_streams(dataset, "algo.cost.states=first", "leave it at all")
    refuse_unreached(dataset, min(values))
    longest = int(dataset.episode_lengths().max())
    return replace(
        config, cost_limit=values[0], cost_horizon=config.cost_horizon or step_limit(dataset.spec.task) or longest
    )


def even_cost(limit: Any, horizon: Any, discount: Any) -> Any:
    """The discounted cost of spending a limit evenly over the steps of an episode, limit (1 - g^T) / (1 - g) / T.

    A number, or a tensor [].
    """
    return limit * (1.0 - discount**horizon) / (1.0 - discount) / horizon


class CostCritic(Critic):
    """Critics Q_c(s, a) of discounted costs, the module "cost_critic", with a target.

    The limit may be a tensor: replicas of one program may have different ones.
    """

    config: CostSettings
    label: ClassVar[str] = "cost"  # of its module and its metrics

    def __init__(self, config: CostSettings, spec: DataSpec) -> None:
        super().__init__(replace(config, value_head="scalar"), spec, COSTS)
        self.config = config

    @property
    def module(self) -> str:
        """The name of its module."""
        return f"{self.label}_critic"

    def begin(self, state: TrainState) -> TrainState:
        return state  # spectral norms bound the critics of rewards alone

    # ---- the limit

    @property
    def threshold(self) -> Any:
        """kappa: see `even_cost`."""
        c = self.config
        return even_cost(c.cost_limit, c.cost_horizon, c.cost_discount)

    @property
    def unit(self) -> Any:
        """The threshold, or that of the limit 1 where it is larger: what an excess is a multiple of."""
        c, limit = self.config, self.config.cost_limit
        limit = limit.clamp(min=1.0) if isinstance(limit, Tensor) else max(limit or 0.0, 1.0)
        return even_cost(limit, c.cost_horizon, c.cost_discount)

    # ---- costs

    def pessimistic(self, costs: Tensor) -> Tensor:
        """One cost of the critics' [E, ...]: the largest, or as OSRL the smallest; at least 0, as all costs are."""
        return (costs.amax(0) if self.config.cost_pessimism == "max" else costs.amin(0)).clamp(min=0.0)

    def cost(self, params: Params, observations: Tensor, policy: Tensor) -> Tensor:
        """Q_c [B] of actions [B, A], or of the dearest of actions [M, B, A]; discrete: its mean under a policy's log
        probabilities [B, K].
        """
        if self.spec.discrete:
            costs = self.head.mean(self.logits_of_all(params, observations))
            return (policy.exp() * self.pessimistic(costs)).sum(-1)
        costs = self.pessimistic(self.q(params, observations, policy))
        return costs if costs.ndim == 1 else costs.amax(0)

    def target(self, batch: Batch, next_cost: Tensor) -> Tensor:
        """c + g Q_c(s', a'), of windows as `discounted` has it; after a terminal step nothing follows, or its own cost
        for ever: [B].
        """
        discount = self.config.cost_discount
        costs, gamma = discounted(batch, discount, "costs")
        if self.config.cost_after_end == "hold":
            last = batch["costs"]
            if SPAN in batch:
                last = batch["step_costs"].gather(-1, (batch[SPAN] - 1).unsqueeze(-1)).squeeze(-1)
            next_cost = torch.where(batch["masks"] > 0.0, next_cost, last / (1.0 - discount))
            return costs + gamma * next_cost
        return costs + gamma * batch["masks"] * next_cost

    def cost_loss(self, params: Params, state: TrainState, batch: Batch, next_cost: Tensor) -> Loss:
        """E (c + g Q_c'(s', a') - Q_c(s, a))^2, summed over critics. next_cost: Q_c'(s', a') [B]."""
        target = self.target(batch, next_cost)
        logits = self.logits(params, batch["observations"], batch["actions"])
        loss = self.objective(logits, Target(target)).mean(-1).sum()
        return loss, {f"{self.label}/loss": loss, f"{self.label}/q": self.head.mean(logits).mean()}

    def learn(self, algorithm: Any, state: TrainState, batch: Batch, policy: PolicyOf) -> tuple[TrainState, Metrics]:
        """A step of the critics of costs."""
        next_cost = self.cost(state.target[self.module], batch["next_observations"], policy(batch))
        state, metrics = algorithm.descend(state, self.module, self.cost_loss, batch, next_cost)
        return algorithm.polyak(state, self.module), metrics
