"""Temporal data augmentation (Ghugare et al., 2024, arXiv 2401.11237): clusters of rows, from whose futures samplers
take goals.

Rows of one cluster count as the same place. A sampler that knows of it replaces a later state of a trajectory by
another row of that state's cluster, and takes the goal from the other row's future: a pair of state and goal that no
single trajectory has.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.errors import UserError, some, warn
from offrl.settings.dataset import DatasetConfig

CLUSTERS = "stitch_clusters"  # column of a dataset: int64 [R]
FITTED = 100_000  # rows that the centres are found from, at most
PART = 50_000  # rows that are assigned at once
ROUNDS = 100  # of Lloyd's algorithm, at most
USELESS = 0.05  # share of draws that leave their trajectory, below which one might as well not stitch


def add_clusters(dataset: Dataset, config: DatasetConfig, seed: int = 0) -> Dataset:
    """`dataset` with the column CLUSTERS, and `Dataset.stitch`, as `config` asks. Raises UserError for what cannot be
    clustered.
    """
    name, features = feature_column(dataset, config)
    centers, assignment = clusters(features, config.augment_clusters, config.augment_dims, seed)
    leave = leaving(assignment, dataset.per_row(torch.arange(dataset.num_episodes)))
    description = f"stitch {config.augment_probability:g} of {config.augment_clusters} clusters of {name}"
    description += f", first {config.augment_dims}" if config.augment_dims else ""
    if 2 * config.augment_clusters > len(dataset):
        warn(
            f"dataset.augment_clusters={config.augment_clusters} of {len(dataset):,} rows: most clusters hold one row, "
            "and nothing is stitched there; take fewer"
        )
    elif leave < USELESS:
        warn(
            f"dataset.augment=stitch: {100 * leave:.1f}% of the draws from a cluster are of another trajectory, so "
            "that hardly anything is stitched; take fewer dataset.augment_clusters"
        )
    note = (
        f"augment {description}: {centers} of them hold rows, and {100 * leave:.0f}% of the draws from one are of "
        "another trajectory"
    )
    columns = {CLUSTERS: assignment.to(dataset.device)}
    return dataset.changed(f"augment {description}", note, columns, stitch=config.augment_probability)


def feature_column(dataset: Dataset, config: DatasetConfig) -> tuple[str, Tensor]:
    """(name, column [R, ...]) by which rows are clustered. Raises UserError."""
    name = {"goals": "achieved_goals", "observations": "observations"}.get(config.augment_on)
    name = name or ("achieved_goals" if dataset.spec.goal_dim else "observations")
    if name not in dataset.columns:
        raise UserError(
            f"dataset.augment_on={config.augment_on}: {dataset.spec.name} has no column {name}; its goals are "
            "observations: dataset.augment_on=observations"
        )
    column = dataset.columns[name]
    width = column[0].numel()
    if not width:
        raise UserError(
            f"dataset.augment=stitch clusters numbers, and {dataset.spec.name} has {some(dataset.stores)} alone; leave "
            "it out, or take data with achieved goals (dataset.augment_on=goals)"
        )
    if config.augment_dims > width:
        raise UserError(
            f"dataset.augment_dims={config.augment_dims} is more than the {width} numbers of a row of {name}"
        )
    if config.augment_clusters > len(dataset):
        raise UserError(
            f"dataset.augment_clusters={config.augment_clusters} is more than the {len(dataset):,} rows of "
            f"{dataset.spec.name}"
        )
    return name, column


def clusters(column: Tensor, count: int, dims: int = 0, seed: int = 0) -> tuple[int, Tensor]:
    """(clusters that have a row, the cluster of each row int64 [R]) by k-means of rows [R, ...], each number divided by
    its deviation.

    dims: the first numbers of a row alone count; 0: all. The centres are those of at most FITTED rows. Equal for equal
    data and seed."""
    rows = column.shape[0]
    generator = np.random.Generator(np.random.PCG64(seed))
    chosen = np.arange(rows) if rows <= FITTED else np.sort(generator.permutation(rows)[:FITTED])
    sample = flat(column, torch.from_numpy(chosen), dims)
    scale = sample.std(0, correction=0)
    scale = torch.where(scale > 0.0, scale, 1.0)
    centres = lloyd(sample / scale, count, generator)
    parts = [nearest(flat(column, part, dims) / scale, centres)[0] for part in torch.arange(rows).split(PART)]
    assignment = torch.cat(parts)
    return len(assignment.unique()), assignment


def flat(column: Tensor, rows: Tensor, dims: int) -> Tensor:
    """Rows of a column as vectors, float64 on the CPU."""
    vectors = column[rows.to(column.device)].cpu().flatten(1).double()
    return vectors[:, :dims] if dims else vectors


def nearest(points: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """(the nearest of centres [k, D], of equals the first, and its squared distance) of points [n, D]: int64 and
    float64 [n].
    """
    distances = (points.square().sum(1, keepdim=True) - 2.0 * points @ centres.T + centres.square().sum(1)).clamp(
        min=0.0
    )
    best = distances.min(1)
    return best.indices, best.values


def lloyd(points: Tensor, count: int, generator: np.random.Generator) -> Tensor:
    """Centres [count, D] of points [n, D] by Lloyd's algorithm from a k-means++ start (Arthur and Vassilvitskii, 2007).
    A centre without points stays where it is."""
    centres = points[int(generator.integers(len(points)))].unsqueeze(0)
    gap = nearest(points, centres)[1]
    for _ in range(1, count):
        total = gap.cumsum(0)
        # where all points are centres already, any will do
        pick = int(
            torch.searchsorted(total, float(generator.random()) * float(total[-1]), right=True).clamp(
                max=len(points) - 1
            )
        )
        centres = torch.cat([centres, points[pick : pick + 1]])
        gap = torch.minimum(gap, nearest(points, centres[-1:])[1])
    before = None
    for _ in range(ROUNDS):
        owner = nearest(points, centres)[0]
        if before is not None and torch.equal(owner, before):
            break
        before = owner
        sums = torch.zeros_like(centres).index_add_(0, owner, points)
        sizes = torch.bincount(owner, minlength=count).unsqueeze(1)
        centres = torch.where(sizes > 0, sums / sizes.clamp(min=1), centres)
    return centres


def leaving(assignment: Tensor, episode: Tensor) -> float:
    """The probability that of two rows of a cluster, the first uniform over all rows, the second is of another
    trajectory.

    assignment [R]; episode [R]: the number of each row's trajectory.
    """
    pairs = episode * (int(assignment.max()) + 1) + assignment
    _, pair_index, counts = pairs.unique(return_inverse=True, return_counts=True)
    sizes = torch.bincount(assignment)
    return 1.0 - float((counts[pair_index].double() / sizes[assignment]).mean())
