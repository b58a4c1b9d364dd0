"""Numbers as tokens: each dimension has bins of its own, with as many samples in each or as wide as one another.

The Trajectory Transformer's discretisation (Janner et al., 2021, arXiv 2106.02039, section 2), with one difference:
there a bin reaches from one threshold to the next and stands for its middle, also where nothing but one value lies in
it. A reward of 0 that fills nine bins of ten would come back as the middle between 0 and the next larger reward. Here
equal samples share a bin, a value that fills a whole bin has it for itself, and a bin stands for the middle of the
samples that lie in it.

Shapes in comments: D dimensions, N bins, R samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

METHODS = ("quantile", "uniform")
MEANINGS = ("middle", "mean")


class Bins(NamedTuple):
    """The bins of D dimensions. Tokens are 0, ..., N - 1; a dimension of fewer bins uses the first ones only."""

    # [D, N - 1] float32: number x is in the bin whose number is how many edges are <= x; inf: there are no more bins
    edges: Tensor
    values: Tensor  # [D, N] float32: what the tokens stand for; of bins that there are not, the last value
    occupied: Tensor  # [D, N] bool: some sample lies in the bin


def fit(
    column: np.ndarray, bins: int, method: str = "quantile", meaning: str = "middle", singletons: Sequence[float] = ()
) -> Bins:
    """The bins of one dimension (D = 1) from samples [R].

    Where there are at most N distinct values, each has a bin of its own, whatever the method. Else, sorted, the samples
    number 0, R/N, 2R/N, ... (rounded down) each begin a bin. `singletons`: values that get a bin of their own however
    rare they are.
    meaning: a bin stands for the "middle" between its smallest and its largest sample, or for their "mean", with which
    the mean of all samples survives exactly. Raises ValueError for no samples, or fewer than 2 bins.
    """
    if bins < 2 or not len(column):
        raise ValueError(f"{bins} bins of {len(column)} samples: there must be 2 of the first and 1 of the second")
    u, counts = np.unique(column.astype(np.float32), return_counts=True)
    if len(u) <= bins:
        first = np.arange(len(u))
    elif method == "uniform":
        width = (float(u[-1]) - float(u[0])) / bins
        number = np.minimum(((u.astype(np.float64) - u[0]) / width).astype(np.int64), bins - 1)
        return _uniform(u, counts, number, bins, width, meaning)
    else:
        first = _bin_starts(u, counts, bins, singletons)
    end = np.append(first[1:], len(u))
    doubles = u.astype(np.float64)
    if meaning == "mean":
        values = np.add.reduceat(doubles * counts, first) / np.add.reduceat(counts, first)
    else:
        values = 0.5 * (doubles[first] + doubles[end - 1])
    # half-way between neighbours: a number that was rounded a little differently than the samples is still in its bin
    edges = _midpoints(u[first[1:] - 1], u[first[1:]])
    return _padded(edges, values, np.ones(len(first), bool), bins)


def _bin_starts(u: np.ndarray, counts: np.ndarray, bins: int, singletons: Sequence[float]) -> np.ndarray:
    """Indices of the sorted distinct values that are the smallest of a bin: int64, at most N."""
    weight = counts.astype(np.int64)
    for value in singletons:
        index = np.flatnonzero(u == np.float32(value))
        if len(index) and bins > 2:  # as many as fill two bins, so that the rule below applies
            weight[index] = np.maximum(weight[index], -(-2 * (weight.sum() - weight[index]) // (bins - 2)))
    ends = np.cumsum(weight)
    # the distinct value that each bin begins with
    slots = np.searchsorted(ends, np.arange(bins) * ends[-1] // bins, side="right")
    first, times = np.unique(slots, return_counts=True)
    fillers = first[times > 1] + 1  # a value that fills a bin: the next value begins the next one
    return np.union1d(first, fillers[fillers < len(u)])


def _uniform(u: np.ndarray, counts: np.ndarray, number: np.ndarray, bins: int, width: float, meaning: str) -> Bins:
    values = float(u[0]) + width * (np.arange(bins) + 0.5)
    occupied = np.bincount(number, minlength=bins) > 0
    if meaning == "mean":
        total = np.bincount(number, weights=counts, minlength=bins)
        sums = np.bincount(number, weights=counts * u.astype(np.float64), minlength=bins)
        values = np.where(occupied, sums / np.maximum(total, 1.0), values)
    return _padded(float(u[0]) + width * np.arange(1, bins), values, occupied, bins)


def _midpoints(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """float32 numbers half-way, above `low` and at most `high`, also where they are neighbours."""
    middle = (0.5 * (low.astype(np.float64) + high.astype(np.float64))).astype(np.float32)
    return np.where(middle > low, middle, high)


def _padded(edges: np.ndarray, values: np.ndarray, occupied: np.ndarray, bins: int) -> Bins:
    missing = bins - len(values)
    return Bins(
        torch.from_numpy(np.pad(edges, (0, missing), constant_values=np.inf).astype(np.float32)).unsqueeze(0),
        torch.from_numpy(np.pad(values, (0, missing), mode="edge").astype(np.float32)).unsqueeze(0),
        torch.from_numpy(np.pad(occupied, (0, missing))).unsqueeze(0),
    )


def choices(count: int, bins: int, column: np.ndarray | None = None) -> Bins:
    """The bins of one dimension (D = 1) that holds one of `count` integers; `column`: the samples, of which some may
    not occur.

    Raises ValueError for more of them than bins.
    """
    if count > bins:
        raise ValueError(f"{count} choices do not fit into {bins} bins")
    occupied = np.ones(count, bool) if column is None else np.bincount(column, minlength=count) > 0
    return _padded(np.arange(count - 1) + 0.5, np.arange(count, dtype=np.float64), occupied, bins)


def stack(dimensions: Sequence[Bins]) -> Bins:
    """The bins of several dimensions."""
    return Bins(*(torch.cat(parts) for parts in zip(*dimensions, strict=True)))


def encode(x: Tensor, edges: Tensor) -> Tensor:
    """Tokens of numbers x [..., D] with edges [D, N - 1]: int64 [..., D]. A number out of range gets the first or the
    last bin.
    """
    flat = x.reshape(-1, x.shape[-1]).transpose(0, 1).contiguous()
    return torch.searchsorted(edges, flat, right=True).transpose(0, 1).reshape(x.shape)


def decode(tokens: Tensor, values: Tensor) -> Tensor:
    """The numbers that tokens [..., D] stand for, with values [D, N]: float32 [..., D]."""
    return values[torch.arange(values.shape[0], device=values.device), tokens]
