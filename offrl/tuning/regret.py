"""What choosing costs: regret against the number of real episodes, from a stored matrix of returns.

One trial is one search: k settings are drawn from the K of the matrix, a rule plays n episodes (returns drawn from each
setting's own, with replacement) and chooses. regret(n) = (V* - V(chosen)) / (V* - V_ref): V is a setting's mean over
the whole matrix, V* the largest of the k, V_ref their mean, so 0 is the best and 1 what a setting drawn at random has.
It is 0 where all k are equal.

The value is the mean over trials. The interval is about other settings and other episodes: both are drawn again with
replacement, and the whole mean computed anew; an interval over trials alone would shrink with their number, however few
settings there are. V* is the largest of K noisy means, so with few returns for each setting regret is overstated.

The expected best of k settings that are all tried (EOP) is `offrl.statistics.aggregate.expected_online_performance`, of
`returns.T`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from offrl.errors import UserError, few
from offrl.statistics.bootstrap import CONFIDENCE, Curve
from offrl.tuning.arms import FINALISTS, schedule, ucb_scores

EPISODES = (0, 1, 2, 5, 10, 20, 50, 100)
TRIALS, RESAMPLES = 1_000, 200
Rule = Callable[[np.ndarray, Sequence[int], np.random.Generator], np.ndarray]
"""Returns [T, K, N] of T trials, arms by prior (best first), and numbers of episodes -> chosen arms [T, numbers]."""


def halving(draws: np.ndarray, ns: Sequence[int], rng: np.random.Generator, *, most: int = FINALISTS) -> np.ndarray:
    """`arms.SequentialHalving` of the `arms.finalists`, a search for each n."""
    trials, arms, _ = draws.shape
    rows, columns = np.arange(trials)[:, None], []
    for n in ns:
        count = min(arms, max(2, min(most, n // 2)))
        left, played = np.tile(np.arange(count), (trials, 1)), 0
        for number, (size, each, extra) in enumerate(plan := schedule(count, n) if n else []):
            keep = plan[number + 1][0] if number + 1 < len(plan) else 1
            sums = draws[rows, left, : played + each].sum(2)
            counts = np.full(size, played + each)
            if extra:
                sums[:, :extra] += draws[rows, left[:, :extra], played + each]
                counts[:extra] += 1
            means = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
            by_prior = np.argsort(left, 1)  # the smaller index is the better prior: it decides where means are equal
            best = np.argsort(-np.take_along_axis(means, by_prior, 1), 1, kind="stable")[:, :keep]
            left, played = np.take_along_axis(np.take_along_axis(left, by_prior, 1), best, 1), played + each
        columns.append(left[:, 0])
    return np.stack(columns, 1)


def uniform(draws: np.ndarray, ns: Sequence[int], rng: np.random.Generator, *, most: int = FINALISTS) -> np.ndarray:
    """The finalists in turn, and the largest mean of those that were played: what a user does without a rule."""
    columns = []
    for n in ns:
        count = min(draws.shape[1], max(2, min(most, n // 2)))
        counts = np.array([n // count + (arm < n % count) for arm in range(count)])
        seen = np.arange(draws.shape[2]) < counts[:, None]
        means = np.where(seen, draws[:, :count], 0.0).sum(2) / np.maximum(counts, 1)
        columns.append(np.where(counts > 0, means, -np.inf).argmax(1))
    return np.stack(columns, 1)


def ucb(
    draws: np.ndarray,
    ns: Sequence[int],
    rng: np.random.Generator,
    *,
    low: float = 0.0,
    high: float = 1.0,
    alpha: float = 2.0,
) -> np.ndarray:
    """`arms.UpperConfidence` over all arms, one search read at every n. low, high: the data's smallest and largest
    return.
    """
    trials, arms, _ = draws.shape
    rows = np.arange(trials)
    counts, sums = np.zeros((trials, arms), np.int64), np.zeros((trials, arms))
    chosen = {0: np.zeros(trials, np.int64)}
    for pull in range(1, max(ns) + 1):
        means = (sums / np.maximum(counts, 1) - low) / (high - low)
        scores = ucb_scores(means, counts, pull, alpha)
        tied = scores == scores.max(1, keepdims=True)
        arm = np.where(tied, rng.random((trials, arms)), -1.0).argmax(1)
        sums[rows, arm] += draws[rows, arm, counts[rows, arm]]
        counts[rows, arm] += 1
        if pull in ns:
            chosen[pull] = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf).argmax(1)
    return np.stack([chosen[n] for n in ns], 1)


RULES: dict[str, Rule] = {"halving": halving, "ucb": ucb, "uniform": uniform}


def regret_curve(
    returns: Any,
    rule: str | Rule = "halving",
    n: Sequence[int] = EPISODES,
    *,
    prior: Sequence[float] | Any | None = None,
    settings: int | None = None,
    paired: bool = False,
    value_range: tuple[float, float] | None = None,
    trials: int = TRIALS,
    resamples: int = RESAMPLES,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Curve:
    """Regret against the number of episodes, a share (0 best, 1 chance), with pointwise intervals.

    returns: [K settings, S episodes], the mean of a row being a setting's true value; column s of all rows belongs to
    one reset seed if `paired`, so that arms are played on the same ones. rule: a name of RULES, or a function like
    them. n: numbers of episodes; 0 takes the largest prior. prior: a judge's estimates [K], NaN ranks last; None and
    ties: at random. settings: k, how many a search has (all). value_range: the data's smallest and largest return, for
    `ucb`; None: of the matrix. Raises UserError for returns that are not finite, fewer than 2 settings, 1 < k <= K not
    being so, a negative n, and an unknown rule.
    """
    r = check_returns(returns)
    estimate = np.zeros(len(r)) if prior is None else np.asarray(prior, np.float64)
    if estimate.shape != (len(r),):
        raise UserError(f"{len(r)} settings have {estimate.size} estimates: give one for each setting")
    k = len(r) if settings is None else settings
    if not 2 <= k <= len(r):
        raise UserError(f"settings={k}: a search has from 2 to all {len(r)} settings of the matrix")
    ns = [int(x) for x in n]
    if not ns or min(ns) < 0:
        raise UserError("n is a list of numbers of episodes, none below 0")
    if trials < 1 or resamples < 1:
        raise UserError(f"trials={trials} and resamples={resamples} must be at least 1")
    choose, bounds = _rule(rule), value_range or (float(r.min()), float(r.max()))
    if rule == "ucb" and bounds[0] < bounds[1]:
        r, bounds = (
            (r - bounds[0]) / (bounds[1] - bounds[0]),
            (0.0, 1.0),
        )  # regret is a ratio, which this does not change

    def mean(matrix: np.ndarray, estimates: np.ndarray, count: int, key: list[int]) -> np.ndarray:
        return _losses(matrix, estimates, choose, ns, k, paired, count, np.random.default_rng(key)).mean(0)

    value = mean(r, estimate, trials, [seed, 0])
    inner, ends = max(1, trials // 10), []
    for number in range(resamples):
        rng = np.random.default_rng([seed, 1, number])
        rows = rng.integers(len(r), size=len(r))
        ends.append(mean(_resampled(r[rows], paired, rng), estimate[rows], inner, [seed, 2, number]))
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(ends, [tail, 100.0 - tail], axis=0)
    return Curve(np.array(ns), value, low, high)


def _losses(
    r: np.ndarray,
    prior: np.ndarray,
    choose: Rule,
    ns: list[int],
    k: int,
    paired: bool,
    trials: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Regret of each trial, [trials, numbers]."""
    arms = rng.random((trials, len(r))).argsort(1)[:, :k]  # a random order, which decides between equal priors
    worth = np.where(np.isnan(prior), -np.inf, prior)[arms]
    arms = np.take_along_axis(arms, np.argsort(-worth, 1, kind="stable"), 1)
    columns = rng.integers(r.shape[1], size=(trials, 1 if paired else k, max(1, *ns)))
    draws = r[arms[:, :, None], columns]
    truth = r.mean(1)[arms]
    best, span = truth.max(1), truth.max(1) - truth.mean(1)
    loss = best[:, None] - np.take_along_axis(truth, choose(draws, ns, rng), 1)
    return np.where(span[:, None] > 0.0, loss / np.where(span > 0.0, span, 1.0)[:, None], 0.0)


