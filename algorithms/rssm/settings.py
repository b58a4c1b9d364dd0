"""Settings of RSSM."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.settings.field import setting
from offrl.world_models.recurrent.settings import LatentConfig


@dataclass
class RSSMConfig(LatentConfig):
    """Settings of RSSM."""

    name: str = "rssm"
    empowerment_weight: float = setting(
        0.0,
        "objective=information: weight of ln q(a|s, s') - ln pi(a|s) among imagined rewards, for exploration in an "
        "environment",
        low=0.0,
    )
    replay_weight: float = setting(0.3, "weight of the critic's loss on the data's returns", low=0.0)
    entropy_weight: float = setting(3e-4, "weight of the policy's entropy against scaled advantages", low=0.0)
    actor_gradient: str = setting(
        "reinforce",
        "how imagined returns train the policy: by the likelihood of its actions (DreamerV3), or by their gradient "
        "through the model (DreamerV2), which does not scale returns",
        choices=("reinforce", "model"),
    )
    bc_weight: float = setting(0.1, "weight of -log pi(a|s) of the data's actions (ours; DreamerV3: 0)", low=0.0)
    policy_after_model: bool = setting(
        False, "actor and critic begin to learn once the model stays as it is, after model_updates (Offline DreamerV2)"
    )
