"""Networks of forward-backward representations (arXiv 2209.14935): F(s, a, z), B(s) and a policy pi(s, z).

Shapes in comments: B batch, O observation, A action, D dimension of z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.nn.ensemble import EnsembleMLP
from offrl.nn.mlp import Linear
from offrl.nn.transformer import Norm


def on_sphere(x: Tensor) -> Tensor:
    """x [..., D] scaled to length sqrt(D); 0 stays 0."""
    return math.sqrt(x.shape[-1]) * F.normalize(x, dim=-1)


class NormTanhMLP(nn.Module):
    """in -> hidden... -> out, where the first hidden layer is linear, LayerNorm, tanh and the others are linear, ReLU,
    as is the first without `norm_tanh`; `rectified`: the output too."""

    def __init__(
        self, in_dim: int, hidden: Sequence[int], out_dim: int, rectified: bool = False, norm_tanh: bool = True
    ) -> None:
        super().__init__()
        sizes = [in_dim, *hidden]
        self.layers = nn.ModuleList(Linear(i, o) for i, o in pairwise(sizes))
        self.norm = Norm(hidden[0]) if hidden and norm_tanh else None
        self.head = Linear(sizes[-1], out_dim)
        self.rectified = rectified

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i or self.norm is None else self.norm(layer(x)).tanh()
        x = self.head(x)
        return F.relu(x) if self.rectified else x


def reader(in_dim: int, widths: Sequence[int], norm_tanh: bool = True) -> NormTanhMLP:
    """The layers of an input before it is joined with another one: in -> widths..., all of them hidden."""
    return NormTanhMLP(in_dim, widths[:-1], widths[-1], rectified=True, norm_tanh=norm_tanh)


class Forward(nn.Module):
    """F(s, a, z), twice: features of (s, a) and of (s, z) side by side, then two MLPs. -> [2, B, D].

    norm_tanh: see `NormTanhMLP`, of the features' layers.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        z_dim: int,
        inputs: Sequence[int],
        hidden: Sequence[int],
        *,
        norm_tanh: bool = True,
    ) -> None:
        super().__init__()
        self.action, self.task = (reader(obs_dim + other, inputs, norm_tanh) for other in (action_dim, z_dim))
        self.heads = EnsembleMLP(2, 2 * inputs[-1], hidden, z_dim)

    def forward(self, observations: Tensor, actions: Tensor, z: Tensor) -> Tensor:
        features = self.action(torch.cat([observations, actions], -1)), self.task(torch.cat([observations, z], -1))
        return self.heads(torch.cat(features, -1))


class Backward(nn.Module):
    """B(s), of length sqrt(D): [B, O] -> [B, D]."""

    def __init__(self, obs_dim: int, z_dim: int, hidden: Sequence[int], *, norm_tanh: bool = True) -> None:
        super().__init__()
        self.net = NormTanhMLP(obs_dim, hidden, z_dim, norm_tanh=norm_tanh)

    def forward(self, observations: Tensor) -> Tensor:
        return on_sphere(self.net(observations))


class Representation(nn.Module):
    """F and B as one module, for one loss trains both."""

    def __init__(self, forward: nn.Module, backward: nn.Module) -> None:
        super().__init__()
        self.ahead, self.back = forward, backward

    def forward(self, part: str, *x: Tensor) -> Tensor:
        """`part`: "forward" of (s [B, O], a [B, A], z [B, D]) -> [2, B, D]; "backward" of s [B, O] -> [B, D]."""
        return self.ahead(*x) if part == "forward" else self.back(*x)


class TaskActor(nn.Module):
    """pi(s, z) = tanh of an MLP of features of s and of (s, z): -> [B, A].

    norm_tanh: see `NormTanhMLP`, of the features' layers, and of those after that.
    """

    def __init__(
        self,
        obs_dim: int,
        action_dim: int,
        z_dim: int,
        inputs: Sequence[int],
        hidden: Sequence[int],
        *,
        norm_tanh: tuple[bool, bool] = (True, True),
    ) -> None:
        super().__init__()
        self.state, self.task = (reader(obs_dim + other, inputs, norm_tanh[0]) for other in (0, z_dim))
        self.net = NormTanhMLP(2 * inputs[-1], hidden, action_dim, norm_tanh=norm_tanh[1])

    def forward(self, observations: Tensor, z: Tensor) -> Tensor:
        features = self.state(observations), self.task(torch.cat([observations, z], -1))
        return self.net(torch.cat(features, -1)).tanh()
