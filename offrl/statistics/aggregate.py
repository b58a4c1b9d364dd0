"""Statistics over a suite: IQM, median, mean, optimality gap, probability of improvement, performance profiles, EOP.

Every estimate comes with a percentile interval of the stratified bootstrap (Agarwal et al. 2021, arXiv 2108.13264,
section 4): the runs of each task are drawn again with replacement, task by task. The tasks themselves are not drawn:
the interval is about other seeds on the same tasks.

**Scores** `X` are an array [runs, tasks] of normalised scores divided by 100 (1.0 is the reference's 100), NaN where a
run is missing, or one array of scores for each task. `offrl.runs.comparable.groups` makes them.

The resamples are those that the rliable library draws for the same seed, so its intervals are these, to rounding
(tests/unit/test_aggregate.py). Where tasks have unequal numbers of runs, for which rliable has no answer, every task
has the same weight."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from offrl.statistics.bootstrap import REPS, Curve, Interval, estimate, estimate_pair, rectangle, tasks_of

DRAWS = (1, 2, 3, 5, 10, 15, 20)  # of settings, for the expected online performance


def aggregates(X: Any, *, gamma: float = 1.0, reps: int = REPS, seed: int = 0) -> dict[str, Interval]:
    """{"iqm", "median", "mean", "optimality_gap"}, from the same resamples.

    - iqm: the interquartile mean, of all runs' scores without the lowest and the highest quarter (floor(NM / 4) scores
      each). With unequal numbers of runs a score weighs 1 / (its task's runs), and scores are cut off by weight.
    - median, mean: over tasks of the tasks' means. One or two tasks decide the median, a single task far above 1 can
      carry the mean.
    - optimality_gap: gamma - mean(min(X, gamma)), how far runs stay below `gamma` on average; smaller is better.

    X: [runs, tasks] (see above); reps: resamples; seed: decides them. Raises ValueError for a task without runs or a
    score that is infinite.
    """
    names = ("iqm", "median", "mean", "optimality_gap")

    def statistic(tasks: list[np.ndarray]) -> np.ndarray:
        return np.stack([_iqm(tasks), _median(tasks), _mean(tasks), _gap(tasks, gamma)], 1)

    return dict(zip(names, estimate(tasks_of(X), statistic, reps, seed), strict=True))


def probability_of_improvement(X: Any, Y: Any, *, reps: int = REPS, seed: int = 0) -> Interval:
    """P(X > Y): the chance that a run of X beats a run of Y on the same task, averaged over tasks; ties count one half.

    X, Y: [runs, tasks] of the same tasks in the same order; the numbers of runs may differ. The two are resampled
    independently."""
    x, y = _same_tasks(X, Y)
    ranks = [np.unique(np.concatenate(pair), return_inverse=True)[1].reshape(-1) for pair in zip(x, y, strict=True)]
    ranks_x, ranks_y = zip(*((r[: len(a)], r[len(a) :]) for r, a in zip(ranks, x, strict=True)), strict=True)
    return estimate_pair(list(ranks_x), list(ranks_y), _improvement, reps, seed)


def difference(X: Any, Y: Any, *, reps: int = REPS, seed: int = 0) -> Interval:
    """IQM of X less IQM of Y, from the resamples of `probability_of_improvement`, whose X and Y these are. 0 in the
    interval: it decides nothing."""
    return estimate_pair(*_same_tasks(X, Y), lambda x, y: _iqm(x) - _iqm(y), reps, seed)


def _same_tasks(X: Any, Y: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    x, y = tasks_of(X), tasks_of(Y)
    if len(x) != len(y):
        raise ValueError(f"X has {len(x)} tasks and Y has {len(y)}: compare them on the same tasks")
    return x, y


def performance_profile(
    X: Any, taus: Any, *, kind: Literal["runs", "tasks"] = "runs", reps: int = REPS, seed: int = 0
) -> Curve:
    """Share of scores above each threshold [T]: of all runs (`kind="runs"`, the run-score profile), or of the tasks'
    means ("tasks"). With unequal numbers of runs every task weighs the same.
    """
    grid = np.asarray(taus, float).reshape(-1)
    statistic = functools.partial(_profile, taus=grid, means=kind == "tasks")
    return _curve(grid, estimate(tasks_of(X), statistic, reps, seed))


def expected_online_performance(scores: Any, ks: Sequence[int] = DRAWS, *, reps: int = REPS, seed: int = 0) -> Curve:
    """Expected best of k settings tried online, for settings drawn at random (ReBRAC, arXiv 2305.09836; Kurenkov and
    Kolesnikov 2022).

    scores: [runs, settings] of mean returns or scores, NaN where a run is missing. A setting's score is the mean of its
    runs; with these sorted ascending, s_1..s_n, and draws without replacement,
    EOP(k) = sum_i s_i (C(i, k) - C(i-1, k)) / C(n, k). ks: those above n are left out. The interval resamples the runs
    of each setting; NaN where no setting has two.
    """
    settings = tasks_of(scores)
    n = len(settings)
    valid = [int(k) for k in ks if 1 <= k <= n]
    if not valid:
        raise ValueError(f"no number of draws from 1 to {n} among {list(ks)}")
    weights = [[(math.comb(i, k) - math.comb(i - 1, k)) / math.comb(n, k) for k in valid] for i in range(1, n + 1)]

    def statistic(samples: list[np.ndarray]) -> np.ndarray:
        return np.sort(_task_means(samples), 1) @ np.array(weights)

    return _curve(np.array(valid), estimate(settings, statistic, reps, seed))


def _curve(x: np.ndarray, intervals: Sequence[Interval]) -> Curve:
    return Curve(x, *(np.array([getattr(i, name) for i in intervals]) for name in ("value", "low", "high")))


# for many resamples at once: tasks of [R, n]


def _task_means(tasks: list[np.ndarray]) -> np.ndarray:
    return np.stack([t.mean(1) for t in tasks], 1)


def _mean(tasks: list[np.ndarray]) -> np.ndarray:
    return _task_means(tasks).mean(1)


def _median(tasks: list[np.ndarray]) -> np.ndarray:
    return np.median(_task_means(tasks), 1)


def _gap(tasks: list[np.ndarray], gamma: float) -> np.ndarray:
    return gamma - np.stack([np.minimum(t, gamma).mean(1) for t in tasks], 1).mean(1)


def _iqm(tasks: list[np.ndarray]) -> np.ndarray:
    pooled = np.concatenate(tasks, 1)
    cut = pooled.shape[1] // 4
    if rectangle(tasks, axis=1):
        return np.sort(pooled, 1)[:, cut : pooled.shape[1] - cut].mean(1)
    weights = np.concatenate([np.full(t.shape[1], 1.0 / (len(tasks) * t.shape[1])) for t in tasks])
    order = np.argsort(pooled, 1)
    above = np.cumsum(weights[order], 1)
    trim = cut / pooled.shape[1]
    inside = np.clip(np.minimum(above, 1.0 - trim) - np.maximum(above - weights[order], trim), 0.0, None)
    return (np.take_along_axis(pooled, order, 1) * inside).sum(1) / inside.sum(1)


def _profile(tasks: list[np.ndarray], taus: np.ndarray, means: bool) -> np.ndarray:
    columns = [t.mean(1, keepdims=True) for t in tasks] if means else tasks
    return np.mean([(t[:, :, None] > taus).mean(1) for t in columns], axis=0)


def _improvement(x: list[np.ndarray], y: list[np.ndarray]) -> np.ndarray:
    """Of ranks, 0 and up: how often each one is among b decides how many pairs each of a wins, without a look at every
    pair.
    """
    parts = []
    for a, b in zip(x, y, strict=True):
        size = 1 + max(int(a.max()), int(b.max()))
        index = b + size * np.arange(len(b))[:, None]
        counts = np.bincount(index.reshape(-1), minlength=size * len(b)).reshape(len(b), size)
        level = np.take_along_axis(counts, a, 1).sum(1)
        above = np.take_along_axis(np.cumsum(counts, 1), a, 1).sum(1) - level
        pairs = a.shape[1] * b.shape[1]
        parts.append(above / pairs + 0.5 * (level / pairs))
    return np.mean(parts, axis=0)
