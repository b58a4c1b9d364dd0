"""A recurrent network that works under `vmap`, which torch's own does not."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GRU(nn.Module):
    """One layer of gated recurrent units (Cho et al., 2014, arXiv 1406.1078), with nn.GRU's equations and order of
    gates; at first the matrices are orthogonal and the biases 0."""

    def __init__(self, in_dim: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight_in, self.bias_in = (
            nn.Parameter(torch.empty(3 * width, in_dim)),
            nn.Parameter(torch.zeros(3 * width)),
        )
        self.weight, self.bias = nn.Parameter(torch.empty(3 * width, width)), nn.Parameter(torch.zeros(3 * width))
        for matrix in (self.weight_in, self.weight):
            nn.init.orthogonal_(matrix)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """x [B, T, in] -> the state after the last of the steps, [B, width]; steps that are not `valid` [B, T] change
        nothing.
        """
        projections = F.linear(x, self.weight_in, self.bias_in)
        h = torch.zeros(*x.shape[:-2], self.width, dtype=x.dtype, device=x.device)
        for t in range(x.shape[-2]):
            state = self._cell(projections[..., t, :], h)
            h = state if valid is None else torch.where(valid[..., t, None], state, h)
        return h

    def step(self, h: Tensor, x: Tensor) -> Tensor:
        """The state [B, width] after one more input x [B, in]."""
        return self._cell(F.linear(x, self.weight_in, self.bias_in), h)

    def _cell(self, projection: Tensor, h: Tensor) -> Tensor:
        a, b = projection.chunk(3, -1), F.linear(h, self.weight, self.bias).chunk(3, -1)
        reset, update = (a[0] + b[0]).sigmoid(), (a[1] + b[1]).sigmoid()
        return (1.0 - update) * (a[2] + reset * b[2]).tanh() + update * h
