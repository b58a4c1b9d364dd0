"""CrossQ's networks: linear layers with batch renormalisation (Ioffe, 2017, arXiv 1702.03275)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from offrl.nn import EnsembleLinear, Linear, TanhGaussian
from offrl.nn.mlp import ACTIVATIONS
from offrl.nn.policies import Dist

MOMENTUM, EPSILON = 0.99, 1e-3  # of the running statistics; added to variances
WARM_UP = 100_000  # passes in which batches are normalised by their own statistics alone
RATIO, SHIFT = 3.0, 5.0  # largest r, whose inverse is the smallest, and largest size of d
LOG_STD = (-20.0, 2.0)

Statistics = dict[str, Tensor]  # mean and variance of each layer's inputs, and the number of passes


class RenormMLP(nn.Module):
    """Linear layers, whose inputs are normalised by batch renormalisation (arXiv 1702.03275): x [B, in] -> [B, out], or
    of an ensemble [size, B, out].
    """

    def __init__(
        self, size: int | None, in_dim: int, hidden: Sequence[int], out_dim: int, activation: str, init: str
    ) -> None:
        super().__init__()
        widths = [in_dim, *hidden, out_dim]
        make: Any = Linear if size is None else partial(EnsembleLinear, size)
        self.layers = nn.ModuleList(make(i, o, init) for i, o in pairwise(widths))
        shapes = [(1, width) if size is None else (size, 1, width) for width in widths[:-1]]
        self.scales = nn.ParameterList(torch.ones(shape) for shape in shapes)
        self.shifts = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.activation = ACTIVATIONS[activation]

    def statistics(self) -> Statistics:
        """Those of before the first pass."""
        result = {"passes": torch.zeros(())}
        for i, scale in enumerate(self.scales):
            result |= {f"mean{i}": torch.zeros_like(scale), f"var{i}": torch.ones_like(scale)}
        return result

    def forward(self, x: Tensor, statistics: Statistics, learn: bool = False) -> tuple[Tensor, Statistics]:
        """The outputs by running statistics, or with `learn` by those of the batch; and the statistics afterwards."""
        after = dict(statistics)
        for i, layer in enumerate(self.layers):
            x = self.activation(x) if i else x
            x = x.to(self.scales[i].dtype)  # in bfloat16 statistics would be coarse
            mean, var = statistics[f"mean{i}"], statistics[f"var{i}"]
            if learn:
                batch = x.mean(-2, keepdim=True), x.var(-2, correction=0, keepdim=True)
                after[f"mean{i}"] = MOMENTUM * mean + (1.0 - MOMENTUM) * batch[0]
                after[f"var{i}"] = MOMENTUM * var + (1.0 - MOMENTUM) * batch[1]
                warm = statistics["passes"] >= WARM_UP
                later = corrected(*batch, mean, var)
                mean, var = (torch.where(warm, a, b) for a, b in zip(later, batch, strict=True))
            x = layer((x - mean) * (var + EPSILON).rsqrt() * self.scales[i] + self.shifts[i])
        return x, {**after, "passes": statistics["passes"] + float(learn)}


def corrected(mean: Tensor, var: Tensor, running_mean: Tensor, running_var: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance in place of a batch's, by which (x - mean) / std becomes (x - mean) / std r + d, with r = std /
    running std in [1/3, 3] and d = (mean - running mean) / running std in [-5, 5] as constants.
    """
    std, running_std = (var + EPSILON).sqrt(), (running_var + EPSILON).sqrt()
    r = (std / running_std).detach().clamp(1.0 / RATIO, RATIO)
    d = ((mean - running_mean) / running_std).detach().clamp(-SHIFT, SHIFT)
    # clamped, for a root has no slope at 0, the variance of an activation that is the same in the whole batch
    return mean - d * var.clamp(min=1e-30).sqrt() / r, var / r.square()


class RenormTanhGaussian(TanhGaussian):
    """A `TanhGaussian` with batch renormalisation."""

    def __init__(self, obs_dim: int, action_dim: int, hidden: Sequence[int], activation: str, init: str) -> None:
        nn.Module.__init__(self)  # without the layers that a `Policy` makes
        self.body = RenormMLP(None, obs_dim, hidden, 2 * action_dim, activation, init)

    def forward(  # type: ignore[override]
        self, observations: Tensor, statistics: Statistics, learn: bool = False
    ) -> tuple[Dist, Statistics]:
        outputs, statistics = self.body(observations, statistics, learn)
        mean, log_std = outputs.chunk(2, -1)
        return (mean, log_std.clamp(*LOG_STD)), statistics
