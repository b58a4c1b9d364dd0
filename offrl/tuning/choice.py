"""Choosing among judged settings: ranks with diverged seeds, the one-standard-error rule, and Pareto fronts.

Values are a judge's estimates, float64 [K settings, S seeds], larger is better, NaN where a seed diverged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

ERROR95 = 1.959964  # standard errors on either side of a 95% interval
MANY = 5  # seeds: from here on a setting's value is their median, and its spread its own


def setting_values(values: np.ndarray) -> np.ndarray:
    """One value for each setting, float64 [K]: the mean over seeds, the median with MANY or more.

    A setting with a diverged seed has NaN, or, with MANY or more, the median with that seed as the worst (NaN where
    half diverged).
    """
    seeds = values.shape[1]
    if seeds < MANY:
        return values.mean(1)
    ordered = np.sort(np.where(np.isnan(values), -np.inf, values), 1)
    middle = ordered[:, (seeds - 1) // 2 : seeds // 2 + 1].mean(1)
    return np.where(np.isfinite(middle), middle, np.nan)


def ranking(values: np.ndarray) -> list[int]:
    """Settings from best to worst. NaN `setting_values` rank last, those with more seeds left before those with fewer,
    then by the mean of these; a setting all of whose seeds diverged is left out. Equal ones: the first."""
    value, alive = setting_values(values), (~np.isnan(values)).sum(1)
    mean = np.nansum(values, 1) / np.maximum(alive, 1)
    return sorted(
        (i for i in range(len(values)) if alive[i]),
        key=lambda i: (True, -int(alive[i]), -mean[i]) if np.isnan(value[i]) else (False, 0, -value[i]),
    )


def pooled_sd(values: np.ndarray) -> float:
    """Standard deviation over the seeds of a setting, one number for all settings: two seeds of one say next to nothing
    about it.

    sqrt(sum of squares about the settings' means / (number of values - number of settings)), of settings with two
    finite seeds; NaN where there is none.
    """
    counts = (~np.isnan(values)).sum(1)
    x, counts = values[counts > 1], counts[counts > 1]
    if not len(x):
        return math.nan
    means = np.nansum(x, 1) / counts
    return math.sqrt(float(np.nansum((x - means[:, None]) ** 2)) / float((counts - 1).sum()))


def places(values: np.ndarray, costs: np.ndarray, limit: float) -> np.ndarray:
    """The place of each setting [K] among all, from the last, which is 0; NaN where its value or its cost is. Those
    whose cost keeps the limit come before the others, the larger value first; the others come by their costs, the
    smallest first. No number of a value and a cost is made."""
    known = ~np.isnan(values) & ~np.isnan(costs)
    safe = known & (costs <= limit)
    order = np.lexsort((np.where(safe, -values, costs), ~safe, ~known))
    result = np.full(len(values), np.nan)
    result[order] = np.arange(len(values))[::-1]
    return np.where(known, result - (~known).sum(), np.nan)


@dataclass(frozen=True)
class Tie:
    """What the data can tell apart. chosen: the setting to take; best: of the largest value; members: all within one
    standard error of it, best first; errors: [K] standard errors of the difference to the best (0 for itself, NaN for
    settings that could not be members)."""

    chosen: int
    best: int
    members: tuple[int, ...]
    errors: np.ndarray


def one_se(values: np.ndarray, caution: np.ndarray, distance: np.ndarray, resampled: np.ndarray | None = None) -> Tie:
    """The most cautious of the settings that cannot be told from the best: CART's one-standard-error rule.

    values: [K, S], of which some setting has all seeds, and S > 1 or `resampled`. caution: [K], larger stays closer to
    the data; of equal ones the smaller `distance` [K] of actions to the data, then the larger value. resampled: [K, S,
    Q] estimates of the same by Q bootstraps, whose spread is a standard error. A setting is a member when its mean is
    no further below the best's than the standard error of their difference: se^2 = sd^2 / S + sd_Q^2, sd over seeds of
    the differences (seed s of every setting shares what it can), pooled over the settings below MANY seeds, and sd_Q
    over bootstraps of the difference of means over seeds. Settings with a diverged seed are no members.
    """
    settings, seeds = values.shape
    complete = np.flatnonzero(~np.isnan(values).any(1))
    x = values[complete]
    means = x.mean(1)
    best = int(np.argmax(means))
    variance = np.zeros(len(x))
    if seeds > 1:
        variance = (x - x[best]).var(1, ddof=1)
        if seeds < MANY and len(x) > 1:
            variance = np.full(len(x), np.delete(variance, best).mean())
        variance = variance / seeds
    if resampled is not None:
        fits = resampled[complete].mean(1)
        variance = variance + (fits - fits[best]).var(1, ddof=1)
    variance[best] = 0.0
    errors = np.full(settings, np.nan)
    errors[complete] = np.sqrt(variance)
    order = np.argsort(-means, kind="stable")
    members = [int(complete[i]) for i in order if means[best] - means[i] <= errors[complete[i]]]
    distance_or_inf = np.where(np.isnan(distance), np.inf, distance)
    chosen = min(members, key=lambda i: (-caution[i], distance_or_inf[i]))  # of equal ones the first, which is the best
    return Tie(chosen, int(complete[best]), tuple(members), errors)


def pareto_front(points: np.ndarray) -> list[int]:
    """Of points [K, M], more is better, those that none beats: no other is at least as good in everything and better in
    something. Equal points stay together; a point with NaN is never on it."""
    known = ~np.isnan(points).any(1)
    beaten = [bool((known & (points >= p).all(1) & (points > p).any(1)).any()) for p in points]
    return [i for i in range(len(points)) if known[i] and not beaten[i]]
