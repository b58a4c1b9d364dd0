"""What choosing costs: regret against the number of real episodes, and how well a judge ranks, with intervals.

Returns are a matrix [K settings, S]: columns are training seeds or episodes. An estimate is one number for each
setting, larger is better; NaN ranks last, and correlations leave it out.

One trial of a regret curve is one search: halving plays n episodes (returns drawn from each setting's own, with
replacement) and chooses. regret(n) = (V* - V(chosen)) / (V* - V_ref): V is a setting's mean over the whole matrix, V*
the largest, V_ref their mean, so 0 is the best and 1 what a setting drawn at random has. It is 0 where all are equal.
The value is the mean over trials. The interval is about other settings and other episodes: both are drawn again with
replacement, and the whole mean computed anew; an interval over trials alone would shrink with their number, however few
settings there are. V* is the largest of K noisy means, so with few returns for each setting regret is overstated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offrl.ope.metrics import regret, spearman
from offrl.statistics.bootstrap import CONFIDENCE, REPS, Curve, Interval
from offrl.tuning.best_arm import schedule

EPISODES = (0, 1, 2, 5, 10, 20, 50, 100)
FINALISTS = 8
FEW = 8  # settings, below which an interval says nothing
TAIL = 50.0 * (1.0 - CONFIDENCE)


def _known(measure: Callable[[np.ndarray, np.ndarray], float]) -> Callable[[np.ndarray, np.ndarray], float]:
    return lambda v, e: measure(v[~np.isnan(e)], e[~np.isnan(e)])


MEASURES: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "spearman": _known(spearman),
    **{f"regret@{k}": (lambda v, e, k=k: regret(v, e, k)) for k in (1, 3, 5)},  # type: ignore[misc]
}
"""True values [K] and estimates [K] -> a number. Regrets are shares of the range of true values."""


def quality(returns: Any, estimate: Any, measure: str, *, reps: int = REPS, seed: int = 0) -> Interval:
    """A measure of one judge with its interval; NaN ends below FEW settings. returns: [K, S]; estimate: [K].

    Settings are drawn again with replacement, and within each its columns."""
    r, e, function = np.asarray(returns, np.float64), np.asarray(estimate, np.float64), MEASURES[measure]
    value = function(r.mean(1), e)
    rng = np.random.default_rng(seed)
    draws = []
    for _ in range(reps if len(r) >= FEW else 0):
        rows = rng.integers(len(r), size=len(r))
        draws.append(function(r[rows[:, None], rng.integers(r.shape[1], size=r.shape)].mean(1), e[rows]))
    draws = [x for x in draws if not math.isnan(x)]
    if math.isnan(value) or not draws:
        return Interval(value, math.nan, math.nan)
    low, high = np.percentile(draws, [TAIL, 100.0 - TAIL])
    return Interval(value, float(low), float(high))


def halving(draws: np.ndarray, ns: Sequence[int], *, most: int = FINALISTS) -> np.ndarray:
    """The choices [T, numbers] of `best_arm.SequentialHalving`, a search for each n, among the `most` first arms or
    n // 2.

    draws: returns [T, K, N] of T trials, arms by prior, the best first."""
    trials, arms, _ = draws.shape
    rows, columns = np.arange(trials)[:, None], []
    for n in ns:
        count = min(arms, max(2, min(most, n // 2)))
        alive, played = np.tile(np.arange(count), (trials, 1)), 0
        for number, (size, each, extra) in enumerate(plan := schedule(count, n) if n else []):
            keep = plan[number + 1][0] if number + 1 < len(plan) else 1
            sums = draws[rows, alive, : played + each].sum(2)
            counts = np.full(size, played + each)
            if extra:
                sums[:, :extra] += draws[rows, alive[:, :extra], played + each]
                counts[:extra] += 1
            means = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
            by_prior = np.argsort(alive, 1)  # the smaller index is the better prior: it decides where means are equal
            best = np.argsort(-np.take_along_axis(means, by_prior, 1), 1, kind="stable")[:, :keep]
            alive, played = np.take_along_axis(np.take_along_axis(alive, by_prior, 1), best, 1), played + each
        columns.append(alive[:, 0])
    return np.stack(columns, 1)


def regret_curve(
    returns: Any,
    n: Sequence[int] = EPISODES,
    *,
    prior: Sequence[float] | Any | None = None,
    trials: int = 1_000,
    resamples: int = 200,
    seed: int = 0,
) -> Curve:
    """Regret against the number of episodes, a share (0 best, 1 chance), with pointwise intervals.

    returns: [K settings, S episodes], finite. n: numbers of episodes; 0 takes the largest prior. prior: a judge's
    estimates [K], NaN ranks last; None and ties: at random."""
    r = np.asarray(returns, np.float64)
    estimate = np.zeros(len(r)) if prior is None else np.asarray(prior, np.float64)

    def mean(matrix: np.ndarray, estimates: np.ndarray, count: int, key: list[int]) -> np.ndarray:
        return _losses(matrix, estimates, n, count, np.random.default_rng(key)).mean(0)

    value = mean(r, estimate, trials, [seed, 0])
    ends = []
    for number in range(resamples):
        rng = np.random.default_rng([seed, 1, number])
        rows = rng.integers(len(r), size=len(r))
        drawn_again = np.take_along_axis(r[rows], rng.integers(r.shape[1], size=r.shape), 1)
        ends.append(mean(drawn_again, estimate[rows], max(1, trials // 10), [seed, 2, number]))
    low, high = np.percentile(ends, [TAIL, 100.0 - TAIL], axis=0)
    return Curve(np.array(n), value, low, high)


def _losses(r: np.ndarray, prior: np.ndarray, ns: Sequence[int], trials: int, rng: np.random.Generator) -> np.ndarray:
    """Regret of each trial, [trials, numbers]."""
    arms = rng.random((trials, len(r))).argsort(1)  # a random order, which decides between equal priors
    worth = np.where(np.isnan(prior), -np.inf, prior)[arms]
    arms = np.take_along_axis(arms, np.argsort(-worth, 1, kind="stable"), 1)
    draws = r[arms[:, :, None], rng.integers(r.shape[1], size=(trials, len(r), max(1, *ns)))]
    truth = r.mean(1)[arms]
    best, span = truth.max(1), truth.max(1) - truth.mean(1)
    loss = best[:, None] - np.take_along_axis(truth, halving(draws, ns), 1)
    return np.where(span[:, None] > 0.0, loss / np.where(span > 0.0, span, 1.0)[:, None], 0.0)
