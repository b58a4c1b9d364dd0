"""Losses that more than one algorithm uses. Each takes tensors of one replica and returns a scalar or one number per
sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

CLONING = 2.5  # the mean size of values over the weight of cloning beside them: TD3+BC's alpha (arXiv 2106.06860)


def expectile_weight(difference: Tensor, expectile: float | Tensor) -> Tensor:
    """|tau - 1(u < 0)|, elementwise: the weight of an expectile regression (IQL, arXiv 2110.06169, equation 5); u =
    target - prediction.
    """
    return torch.where(difference < 0, 1.0 - expectile, expectile)


def expectile(difference: Tensor, expectile: float | Tensor) -> Tensor:
    """Asymmetric squared error |tau - 1(u < 0)| u**2, elementwise."""
    return expectile_weight(difference, expectile) * difference.square()


def advantage_weight(advantage: Tensor, temperature: float | Tensor, max_weight: float = 100.0) -> Tensor:
    """min(exp(temperature * A), max_weight), elementwise (IQL, arXiv 2110.06169, equation 7). `temperature` multiplies
    (it is inverse).
    """
    return (temperature * advantage).exp().clamp(max=max_weight)


def td_target(rewards: Tensor, masks: Tensor, discount: float | Tensor, next_value: Tensor) -> Tensor:
    """r + discount * (1 - terminated) * V(s'), all [B]."""
    return rewards + discount * masks * next_value


def n_step_target(rewards: Tensor, going_on: Tensor, discount: float | Tensor, value: Tensor) -> Tensor:
    """sum_{t<n} gamma^t r_t + gamma^n V(s_n), each where its state is no terminal and comes after none: [B].

    rewards [n, B]; going_on [n + 1, B]: 1 for these states, else 0; value [B].
    """
    weights = discount ** torch.arange(len(going_on), device=value.device)
    return (weights.unsqueeze(-1) * going_on * torch.cat([rewards, value.unsqueeze(0)])).sum(0)


def gumbel(
    difference: Tensor,
    temperature: float | Tensor,
    clip: float | Tensor,
    *,
    rescaled: bool = True,
    scale_rows: Tensor | None = None,
) -> Tensor:
    """e**(z - m) - (z + 1) e**(-m), elementwise over a batch [B]; z = min(u / temperature, clip), u = target -
    prediction.

    The Gumbel loss e**z - z - 1, whose minimum is temperature log E[e**(target / temperature)] (XQL, arXiv 2301.02328),
    times e**(-m) with m = max(largest z of the batch, -1), a constant to the gradient: that keeps it finite. A row
    whose z is clipped has no gradient. rescaled=False: m = 0, the loss as the paper writes it. scale_rows [B']:
    differences of more rows that m counts too."""
    z = (difference / temperature).clamp(max=clip)
    if not rescaled:
        return z.exp() - z - 1.0
    shift = z.detach().amax()
    if scale_rows is not None:
        shift = torch.maximum(shift, (scale_rows.detach().amax() / temperature).clamp(max=clip))
    shift = shift.clamp(min=-1.0)
    return (z - shift).exp() - (z + 1.0) * (-shift).exp()


def huber(error: Tensor, delta: float | Tensor) -> Tensor:
    """u**2 / 2 within +-delta and delta (|u| - delta / 2) beyond, elementwise."""
    size = error.abs()
    clipped = size.clamp(max=delta)
    return 0.5 * clipped.square() + delta * (size - clipped)


def total_variation_dual(difference: Tensor, weight: float | Tensor) -> Tensor:
    """weight max(u, 0) - (1 - weight) u, elementwise (f-DVL, arXiv 2302.08560); u = Q - V."""
    return weight * difference.clamp(min=0.0) - (1.0 - weight) * difference


def chi_square_dual(difference: Tensor, weight: float | Tensor) -> Tensor:
    """weight max(u + u**2 / 4, 0) - (1 - weight) u, elementwise (f-DVL, arXiv 2302.08560); u = Q - V. Rises again where
    u < -4.
    """
    return weight * (difference + 0.25 * difference.square()).clamp(min=0.0) - (1.0 - weight) * difference


def mmd(x: Tensor, y: Tensor, sigma: float | Tensor, kernel: str) -> Tensor:
    """Maximum mean discrepancy [B] of samples x [M, B, D] from samples y [M', B, D]: sqrt(E k(x, x') + E k(y, y') - 2 E
    k(x, y)), all pairs counted, those of a sample with itself too (BEAR, arXiv 1906.00949, section 5).

    kernel "gaussian": exp(-|x - y|^2 / (2 sigma)); "laplacian": exp(-|x - y|_1 / (2 sigma))."""

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        difference = a.unsqueeze(1) - b
        size = difference.abs() if kernel == "laplacian" else difference.square()
        return (-size.sum(-1) / (2.0 * sigma)).expm1().mean((0, 1))  # the 1 of all cancels, and with it rounding

    # 1e-6, as BEAR's authors: of equal samples the root has no gradient
    return (similarity(x, x) + similarity(y, y) - 2.0 * similarity(x, y) + 1e-6).sqrt()


def percentile(values: Tensor, share: float) -> Tensor:
    """The number that a `share` of all entries of `values` lie below, linear between order statistics: []."""
    ordered = values.flatten().sort().values
    position = share * (len(ordered) - 1)
    below = int(position)
    return torch.lerp(ordered[below], ordered[min(below + 1, len(ordered) - 1)], position - below)
