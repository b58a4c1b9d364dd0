"""Multi-layer perceptrons."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}


def initialise(weight: Tensor, bias: Tensor | None, init: str) -> None:
    """Fill one [out, in] weight and its [out] bias in place.

    "torch": both uniform in +-1/sqrt(in), as nn.Linear. "orthogonal": gain sqrt(2), bias 0 (jaxrl's networks). "zero": both 0.
    """
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        if init == "torch":
            weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)
        elif init in ("orthogonal", "zero"):
            if init == "orthogonal":
                nn.init.orthogonal_(weight, 2.0**0.5)
            else:
                weight.zero_()
            if bias is not None:
                bias.zero_()
        else:
            raise ValueError(f"init is {init!r}; it must be torch, orthogonal or zero")


class Linear(nn.Module):
    """y = x W^T + b; x [..., in] -> [..., out]."""

    def __init__(self, in_dim: int, out_dim: int, init: str = "torch") -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim))
        initialise(self.weight, self.bias, init)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def dropout(x: Tensor, rate: float, key: Tensor) -> Tensor:
    """Zero a share `rate` of the entries and scale the rest, with noise from a key instead of hidden global state."""
    keep = rng.uniform(key, tuple(x.shape)) >= rate
    return torch.where(keep, x / (1.0 - rate), 0.0)


class MLP(nn.Module):
    """in_dim -> hidden... -> out_dim. Each hidden layer is linear, activation, LayerNorm (if asked), dropout (if a key is given).

    The order, LayerNorm after the activation, is ReBRAC's (arXiv 2305.09836); without LayerNorm it makes no difference.
    """

    def __init__(
        self,
        in_dim: int,
        hidden: Sequence[int],
        out_dim: int,
        *,
        activation: str = "relu",
        layer_norm: bool = False,
        dropout: float = 0.0,
        init: str = "torch",
    ) -> None:
        super().__init__()
        sizes = [in_dim, *hidden]
        self.layers = nn.ModuleList(Linear(i, o, init) for i, o in zip(sizes[:-1], sizes[1:], strict=True))
        self.norms = nn.ModuleList(nn.LayerNorm(o) for o in sizes[1:]) if layer_norm else None
        self.head = Linear(sizes[-1], out_dim, init)
        self.activation = ACTIVATIONS[activation]
        self.dropout = dropout

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """x [..., in_dim] -> [..., out_dim]. Dropout is on exactly when a key is given."""
        for i, layer in enumerate(self.layers):
            x = self.activation(layer(x))
            if self.norms is not None:
                x = self.norms[i](x)
            if key is not None and self.dropout > 0.0:
                x = dropout(x, self.dropout, rng.fold_in(key, i))
        return self.head(x)
