"""Weights of several losses by the multiple-gradient descent algorithm (MGDA: Sener and Koltun, 2018, arXiv
1810.04650).
"""

from __future__ import annotations

import torch
from torch import Tensor


def shortest(slopes: Tensor, iterations: int = 20) -> Tensor:
    """Weights [M] >= 0 of sum 1 that make |sum_i w_i slopes_i| smallest, for slopes [M, P]: Frank-Wolfe with exact line
    search.

    A slope of zeros, of a loss that nothing in the batch speaks of, has weight 0: with weight 1 no other loss would be
    learnt from."""
    products = slopes @ slopes.T
    nonzero = products.diagonal() > 0.0
    nonzero = nonzero | ~nonzero.any()
    weights = nonzero.float() / nonzero.sum()
    index = torch.arange(len(slopes), device=slopes.device)
    for _ in range(iterations):
        projection = products @ weights
        corner = (index == torch.where(nonzero, projection, float("inf")).argmin()).float()
        current, cross, target = weights @ projection, corner @ projection, corner @ products @ corner
        step = ((current - cross) / (current - 2.0 * cross + target).clamp(min=1e-12)).clamp(0.0, 1.0)
        weights = (1.0 - step) * weights + step * corner
    return weights
