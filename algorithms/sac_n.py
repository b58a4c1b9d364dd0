"""SAC-N: "Uncertainty-Based Offline Reinforcement Learning with Diversified Q-Ensemble" (An et al., 2021, arXiv
2110.01548), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.families.sac import ManyCriticsSettings, SoftActorCritic, SplitSettings
from offrl.registry import register


@dataclass
class SACNConfig(ManyCriticsSettings, SplitSettings):
    """Settings of SAC-N; the defaults are the authors' for D4RL's HalfCheetah."""

    name: str = "sac_n"


@register("algo", "sac_n")
class SACN(SoftActorCritic[SACNConfig]):
    """SAC with N critics: the smallest of many estimates is low where they disagree. The policy's and the entropy's
    losses are SAC's.

    With `utd_split` above 1 (RLPD: 20) the critics learn from each part of a batch in turn, and then policy and
    entropy from the last part, as in RLPD's code (arXiv 2302.02948).
    """

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma (min_j Q'_j(s', a') - alpha log pi(a'|s')) - Q_i(s, a))^2, j = 1..N, summed over critics i
        (section 3).
        """
        return self.critic.loss(critic, batch, self.target(state, state.params["actor"], batch, key), key)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        parts = self.batch_parts(batch)
        if len(parts) == 1:
            return super().update(state, batch, key, phase=phase)
        critic_key, actor_key = rng.split(key)
        state, critic = self.critic_steps(state, parts, critic_key)
        negative_entropy = self.negative_entropy(state.params["actor"], parts[-1]["observations"], actor_key)
        state, policy = self.policy_step(state, parts[-1], actor_key, negative_entropy)
        state, costs = self.learn_costs(state, parts[-1], lambda b: self.next_policy(state, b, critic_key), policy)
        return state, {**critic, **policy, **costs}
