"""Gaussians over vectors that are no actions of an environment, such as skills: nothing is squashed or clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from offrl import rng
from offrl.nn.policies import Dist, Policy, gaussian_log_prob

LOG_STD = (-10.0, 2.0)  # the range of log standard deviations, SPiRL's


class Latent(Policy):
    """N(mean(x), diag(std(x)**2)) over vectors of any size; its mode is the mean."""

    outputs = 2

    def forward(self, x: Tensor, key: Tensor | None = None) -> Dist:
        return bounded(self.net(x, key))

    def mode(self, dist: Dist) -> Tensor:
        return dist[0]

    def sample(self, dist: Dist, key: Tensor) -> Tensor:
        return draw(dist, key)

    def log_prob(self, dist: Dist, actions: Tensor) -> Tensor:
        return gaussian_log_prob(dist[0], dist[1], actions)


def bounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(mean, log standard deviation) from a network's output of twice the width."""
    mean, log_std = x.chunk(2, -1)
    return mean, log_std.clamp(*LOG_STD)


def draw(dist: Dist, key: Tensor) -> Tensor:
    """A sample, reparametrised."""
    mean, log_std = dist
    return mean + log_std.exp() * rng.normal(key, tuple(mean.shape))


def gaussian_kl(p: Dist, q: Dist) -> Tensor:
    """KL(p || q) of two diagonal Gaussians, (mean, log standard deviation) each: [...] , summed over the last axis."""
    (mean, log_std), (other, other_log_std) = p, q
    ratio = (2.0 * (log_std - other_log_std)).exp()
    return (other_log_std - log_std + 0.5 * (ratio + ((mean - other) * (-other_log_std).exp()).square()) - 0.5).sum(-1)


def standard(mean: Tensor) -> tuple[Tensor, Tensor]:
    """N(0, I) of the same shape."""
    return torch.zeros_like(mean), torch.zeros_like(mean)
