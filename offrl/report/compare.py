"""Algorithms compared over a group of datasets: aggregates, performance profiles, probabilities of improvement."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from offrl.runs.comparable import Group
from offrl.statistics.aggregate import aggregates, performance_profile, probability_of_improvement
from offrl.statistics.bootstrap import Curve, Interval

MOST_PAIRS = 5  # algorithms that are compared pair by pair; with more only the best with each other one
SEARCH = 3  # settings of one algorithm from which on the best of them counts as chosen
PROFILE_REPS = 500  # resamples for the bands of the profiles, which need many thresholds each


@dataclass(frozen=True)
class Comparison:
    """A comparison of algorithms in one group. Scores are in units of 1 (a score of 100 is 1.0), as in
    `offrl.statistics.aggregate`.
    """

    group: Group
    order: tuple[str, ...]  # labels, the highest IQM first
    aggregates: dict[str, dict[str, Interval]]
    profiles: dict[str, Curve]
    improvement: dict[tuple[str, str], Interval]
    why_not: str  # why the group is not aggregated; empty where it is


def compare(group: Group, reps: int, baseline: str = "") -> Comparison:
    """Aggregate one group. `reps`: bootstrap resamples; `baseline`: the algorithm that the others are compared with,
    where it is there.
    """
    why_not = "" if group.scores else "no algorithm has final scores on most of its datasets"
    if len(group.datasets) < 2:
        only = group.datasets[0] if group.datasets else "none"
        why_not = f"one dataset only ({only}): its scores above say all that there is to say"
    if why_not:
        return Comparison(group, tuple(group.scores), {}, {}, {}, why_not)
    intervals = {label: aggregates(x, reps=reps) for label, x in group.scores.items()}
    order = tuple(sorted(intervals, key=lambda label: -intervals[label]["iqm"].value))
    top = max(float(x[x == x].max()) for x in group.scores.values())
    low = min(0.0, *(float(x[x == x].min()) for x in group.scores.values()))
    grid = [low + (top - low) * i / 60 for i in range(61)] if top > low else [low, low + 1.0]
    profiles = {label: performance_profile(group.scores[label], grid, reps=min(reps, PROFILE_REPS)) for label in order}
    if baseline in group.scores:  # and the two best with each other, for the headline
        with_baseline = [(label, baseline) for label in order if label != baseline]
        pairs = [p for p in [order[:2]] if baseline not in p and len(p) > 1] + with_baseline
    elif len(order) <= MOST_PAIRS:
        pairs = list(itertools.combinations(order, 2))
    else:
        pairs = [(order[0], label) for label in order[1:]]
    chances = {(x, y): probability_of_improvement(group.scores[x], group.scores[y], reps=reps) for x, y in pairs}
    return Comparison(group, order, {label: intervals[label] for label in order}, profiles, chances, "")


def without_searches(ordered: Sequence[str], algorithm: dict[str, str]) -> tuple[list[str], dict[str, int]]:
    """(labels, the best first, of an algorithm with SEARCH settings or more only its best, {label of such a best: the
    number of its algorithm's settings}).
    """
    count = collections.Counter(algorithm[label] for label in ordered)
    best: dict[str, str] = {}
    for label in ordered:
        best.setdefault(algorithm[label], label)
    labels = [label for label in ordered if count[algorithm[label]] < SEARCH or label == best[algorithm[label]]]
    return labels, {label: n for label in labels if (n := count[algorithm[label]]) >= SEARCH}


def chosen(labels: Sequence[str], searched: dict[str, int], algorithm: dict[str, str]) -> tuple[str, ...]:
    """`iql (temperature=3) is the best of 16 settings of iql, chosen with the environment: ...`, for those that are."""
    return tuple(
        f"{label} is the best of {searched[label]} settings of {algorithm[label]}, chosen with the environment: its "
        "score is too high an estimate."
        for label in labels
        if label in searched
    )
