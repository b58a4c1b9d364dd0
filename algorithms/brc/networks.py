"""BroNet, the residual network of BRC's critics and policy, and those of several tasks."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.families.multitask.numbers import of_numbers, of_present_actions
from offrl.nn.ensemble import EnsembleLinear, Pairs
from offrl.nn.mlp import ACTIVATIONS, Linear
from offrl.nn.policies import Dist, TwoHeadedTanhGaussian
from offrl.nn.residual import NormLinear

EMBEDDING = 32  # numbers of a task's embedding


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


class TaskEmbedding(nn.Module):
    """Observations [..., O + 1] of T tasks -> [..., O + EMBEDDING]: the task's number, which is last, becomes its
    embedding, of norm 1. weight [T, EMBEDDING]: embeddings before they are normalised.
    """

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(tasks, EMBEDDING) / math.sqrt(EMBEDDING))

    def forward(self, observations: Tensor) -> Tensor:
        embeddings = of_numbers(F.normalize(self.weight, dim=-1), observations[..., -1])
        return torch.cat([observations[..., :-1], embeddings], -1)


class TaskBroEnsemble(nn.Module):
    """A `BroEnsemble` of T tasks, whose embeddings its members share. observations: numbers of one, with the task's."""

    def __init__(self, tasks: int, observations: int, size: int, in_dim: int, *sizes: int, **form: Any) -> None:
        super().__init__()
        self.observations, self.tasks = observations, TaskEmbedding(tasks)
        self.network = BroEnsemble(size, in_dim - 1 + EMBEDDING, *sizes, **form)

    def forward(self, x: Tensor | Pairs, key: Tensor | None = None) -> Tensor:
        """As `BroEnsemble`, of x [..., in] that begin with an observation."""
        if isinstance(x, Pairs):
            return cast(Tensor, self.network(Pairs(self.tasks(x.states), x.actions)))
        states, actions = x[..., : self.observations], x[..., self.observations :]
        return cast(Tensor, self.network(torch.cat([self.tasks(states), actions], -1)))


class TaskBroTanhGaussian(BroTanhGaussian):
    """A `BroTanhGaussian` of tasks with actions of these masks [T, A]; actions that a task lacks are 0.

    Its embeddings are the critics', copied, and its masks stay: no loss trains either.
    """

    def __init__(self, masks: Tensor, obs_dim: int, action_dim: int, *sizes: int, **form: Any) -> None:
        super().__init__(obs_dim - 1 + EMBEDDING, action_dim, *sizes, **form)
        self.tasks, self.masks = TaskEmbedding(len(masks)), nn.Parameter(masks)

    def forward(self, observations: Tensor, key: Tensor | None = None) -> Dist:
        mask = of_numbers(self.masks.detach(), observations[..., -1])
        mean, log_std = super().forward(self.tasks(observations).detach(), key)
        return of_present_actions(mean, log_std, mask)

    @staticmethod
    def _density(dist: Dist, u: Tensor) -> Tensor:
        mean, log_std = dist
        absent = log_std == -torch.inf
        # of these u is 0, and counts as drawn from a standard normal distribution, whose density is taken back
        density = BroTanhGaussian._density((mean, torch.where(absent, 0.0, log_std)), u)
        return density + 0.5 * math.log(2.0 * math.pi) * absent.sum(-1)
