"""How well a judge ranks settings, with intervals: rank correlation, regret of its first k, and comparisons of judges.

Truth is a matrix of returns [K settings, S]: its columns are what is averaged and drawn again, training seeds where
there are several (the mean of a seed's episodes each), episodes otherwise. An estimate is one number for each setting;
NaN ranks last, and correlations leave it out. Settings are drawn again with replacement, and within each its columns.
Below FEW settings no interval is given: it says nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offrl.errors import UserError, few
from offrl.ope.metrics import kendall, regret, spearman
from offrl.statistics.bootstrap import CONFIDENCE, REPS, Interval
from offrl.statistics.comparisons import holm, two_sided_p
from offrl.tuning.regret import check_returns

FEW = 8
TOP = (1, 3, 5)
Measure = Callable[[np.ndarray, np.ndarray], float]


def _known(measure: Measure) -> Measure:
    def of_known(v: np.ndarray, e: np.ndarray) -> float:
        known = ~np.isnan(e)
        return measure(v[known], e[known])

    return of_known


MEASURES: dict[str, Measure] = {
    "spearman": _known(spearman),
    "kendall": _known(kendall),
    **{f"regret@{k}": (lambda v, e, k=k: regret(v, e, k)) for k in TOP},  # type: ignore[misc]
}
"""True values [K] and estimates [K] -> a number. Regrets are shares of the range of true values, as in
`offrl.ope.metrics`.
"""


def quality(
    returns: Any,
    estimate: Any,
    measure: str | Measure = "spearman",
    *,
    reps: int = REPS,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """A measure of one judge with its interval. returns: [K, S]; estimate: [K]; measure: a name of MEASURES, or a
    function like them.

    The ends are NaN below FEW settings, or where the measure is NaN. Raises UserError for returns that are not finite,
    fewer than 2 settings, another number of estimates, and an unknown measure.
    """
    r, e = check_returns(returns), np.asarray(estimate, np.float64)
    function = _measure(measure)
    _same_settings(r, {"the judge": e})
    value = function(r.mean(1), e)
    draws = [function(truth, e[rows]) for rows, truth in _draws(r, reps, seed)] if len(r) >= FEW else []
    return _interval(value, draws, confidence)


def chance_of_best(returns: Any, estimate: Any, k: int = 1, *, reps: int = REPS, seed: int = 0) -> float:
    """Probability that the setting that is best in truth is among the k with the largest estimates: the share of
    resamples of the columns of `returns` [K, S] in which it is, settings staying as they are. Equal truths or estimates
    count by shares.

    With one column nothing is drawn again, and the answer is about these returns alone. Raises UserError as `quality`,
    and for k < 1."""
    r, e = check_returns(returns), np.asarray(estimate, np.float64)
    _same_settings(r, {"the judge": e})
    if k < 1:
        raise UserError(f"k={k} must be at least 1")
    inside = _share_in_top(np.where(np.isnan(e), -np.inf, e), k)
    rng = np.random.default_rng(seed)
    rows, total = np.arange(len(r))[:, None], 0.0
    for _ in range(reps):
        mean = r[rows, rng.integers(r.shape[1], size=r.shape)].mean(1)
        total += float(inside[mean == mean.max()].mean())
    return total / reps


@dataclass(frozen=True)
class JudgePair:
    """Two judges on the same settings: `first` less `second`. "Better" may be said where `adjusted` (Holm's) is below
    0.05.
    """

    first: str
    second: str
    difference: Interval
    p: float
    adjusted: float


def compare_judges(
    returns: Any, estimates: Mapping[str, Any], measure: str | Measure = "spearman", *, reps: int = REPS, seed: int = 0,
    confidence: float = CONFIDENCE,
) -> list[JudgePair]:  # fmt: skip
    """All pairs of judges, each on the same resamples, with Holm's correction over the pairs.

    returns: [K, S]; estimates: {name: [K]}. p is NaN below FEW settings. Raises UserError as `quality`, and for fewer
    than 2 judges."""
    r = check_returns(returns)
    e = {name: np.asarray(values, np.float64) for name, values in estimates.items()}
    _same_settings(r, e)
    if len(e) < 2:
        raise UserError("to compare judges takes at least 2: add one to judge=[...]")
    function = _measure(measure)
    value = {name: function(r.mean(1), x) for name, x in e.items()}
    drawn = list(_draws(r, reps, seed)) if len(r) >= FEW else []
    draws = {name: np.array([function(truth, x[rows]) for rows, truth in drawn]) for name, x in e.items()}
    pairs = list(itertools.combinations(e, 2))
    differences = [draws[a] - draws[b] for a, b in pairs]
    p = [two_sided_p(d) for d in differences]
    return [
        JudgePair(a, b, _interval(value[a] - value[b], d, confidence), one, adjusted)
        for (a, b), d, one, adjusted in zip(pairs, differences, p, holm(p), strict=True)
    ]


def _draws(r: np.ndarray, reps: int, seed: int) -> Any:
    """(settings [K], their mean over columns drawn again [K]) of each resample."""
    rng = np.random.default_rng(seed)
    for _ in range(reps):
        rows = rng.integers(len(r), size=len(r))
        yield rows, r[rows[:, None], rng.integers(r.shape[1], size=r.shape)].mean(1)


def _share_in_top(e: np.ndarray, k: int) -> np.ndarray:
    """For each setting the share of orders of equal estimates in which it is among the first k, [K]."""
    if k >= len(e):
        return np.ones(len(e))
    edge = np.sort(e)[::-1][k - 1]
    above, level = e > edge, e == edge
    return np.where(above, 1.0, np.where(level, (k - above.sum()) / level.sum(), 0.0))


def _interval(value: float, draws: Sequence[float] | np.ndarray, confidence: float) -> Interval:
    kept = np.asarray(draws, np.float64)
    kept = kept[~np.isnan(kept)]
    if math.isnan(value) or not len(kept):
        return Interval(value, math.nan, math.nan)
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(kept, [tail, 100.0 - tail])
    return Interval(value, float(low), float(high))


def _measure(measure: str | Measure) -> Measure:
    if not isinstance(measure, str):
        return measure
    if measure not in MEASURES:
        raise UserError(f"there is no measure '{measure}' of a judge.{few(measure, MEASURES)}")
    return MEASURES[measure]


def _same_settings(r: np.ndarray, estimates: Mapping[str, np.ndarray]) -> None:
    for name, e in estimates.items():
        if e.shape != (len(r),):
            raise UserError(f"{len(r)} settings have {e.size} estimates of {name}: give one for each setting")
