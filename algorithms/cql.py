"""CQL: "Conservative Q-Learning for Offline Reinforcement Learning" (Kumar et al., 2020, arXiv 2006.04779)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Loss, Metrics, Params, TrainState
from offrl.families import conservative
from offrl.families.conservative import Conservative, ConservativeSettings, SoftMaximum
from offrl.families.critics import ConstraintSettings
from offrl.families.sac import SoftActorCritic
from offrl.registry import register


@dataclass
class CQLConfig(ConservativeSettings, ConstraintSettings):
    """Settings of CQL(H); the defaults are CORL's for D4RL's locomotion tasks."""

    name: str = "cql"


@register("algo", "cql")
class CQL(Conservative[CQLConfig], SoftActorCritic[CQLConfig]):
    """SAC whose critics are pushed down at actions that the policy would take and up at the data's.

    The policy's and the entropy's losses are SAC's. All losses of an update are those of the state before it. With
    `action_gap` there is the module "lagrange", the logarithm of the penalty's multiplier.
    """

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma min_j Q'_j(s', a') - Q_i(s, a))^2 + the penalty, summed over critics i (equation 4)."""
        return conservative.penalised_loss(self, critic, state, batch, key)

    def penalty(
        self, critic: Params, state: TrainState, batch: Batch, key: Tensor, logits: Tensor | None = None
    ) -> Loss:
        """alpha E [log sum_a exp Q_i(s, a) - Q_i(s, a_data)], summed over critics i (equation 4, the regulariser H).

        With `action_gap` it is multiplier * alpha * (E [...] - gap) (equation 30). logits: the critics' at (s, a_data),
        where known."""
        rows = conservative.spread_rows(batch, self.config.penalty_share)
        soft, metrics = self.soft_maximum(critic, state, rows, key, logits if rows is batch else None)
        loss, penalty_metrics = self.weighted(state, soft)
        return loss, {**metrics, **penalty_metrics}

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
