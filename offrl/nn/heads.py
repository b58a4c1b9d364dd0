"""Value heads: the forms in which a network's outputs stand for a value. Chosen by one setting in every algorithm with
values.

A scalar head is trained by squared error. Quantiles and a Gaussian stand for the distribution of returns, whose tail
`cvar` reads. The others hold a distribution over bins and are trained by cross-entropy, which large networks bear
better ("Stop Regressing: Training Value Functions via Classification for Scalable Deep RL", Farebrother et al., 2024,
arXiv 2403.03950). Values outside the bins' range cannot be represented: the share of such
targets is logged as `saturation`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import softplus


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

    def cvar(self, logits: Tensor, level: float | Tensor) -> Tensor:
        """The mean of the worst share `level` of the returns: [..., out_dim] -> [...]."""

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

    def cvar(self, logits: Tensor, level: float | Tensor) -> Tensor:
        return self.mean(logits)

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

    def cvar(self, logits: Tensor, level: float | Tensor) -> Tensor:
        p = logits.float().softmax(-1)
        before = p.cumsum(-1) - p
        worst = torch.minimum(p, (level - before).clamp(min=0.0)) / level
        return self.first + self.width * (worst * self.index(logits)).sum(-1)

    @abstractmethod
    def project(self, target: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        """The distribution [..., K] that stands for targets [...], first clipped to the range."""

    def loss(self, logits: Tensor, target: Tensor, bootstrap: Bootstrap | None = None) -> Tensor:
        return -(self.project(target, bootstrap) * logits.float().log_softmax(-1)).sum(-1)

    def saturation(self, target: Tensor) -> Tensor:
        return ((target < self.low) | (target > self.high)).float().mean()


class TwoHot(Binned):
    """A target's mass goes to the two bins around it, in proportion, so that the mean is the target. Bins at both ends
    of the range.
    """

    def project(self, target: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        return (1.0 - (self.position(target).unsqueeze(-1) - self.index(target)).abs()).clamp(min=0.0)


def symlog(x: Tensor) -> Tensor:
    """sign(x) log(1 + |x|), elementwise."""
    return x.sign() * x.abs().log1p()


def symexp(x: Tensor) -> Tensor:
    """The inverse of `symlog`."""
    return x.sign() * x.abs().expm1()


class SymlogTwoHot(TwoHot):
    """TwoHot of symlog(target), over an odd number of bins of [-limit, limit] in these units; the value is symexp of
    the mean (TD-MPC2, arXiv 2310.16828).
    """

    def __init__(self, bins: int, limit: float) -> None:
        super().__init__(bins, -limit, limit)

    def position(self, target: Tensor) -> Tensor:
        return super().position(symlog(target.float()))

    def mean(self, logits: Tensor) -> Tensor:
        # bins in pairs: equal outputs give exactly 0, and small values keep their digits
        p, half = logits.float().softmax(-1), self.out_dim // 2
        excess = p[..., half + 1 :] - p[..., :half].flip(-1)
        return symexp(self.width * (excess * (1.0 + self.index(logits)[:half])).sum(-1))

    def saturation(self, target: Tensor) -> Tensor:
        return super().saturation(symlog(target))


class SymexpTwoHot(SymlogTwoHot):
    """Over bins whose values are symexp of those: the target's mass goes to the two around it in proportion to the
    value itself, and the mean is that of the values (DreamerV3, arXiv 2301.04104).
    """

    def values(self, tensor: Tensor) -> Tensor:
        """The bins' values, [K] on the device of `tensor`."""
        half = symexp(torch.linspace(self.low, 0.0, self.out_dim // 2 + 1, device=tensor.device))
        return torch.cat([half, -half[:-1].flip(0)])

    def project(self, target: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        values = self.values(target)
        y = target.float().clamp(values[0], values[-1]).unsqueeze(-1)
        above = (values < y).sum(-1, keepdim=True).clamp(min=1)
        low, high = values[above - 1], values[above]
        share, index = (y - low) / (high - low), self.index(target)
        return (1.0 - share) * (index == above - 1) + share * (index == above)

    def mean(self, logits: Tensor) -> Tensor:
        p, half = logits.float().softmax(-1), self.out_dim // 2
        excess = p[..., half + 1 :] - p[..., :half].flip(-1)  # pairs, as above
        return (excess * self.values(logits)[half + 1 :]).sum(-1)


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


class Quantile:
    """N quantiles at the middles of N equal shares, by the Huber quantile loss: the sum over quantiles, the mean over
    the target's samples (QR-DQN, arXiv 1710.10044).

    Samples are the next value's quantiles, moved and shrunk as C51's atoms are. Quantiles may cross: only `cvar` sorts.
    """

    distributional = True

    def __init__(self, quantiles: int) -> None:
        self.out_dim = quantiles

    def mean(self, logits: Tensor) -> Tensor:
        return logits.mean(-1)

    def cvar(self, logits: Tensor, level: float | Tensor) -> Tensor:
        count = self.out_dim * level  # the last quantile counts in part
        worst = (count - torch.arange(self.out_dim, device=logits.device)).clamp(0.0, 1.0) / count
        return (logits.sort(-1).values * worst).sum(-1)

    def loss(self, logits: Tensor, target: Tensor, bootstrap: Bootstrap | None = None) -> Tensor:
        samples = target.unsqueeze(-1)
        if bootstrap is not None:
            following = bootstrap.logits
            samples = samples + bootstrap.scale.unsqueeze(-1) * (following - following.mean(-1, keepdim=True))
        error = samples.unsqueeze(-2) - logits.unsqueeze(-1)  # [..., N, samples]
        shares = (torch.arange(self.out_dim, device=logits.device) + 0.5) / self.out_dim
        return quantile_loss(error, shares.unsqueeze(-1)).mean(-1).sum(-1)

    def saturation(self, target: Tensor) -> Tensor | None:
        return None


def quantile_loss(error: Tensor, shares: Tensor) -> Tensor:
    """|tau - 1(u < 0)| H(u) of errors u = target - quantile, elementwise; H is Huber's with threshold 1."""
    return (shares - (error < 0).to(error.dtype)).abs() * huber(error, 1.0)


def huber(error: Tensor, threshold: float) -> Tensor:
    """u^2 / 2, from |u| = threshold on linear, elementwise."""
    size = error.abs()
    return torch.where(size <= threshold, 0.5 * error.square(), threshold * (size - 0.5 * threshold))


class GaussianValues:
    """A mean q and, by softplus, a standard deviation sigma of returns.

    With the next value's q' and sigma' the loss is (y - q)^2 / 2 + sigma sg((sigma^2 - v) / (sigma + 0.1)), where v =
    (y - q)^2 + scale^2 sigma'^2 is the mean square of the target's distribution about q: DSAC-T's gradients (arXiv
    2310.05858) with that mean in place of a sample, unweighted and unclipped.
    """

    out_dim = 2
    distributional = True

    def mean(self, logits: Tensor) -> Tensor:
        return logits[..., 0]

    def std(self, logits: Tensor) -> Tensor:
        """sigma, [..., 2] -> [...]."""
        return softplus(logits[..., 1])

    def cvar(self, logits: Tensor, level: float | Tensor) -> Tensor:
        level = torch.as_tensor(level, dtype=logits.dtype, device=logits.device)
        density = torch.exp(-0.5 * torch.special.ndtri(level).square()) / math.sqrt(2.0 * math.pi)
        return logits[..., 0] - self.std(logits) * density / level

    def loss(self, logits: Tensor, target: Tensor, bootstrap: Bootstrap | None = None) -> Tensor:
        error, std = target - logits[..., 0], self.std(logits)
        spread = error.square()
        if bootstrap is not None:
            spread = spread + (bootstrap.scale * self.std(bootstrap.logits)).square()
        return 0.5 * error.square() + std * ((std.square() - spread) / (std + STD_FLOOR)).detach()

    def saturation(self, target: Tensor) -> Tensor | None:
        return None


STD_FLOOR = 0.1  # DSAC-T's epsilon
BINNED = ("hl_gauss", "two_hot", "c51")
HEADS = ("scalar", *BINNED, "quantile", "gaussian")


def make_head(
    name: str, bins: int = 101, low: float = 0.0, high: float = 1.0, sigma: float = 0.75, quantiles: int = 32
) -> ValueHead:
    """The value head called `name`, one of HEADS; those of BINNED with `bins` bins over [low, high]."""
    if name == "hl_gauss":
        return HLGauss(bins, low, high, sigma)
    if name in BINNED:
        return {"two_hot": TwoHot, "c51": C51}[name](bins, low, high)
    return Quantile(quantiles) if name == "quantile" else GaussianValues() if name == "gaussian" else Scalar()
