"""How latent samples are distributed: over classes (DreamerV2, arXiv 2010.02193), or as normal numbers (PlaNet, arXiv
1811.04551; DreamerV1, arXiv 1912.01603). A distribution is one tensor, so that those of steps and of heads are stacked.

Shapes: S variables; C classes of each; M prior heads.
"""

from __future__ import annotations

from torch import Tensor, arange, stack
from torch.nn import functional as F

from offrl import rng
from offrl.world_models.recurrent.settings import LatentConfig

SMALLEST = 1e-30  # probability of a class
SMALLEST_DEVIATION = 0.1  # of a normal number (PlaNet)


class Classes:
    """Log probabilities [..., S, C], of which a share is uniform."""

    def __init__(self, groups: int, classes: int, unimix: float | Tensor) -> None:
        self.groups, self.classes, self.unimix = groups, classes, unimix
        self.size = self.outputs = groups * classes

    def read(self, raw: Tensor) -> Tensor:
        """The distribution of a network's outputs [..., S C]."""
        return class_log_probs(raw, self.groups, self.classes, self.unimix)

    def noise(self, key: Tensor, *rows: int) -> Tensor:
        """What `draw` needs for so many rows: Gumbel's [*rows, S, C]."""
        return rng.gumbel(key, (*rows, self.groups, self.classes))

    def draw(self, known: Tensor, noise: Tensor | None) -> Tensor:
        """A sample [..., S C]; None: the likeliest classes."""
        return drawn_classes(known, noise)

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """KL(p | q): [...] nats."""
        return kl(p, q)

    def disagreement(self, heads: Tensor) -> Tensor:
        """mean_m |p_m - mean p|, the norm over groups and classes: [..., M, S, C] -> [...] (Offline DreamerV2, arXiv
        2206.04779).
        """
        return mean_distance(heads.exp())


class Normals:
    """Means and standard deviations [..., S, 2] of independent normal numbers."""

    def __init__(self, size: int) -> None:
        self.size, self.outputs = size, 2 * size

    def read(self, raw: Tensor) -> Tensor:
        """The distribution of a network's outputs [..., 2 S]: softplus(x) + 0.1 is the standard deviation."""
        mean, deviation = raw.float().chunk(2, -1)
        return stack([mean, F.softplus(deviation) + SMALLEST_DEVIATION], -1)

    def noise(self, key: Tensor, *rows: int) -> Tensor:
        """What `draw` needs for so many rows: standard normal [*rows, S]."""
        return rng.normal(key, (*rows, self.size))

    def draw(self, known: Tensor, noise: Tensor | None) -> Tensor:
        """A sample [..., S], with the gradient of mean and deviation; None: the mean."""
        mean, deviation = known.unbind(-1)
        return mean if noise is None else mean + deviation * noise

    def kl(self, p: Tensor, q: Tensor) -> Tensor:
        """KL(p | q): [...] nats."""
        (mean, deviation), (other, wide) = p.unbind(-1), q.unbind(-1)
        spread = (deviation.square() + (mean - other).square()) / (2.0 * wide.square())
        return ((wide / deviation).log() + spread - 0.5).sum(-1)

    def disagreement(self, heads: Tensor) -> Tensor:
        """The heads' mean 2-Wasserstein distance from their barycentre, the normal of their mean means and deviations:
        [..., M, S, 2] -> [...] (ours: what Offline DreamerV2 measures of classes).
        """
        return mean_distance(heads)


def latent_kind(config: LatentConfig) -> Classes | Normals:
    """The kind of distribution of latent samples."""
    c = config
    return Normals(c.latent) if c.latents == "gaussian" else Classes(c.groups, c.classes, c.unimix)


def class_log_probs(logits: Tensor, groups: int, classes: int, unimix: float | Tensor) -> Tensor:
    """Log probabilities [..., S, C] of logits [..., S C], with a share of the uniform distribution."""
    probabilities = logits.float().unflatten(-1, (groups, classes)).softmax(-1)
    return ((1.0 - unimix) * probabilities + unimix / classes).clamp(min=SMALLEST).log()


def drawn_classes(log_probs: Tensor, noise: Tensor | None) -> Tensor:
    """One class of each group, as ones and zeros [..., S C], with the gradient of the probabilities ("straight-
    through").
    """
    probabilities = log_probs.exp()
    chosen = (log_probs if noise is None else log_probs + noise).argmax(-1, keepdim=True)
    ones = (chosen == arange(log_probs.shape[-1], device=log_probs.device)).to(probabilities.dtype)
    return (ones + probabilities - probabilities.detach()).flatten(-2)


def one_head(prior: Tensor, key: Tensor) -> Tensor:
    """[..., M, S, C] -> [..., S, C]: a head drawn for each state."""
    if prior.shape[-3] == 1:
        return prior.squeeze(-3)
    index = rng.randint(key, tuple(prior.shape[:-3]), prior.shape[-3])
    return prior.take_along_dim(index[..., None, None, None], -3).squeeze(-3)


def mean_distance(heads: Tensor) -> Tensor:
    """The mean distance of heads from their mean: [..., M, S, C] -> [...]."""
    return (heads - heads.mean(-3, keepdim=True)).square().sum((-2, -1)).sqrt().mean(-1)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p | q) of log probabilities [..., S, C], summed over the groups: [...] nats."""
    return (p.exp() * (p - q)).sum((-2, -1))
