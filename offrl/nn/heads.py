"""Value heads: how a critic's outputs stand for a value. Chosen by config in every TD algorithm."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ValueHead(Protocol):
    """Turns a network's last axis [..., out_dim] into values [...] and gives the loss against target values."""

    out_dim: int

    def mean(self, logits: Tensor) -> Tensor:
        """The value that the outputs stand for: [..., out_dim] -> [...]."""

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Elementwise loss [...] of outputs [..., out_dim] against targets that broadcast to [...]."""


class Scalar:
    """One output is the value; squared error."""

    out_dim = 1

    def mean(self, logits: Tensor) -> Tensor:
        return logits.squeeze(-1)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return (logits.squeeze(-1) - target).square()


HEADS: dict[str, type] = {"scalar": Scalar}


def make_head(name: str) -> ValueHead:
    """The value head called `name`."""
    return HEADS[name]()
