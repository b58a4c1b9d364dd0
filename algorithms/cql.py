"""CQL: "Conservative Q-Learning for Offline Reinforcement Learning" (Kumar et al., 2020, arXiv 2006.04779)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Dataset, Grid, Loss, Metrics, Params, TrainState, Update
from offrl.families import conservative
from offrl.families.conservative import ConservativeSettings, SoftMaximum
from offrl.families.sac import LogWeight, SoftActorCritic
from offrl.registry import register


@dataclass
class CQLConfig(ConservativeSettings):
    """Settings of CQL(H); the defaults are CORL's for D4RL's locomotion tasks."""

    name: str = "cql"


@register("algo", "cql")
class CQL(SoftActorCritic):
    """SAC whose critics are pushed down at actions that the policy would take and up at the data's.

    The policy's and the entropy's losses are SAC's. All losses of an update are those of the state before it. With
    `action_gap` there is the module "lagrange", the logarithm of the penalty's multiplier.
    """

    Config = CQLConfig

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        conservative.check(config, grid)
        return super().fit_config(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        modules = super().modules()
        return modules if self.config.action_gap is None else {**modules, "lagrange": LogWeight(math.e)}

    def make_actor(self) -> nn.Module:
        return conservative.make_actor(self.config, self.spec)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma min_j Q'_j(s', a') - Q_i(s, a))^2 + the penalty, summed over critics i (equation 4)."""
        target = self.target(state, state.params["actor"], batch, key)
        logits = conservative.data_logits(self.critic, critic, batch)  # one forward pass for both
        loss, metrics = self.critic.loss(critic, batch, target, key, logits)
        penalty, penalty_metrics = self.penalty(critic, state, batch, rng.fold_in(key, 102), logits)
        return loss + penalty, {**metrics, **penalty_metrics}

    def penalty(
        self, critic: Params, state: TrainState, batch: Batch, key: Tensor, logits: Tensor | None = None
    ) -> Loss:
        """alpha E [log sum_a exp Q_i(s, a) - Q_i(s, a_data)], summed over critics i (equation 4, the regulariser H).

        With `action_gap` it is multiplier * alpha * (E [...] - gap) (equation 30). logits: the critics' at (s, a_data),
        where known."""
        c = self.config
        rows = conservative.spread_rows(batch, c.penalty_share)
        soft, metrics = self.soft_maximum(critic, state, rows, key, logits if rows is batch else None)
        difference = soft.level - soft.q_data  # [E, B]
        if c.min_difference is not None:
            difference = difference.clamp(min=c.min_difference)
        if c.max_difference is not None:
            difference = difference.clamp(max=c.max_difference)
        per_critic = difference.mean(-1)  # of each critic
        if c.action_gap is None:
            loss = c.conservative_weight * per_critic.sum()
        else:
            multiplier = self.apply("lagrange", state.params["lagrange"]).clamp(max=conservative.MAX_MULTIPLIER)
            loss = multiplier * c.conservative_weight * (per_critic - c.action_gap).sum()
        return loss, {
            **metrics,
            "cql/penalty": loss,
            "cql/difference": per_critic.mean(),
            "cql/q_data": soft.q_data.mean(),
        }

    def soft_maximum(
        self, critic: Params, state: TrainState, batch: Batch, key: Tensor, logits: Tensor | None
    ) -> tuple[SoftMaximum, Metrics]:
        """log sum_a exp Q_i(s, a): over sampled actions, divided by their densities (appendix F), or exact over
        discrete ones.
        """
        c = self.config
        if self.spec.discrete:
            soft = conservative.exact_soft_maximum(self.critic, critic, batch, c.cql_temperature)
            return soft, {"cql/q_uniform": soft.q.mean()}
        sampled = conservative.sampled_actions(partial(self.sample, state.params["actor"]), batch, c.actions, key)
        soft = conservative.soft_maximum(self.critic, critic, batch, sampled, c, rng.fold_in(key, 3), logits)
        return soft, {
            "cql/q_uniform": soft.q[:, : c.actions].mean(),
            "cql/q_policy": soft.q[:, c.actions : 2 * c.actions].mean(),
        }

    def lagrange_loss(self, lagrange: Params, state: TrainState, difference: Tensor) -> Loss:
        """-multiplier * alpha * (difference - gap), difference [] the mean over critics (equation 30): it rises above
        the gap.
        """
        multiplier = self.apply("lagrange", lagrange).clamp(max=conservative.MAX_MULTIPLIER)
        loss = -multiplier * self.config.conservative_weight * (difference - self.config.action_gap)
        return loss, {"cql/multiplier": multiplier}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, critic_key = rng.split(key)
        negative_entropy = self.negative_entropy(state.params["actor"], batch["observations"], actor_key)
        steps = {
            "entropy": self.descend(state, "entropy", self.entropy_loss, negative_entropy),
            "actor": self.descend(state, "actor", self.actor_loss, batch, actor_key),
        }
        critic, metrics = self.descend(state, "critic", self.critic_loss, batch, critic_key)
        steps["critic"] = self.critic.regularised(critic), metrics
        if self.config.action_gap is not None:
            steps["lagrange"] = self.descend(state, "lagrange", self.lagrange_loss, metrics["cql/difference"])
        state, metrics = conservative.simultaneous(state, steps)
        return self.polyak(state, "critic", self.config.polyak), metrics
