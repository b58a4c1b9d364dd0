"""Pooling of image encoders."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def max_pool(x: Tensor, *, same: bool) -> Tensor:
    """The largest of windows 3x3 two pixels apart: [B, C, H, W] -> [B, C, ceil(H / 2), ceil(W / 2)].

    same: padded as XLA's SAME, even sizes at the end only; else on all sides, as torch's padding of 1.
    """
    before = [n % 2 if same else 1 for n in x.shape[-2:]]
    if x.device.type != "cuda":
        return F.max_pool2d(x, 3, 2, before, ceil_mode=same)
    # CUDA adds the gradients of windows that overlap in no fixed order
    return ordered_max_pool(x, before)


def ordered_max_pool(x: Tensor, before: Sequence[int]) -> Tensor:
    """`max_pool` by slices, whose gradients are added in a fixed order. before: pixels added above and on the left."""
    sizes = [-(-n // 2) for n in x.shape[-2:]]
    x = F.pad(x, (before[1], 1, before[0], 1), value=-math.inf)
    for dim, size in zip((-2, -1), sizes, strict=True):
        first, second, third = (x.movedim(dim, 0)[i : i + 2 * size : 2] for i in range(3))
        x = torch.maximum(torch.maximum(first, second), third).movedim(0, dim)
    return x
