"""The networks of ARSQ: V(s), and U(s, prefix), which has a block of outputs for each position of which one alone is
read.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from offrl.nn import EnsembleMLP, Pairs


class PositionValues(nn.Module):
    """Two copies of V and of U, with tanh and orthogonal weights (output layers of gain 0.01), as published."""

    def __init__(self, observations: int, actions: int, hidden: Sequence[int], positions: int, bins: int) -> None:
        super().__init__()
        self.value = EnsembleMLP(2, observations, hidden, 1, activation="tanh", init="small_head")
        self.blocks = EnsembleMLP(
            2, observations + actions, hidden, positions * bins, activation="tanh", init="small_head"
        )
        self.positions, self.bins = positions, bins

    def forward(
        self, part: str, observations: Tensor, prefixes: Tensor | None = None, position: int | None = None
    ) -> Tensor:
        """`part` "value": V [2, B] of observations [B, O].

        "blocks": U of each position p with its own prefix, [2, P, B, bins] of prefixes [P, B, A]; or with `position` of
        that one alone, [2, 1, B, bins] of prefixes [1, B, A].
        """
        if part == "value":
            return self.value(observations).squeeze(-1)
        assert prefixes is not None
        x: Tensor | Pairs = Pairs(observations, prefixes)
        for layer in self.blocks.layers:
            x = torch.tanh(layer(x))
        if isinstance(x, Pairs):  # no hidden layers
            x = (
                torch.cat([observations.expand(len(prefixes), *observations.shape), prefixes], -1)
                .flatten(0, 1)
                .expand(2, -1, -1)
            )
        # of each row the one block that is read: P times less work than the whole output layer
        weight = self.blocks.head.weight.unflatten(-1, (self.positions, self.bins)).transpose(1, 2)  # [2, P, H, bins]
        bias = self.blocks.head.bias.unflatten(-1, (self.positions, self.bins)).transpose(1, 2)  # [2, P, 1, bins]
        if position is not None:
            weight, bias = weight[:, position : position + 1], bias[:, position : position + 1]
        return torch.matmul(x.unflatten(1, (len(prefixes), -1)), weight) + bias
