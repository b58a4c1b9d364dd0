"""Encoders that learn to predict, as in MR.Q (Fujimoto et al., 2025, arXiv 2501.16142), whose layers normalise without
learning to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.data.dataset import DataSpec
from offrl.nn.encoders.streams import observation_network
from offrl.nn.heads import SymexpTwoHot
from offrl.nn.mlp import MLP, Linear

FORM: dict[str, Any] = {"layer_norm": True, "affine": False, "norm_first": True, "init": "xavier_relu"}
HEAD = SymexpTwoHot(65, 10.0)  # of rewards


class StateEncoder(nn.Module):
    """z(s): observations [..., O] -> latents [..., L]."""

    def __init__(self, in_dim: int, hidden: Sequence[int], latent: int) -> None:
        super().__init__()
        self.net = MLP(in_dim, hidden, latent, activation="elu", **FORM)

    def forward(self, observations: Tensor) -> Tensor:
        y = self.net(observations)
        return F.elu(F.layer_norm(y, y.shape[-1:]))


def state_encoder(spec: DataSpec, hidden: Sequence[int], latent: int) -> nn.Module:
    """The encoder of these observations; behind the features of images it has one layer."""
    layers = [] if spec.streams else hidden
    return observation_network(spec, lambda inputs: StateEncoder(inputs, layers, latent))


class PairEncoder(nn.Module):
    """z(s, a): latents [..., L] and actions [..., A] -> [..., L]."""

    def __init__(self, latent: int, action_dim: int, action_latent: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.action = Linear(action_dim, action_latent, FORM["init"])
        self.net = MLP(latent + action_latent, hidden, latent, activation="elu", **FORM)

    def forward(self, latents: Tensor, actions: Tensor) -> Tensor:
        return self.net(torch.cat([latents, F.elu(self.action(actions))], -1))


class LinearModel(nn.Module):
    """Linear predictions from z(s, a) [..., L]: whether a terminal follows [...], the next latent [..., L], and outputs
    that HEAD reads as the reward [..., K].
    """

    def __init__(self, latent: int) -> None:
        super().__init__()
        self.sizes = [1, latent, HEAD.out_dim]
        self.linear = Linear(latent, sum(self.sizes), FORM["init"])

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        end, latent, reward = self.linear(pairs).split(self.sizes, -1)
        return end.squeeze(-1), latent, reward
