"""E networks of one shape, evaluated together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offrl.nn.mlp import Layers, initialise


class Pairs(NamedTuple):
    """M actions at each of B states: stands for the M * B rows [s; a], in the order of the actions, which are never
    made.
    """

    states: Tensor  # [B, S]
    actions: Tensor  # [M, B, A]


class EnsembleLinear(nn.Module):
    """E independent linear layers: x [B, in] or [E, B, in] -> [E, B, out]; `Pairs` -> [E, M * B, out]. Weights are
    stored [E, in, out].
    """

    def __init__(self, size: int, in_dim: int, out_dim: int, init: str = "torch", *, head: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(size, 1, out_dim))
        for member in range(size):
            initialise(self.weight.data[member].T, self.bias.data[member, 0], init, head=head)

    def forward(self, x: Tensor | Pairs) -> Tensor:
        if isinstance(x, Pairs):
            return self._of_pairs(x)
        if x.ndim == 2:
            x = x.expand(self.weight.shape[0], *x.shape)
        return torch.baddbmm(self.bias, x, self.weight)

    def _of_pairs(self, x: Pairs) -> Tensor:
        """W_s s + b + W_a a, the states' part once for all actions: with 30 actions that is most of the layer's
        work.
        """
        size, split = self.weight.shape[0], x.states.shape[-1]
        states, actions = (part.expand(size, *part.shape) for part in (x.states, x.actions.flatten(0, 1)))
        of_states = torch.baddbmm(self.bias, states, self.weight[:, :split])
        of_actions = torch.bmm(actions, self.weight[:, split:])
        return (of_states.unsqueeze(1) + of_actions.unflatten(1, x.actions.shape[:2])).flatten(1, 2)


class EnsembleMLP(Layers):
    """E multi-layer perceptrons over the same input: [B, in] -> [E, B, out_dim]; built like `MLP`.

    Given the parameters of some of the members only (`functional_call` with slices of the first axis) it evaluates
    those.
    """

    head: EnsembleLinear

    def __init__(
        self, size: int, in_dim: int, hidden: Sequence[int], out_dim: int, *, init: str = "torch", **form: Any
    ) -> None:
        sizes = [in_dim, *hidden]
        super().__init__((EnsembleLinear(size, i, o, init) for i, o in pairwise(sizes)), **form)
        if self.affine:
            self.scales = nn.ParameterList(torch.ones(size, 1, o) for o in hidden)
            self.shifts = nn.ParameterList(torch.zeros(size, 1, o) for o in hidden)
        self.head = EnsembleLinear(size, sizes[-1], out_dim, init, head=True)
        self.own: nn.Module | None = None

    def norm(self, i: int) -> tuple[Tensor, Tensor]:
        return self.scales[i], self.shifts[i]

    def replace(self, network: nn.Module) -> None:
        """Let a module of the same inputs and outputs take the place of the layers."""
        for name in [name for name, _ in self.named_children()]:
            delattr(self, name)
        self.own = network

    def forward(self, x: Tensor | Pairs, key: Tensor | None = None) -> Tensor:
        """x [B, in] -> [E, B, out_dim], or `Pairs` -> [E, M * B, out_dim]. Dropout is on exactly when a key is
        given.
        """
        return super().forward(x, key) if self.own is None else self.own(x, key)
