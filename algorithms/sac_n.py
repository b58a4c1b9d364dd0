"""SAC-N: "Uncertainty-Based Offline Reinforcement Learning with Diversified Q-Ensemble" (An et al., 2021, arXiv
2110.01548), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.errors import UserError
from offrl.families.sac import ManyCriticsSettings, SoftActorCritic, action_gradients, alignment
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class SACNConfig(ManyCriticsSettings):
    """Settings of SAC-N; the defaults are the authors' for D4RL's HalfCheetah."""

    name: str = "sac_n"
    log_alignment: bool = setting(
        False, "log how much the critics' gradients agree (EDAC's critic/alignment); costs a tenth of the time"
    )


@register("algo", "sac_n")
class SACN(SoftActorCritic):
    """SAC with N critics: the smallest of many estimates is low where they disagree. The policy's and the entropy's
    losses are SAC's.
    """

    Config = SACNConfig

    def modules(self) -> dict[str, nn.Module]:
        if self.config.log_alignment and (self.spec.discrete or self.config.critics < 2):
            raise UserError(
                "algo.log_alignment=true needs continuous actions and at least 2 critics to compare; leave it out"
            )
        return super().modules()

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma (min_j Q'_j(s', a') - alpha log pi(a'|s')) - Q_i(s, a))^2, j = 1..N, summed over critics i
        (section 3).
        """
        target = self.target(state, state.params["actor"], batch, key)
        loss, metrics = self.critic.loss(critic, batch, target, key)
        if self.config.log_alignment:
            constant = {k: v.detach() for k, v in critic.items()}
            metrics["critic/alignment"] = alignment(
                action_gradients(self.critic, constant, batch["observations"], batch["actions"])[1]
            )
        return loss, metrics
