"""The random shift of images that are trained on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offrl import rng


def random_shift(images: Tensor, key: Tensor, pad: int, together: bool = False) -> Tensor:
    """Each image, padded by `pad` pixels that repeat its edge, cropped to its size at a place of its own (DrQ-v2, arXiv
    2107.09645): images [*, H, W, C] of any type -> the same. together: those of a window [B, K, H, W, C] at one place.
    """
    *batch, height, width, channels = images.shape
    crops = [batch[0], *[1] * (len(batch) - 1)] if together else batch
    dy, dx = rng.randint(key, (2, *crops, 1), 2 * pad + 1) - pad
    rows = (torch.arange(height, device=images.device) + dy).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + dx).clamp(0, width - 1)
    first = height * width * torch.arange(math.prod(batch), device=images.device).reshape(*batch, 1, 1)
    pixels = first + width * rows.unsqueeze(-1) + columns.unsqueeze(-2)
    # whole pixels at once: on a CPU faster than a gather along each axis
    return images.reshape(-1, channels).index_select(0, pixels.flatten()).reshape(images.shape)
