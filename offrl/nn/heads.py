"""Value heads: the forms in which a network's outputs stand for a value. Chosen by one setting in every algorithm with
values.

A scalar head is trained by squared error. The others hold a distribution over bins and are trained by cross-entropy,
which large networks bear better ("Stop Regressing: Training Value Functions via Classification for Scalable Deep RL",
Farebrother et al., 2024, arXiv 2403.03950). Values outside the bins' range cannot be represented: the share of such
targets is logged as `saturation`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Bootstrap(NamedTuple):
    """The source of a target's value: outputs of the network at the next state, and the factor of their value in the
    target.
    """

    logits: Tensor  # [B, out_dim]
    scale: Tensor  # [B]: discount * (1 - terminated)


class ValueHead(Protocol):
    """The map from a network's last axis [..., out_dim] to values [...], and the loss against target values."""

    out_dim: int
    distributional: bool  # True where `loss` reads `bootstrap`

    def mean(self, logits: Tensor) -> Tensor:
        """The value that the outputs stand for: [..., out_dim] -> [...]."""

    def loss(self, logits: Tensor, target: Tensor, bootstrap: Bootstrap | None = None) -> Tensor:
        """Elementwise loss [...] of outputs [..., out_dim] against targets [B] that broadcast to [...]."""

    def saturation(self, target: Tensor) -> Tensor | None:
        """Share of the targets that the head cannot represent, []; None where there is no such limit."""


class Scalar:
    """One output is the value; squared error."""

    out_dim = 1
    distributional = False

    def mean(self, logits: Tensor) -> Tensor:
        return logits.squeeze(-1)

    def loss(self, logits: Tensor, target: Tensor, bootstrap: Bootstrap | None = None) -> Tensor:
        return (logits.squeeze(-1) - target).square()

    def saturation(self, target: Tensor) -> Tensor | None:
        return None


class Binned(ABC):
    """Softmax over `bins` values; cross-entropy with the distribution that `project` makes of a target."""

    distributional = False

    def __init__(self, bins: int, low: float, high: float) -> None:
        """Bins over [low, high]. Raises ValueError for an empty range."""
        if not (math.isfinite(low) and math.isfinite(high) and low < high and bins > 1):
            raise ValueError(f"bins={bins} over [{low}, {high}]: at least two bins and a finite range are needed")
        self.out_dim, self.low, self.high = bins, low, high
        self.width = (high - low) / (bins - 1)
        self.first = low

    def index(self, tensor: Tensor) -> Tensor:
        """0 .. K - 1, [K] float32. Bins are computed with in these units, in which float32 is exact wherever the range
        lies.
        """
        return torch.arange(self.out_dim, device=tensor.device, dtype=torch.float32)

    def position(self, target: Tensor) -> Tensor:
        """Positions of targets [...], clipped to the range: in widths of a bin from `low`, [...] float32."""
        return (target.float().clamp(self.low, self.high) - self.low) / self.width

    def mean(self, logits: Tensor) -> Tensor:
        return self.first + self.width * (logits.float().softmax(-1) * self.index(logits)).sum(-1)

    @abstractmethod
    def project(self, target: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        """The distribution [..., K] that stands for targets [...], first clipped to the range."""

    def loss(self, logits: Tensor, target: Tensor, bootstrap: Bootstrap | None = None) -> Tensor:
        return -(self.project(target, bootstrap) * logits.float().log_softmax(-1)).sum(-1)

    def saturation(self, target: Tensor) -> Tensor | None:
        return ((target < self.low) | (target > self.high)).float().mean()


class TwoHot(Binned):
    """A target's mass goes to the two bins around it, in proportion, so that the mean is the target. Bins at both ends
    of the range.
    """

    def project(self, target: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        return (1.0 - (self.position(target).unsqueeze(-1) - self.index(target)).abs()).clamp(min=0.0)


class HLGauss(Binned):
    """A target becomes a Gaussian around it, integrated over each of the bins that tile the range, and renormalised
    (arXiv 2403.03950).
    """

    def __init__(self, bins: int, low: float, high: float, sigma: float = 0.75) -> None:
        """sigma: standard deviation in widths of a bin."""
        super().__init__(bins, low, high)
        self.width = (high - low) / bins
        self.first = low + 0.5 * self.width
        self.sigma = sigma

    def project(self, target: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        edges = torch.arange(self.out_dim + 1, device=target.device, dtype=torch.float32)
        cdf = torch.erf((edges - self.position(target).unsqueeze(-1)) / (math.sqrt(2.0) * self.sigma))
        mass = cdf[..., 1:] - cdf[..., :-1]
        return mass / (cdf[..., -1:] - cdf[..., :1] + 1e-8)


class C51(TwoHot):
    """The whole distribution of the next value, moved and shrunk as the target says, and projected onto the bins
    ("A Distributional Perspective on Reinforcement Learning", Bellemare et al., 2017, arXiv 1707.06887, algorithm 1).

    The atoms become target + scale * (atom - mean): r + discount * atom, with whatever else the algorithm adds to the
    target. Without `bootstrap` it is `TwoHot`.
    """

    distributional = True

    def project(self, target: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        if bootstrap is None:
            return super().project(target, None)
        index, p = self.index(target), bootstrap.logits.float().softmax(-1)
        spread = self.width * (index - (p * index).sum(-1, keepdim=True))  # [B, K]: atom - mean
        atoms = target.unsqueeze(-1) + bootstrap.scale.unsqueeze(-1) * spread
        shares = super().project(atoms, None)  # [B, K from, K to]
        return (p.unsqueeze(-1) * shares).sum(-2)


HEADS = ("scalar", "hl_gauss", "two_hot", "c51")


def make_head(name: str, bins: int = 101, low: float = 0.0, high: float = 1.0, sigma: float = 0.75) -> ValueHead:
    """The value head called `name`: scalar, hl_gauss, two_hot or c51, the last three with `bins` bins over [low,
    high].
    """
    if name == "hl_gauss":
        return HLGauss(bins, low, high, sigma)
    return Scalar() if name == "scalar" else {"two_hot": TwoHot, "c51": C51}[name](bins, low, high)
