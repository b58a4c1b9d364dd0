"""Cal-QL: "Cal-QL: Calibrated Offline RL Pre-Training for Efficient Online Fine-Tuning" (Nakamoto et al., 2023, arXiv
2303.05479).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.families import conservative
from offrl.families.calibrated import Calibrated, CalibratedSettings
from offrl.families.sac import SoftActorCritic
from offrl.registry import register


@dataclass
class CalQLConfig(CalibratedSettings):
    """Settings of Cal-QL; the defaults are CQL's for D4RL's locomotion tasks (the paper's own tasks: `offrl list`,
    experiments).
    """

    name: str = "cal_ql"


@register("algo", "cal_ql")
class CalQL(Calibrated[CalQLConfig], SoftActorCritic[CalQLConfig]):
    """CQL whose penalty pushes no value of the policy below the return that the data had from the state.

    The policy's and the entropy's losses are SAC's. All losses of an update are those of the state before it. With
    `action_gap` there is the module "lagrange", the logarithm of the penalty's multiplier.
    """

    traits = replace(SoftActorCritic.traits, actions=("continuous",))

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma min_j Q'_j(s', a') - Q_i(s, a))^2 + the penalty, summed over critics i (equation 4.1)."""
        return conservative.penalised_loss(self, critic, state, batch, key)
