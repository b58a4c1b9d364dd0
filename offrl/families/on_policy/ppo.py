"""Proximal policy optimisation (Schulman et al., 2017, arXiv 1707.06347): advantages, the clipped objective, and what
decides when to stop.

`weight` [B] in functions of a batch is 1 for a row that counts and 0 for one that does not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from offrl.optim import Params, global_norm


def generalised_advantages(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    over: Tensor,
    discount: float,
    decay: float,
    weight: Tensor | None = None,
) -> Tensor:
    """A_t = d_t + discount decay A_{t+1} within an episode, d_t = r_t + discount V(s_{t+1}) - V(s_t) (Schulman et al.,
    2015, arXiv 1506.02438, equation 16).

    All [T, ...] in order of time. next_values: of the true next states, that of an episode's last one included; it
    counts for nothing where the episode `terminated` (bool). over (bool): the row is the last one of its episode, or
    the episode was cut after it. weight: 0 for a row that does not count, whose advantage is 0.
    """
    deltas = rewards + discount * next_values * ~terminated - values
    deltas = deltas if weight is None else torch.where(weight > 0.0, deltas, 0.0)  # of such a row anything may be NaN
    result, following = torch.empty_like(deltas), torch.zeros_like(deltas[0])
    for t in range(len(deltas) - 1, -1, -1):
        following = deltas[t] + discount * decay * ~over[t] * following
        result[t] = following
    return result


def weighted_mean(values: Tensor, weight: Tensor) -> Tensor:
    """The mean of the values [B] of the rows that count."""
    return (values * weight).sum() / weight.sum().clamp(min=1.0)


def normalised(advantages: Tensor, weight: Tensor) -> Tensor:
    """Advantages [B] less their mean, over their sample standard deviation (+ 1e-8)."""
    centred = advantages - weighted_mean(advantages, weight)
    variance = (centred.square() * weight).sum() / (weight.sum() - 1.0).clamp(min=1.0)
    return centred / (variance.sqrt() + 1e-8)


def clipped_loss(advantages: Tensor, ratio: Tensor, clip: float, weight: Tensor) -> Tensor:
    """mean max(-A r, -A clip(r, 1 - c, 1 + c)) (equation 7 of the paper, negated); ratio [B] of the new policy's
    density to the old's.
    """
    bounded = ratio.clamp(1.0 - clip, 1.0 + clip)
    return weighted_mean(torch.maximum(-advantages * ratio, -advantages * bounded), weight)


def divergence(log_ratio: Tensor, weight: Tensor) -> Tensor:
    """mean((r - 1) - log r), which estimates KL(old || new) from actions of the old policy and is never negative."""
    return weighted_mean(torch.expm1(log_ratio) - log_ratio, weight)


def surrogate(advantages: Tensor, log_ratio: Tensor, clip: float, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """`clipped_loss` of log ratios [B], with the divergence and the share of rows whose ratio is outside the clip."""
    ratio = log_ratio.exp()
    loss = clipped_loss(advantages, ratio, clip, weight)
    outside = weighted_mean(((ratio - 1.0).abs() > clip).float(), weight)
    return loss, {"actor/loss": loss, "actor/kl": divergence(log_ratio, weight), "actor/clipped": outside}


def clipped_value_errors(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) [B]: a value that moves further than c gains nothing."""
    bounded = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (bounded - returns).square())


def gaussian_divergence(means: Tensor, log_std: Tensor, new_means: Tensor, new_log_std: Tensor) -> Tensor:
    """KL(old || new) [B] of diagonal Gaussians [B, A]: sum log(s1 / s0) + (s0^2 + (m0 - m1)^2) / (2 s1^2) - 1/2."""
    shift, narrower = (means - new_means) * torch.exp(-new_log_std), log_std - new_log_std
    return (0.5 * shift.square() - narrower + 0.5 * torch.expm1(2.0 * narrower)).sum(-1)


def adapted_rate(rate: Tensor, kl: Tensor, desired: float) -> Tensor:
    """The learning rate [] after a divergence [] (rsl_rl): over 1.5 where it is above twice the desired one, times 1.5
    where it is below half of it but not 0, which is that of the policy that played; within [1e-5, 1e-2].
    """
    moved = kl > 1e-9  # above what rounding makes of 0
    higher = torch.where(moved & (kl < 0.5 * desired), (rate * 1.5).clamp(max=1e-2), rate)
    return torch.where(kl > 2.0 * desired, (rate / 1.5).clamp(min=1e-5), higher)


def clipped_together(gradients: dict[str, Params], largest: float) -> dict[str, Params]:
    """The gradients of several modules, scaled down where their joint Euclidean norm is above `largest`; 0: as they
    are.
    """
    if not largest:
        return gradients
    norm = global_norm({f"{name}/{k}": g for name, grads in gradients.items() for k, g in grads.items()})
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    return {name: {k: g * scale for k, g in grads.items()} for name, grads in gradients.items()}


def rate_factor(iteration: int, iterations: int, warmup: int = 0) -> float:
    """The factor of a learning rate in an iteration, from 0: linear from 0 over `warmup` iterations, then half a cosine
    to 0 at `iterations`."""
    if iteration < warmup:
        return iteration / warmup
    progress = (iteration - warmup) / max(1, iterations - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress))))


class Moments(NamedTuple):
    """Running mean and variance of N series: [N] float64 each. They begin as mean 0, variance 1 and 1e-4 values
    seen, or as many as `begin` is told.
    """

    mean: Tensor
    variance: Tensor
    num_values: Tensor  # of each series

    @classmethod
    def begin(cls, many: int, prior: float = 1e-4) -> Moments:
        """Of `many` series of which nothing is known. prior: how many values the mean 0 and the variance 1 stand
        for.
        """
        zeros = torch.zeros(many, dtype=torch.float64)
        return cls(zeros, zeros + 1.0, zeros + prior)

    def add(self, values: Tensor) -> Moments:
        """With the values [N, E] of one moment (Chan et al., 1979)."""
        values = values.double()
        more, mean, variance = values.shape[1], values.mean(1), values.var(1, unbiased=False)
        total, shift = self.num_values + more, mean - self.mean
        squares = self.variance * self.num_values + variance * more + shift.square() * self.num_values * more / total
        return Moments(self.mean + shift * more / total, squares / total, total)

    def scaled(self, values: Tensor, largest: float) -> Tensor:
        """Values [N, E] over the standard deviation, within +-`largest`; the mean stays in."""
        return (values / (self.variance.unsqueeze(-1) + 1e-8).sqrt()).clamp(-largest, largest)
