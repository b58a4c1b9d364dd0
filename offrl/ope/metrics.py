"""Metrics of a ranking of policies by estimated value, given their true values (DOPE, arXiv 2103.16596, section 4)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike


def ranks(values: ArrayLike) -> np.ndarray:
    """Ranks from 1 (smallest), float64; equal values share the mean of their ranks."""
    x = np.asarray(values, np.float64)
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]


def spearman(truth: ArrayLike, estimate: ArrayLike) -> float:
    """Rank correlation: Pearson's of the ranks, which is 1 - 6 sum d**2 / (n (n**2 - 1)) where no values are equal.

    NaN for fewer than two values, where all of one side are equal, or where a value is NaN.
    """
    a, b = _pair(truth, estimate)
    if len(a) < 2 or np.isnan(a).any() or np.isnan(b).any():
        return math.nan
    a, b = ranks(a) - (len(a) + 1) / 2.0, ranks(b) - (len(b) + 1) / 2.0
    size = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / size if size > 0.0 else math.nan


def regret(truth: ArrayLike, estimate: ArrayLike, k: int = 1) -> float:
    """The loss of taking the best of the k policies with the largest estimates in place of the best of all, as a share
    of the range of true values: 0 is perfect, 1 the worst. Of equal estimates the expected loss over all orders; NaN
    estimates rank last.

    0 where all true values are equal, or k covers all policies. Raises ValueError for k below 1 or a NaN among the true
    values."""
    v, e = _pair(truth, estimate)
    if k < 1:
        raise ValueError(f"regret@k needs k of at least 1, not {k}")
    if not np.isfinite(v).all() or not len(v):
        raise ValueError("regret needs at least one policy, and finite true values")
    span = float(v.max() - v.min())
    if span == 0.0 or k >= len(v):
        return 0.0
    return (float(v.max()) - _expected_best(v, np.where(np.isnan(e), -np.inf, e), k)) / span


def _expected_best(v: np.ndarray, e: np.ndarray, k: int) -> float:
    """Mean, over all orders of equal estimates, of the largest true value among the first k."""
    edge = np.sort(e)[::-1][k - 1]
    sure, tied = v[e > edge], np.sort(v[e == edge])
    best = float(sure.max()) if len(sure) else -math.inf
    draw = k - len(sure)  # this number of the tied ones, each set as likely
    total = math.comb(len(tied), draw)
    # the i-th smallest is the largest drawn in comb(i, draw - 1) of the sets
    return sum(math.comb(i, draw - 1) / total * max(best, float(tied[i])) for i in range(draw - 1, len(tied)))


def precision(truth: ArrayLike, estimate: ArrayLike, k: int) -> float:
    """Share of the k policies with the largest estimates that are among the k with the largest true values.

    With sets of one size this is recall@k as well. Equal values: the earlier policy first. Raises ValueError for k
    outside 1..n."""
    v, e = _pair(truth, estimate)
    if not 1 <= k <= len(v):
        raise ValueError(f"precision@k needs k from 1 to {len(v)}, not {k}")
    best, chosen = (set(np.argsort(-np.where(np.isnan(x), -np.inf, x), kind="stable")[:k].tolist()) for x in (v, e))
    return len(best & chosen) / k


def absolute_error(truth: ArrayLike, estimate: ArrayLike) -> float:
    """Mean of |V - estimate|."""
    v, e = _pair(truth, estimate)
    return float(np.abs(v - e).mean())


def _pair(truth: ArrayLike, estimate: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    v, e = np.asarray(truth, np.float64), np.asarray(estimate, np.float64)
    if v.shape != e.shape or v.ndim != 1:
        raise ValueError(
            f"true values of shape {v.shape} and estimates of shape {e.shape}: both must be lists of one length"
        )
    return v, e
