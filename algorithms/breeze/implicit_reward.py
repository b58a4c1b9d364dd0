"""The reward for which a task vector z stands, which BREEZE's Q has to explain."""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-3  # added to B's covariance before it is inverted
NEWTON = 40  # steps: enough for condition numbers up to 1e9


def implicit_reward(b: Tensor, z: Tensor) -> Tensor:
    """B(s')^T (B^T B / n + ridge)^-1 z [B], the reward for which z [B, D] stands, as far as it is linear in B [B, D].
    Gradients go through all of it, as in the code."""
    covariance = (b.transpose(-1, -2) @ b / len(b)).float()  # bfloat16 has no inverse
    matrix = covariance + RIDGE * torch.eye(b.shape[-1], device=b.device, dtype=covariance.dtype)
    inverse = torch.linalg.inv_ex(matrix).inverse if b.device.type == "cpu" else inverse_by_products(matrix)
    return (b @ inverse * z).sum(-1)


def inverse_by_products(matrix: Tensor) -> Tensor:
    """The inverse of a symmetric positive definite matrix [D, D] by Newton's iteration: CUDA's own solvers may wait for
    the host, which no CUDA graph can hold.

    An error of 1 - 1 / condition number is squared by each step; float64 keeps products exact whatever precision= says.
    """
    a = matrix.double()
    fixed = a.detach()
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    x = eye / fixed.diagonal(dim1=-2, dim2=-1).sum(-1)
    for _ in range(NEWTON):
        x = x @ (2.0 * eye - fixed @ x)
    return (x @ (2.0 * eye - a @ x)).to(matrix.dtype)  # a step more, through which the gradient is that of the inverse
