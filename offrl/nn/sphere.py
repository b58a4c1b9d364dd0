"""Networks whose features and weights lie on the unit sphere: "Hyperspherical Normalization for Scalable Deep
Reinforcement Learning" (Lee et al., 2025, arXiv 2502.15280).

Every column of a weight, over its inputs, has length 1: `projected` brings them back after each step of an optimiser.
Learnt vectors are stored at a scale that has the optimiser move them as fast as the weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.nn.ensemble import Pairs
from offrl.nn.mlp import ACTIVATIONS, initialise
from offrl.nn.policies import TwoHeadedTanhGaussian
from offrl.optim import Params

EPSILON = 1e-8
SHIFT = 3.0  # appended to the inputs, so that their length is not lost on the sphere
EXPANSION = 4  # a block's hidden layer is so many times as wide


def normalised(x: Tensor) -> Tensor:
    """x / max(|x|, 1e-8) over the last axis."""
    return F.normalize(x, dim=-1, eps=EPSILON)


def unit_columns(weight: Tensor) -> Tensor:
    """[..., in, out] with columns of length 1. Columns that differ from it by rounding alone stay as they are."""
    norm = weight.norm(dim=-2, keepdim=True)
    off = (norm - 1.0).abs() > 8.0 * torch.finfo(weight.dtype).eps
    return torch.where(off, weight / norm.clamp(min=EPSILON), weight)


def projected(params: Params) -> Params:
    """The parameters of a network of this file, with the columns of all weights on the unit sphere."""
    return {name: unit_columns(x) if name.endswith("weight") else x for name, x in params.items()}


class SphereLinear(nn.Module):
    """x W without a bias: [..., in] -> [..., out]; with a size [B, in] or [E, B, in] -> [E, B, out]."""

    def __init__(self, size: int | None, in_dim: int, out_dim: int) -> None:
        super().__init__()
        weight = torch.empty(size or 1, in_dim, out_dim)
        for member in weight:
            initialise(member.T, None, "isometric")
        self.weight = nn.Parameter(unit_columns(weight if size else weight[0]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class SphereScale(nn.Module):
    """x times a learnt vector that begins at `init` and is stored at `scale`."""

    def __init__(self, size: int | None, width: int, init: float, scale: float) -> None:
        super().__init__()
        self.factor = init / scale
        self.vector = nn.Parameter(torch.full((size, 1, width) if size else (width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.vector * self.factor)


class SphereBlock(nn.Module):
    """h on the sphere -> n(h + alpha (n(W_2 (f(s W_1 h) + 1e-8)) - h)), f the activation, s and alpha learnt."""

    def __init__(self, size: int | None, width: int, blocks: int, activation: str) -> None:
        super().__init__()
        root = math.sqrt(2.0 / width / EXPANSION)
        self.first = SphereLinear(size, width, EXPANSION * width)
        self.scale = SphereScale(size, EXPANSION * width, root, root)
        self.activation = ACTIVATIONS[activation]
        self.second = SphereLinear(size, EXPANSION * width, width)
        self.share = SphereScale(size, width, 1.0 / (blocks + 1), width**-0.5)

    def forward(self, h: Tensor) -> Tensor:
        branch = self.second(self.activation(self.scale(self.first(h))) + EPSILON)  # 1e-8: no vector of zeros
        return self.towards(h, normalised(branch))

    def towards(self, h: Tensor, branch: Tensor) -> Tensor:
        """n(h + alpha (branch - h))."""
        return normalised(h + self.share(branch - h))


class SphereHead(nn.Module):
    """h on the sphere -> W_2 (s W_1 h) + b."""

    def __init__(self, size: int | None, width: int, out_dim: int) -> None:
        super().__init__()
        self.first = SphereLinear(size, width, width)
        self.scale = SphereScale(size, width, 1.0, 1.0)
        self.second = SphereLinear(size, width, out_dim)
        self.bias = nn.Parameter(torch.zeros((size, 1, out_dim) if size else (out_dim,)))

    def forward(self, h: Tensor) -> Tensor:
        return self.second(self.scale(self.first(h))) + self.bias


class SphereFeatures(nn.Module):
    """x [..., in] -> features on the unit sphere, [..., width]; with a size as `SphereLinear`."""

    def __init__(self, size: int | None, in_dim: int, width: int, blocks: int, activation: str = "relu") -> None:
        super().__init__()
        root = math.sqrt(2.0 / width)
        self.first = SphereLinear(size, in_dim + 1, width)
        self.scale = SphereScale(size, width, root, root)
        self.blocks = nn.ModuleList(SphereBlock(size, width, blocks, activation) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        h = normalised(self.scale(self.first(self.on_sphere(x))))
        for block in self.blocks:
            h = block(h)
        return h

    @staticmethod
    def on_sphere(x: Tensor) -> Tensor:
        """n([x, 3])."""
        return normalised(torch.cat([x, torch.full_like(x[..., :1], SHIFT)], -1))


class SphereEnsemble(nn.Module):
    """E networks over the same input, called as `EnsembleMLP` is."""

    def __init__(self, size: int, in_dim: int, width: int, blocks: int, out_dim: int, activation: str = "relu") -> None:
        super().__init__()
        self.features = SphereFeatures(size, in_dim, width, blocks, activation)
        self.head = SphereHead(size, width, out_dim)

    def forward(self, x: Tensor | Pairs, key: Tensor | None = None) -> Tensor:
        """x [B, in] or [E, B, in] -> [E, B, out_dim], or `Pairs` -> [E, M * B, out_dim]."""
        if isinstance(x, Pairs):
            x = torch.cat([x.states.expand(len(x.actions), *x.states.shape), x.actions], -1).flatten(0, 1)
        return self.head(self.features(x))


class SphereTanhGaussian(TwoHeadedTanhGaussian):
    """A policy with features and weights on the unit sphere."""

    def __init__(self, obs_dim: int, action_dim: int, width: int, blocks: int, activation: str = "relu") -> None:
        features = SphereFeatures(None, obs_dim, width, blocks, activation)
        super().__init__(features, *(SphereHead(None, width, action_dim) for _ in range(2)))
