"""A conditional variational autoencoder of actions (arXiv 1812.02900), by which algorithms tell what data hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offrl.nn.mlp import MLP

LOG_STD = -4.0, 15.0  # bounds


class ActionAutoencoder(nn.Module):
    """Encodes (s, a) as a normal distribution of latents of twice the action's dimensions, and decodes (s, z)."""

    def __init__(self, observation_dim: int, action_dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.latent_dim = 2 * action_dim
        self.encoder = MLP(observation_dim + action_dim, hidden, 2 * self.latent_dim)
        self.decoder = MLP(observation_dim + self.latent_dim, hidden, action_dim)

    def forward(self, kind: str, observations: Tensor, x: Tensor) -> Tensor:
        """kind "encode": (mean, log_std) side by side [..., 2 L] of actions x; "decode": actions before their tanh
        [..., A] of latents x.
        """
        x = torch.cat([observations, x], -1)
        return self.encoder(x) if kind == "encode" else self.decoder(x)


def encoded(output: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, log_std) [..., L] of the encoder's output."""
    mean, log_std = output.chunk(2, -1)
    return mean, log_std.clamp(*LOG_STD)


def divergence(mean: Tensor, log_std: Tensor) -> Tensor:
    """KL divergence of the latent's distribution from N(0, 1), the mean over its dimensions: [...]."""
    return -0.5 * (1.0 + 2.0 * log_std - mean.square() - (2.0 * log_std).exp()).mean(-1)
