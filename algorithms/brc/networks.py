"""BroNet, the residual network of BRC's critics and policy."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from offrl.nn.ensemble import EnsembleLinear, Pairs
from offrl.nn.mlp import ACTIVATIONS, Linear
from offrl.nn.policies import TwoHeadedTanhGaussian
from offrl.nn.residual import NormLinear


class BroNet(nn.Module):
    """Linear, LayerNorm, activation, and blocks x + LayerNorm(linear(activation(LayerNorm(linear(x))))): see
    `NormLinear` for the shapes. Weights are orthogonal with gain sqrt(2). epsilon: of LayerNorm.
    """

    def __init__(
        self, size: int | None, in_dim: int, width: int, blocks: int, *, activation: str = "relu", epsilon: float = 1e-6
    ) -> None:
        super().__init__()
        self.first = NormLinear(size, in_dim, width, epsilon, "orthogonal")
        pairs = ((NormLinear(size, width, width, epsilon, "orthogonal") for _ in range(2)) for _ in range(blocks))
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor | Pairs) -> Tensor:
        h = self.activation(self.first(x))
        for block in self.blocks:
            first, second = cast(nn.ModuleList, block)
            h = h + second(self.activation(first(h)))
        return h


class BroEnsemble(nn.Module):
    """E networks over the same input, called as `EnsembleMLP` is. form: see `BroNet`."""

    def __init__(self, size: int, in_dim: int, width: int, blocks: int, out_dim: int, **form: Any) -> None:
        super().__init__()
        self.features = BroNet(size, in_dim, width, blocks, **form)
        self.head = EnsembleLinear(size, width, out_dim, "orthogonal", head=True)

    def forward(self, x: Tensor | Pairs, key: Tensor | None = None) -> Tensor:
        """x [B, in] or [E, B, in] -> [E, B, out_dim], or `Pairs` -> [E, M * B, out_dim]."""
        return cast(Tensor, self.head(self.features(x)))


class BroTanhGaussian(TwoHeadedTanhGaussian):
    """A policy with the features of a `BroNet`, of its `form`; the head of log_std is orthogonal with gain 1."""

    def __init__(self, obs_dim: int, action_dim: int, width: int, blocks: int, **form: Any) -> None:
        heads = (Linear(width, action_dim, init) for init in ("orthogonal", "isometric"))
        super().__init__(BroNet(None, obs_dim, width, blocks, **form), *heads)
