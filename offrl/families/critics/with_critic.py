"""What algorithms with critics have in common beside their losses: optimisers, fitted settings, a limit of costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from offrl.algorithm import Adam, Batch, Dataset, Grid, Loss, Metrics, TrainState, Traits, Update, merged
from offrl.data.value_range import value_range
from offrl.families.critics.constraint import Constraint
from offrl.families.critics.costs import PolicyOf, fit_limit
from offrl.families.critics.critic import Critic, represents
from offrl.families.critics.representation import ENCODERS, Represented
from offrl.families.critics.value import check_risk
from offrl.nn import BINNED


class WithCritic(Represented):
    """What algorithms with the part `critic` have in common: bins for its values, optimisers, their Q, and a limit of
    costs.
    """

    critic: Critic
    traits = Traits(targets=("critic",), critic_modules=("critic",), observations="encoded")

    constraint: Constraint | None = None  # where the settings name a limit of costs
    constraint_class: type[Constraint] = Constraint

    @classmethod
    def traits_for(cls, config: Any) -> Traits:
        traits = cls.with_latents(cls.traits, config)
        if getattr(config, "cost_limit", None) is None:
            return traits
        return replace(traits, targets=(*traits.targets, "cost_critic"))

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        """`config` with the range of the value head's bins from the data, where it needs one and has none, and with
        what a limit of costs needs; see `fit_limit`. Raises UserError for a `risk` without a distribution, too.
        """
        check_risk(config, grid)
        config = fit_limit(config, dataset, grid)
        if config.value_head not in BINNED or config.value_range:
            return config
        ranges = [value_range(dataset, float(x)) for x in (grid or {}).get("discount", [config.discount])]
        return replace(config, value_range=[min(low for low, _ in ranges), max(high for _, high in ranges)])

    def optimizer(self, name: str) -> Adam:
        """Adam with `learning_rate`; the actor's with its own rate and schedule, where it has them."""
        c = self.config
        if represents(c) and name in ENCODERS:
            return self.encoder_optimizer()
        if name != "actor":
            return Adam(c.learning_rate)
        rate = c.learning_rate if c.actor_learning_rate is None else c.actor_learning_rate
        if getattr(c, "actor_schedule", "constant") == "constant":
            return Adam(rate)
        return Adam(rate, schedule=c.actor_schedule, decay_steps=c.decay_steps)

    def sampler(self) -> Any:
        """The algorithm's own, whose batches have costs too where there is a limit of them."""
        sampler = super().sampler()
        return sampler if self.constraint is None else replace(sampler, extra=(*sampler.extra, *self.constraint.extra))

    # ---- a limit of costs: nothing happens without one

    def cost_modules(self) -> dict[str, nn.Module]:
        """The modules of the part `constraint`, which is made here."""
        if getattr(self.config, "cost_limit", None) is None:
            return {}
        self.constraint = self.constraint_class(self.config, self.spec)
        return self.constraint.modules

    def limits(self) -> tuple[Constraint, ...]:
        """The limits that the policy keeps to."""
        return () if self.constraint is None else (self.constraint,)

    def limited(
        self,
        loss: Tensor,
        metrics: Metrics,
        state: TrainState,
        observations: Tensor,
        policy: Tensor,
        size: Tensor | float = 1.0,
    ) -> Loss:
        """(loss + size * sum of multiplier * E excess) / (1 + sum of multipliers) of an actor, whose actions (or log
        probabilities) carry the gradient, and metrics. size: that of a value in the loss.
        """
        limits = self.limits()
        if not limits:
            return loss, metrics
        weight: Tensor | float = 1.0
        for limit in limits:
            multiplier = state.extra[limit.multiplier]["value"]
            cost = limit.cost(state.params[limit.module], observations, policy)
            loss = loss + multiplier * size * limit.excess(cost).mean()
            weight = weight + multiplier
            metrics = metrics | limit.shown(cost, multiplier)
        loss /= weight
        return loss, {**metrics, "actor/loss": loss}

    def limited_advantage(
        self, advantage: Tensor, state: TrainState, batch: Batch, baseline: Callable[[Any], Tensor]
    ) -> tuple[Tensor, Metrics]:
        """Advantages [B] of the data's actions less those of their costs, and metrics; see `Constraint.advantage`.
        baseline: the policy's costs [B], of the part `constraint`.
        """
        if self.constraint is None:
            return advantage, {}
        return self.constraint.advantage(advantage, state, batch, baseline(self.constraint))

    def learn_costs(self, state: TrainState, batch: Batch, policy: PolicyOf, actor: Metrics) -> Update:
        """A step of the critics of costs, and of the multiplier where `actor`, the metrics of the policy's step, have
        its excess. policy: see `PolicyOf`; of policies that imitate, the weights [B] of a batch's actions."""
        if self.constraint is None:
            return state, {}
        state, metrics = self.constraint.learn(self, state, batch, policy)
        if "cost/excess" in actor:
            state = self.constraint.adjusted(state, batch, policy, actor["cost/excess"])
        return state, metrics

    def simultaneous(self, before: TrainState, *steps: Update) -> Update:
        """The state after steps of several modules that each descended from `before`, and its target critics a step
        towards the critics of before.
        """
        after = self.critic.regularised(merged(before, *(state for state, _ in steps)))
        metrics = {name: value for _, values in steps for name, value in values.items()}
        return after._replace(target=self.polyak(before, "critic").target), metrics

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor | None:
        """The smallest of the critics' values, [B]; None where they are not of single actions."""
        if not self.traits.critic_modules:
            return None
        critic = self.critic
        if represents(self.config):
            observations = self.apply("encoder", state.params["encoder"], observations)
            critic = self.with_encoders(state.params).critic
        return critic.q(state.params["critic"], observations, actions).amin(0)
