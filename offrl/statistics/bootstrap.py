"""The stratified bootstrap under `offrl.statistics.aggregate`: resamples, percentiles, and the way through rliable."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from offrl.errors import UserError

REPS = 2_000  # resamples
RLIABLE_REPS = 5_000  # with more than this "auto" takes the vectorised code: rliable needs 0.12 s for each thousand
CONFIDENCE = 0.95
CHUNK = 2_000_000  # numbers held at once
Through = Literal["auto", "rliable", "numpy"]


@dataclass(frozen=True)
class Interval:
    """An estimate and the ends of its interval, which are NaN where no task has two runs."""

    value: float
    low: float
    high: float
    through: str = "numpy"  # "rliable 1.2.0" or "numpy"


@dataclass(frozen=True)
class Curve:
    """Estimates along an axis, with the ends of their pointwise intervals: four arrays of one length."""

    x: np.ndarray
    value: np.ndarray
    low: np.ndarray
    high: np.ndarray
    through: str = "numpy"


def tasks_of(X: Any) -> list[np.ndarray]:
    """One array of float64 scores for each task, without the NaN. X: [runs, tasks], or one sequence of scores for each task.

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
    ours: Callable[[list[np.ndarray]], np.ndarray],
    theirs: Callable[[np.ndarray], np.ndarray] | None,
    reps: int,
    seed: int,
    confidence: float,
    through: Through,
) -> list[Interval]:
    """An interval for each output of a statistic.

    tasks: one array [n] of scores for each task. ours: one array [R, n] for each task -> [R, outputs]. theirs: the same for one resample,
    scores [runs, tasks] -> [outputs], with rliable's functions; None where it has none.
    """
    square = rectangle(tasks)
    if through == "auto":
        through = "rliable" if square and theirs is not None and reps <= RLIABLE_REPS and rliable_name() else "numpy"
    if through == "rliable" and theirs is not None:
        _check_rliable(square)
        values, low_high = _rliable(np.stack(tasks, 1), theirs, reps, seed, confidence)
        name = rliable_name()
    else:
        values = ours([t[None] for t in tasks])[0]
        draws = [ours(drawn) for drawn in _resampled(tasks, reps, np.random.RandomState(seed))]
        low_high, name = _percentiles(np.concatenate(draws), confidence), "numpy"
    return [Interval(float(v), low, high, name) for v, (low, high) in zip(values, _ends(low_high, tasks), strict=True)]


def estimate_pair(
    x: list[np.ndarray],
    y: list[np.ndarray],
    ours: Callable[[list[np.ndarray], list[np.ndarray]], np.ndarray],
    reps: int,
    seed: int,
    confidence: float,
    through: Through,
) -> Interval:
    """An interval for the probability of improvement. ours: arrays [R, n] and [R, n'] for each task -> [R]. "auto" is never rliable."""
    if through == "rliable":
        from rliable import metrics

        _check_rliable(rectangle(x) and rectangle(y))
        both = [np.stack(x, 1), np.stack(y, 1)]
        values, low_high = _rliable(both, lambda a, b: np.array([metrics.probability_of_improvement(a, b)]), reps, seed, confidence)
        return Interval(float(values[0]), *_ends(low_high, [*x, *y])[0], rliable_name())
    value = float(ours([t[None] for t in x], [t[None] for t in y])[0])
    draws = [ours(a, b) for a, b in _resampled_pairs(x, y, reps, np.random.RandomState(seed))]
    return Interval(value, *_ends(_percentiles(np.concatenate(draws)[:, None], confidence), [*x, *y])[0])


def _ends(low_high: np.ndarray, tasks: Sequence[np.ndarray]) -> list[tuple[float, float]]:
    """[2, outputs] -> (low, high) of each output; NaN where there is nothing to resample."""
    if all(len(t) < 2 for t in tasks):
        return [(math.nan, math.nan)] * low_high.shape[1]
    return [(float(low), float(high)) for low, high in low_high.T]


def _percentiles(draws: np.ndarray, confidence: float) -> np.ndarray:
    """[R, outputs] -> [2, outputs]."""
    tail = (1.0 - confidence) / 2
    return np.percentile(draws, [100 * tail, 100 * (1 - tail)], axis=0)


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
            drawn = square[rng.randint(0, n, (part, n, m)), np.arange(m)]
            yield [drawn[:, :, j] for j in range(m)]
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
        pairs = [(rng.randint(0, len(a), a.shape), rng.randint(0, len(b), b.shape)) for _ in range(part)]  # in rliable's order
        left, right = (side[np.stack(index), np.arange(m)] for side, index in zip((a, b), zip(*pairs, strict=True), strict=True))
        yield [left[:, :, j] for j in range(m)], [right[:, :, j] for j in range(m)]


# ------------------------------------------------------------------------------------------------------------------ rliable


@functools.cache
def rliable_name() -> str:
    """`rliable 1.2.0`, or an empty string where it cannot be imported."""
    from importlib.metadata import version

    try:
        from rliable import library, metrics  # noqa: F401 - 0.6 s; it fails under pandas 3
    except Exception:  # whatever the packages below it raise
        return ""
    return f"rliable {version('rliable')}"


def _check_rliable(square: bool) -> None:
    if not rliable_name():
        raise UserError('rliable cannot be imported here: pip install "offrl[report]", or leave through=auto')
    if not square:
        raise ValueError("rliable needs the same number of runs for each task")


def _rliable(
    scores: np.ndarray | list[np.ndarray], statistic: Callable[..., np.ndarray], reps: int, seed: int, confidence: float
) -> tuple[np.ndarray, np.ndarray]:
    """(point estimates [outputs], [2, outputs]) from rliable. It draws from NumPy's global generator, which is seeded and put back."""
    from rliable import library

    state = np.random.get_state()
    try:
        np.random.seed(seed)
        points, ends = library.get_interval_estimates({"": scores}, statistic, reps=reps, confidence_interval_size=confidence)
    finally:
        np.random.set_state(state)
    return points[""], ends[""]
