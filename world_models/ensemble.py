"""Ensembles of dynamics networks: p(s', r | s, a) of E members as one program (PETS, arXiv 1805.12114; MBPO, arXiv
1906.08253).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.nn import EnsembleMLP

MAX_LOG_VAR, MIN_LOG_VAR = 0.5, -10.0  # where the learnt bounds begin


class Raw(NamedTuple):
    """The networks' outputs, for inputs [B, I] or [E, B, I]."""

    mean: Tensor  # [E, B, D]
    log_var: Tensor  # [E, B, D], inside the learnt bounds; 0 where no variance is learnt
    ending: Tensor | None  # [E, B] logits of a termination; None where it is not learnt


class GaussianEnsemble(nn.Module):
    """E networks I -> N(mean [D], diag(exp(log_var [D]))), and, if asked, the logit of a termination.

    The bounds of log_var are learnt vectors that the members share; weights begin as normal numbers with standard
    deviation 1 / (2 sqrt(fan in)), cut off at two of those, biases as 0.
    """

    def __init__(
        self,
        members: int,
        in_dim: int,
        out_dim: int,
        hidden: Sequence[int],
        *,
        activation: str = "silu",
        residual: bool = False,
        ending: bool = False,
        variance: bool = True,
    ) -> None:
        """ending: learn terminations as well; variance: without, the mean alone is learnt."""
        super().__init__()
        self.out_dim, self.ending, self.variance = out_dim, ending, variance
        width = (2 if variance else 1) * out_dim + int(ending)
        self.net = EnsembleMLP(
            members, in_dim, hidden, width, activation=activation, residual=residual, init="truncated"
        )
        if variance:
            self.max_log_var = nn.Parameter(torch.full((out_dim,), MAX_LOG_VAR))
            self.min_log_var = nn.Parameter(torch.full((out_dim,), MIN_LOG_VAR))

    def forward(self, x: Tensor) -> Raw:
        out = self.net(x)
        mean, log_var = out[..., : self.out_dim], torch.zeros_like(out[..., : self.out_dim])
        if self.variance:
            log_var = bounded(out[..., self.out_dim : 2 * self.out_dim], self.min_log_var, self.max_log_var)
        return Raw(mean, log_var, out[..., -1] if self.ending else None)


def bounded(log_var: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`log_var` bent smoothly below `high`, then above `low` (PETS, appendix A.1)."""
    log_var = high - F.softplus(high - log_var)
    return low + F.softplus(log_var - low)


def gaussian_loss(mean: Tensor, log_var: Tensor, target: Tensor, known: Tensor | None = None) -> Tensor:
    """Mean over rows and dimensions of (mean - target)^2 exp(-log_var) + log_var for each member: [E].

    mean, log_var [E, B, D]; target [B, D] or [E, B, D]; known: see `averaged`.
    """
    return averaged((mean - target).square() * torch.exp(-log_var) + log_var, known)


def squared_loss(mean: Tensor, target: Tensor, scale: Tensor | None = None, known: Tensor | None = None) -> Tensor:
    """Mean over rows and dimensions of scale * (mean - target)^2 for each member: [E]. scale: [D], [B, D] or [E, B,
    D].
    """
    each = (mean - target).square()
    return averaged(each if scale is None else each * scale, known)


def averaged(each: Tensor, known: Tensor | None) -> Tensor:
    """The mean of [E, B, D] over rows and dimensions. Where `known` [E, B] is 0 there is no next observation: the last
    dimension, the reward, alone counts then."""
    if known is not None:
        each = each * torch.cat(
            [known.unsqueeze(-1).expand(*each.shape[:-1], each.shape[-1] - 1), torch.ones_like(each[..., -1:])], -1
        )
    return each.mean((-2, -1))


def decay_of_layers(decay: Sequence[float], layers: int) -> list[float]:
    """Weight decay of each layer: as listed, or, for another number of layers, the list stretched or shrunk to it."""
    if len(decay) == layers:
        return [float(x) for x in decay]
    return (
        np.interp(np.linspace(0.0, 1.0, layers), np.linspace(0.0, 1.0, len(decay)), decay).tolist()
        if len(decay) > 1
        else list(decay) * layers
    )


def weight_decay(params: dict[str, Tensor], decay: Sequence[float] | Tensor) -> Tensor:
    """Sum over layers of decay * ||W||^2 / 2, all members together: part of the loss, not AdamW."""
    layers = [*(params[f"net.layers.{i}.weight"] for i in range(len(decay) - 1)), params["net.head.weight"]]
    return torch.stack([0.5 * d * w.square().sum() for d, w in zip(decay, layers, strict=True)]).sum()


def bounds_loss(params: dict[str, Tensor]) -> Tensor:
    """sum max_log_var - sum min_log_var, which keeps the bounds near what the data need."""
    return params["max_log_var"].sum() - params["min_log_var"].sum()
