"""The stratified bootstrap under `offrl.statistics.aggregate`: resamples and percentiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

REPS = 2_000  # resamples
CONFIDENCE = 0.95
CHUNK = 2_000_000  # numbers held at once


class Interval(NamedTuple):
    """An estimate and the ends of its interval, which are NaN where no task has two runs."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Curve:
    """Estimates along an axis, with the ends of their pointwise intervals: four arrays of one length."""

    x: np.ndarray
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray


def tasks_of(X: Any) -> list[np.ndarray]:
    """One array of float64 scores for each task, without the NaN. X: [runs, tasks], or one sequence of scores for each
    task.

    Raises ValueError where there is no task, a task has no score, or a score is infinite.
    """
    if isinstance(X, np.ndarray):
        if X.ndim != 2:
            raise ValueError(f"scores must be [runs, tasks], got shape {X.shape}")
        columns = list(X.T)
    else:
        columns = list(X)
    tasks = [(c := np.asarray(column, float).reshape(-1))[~np.isnan(c)] for column in columns]
    if not tasks:
        raise ValueError("there are no tasks")
    for index, task in enumerate(tasks):
        if not len(task):
            raise ValueError(f"task {index} has no scores")
        if np.isinf(task).any():
            raise ValueError(f"task {index} has an infinite score")
    return tasks


def rectangle(tasks: Sequence[np.ndarray], axis: int = 0) -> bool:
    return len({t.shape[axis] for t in tasks}) == 1


def estimate(
    tasks: list[np.ndarray],
    statistic: Callable[[list[np.ndarray]], np.ndarray],
    reps: int,
    seed: int,
) -> list[Interval]:
    """An interval for each output of a statistic. tasks: scores [n] of each task. statistic: arrays [R, n] of each task
    -> [R, outputs].
    """
    values = statistic([t[None] for t in tasks])[0]
    draws = [statistic(samples) for samples in _resampled(tasks, reps, np.random.RandomState(seed))]
    ends = _ends(np.concatenate(draws), tasks)
    return [Interval(float(v), low, high) for v, (low, high) in zip(values, ends, strict=True)]


def estimate_pair(
    x: list[np.ndarray],
    y: list[np.ndarray],
    statistic: Callable[[list[np.ndarray], list[np.ndarray]], np.ndarray],
    reps: int,
    seed: int,
) -> Interval:
    """An interval for a statistic of two sets of scores: arrays [R, n] and [R, n'] for each task -> [R]."""
    value = float(statistic([t[None] for t in x], [t[None] for t in y])[0])
    draws = [statistic(a, b) for a, b in _resampled_pairs(x, y, reps, np.random.RandomState(seed))]
    return Interval(value, *_ends(np.concatenate(draws)[:, None], [*x, *y])[0])


def _ends(draws: np.ndarray, tasks: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """[R, outputs] -> (low, high) of each output; NaN where there is nothing to resample."""
    if all(len(t) < 2 for t in tasks):
        return [(math.nan, math.nan)] * draws.shape[1]
    tail = (1.0 - CONFIDENCE) / 2
    low_high = np.percentile(draws, [100 * tail, 100 * (1 - tail)], axis=0)
    return [(float(low), float(high)) for low, high in low_high.T]


def _parts(reps: int, numbers: int) -> Iterator[int]:
    """`reps` in parts whose resamples fit into CHUNK numbers."""
    if reps < 1:
        raise ValueError(f"reps={reps} must be at least 1")
    size = max(1, CHUNK // numbers)
    for start in range(0, reps, size):
        yield min(size, reps - start)


def _resampled(tasks: list[np.ndarray], reps: int, rng: np.random.RandomState) -> Iterator[list[np.ndarray]]:
    """Parts of `reps` resamples: for each task an array [part, n].

    For equal numbers of runs the indices are those that rliable draws from NumPy's global generator with the same seed.
    """
    n, m = len(tasks[0]), len(tasks)
    square = np.stack(tasks, 1) if rectangle(tasks) else None
    for part in _parts(reps, sum(map(len, tasks))):
        if square is not None:
            sample = square[rng.randint(0, n, (part, n, m)), np.arange(m)]
            yield [sample[:, :, j] for j in range(m)]
        else:
            yield [task[rng.randint(0, len(task), (part, len(task)))] for task in tasks]


def _resampled_pairs(
    x: list[np.ndarray], y: list[np.ndarray], reps: int, rng: np.random.RandomState
) -> Iterator[tuple[list[np.ndarray], list[np.ndarray]]]:
    """The same for two sets of scores, drawn independently."""
    m = len(x)
    a, b = (np.stack(side, 1) if rectangle(side) else None for side in (x, y))
    for part in _parts(reps, sum(len(s) * len(t) for s, t in zip(x, y, strict=True))):
        if a is None or b is None:
            yield next(_resampled(x, part, rng)), next(_resampled(y, part, rng))
            continue
        # in rliable's order
        pairs = [(rng.randint(0, len(a), a.shape), rng.randint(0, len(b), b.shape)) for _ in range(part)]
        sample_a, sample_b = (
            side[np.stack(index), np.arange(m)] for side, index in zip((a, b), zip(*pairs, strict=True), strict=True)
        )
        yield [sample_a[:, :, j] for j in range(m)], [sample_b[:, :, j] for j in range(m)]
