"""Choosing among judged settings: ranks with diverged seeds, the one-standard-error rule, and Pareto fronts.

Values are a judge's estimates [K settings, S seeds], larger is better, NaN where a seed diverged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offrl.errors import UserError

MANY = 5  # seeds: from here on a setting's value is their median, and its spread its own


def setting_values(values: Any) -> np.ndarray:
    """One value for each setting, float64 [K]: the mean over seeds, the median with MANY or more.

    A setting with a diverged seed has NaN, or, with MANY or more, the median with that seed as the worst (NaN where
    half diverged). Raises UserError for another shape or an infinite value.
    """
    x = _values(values)
    if x.shape[1] < MANY:
        return x.mean(1)
    middle = np.sort(np.where(np.isnan(x), -np.inf, x), 1)[:, (x.shape[1] - 1) // 2 : x.shape[1] // 2 + 1].mean(1)
    return np.where(np.isfinite(middle), middle, np.nan)


def ranking(values: Any) -> list[int]:
    """Settings from best to worst. NaN `setting_values` rank last, those with more seeds left before those with fewer,
    then by the mean of these; a setting all of whose seeds diverged is left out. Equal ones: the first. Raises
    UserError as `setting_values`, and where all settings diverged."""
    x = _values(values)
    value, left = setting_values(x), (~np.isnan(x)).sum(1)
    rest = np.where(np.isnan(x), 0.0, x).sum(1) / np.maximum(left, 1)
    alive = [i for i in range(len(x)) if left[i]]
    if not alive:
        raise UserError("every seed of every setting diverged: lower the learning rates in the search space")
    return sorted(alive, key=lambda i: (True, -int(left[i]), -rest[i]) if np.isnan(value[i]) else (False, 0, -value[i]))


def pooled_sd(values: Any) -> float:
    """Standard deviation over the seeds of a setting, one number for all settings: two seeds of one say next to nothing
    about it.

    sqrt(sum of squares about the settings' means / (number of values - number of settings)), of settings with two
    finite seeds; NaN where there is none. Raises UserError as `setting_values`.
    """
    x = _values(values)
    counts = (~np.isnan(x)).sum(1)
    x, counts = x[counts > 1], counts[counts > 1]
    if not len(x):
        return math.nan
    means = np.nansum(x, 1) / counts
    return math.sqrt(float(np.nansum((x - means[:, None]) ** 2)) / float((counts - 1).sum()))


@dataclass(frozen=True)
class Tie:
    """What the data can tell apart. chosen: the setting to take; best: of the largest value; members: all within one
    standard error of it, best first; errors: [K] standard errors of the difference to the best (0 for itself, NaN for
    settings that could not be members)."""

    chosen: int
    best: int
    members: tuple[int, ...]
    errors: np.ndarray


def one_se(
    values: Any, caution: Any, distance: Any | None = None, *, resampled: Any | None = None, paired: bool = True
) -> Tie:
    """The most cautious of the settings that cannot be told from the best: CART's one-standard-error rule.

    values: [K, S]. caution: [K], larger stays closer to the data; of equal ones the smaller `distance` [K] of actions
    to the data, then the larger value. resampled: [K, S, Q] estimates of the same by Q bootstraps, whose spread is a
    standard error. A setting is a member when its mean is no further below the best's than the standard error of their
    difference:
    se^2 = sd^2 / S + sd_Q^2, sd over seeds of the differences (`paired`: seed s of every setting shares what it can),
    pooled over the settings below MANY seeds, and sd_Q over bootstraps of the difference of means over seeds. Not
    paired: the two variances are added. Settings with a diverged seed are no members. Raises UserError for shapes that
    do not fit, NaN in `caution`, one seed without `resampled`, and where every setting has a diverged seed.
    """
    x = _values(values)
    settings, seeds = x.shape
    careful = _row(caution, settings, "caution")
    far = np.zeros(settings) if distance is None else _row(distance, settings, "distance")
    complete = np.flatnonzero(~np.isnan(x).any(1))
    if not len(complete):
        raise UserError(
            "every setting has a diverged seed, so none can be told from another: take rule=best, or lower the "
            "learning rates"
        )
    if seeds < 2 and resampled is None:
        raise UserError("one seed without bootstraps has no standard error: take rule=best, or seeds=2")
    means = x[complete].mean(1)
    place = int(np.argmax(means))
    variance = _seed_variance(x[complete], place, paired)
    if resampled is not None:
        variance = variance + _bootstrap_variance(resampled, x.shape, complete, place, paired)
    variance[place] = 0.0
    errors = np.full(settings, np.nan)
    errors[complete] = np.sqrt(variance)
    order = np.argsort(-means, kind="stable")
    members = [int(complete[i]) for i in order if means[place] - means[i] <= errors[complete[i]]]
    chosen = min(members, key=lambda i: (-careful[i], far[i]))  # of equal ones the first, which is the best
    return Tie(chosen, int(complete[place]), tuple(members), errors)


def _seed_variance(x: np.ndarray, best: int, paired: bool) -> np.ndarray:
    """Variance over seeds of the mean difference to the best, [K]."""
    seeds = x.shape[1]
    if seeds < 2:
        return np.zeros(len(x))
    spread = (x - x[best] if paired else x).var(1, ddof=1)
    if seeds < MANY:
        others = np.delete(spread, best) if paired else spread
        spread = np.full(len(x), others.mean() if len(others) else 0.0)
    return (spread if paired else spread + spread[best]) / seeds


def _bootstrap_variance(
    resampled: Any, shape: tuple[int, ...], rows: np.ndarray, best: int, paired: bool
) -> np.ndarray:
    """Variance over bootstraps of the difference to the best of means over seeds, [K]."""
    q = np.asarray(resampled, np.float64)
    if q.ndim != 3 or q.shape[:2] != shape or q.shape[2] < 2:
        raise UserError(
            f"bootstraps of shape {q.shape} for values of shape {shape}: give [settings, seeds, Q] with Q of at least 2"
        )
    if not np.isfinite(q[rows]).all():
        raise UserError("a bootstrap's estimate is not finite where the estimate itself is: leave that setting out")
    means = q[rows].mean(1)
    spread = (means - means[best] if paired else means).var(1, ddof=1)
    return spread if paired else spread + spread[best]


def calibrated(estimates: Sequence[float] | Any, returns: Sequence[float] | Any) -> tuple[np.ndarray, float]:
    """Estimates of discounted values as a prior of returns: (means [K], sd), by least squares on the settings whose
    returns are known.

    returns: [K] mean returns, NaN where unknown. A slope below 0 says that the estimates are worth nothing: it becomes
    0, and all means are the mean return. sd: of the residuals (n - 2 degrees of freedom); it holds the noise of the
    known returns as well. Raises UserError for fewer than 3 known settings, an estimate that is not finite, and a fit
    without residuals.
    """
    e, r = _row(estimates, len(np.atleast_1d(estimates)), "estimates"), np.asarray(returns, np.float64)
    if r.shape != e.shape:
        raise UserError(f"{len(e)} settings have {r.size} returns: give one for each, NaN where it is not known")
    known = np.isfinite(r)
    n = int(known.sum())
    if n < 3:
        raise UserError(f"a prior needs 3 settings whose returns are known, not {n}: play more of them once")
    centred = e[known] - e[known].mean()
    square = float((centred**2).sum())
    slope = max(0.0, float((centred * r[known]).sum()) / square) if square > 0.0 else 0.0
    means = r[known].mean() + slope * (e - e[known].mean())
    sd = math.sqrt(float(((r[known] - means[known]) ** 2).sum()) / (n - 2))
    if sd == 0.0:
        raise UserError("the estimates give the known returns exactly, which leaves no spread: give prior_sd")
    return means, sd


# ----------------------------------------------------------------------------------------------------------- several
# criteria


def on_unit_axes(points: Any, worst: Sequence[float], best: Sequence[float]) -> np.ndarray:
    """Criteria [K, M] so that on every axis 0 is `worst` (the fixed reference) and 1 is `best`, and more is better; a
    criterion that is minimised has worst > best. Nothing is cut off. Raises UserError where the two are equal or do not
    fit."""
    x, low, high = _points(points), np.asarray(worst, np.float64), np.asarray(best, np.float64)
    if low.shape != (x.shape[1],) or high.shape != low.shape:
        raise UserError(f"{x.shape[1]} criteria need as many worst and best values")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low != high).all()):
        raise UserError("the worst and the best value of a criterion must be finite and differ")
    return (x - low) / (high - low)


def pareto_front(points: Any) -> list[int]:
    """Of points [K, M], more is better, those that none beats: no other is at least as good in everything and better in
    something. Equal points stay together; a point with NaN is never on it. Raises UserError for another shape."""
    x = _points(points)
    known = ~np.isnan(x).any(1)
    beaten = [bool((known & (x >= p).all(1) & (x > p).any(1)).any()) for p in x]
    return [i for i in range(len(x)) if known[i] and not beaten[i]]


def hypervolume(points: Any, reference: Sequence[float] = (0.0, 0.0)) -> float:
    """The area that points [K, 2], more is better, dominate above the reference: 1.5 for (1, 1) and (2, .5).

    Points that are not above it in both, or NaN, add nothing. Compare only areas of one reference and one pair of axes
    (`on_unit_axes`). Raises UserError for other than two criteria, or an infinite one."""
    x, corner = _points(points), np.asarray(reference, np.float64)
    if x.shape[1] != 2 or corner.shape != (2,):
        raise UserError("the hypervolume is of two criteria and a reference of two: choose two of them")
    if np.isinf(x).any() or not np.isfinite(corner).all():
        raise UserError("the hypervolume needs finite criteria")
    above = x[(x > corner).all(1)] - corner
    area, height = 0.0, 0.0
    for width, top in above[
        np.argsort(-above[:, 0], kind="stable")
    ]:  # the widest first; a higher one adds a strip on top
        area += width * max(0.0, top - height)
        height = max(height, top)
    return float(area)


def _values(values: Any) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if x.ndim != 2 or not x.size:
        raise UserError(f"values of shape {x.shape}: give a matrix [settings, seeds]")
    if np.isinf(x).any():
        raise UserError("a judge's value is infinite: mark it as NaN, which ranks last")
    return x


def _points(points: Any) -> np.ndarray:
    x = np.asarray(points, np.float64)
    if x.ndim != 2 or not x.size:
        raise UserError(f"criteria of shape {x.shape}: give a matrix [settings, criteria]")
    return x


def _row(values: Any, count: int, name: str) -> np.ndarray:
    x = np.asarray(values, np.float64)
    if x.shape != (count,) or not np.isfinite(x).all():
        raise UserError(f"{name} must be {count} finite numbers, one for each setting")
    return x
