"""Goals from the futures of other trajectories that pass the same place; see `offrl.data.transforms.stitch`. Pure, like
all samplers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.transforms.stitch import CLUSTERS

KEY = -(1 << 44)  # folded into the key of the goals that may be replaced


@dataclass(frozen=True)
class Stitches:
    """The clusters of a sampler's R rows, and how often a goal is taken through one."""

    probability: float
    cluster: Tensor  # [R] int64
    order: Tensor  # [R] int64: the rows, those of a cluster side by side
    first: Tensor  # [k] int64: where they begin in `order`
    count: Tensor  # [k] int64: how many there are

    def through(self, key: Tensor, rows: Tensor) -> Tensor:
        """For each of rows [...] another one of its cluster, all alike, the row itself too."""
        cluster = self.cluster[rows]
        return self.order[self.first[cluster] + rng.randint(key, tuple(rows.shape), self.count[cluster])]


def stitches(dataset: Dataset, rows: Tensor | None) -> Stitches | None:
    """The clusters of `rows` [R] of the dataset (None: all), numbered as they come; None where the data have none."""
    if CLUSTERS not in dataset.columns or not dataset.stitch:
        return None
    cluster = dataset.columns[CLUSTERS] if rows is None else dataset.columns[CLUSTERS][rows]
    order = torch.argsort(cluster, stable=True)
    count = torch.bincount(cluster)
    return Stitches(dataset.stitch, cluster, order, torch.cumsum(count, 0) - count, count)


def later(key: Tensor, rows: Tensor, last: Tensor) -> Tensor:
    """Rows from `rows` [...] to `last`, the last ones of their trajectories, all alike."""
    return rows + rng.randint(key, tuple(rows.shape), last - rows + 1)


def stitched(known: Stitches | None, key: Tensor, goals: Tensor, replaced: Tensor, last: Tensor) -> Tensor:
    """Goals [B], of which those that are `replaced` [B] bool give way, with the probability of `known`, to a row of the
    future of another row of their cluster. last [R]: the last row of each row's trajectory."""
    if known is None:
        return goals
    keys = rng.split(rng.fold_in(key, KEY), 3)
    other = known.through(keys[0], goals)
    chosen = replaced & rng.bernoulli(keys[1], tuple(goals.shape), known.probability)
    return torch.where(chosen, later(keys[2], other, last[other]), goals)
