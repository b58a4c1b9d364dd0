"""A limit on what an episode costs, as a part of algorithms that learn Q: critics of the costs, the discounted
threshold, and a multiplier that weighs costs against values.

Lagrangian relaxation; the multiplier is a PID controller's ("Responsive Safety in Reinforcement Learning by PID
Lagrangian Methods", Stooke et al., 2020, arXiv 2007.03964), with bounds, or dual ascent's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offrl.algorithm import Batch, Dataset, DataSpec, Grid, Loss, Metrics, Params, TrainState
from offrl.data.costs import refuse_costless
from offrl.data.dataset import refuse_streams
from offrl.data.raw.infer import step_limit
from offrl.data.samplers.transitions import FIRST, SPAN, discounted
from offrl.errors import UserError
from offrl.families.critics.critic import Critic
from offrl.families.critics.value import CriticSettings, Target, Value
from offrl.settings.field import setting

GAINS = (0.1, 0.003, 0.001)  # of the error, its integral and its rise (OSRL's)
LOWEST, HIGHEST = -10.0, 100.0  # dual variable and multiplier
COSTS = 2  # critics of costs, whatever the number of the others

# of a batch: the policy's actions [B, A] at its next observations; discrete: their log probabilities [B, K]
PolicyOf = Callable[[Batch], Tensor]


@dataclass
class ConstraintSettings(CriticSettings):
    """Settings of algorithms that take a limit of costs."""

    cost_limit: float | None = setting(
        None, "limit of an episode's undiscounted cost; null: none, and no costs are looked at", low=0.0
    )
    cost_horizon: int | None = setting(
        None, "steps of an episode over which the limit is spread; null: the task's, else the data's longest", low=1
    )
    cost_discount: float = setting(0.99, "discount factor of the costs", low=0.0, high=0.9999)
    cost_pessimism: str = setting(
        "max", "which of the two critics of costs counts; min: as OSRL, where the cheapest does", choices=("max", "min")
    )
    cost_after_end: str = setting(
        "zero",
        "what follows a terminal step: zero: no costs; hold: its own cost at every step for ever",
        choices=("zero", "hold"),
    )
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


def fit_limit(config: Any, dataset: Dataset, grid: Grid) -> Any:
    """`config` with a grid's limit and the horizon, where it has a limit; `config` itself where it has none.

    Raises UserError for data without costs, and for a limit below what any episode costs."""
    values = (grid or {}).get("cost_limit", [getattr(config, "cost_limit", None)])
    if None in values:
        return config
    refuse_costless(dataset, "algo.cost_limit")
    if config.cost_states == "first":
        refuse_streams(dataset, "algo.cost_states=first", "leave it at all")
    costs, name = dataset.episode_costs(), dataset.spec.name
    if (lowest := min(values)) < (least := float(costs.min())):
        raise UserError(
            f"algo.cost_limit={lowest:g} is below what any episode of {name} costs: the cheapest costs {least:g}"
        )
    longest = int(dataset.episode_lengths().max())
    return replace(
        config, cost_limit=values[0], cost_horizon=config.cost_horizon or step_limit(dataset.spec.task) or longest
    )


class Constraint(Critic):
    """Critics Q_c(s, a) of discounted costs (the module "cost_critic", with a target), and the multiplier's state in
    `TrainState.extra`.

    The limit may be a tensor: replicas of one program may have different ones.
    """

    config: ConstraintSettings

    def __init__(self, config: ConstraintSettings, spec: DataSpec) -> None:
        super().__init__(replace(config, value_head="scalar"), spec, COSTS)
        self.config = config

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The modules by name."""
        return {"cost_critic": self.network}

    @property
    def extra(self) -> tuple[str, ...]:
        """The columns of batches that it reads."""
        return ("costs",) if self.config.cost_states == "all" else ("costs", FIRST)

    def begin(self, state: TrainState) -> TrainState:
        zero = torch.zeros(())
        return state.with_extra(multiplier={"value": zero, "integral": zero.clone(), "error": zero.clone()})

    # ---- the limit

    @property
    def share(self) -> Any:
        """Discounted cost where all steps of an episode cost the same, and 1 together: (1 - g^T) / (1 - g) / T."""
        discount, horizon = self.config.cost_discount, self.config.cost_horizon
        assert horizon is not None
        return (1.0 - discount**horizon) / (1.0 - discount) / horizon

    @property
    def threshold(self) -> Any:
        """kappa: the discounted cost of spending the limit evenly, a number or a tensor []."""
        return self.config.cost_limit * self.share

    @property
    def unit(self) -> Any:
        """The threshold, or that of the limit 1 where it is larger: what an excess is a multiple of."""
        limit: Any = self.config.cost_limit
        return self.share * (limit.clamp(min=1.0) if isinstance(limit, Tensor) else max(limit, 1.0))

    # ---- costs

    def pessimistic(self, costs: Tensor) -> Tensor:
        """One cost of the critics' [E, ...]: the largest, or as OSRL the smallest; at least 0, as all costs are."""
        return (costs.amax(0) if self.config.cost_pessimism == "max" else costs.amin(0)).clamp(min=0.0)

    def cost(self, params: Params, observations: Tensor, policy: Tensor) -> Tensor:
        """Q_c [B] of actions [B, A]; discrete: its mean under a policy's log probabilities [B, K]."""
        if self.spec.discrete:
            costs = self.head.mean(self.logits_of_all(params, observations))
            return (policy.exp() * self.pessimistic(costs)).sum(-1)
        return self.pessimistic(self.q(params, observations, policy))

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
        return loss, {"cost/loss": loss, "cost/q": self.head.mean(logits).mean()}

    def learn(self, algorithm: Any, state: TrainState, batch: Batch, policy: PolicyOf) -> tuple[TrainState, Metrics]:
        """A step of the critics of costs."""
        next_cost = self.cost(state.target["cost_critic"], batch["next_observations"], policy(batch))
        state, metrics = algorithm.descend(state, "cost_critic", self.cost_loss, batch, next_cost)
        return algorithm.polyak(state, "cost_critic"), metrics

    def first_cost(self, state: TrainState, batch: Batch, policy: PolicyOf) -> Tensor:
        """Costs [B] of the policy from the first observations of the batch's episodes."""
        actions = policy({**batch, "next_observations": batch[FIRST]})
        return self.cost(state.params["cost_critic"], batch[FIRST], actions)

    # ---- the policy

    def excess(self, cost: Tensor) -> Tensor:
        """(Q_c - kappa) / unit of costs [B]."""
        return (cost - self.threshold) / self.unit

    def penalised(
        self,
        loss: Tensor,
        metrics: Metrics,
        state: TrainState,
        observations: Tensor,
        policy: Tensor,
        size: Tensor | float,
    ) -> Loss:
        """(loss + multiplier * size * E excess) / (1 + multiplier) of an actor, whose actions (or log probabilities)
        carry the gradient. size: that of a value in the loss.
        """
        multiplier = state.extra["multiplier"]["value"]
        cost = self.cost(state.params["cost_critic"], observations, policy)
        excess = self.excess(cost).mean()
        loss = (loss + multiplier * size * excess) / (1.0 + multiplier)
        return loss, {**metrics, "actor/loss": loss, **self.shown(cost, multiplier)}

    def advantage(self, advantage: Tensor, state: TrainState, batch: Batch, baseline: Tensor) -> tuple[Tensor, Metrics]:
        """A - multiplier * E|A| * (Q_c(s, a) - baseline) / unit [B] at the data's actions. baseline [B]: the cost of
        the policy's own.
        """
        multiplier = state.extra["multiplier"]["value"]
        cost = self.pessimistic(self.q(state.params["cost_critic"], batch["observations"], batch["actions"]))
        weight = multiplier * advantage.abs().mean() / self.unit
        return advantage - weight * (cost - baseline), self.shown(baseline, multiplier)

    def shown(self, cost: Tensor, multiplier: Tensor) -> Metrics:
        """Metrics of the policy's costs [B], of which `adjusted` reads the excess."""
        return {
            "cost/policy": cost.mean(),
            "cost/excess": self.excess(cost.detach()).mean(),
            "cost/multiplier": multiplier,
        }

    def adjusted(self, state: TrainState, batch: Batch, policy: PolicyOf, excess: Tensor) -> TrainState:
        """The state with the multiplier after an excess [] of the policy's costs at the batch's states; `cost_states`
        may name others.
        """
        if self.config.cost_states == "first":
            excess = self.excess(self.first_cost(state, batch, policy)).mean()
        step = pid if self.config.multiplier == "pid" else self.ascent
        return state.with_extra(multiplier=step(state.extra["multiplier"], excess))

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
