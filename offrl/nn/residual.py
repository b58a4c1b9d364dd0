"""Deep residual networks for values: "1000 Layer Networks for Self-Supervised RL" (arXiv 2503.14858)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.nn.ensemble import EnsembleLinear, Pairs
from offrl.nn.mlp import Linear

BLOCK = 4  # layers between two identities


class NormLinear(nn.Module):
    """Linear, LayerNorm: [B, in] -> [B, out]; with a size E members, [B, in] or [E, B, in] -> [E, B, out], and `Pairs`
    as `EnsembleLinear`.
    """

    def __init__(self, size: int | None, in_dim: int, width: int, epsilon: float, init: str = "torch") -> None:
        super().__init__()
        self.epsilon = epsilon
        self.linear = EnsembleLinear(size, in_dim, width, init) if size else Linear(in_dim, width, init)
        nn.init.zeros_(self.linear.bias)
        shape = (size, 1, width) if size else (width,)
        self.scale, self.shift = nn.Parameter(torch.ones(shape)), nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor | Pairs) -> Tensor:
        y = self.linear(x)
        return F.layer_norm(y, y.shape[-1:], eps=self.epsilon) * self.scale + self.shift


class _Layer(NormLinear):
    """Linear, LayerNorm, SiLU; of E members."""

    def forward(self, x: Tensor | Pairs) -> Tensor:
        return F.silu(super().forward(x))


class ResidualEnsemble(nn.Module):
    """E networks [B, in] -> [E, B, out]: a first layer, depth / 4 blocks of four layers that add their input to their
    output, a linear one. A layer is linear, LayerNorm, SiLU: in this order, which the depth needs. `depth` counts the
    layers in blocks.
    epsilon: of LayerNorm."""

    def __init__(self, size: int, in_dim: int, width: int, depth: int, out_dim: int, *, epsilon: float = 1e-5) -> None:
        super().__init__()
        if depth < BLOCK or depth % BLOCK:
            raise ValueError(f"depth is {depth}; it must be a multiple of {BLOCK}")
        self.first = _Layer(size, in_dim, width, epsilon)
        blocks = ((_Layer(size, width, width, epsilon) for _ in range(BLOCK)) for _ in range(depth // BLOCK))
        self.blocks = nn.ModuleList(nn.Sequential(*block) for block in blocks)
        self.head = EnsembleLinear(size, width, out_dim)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in] -> [E, B, out_dim]."""
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return cast(Tensor, self.head(x))


class Encoders(nn.Module):
    """Two encoders of E members each, of queries and of goals, whose latents are compared."""

    def __init__(self, query_encoder: nn.Module, goal_encoder: nn.Module) -> None:
        super().__init__()
        self.near, self.far = query_encoder, goal_encoder

    def forward(self, x: Tensor, goals: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, I], goals [B, G] -> latents [E, B, D] of each."""
        return self.near(x), self.far(goals)
