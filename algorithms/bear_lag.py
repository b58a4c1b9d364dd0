"""BEAR-Lagrangian: BEAR ("Stabilizing Off-Policy Q-Learning via Bootstrapping Error Reduction", Kumar et al., 2019,
arXiv 1906.00949) with a limit of costs, as a baseline of DSRL's (arXiv 2306.09303).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Batch, Loss, Params, TrainState, Tree, Update
from offrl.families.behaviour import Autoencoder, BehaviourSettings, NearBehaviour
from offrl.families.critics import Critic
from offrl.nn import TanhGaussian
from offrl.registry import register
from offrl.settings.field import setting

LOG_ALPHA = -5.0, 5.0  # bounds of the logarithm of the discrepancy's weight


@dataclass
class BEARLagConfig(BehaviourSettings):
    """Settings of BEAR-Lagrangian; the defaults are OSRL's for DSRL's tasks."""

    name: str = "bear_lag"
    mmd_kernel: str = setting(
        "gaussian", "kernel of the discrepancy between policy and data", choices=("gaussian", "laplacian")
    )
    mmd_sigma: float = setting(50.0, "its width: distances (gaussian: their squares) count over twice this", above=0.0)
    mmd_samples: int = setting(10, "actions of the policy, and of the autoencoder, that are compared", low=1)
    mmd_limit: float = setting(0.05, "the discrepancy that the policy is held at", low=0.0)
    mmd_rate: float = setting(1e-3, "step of the logarithm of the discrepancy's weight", low=0.0)


@register("algo", "bear_lag")
class BEARLag(NearBehaviour[BEARLagConfig]):
    """The policy stays within the support of the data's actions, by its discrepancy from an autoencoder's, and a
    multiplier weighs what it costs. Without `cost_limit` it is BEAR.

    Modules: autoencoder, critic, actor; with a limit cost_critic.
    """

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.critic, self.autoencoder = Critic(c, s), Autoencoder(c, s)
        return {
            "critic": self.critic.network,
            "autoencoder": self.autoencoder.network,
            "actor": TanhGaussian(s.observation_dim, s.action_dim, c.hidden, activation=c.activation, init=c.init),
            **self.cost_modules(),
        }

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"log_alpha": torch.zeros(())}

    def samples(self, actor: Params, observations: Tensor, key: Tensor, count: int) -> Tensor:
        """Actions of the policy before their tanh: [count, B, A]."""
        mean, log_std = self.apply("actor", actor, observations)
        return mean + log_std.exp() * rng.normal(key, (count, *mean.shape))

    def candidates(self, actor: Params, state: TrainState, observations: Tensor, key: Tensor) -> Tensor:
        return self.samples(actor, observations, key, self.config.candidates).tanh()

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E [alpha (MMD(pi, autoencoder) - epsilon) - min_i Q_i(s, a)], and the costs of a (BEAR, section 5). Actions
        before their tanh are compared; a is the first of the policy's.
        """
        c, observations = self.config, batch["observations"]
        own_key, data_key = rng.split(key)
        samples = self.samples(actor, observations, own_key, c.mmd_samples)
        latents = self.autoencoder.latents(observations, data_key, c.mmd_samples)
        known = self.autoencoder.decode(state.params["autoencoder"], observations, latents)
        excess = losses.mmd(known, samples, c.mmd_sigma, c.mmd_kernel).mean() - c.mmd_limit
        actions, alpha = samples[0].tanh(), state.extra["log_alpha"].exp()
        q = self.critic.q(state.params["critic"], observations, actions).amin(0)
        loss = alpha * excess - q.mean()
        metrics = {"actor/loss": loss, "actor/q": q.mean(), "mmd/excess": excess, "mmd/alpha": alpha}
        return self.limited(loss, metrics, state, observations, actions, q.detach().abs().mean())

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        """Afterwards log alpha + rate alpha (MMD - epsilon): it grows while the policy is too far from the data."""
        state, metrics = super().update(state, batch, key, phase=phase)
        log_alpha = state.extra["log_alpha"]
        step = self.config.mmd_rate * log_alpha.exp() * metrics["mmd/excess"]
        return state.with_extra(log_alpha=(log_alpha + step).clamp(*LOG_ALPHA)), metrics
