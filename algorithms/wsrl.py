"""WSRL: "Efficient Online Reinforcement Learning Fine-Tuning Need Not Retain Offline Data" (Zhou et al., 2024, arXiv
2412.07762).

On data Cal-QL; in an environment soft actor-critic without the data: `offrl finetune RUN` plays 5,000 steps by the
run's policy before the first update, then learns without a penalty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Loss, Params, TrainState, Update
from offrl.data.samplers.transitions import TransitionSampler
from offrl.families import conservative
from offrl.families.calibrated import Calibrated, CalibratedSettings
from offrl.families.sac import SoftActorCritic, SplitSettings
from offrl.nn import TanhGaussian
from offrl.registry import register
from offrl.settings.field import defaults

STD_RANGE = (1e-5, 10.0)  # of the policy before tanh


@dataclass
@defaults(
    hidden=[256, 256],
    init="orthogonal",
    critics=10,
    target_critics=2,
    layer_norm=True,
    layer_norm_epsilon=1e-6,
    actor_learning_rate=1e-4,
    conservative_weight=5.0,
    max_target_actions=10,
)
class WSRLConfig(CalibratedSettings, SplitSettings):
    """Settings of WSRL; the defaults are the authors' for locomotion (AntMaze's: `offrl list`, experiments)."""

    name: str = "wsrl"


@register("algo", "wsrl")
class WSRL(Calibrated[WSRLConfig], SoftActorCritic[WSRLConfig]):
    """Cal-QL with layer normalisation in critics and policy, which forgets the data where it may play.

    With `utd_split` above 1 (online: 4) the critics learn first, each part in turn with targets that move after it, and
    then policy and entropy at once, as in the authors' code.
    """

    traits = replace(SoftActorCritic.traits, actions=("continuous",), observations="vector")
    norm_first = True

    def sampler(self) -> TransitionSampler:
        return (
            super().sampler() if conservative.penalised(self.config) else TransitionSampler(n_step=self.config.n_step)
        )

    def make_actor(self) -> nn.Module:
        c, s, (low, high) = self.config, self.spec, STD_RANGE
        return TanhGaussian(
            s.observation_dim,
            s.action_dim,
            c.hidden,
            activation=c.activation,
            init=c.init,
            layer_norm=True,
            layer_norm_epsilon=c.layer_norm_epsilon,
            norm_first=self.norm_first,
            log_std_min=math.log(low),
            log_std_max=math.log(high),
        )

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E (r + gamma min_j Q'_j(s', a') - Q_i(s, a))^2 + the penalty, summed over critics i (Cal-QL, 4.1)."""
        return conservative.penalised_loss(self, critic, state, batch, key)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        parts = self.batch_parts(batch)
        if len(parts) == 1:
            return super().update(state, batch, key, phase=phase)
        critic_key, actor_key, entropy_key = rng.split(key, 3)
        state, critic = self.critic_steps(state, parts, critic_key)
        negative_entropy = self.negative_entropy(state.params["actor"], batch["next_observations"], entropy_key)
        state, policy = self.policy_step(state, batch, actor_key, negative_entropy)
        return state, {**critic, **policy}