def _resampled(r: np.ndarray, paired: bool, rng: np.random.Generator) -> np.ndarray:
    """The same settings with other episodes: of all settings the same ones if they are paired."""
    if paired:
        return r[:, rng.integers(r.shape[1], size=r.shape[1])]
    return np.take_along_axis(r, rng.integers(r.shape[1], size=r.shape), 1)


def _rule(rule: str | Rule) -> Rule:
    if not isinstance(rule, str):
        return rule
    if rule not in RULES:
        raise UserError(f"there is no rule '{rule}' to choose with episodes.{few(rule, RULES)}")
    return RULES[rule]


def check_returns(returns: Any) -> np.ndarray:
    """A matrix of returns, float64 [K settings, S]. Raises UserError unless it is finite with K >= 2 and S >= 1."""
    r = np.asarray(returns, np.float64)
    if r.ndim != 2 or r.shape[0] < 2 or r.shape[1] < 1:
        raise UserError(
            f"returns of shape {r.shape}: give a matrix [settings, episodes] of at least 2 settings and 1 episode"
        )
    if not np.isfinite(r).all():
        bad = int(np.flatnonzero(~np.isfinite(r).all(1))[0])
        raise UserError(f"setting {bad} has a return that is not finite: leave out settings that diverged")
    return r
