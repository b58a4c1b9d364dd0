"""Networks of TD-MPC2: layers are a linear map, LayerNorm and Mish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offrl.algorithm import DataSpec
from offrl.nn import MLP, TanhGaussian
from offrl.nn.encoders.streams import observation_network
from offrl.nn.heads import SymlogTwoHot
from offrl.nn.policies import Dist
from offrl.nn.simnorm import SimNormMLP

FORM: dict[str, Any] = {"activation": "mish", "layer_norm": True, "norm_first": True, "init": "gpt"}
HEAD = SymlogTwoHot(101, 10.0)  # of rewards and values
LOG_STD = (-10.0, 2.0)  # of the policy


class LatentStep(NamedTuple):
    """Predictions of the model for latents and actions [...]."""

    latent: Tensor  # [..., L]: the next one
    reward: Tensor  # [..., K]: outputs that HEAD reads
    termination: Tensor | None  # [...]: logit of a terminal at the next latent; None where ends are not learnt


def latent_encoder(spec: DataSpec, hidden: Sequence[int], latent: int) -> nn.Module:
    """The encoder of these observations."""
    return observation_network(spec, lambda inputs: SimNormMLP(inputs, hidden, latent))


class LatentModel(nn.Module):
    """Dynamics, rewards and terminals in latent space."""

    def __init__(self, latent: int, action_dim: int, hidden: Sequence[int], episodic: bool) -> None:
        super().__init__()
        self.dynamics = SimNormMLP(latent + action_dim, hidden, latent)
        self.reward = MLP(latent + action_dim, hidden, HEAD.out_dim, **FORM)
        self.termination = MLP(latent, hidden, 1, **FORM) if episodic else None
        nn.init.zeros_(self.reward.head.weight)

    def forward(self, latents: Tensor, actions: Tensor) -> LatentStep:
        """latents [..., L], actions [..., A]."""
        x = torch.cat([latents, actions], -1)
        following = self.dynamics(x)
        ends = None if self.termination is None else self.termination(following).squeeze(-1)
        return LatentStep(following, self.reward(x), ends)


class LatentPolicy(TanhGaussian):
    """TanhGaussian whose log standard deviation is low + (high - low) (tanh(x) + 1) / 2 of the network's output x."""

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        mean, x = self.net(observations, key).chunk(2, -1)
        low, high = LOG_STD
        return mean, low + 0.5 * (high - low) * (x.tanh() + 1.0)
