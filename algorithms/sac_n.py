"""SAC-N: "Uncertainty-Based Offline Reinforcement Learning with Diversified Q-Ensemble" (An et al., 2021, arXiv
2110.01548), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.families.sac import ManyCriticsSettings, SoftActorCritic
from offrl.registry import register


@dataclass
class SACNConfig(ManyCriticsSettings):
    """Settings of SAC-N; the defaults are the authors' for D4RL's HalfCheetah."""

    name: str = "sac_n"


@register("algo", "sac_n")
class SACN(SoftActorCritic[SACNConfig]):
    """SAC with N critics: the smallest of many estimates is low where they disagree. The policy's and the entropy's
    losses are SAC's.
    """

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma (min_j Q'_j(s', a') - alpha log pi(a'|s')) - Q_i(s, a))^2, j = 1..N, summed over critics i
        (section 3).
        """
        return self.critic.loss(critic, batch, self.target(state, state.params["actor"], batch, key), key)
