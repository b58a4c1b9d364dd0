"""Losses that more than one algorithm uses. Each takes tensors of one replica and returns a scalar or one number per sample."""

from __future__ import annotations

import torch
from torch import Tensor


def expectile_weight(difference: Tensor, expectile: float | Tensor) -> Tensor:
    """|tau - 1(u < 0)|, elementwise: what turns the mean into an expectile (IQL, arXiv 2110.06169, equation 5); u = target - prediction."""
    return torch.where(difference < 0, 1.0 - expectile, expectile)


def expectile(difference: Tensor, expectile: float | Tensor) -> Tensor:
    """Asymmetric squared error |tau - 1(u < 0)| u**2, elementwise."""
    return expectile_weight(difference, expectile) * difference.square()


def advantage_weight(advantage: Tensor, temperature: float | Tensor, largest: float = 100.0) -> Tensor:
    """min(exp(temperature * A), largest), elementwise (IQL, arXiv 2110.06169, equation 7). `temperature` multiplies (it is inverse)."""
    return (temperature * advantage).exp().clamp(max=largest)


def td_target(rewards: Tensor, masks: Tensor, discount: float | Tensor, next_value: Tensor) -> Tensor:
    """r + discount * (1 - terminated) * V(s'), all [B]."""
    return rewards + discount * masks * next_value
