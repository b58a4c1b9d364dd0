"""Running scales of returns and advantages, the weights that keep a quantity where it should be, and what they make of
the loss of a policy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offrl.algorithm import Metrics, Tree
from offrl.algorithms.director.settings import DirectorConfig


def correction(value: Tensor, target: float | Tensor) -> Tensor:
    """The factor of a weight that is to bring a value down to its target: 1 where it is within a tenth of it."""
    return torch.where(value > 1.1 * target, 1.1, torch.where(value < target / 1.1, 1.0 / 1.1, 1.0))


def followed(moments: Tensor, values: Tensor, decay: float) -> Tensor:
    """Running sums [3] of means, squares and weights, and with them these values."""
    now = torch.stack([values.mean(), values.square().mean(), torch.ones_like(moments[2])]).detach()
    return torch.lerp(moments, now, 1.0 - decay)


def deviation(moments: Tensor, smallest: float) -> Tensor:
    """The standard deviation [] of what was `followed`."""
    mean, square = moments[0] / moments[2], moments[1] / moments[2]
    return (square - mean.square()).clamp(min=smallest**2).sqrt()


def policy_loss(
    config: DirectorConfig,
    name: str,
    extra: Tree,
    gain: Tensor,
    entropy: Tensor,
    alive: Tensor,
    log_prob: Tensor | None = None,
) -> tuple[Tensor, Metrics, Tree]:
    """-E weight [A + eta H], or with `log_prob` -E weight [sg(A) ln pi + eta H], of advantages [T, N], which are
    standardised by their running moments, and of entropies [T, N, G] as shares of the largest, each of which has an eta
    that keeps it at `entropy_share`; alive [T + 1, N]. And the next moments and etas, by their names in `extra`.
    """
    moments = followed(extra[name], gain, 0.99)
    gain = (gain - moments[0] / moments[2]) / deviation(moments, 1e-8)
    if log_prob is not None:
        gain = gain.detach() * log_prob
    weight = extra[f"{name}_entropy"] / correction(entropy.detach().mean((0, 1)), config.entropy_share)
    weight = weight.clamp(1e-5, 100.0)
    loss = -(alive.detach().cumprod(0)[:-1] * (gain + (weight * entropy).sum(-1))).mean()
    metrics = {"loss": loss, "entropy": entropy.mean(), "entropy_weight": weight.mean()}
    return loss, {f"{name}/{k}": v for k, v in metrics.items()}, {name: moments, f"{name}_entropy": weight}
