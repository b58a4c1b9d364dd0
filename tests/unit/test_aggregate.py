"""Aggregate statistics: worked examples by hand, the numbers of the rliable library, coverage of the intervals."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from offrl.statistics import aggregate, bootstrap

SIXTEEN = np.arange(1.0, 17.0).reshape(4, 4)  # [runs, tasks]


def scores(runs: int, tasks: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).gamma(2.0, 0.4, (runs, tasks)) - 0.1


def test_worked_examples() -> None:
    found = aggregate.aggregates(SIXTEEN, gamma=4.0, reps=200)
    assert found["iqm"].value == 8.5  # the mean of 5..12
    assert found["mean"].value == 8.5 and found["median"].value == 8.5  # task means 7, 8, 9, 10
    assert found["optimality_gap"].value == pytest.approx(4.0 - (1 + 2 + 3 + 13 * 4) / 16)
    assert all(i.low <= i.value <= i.high for i in found.values())
    for name, interval in aggregate.aggregates(np.full((3, 5), 0.7), reps=50).items():
        expect = pytest.approx(0.3 if name == "optimality_gap" else 0.7)
        assert (interval.value, interval.low, interval.high) == (expect, expect, expect)


def test_probability_of_improvement_by_hand() -> None:
    assert aggregate.probability_of_improvement(SIXTEEN, SIXTEEN + 1, reps=100).value < 0.5
    assert aggregate.probability_of_improvement(SIXTEEN, SIXTEEN, reps=100).value == 0.5
    # task 0: 1, 3 against 2, 2, 4: 3 beats twice, 2 of 6; task 1: 5, 5 against 5, 0, 0: two ties and four wins, 5 of 6
    x, y = np.array([[1.0, 5.0], [3.0, 5.0]]), np.array([[2.0, 5.0], [2.0, 0.0], [4.0, 0.0]])
    assert aggregate.probability_of_improvement(x, y, reps=100).value == pytest.approx((2 / 6 + 5 / 6) / 2)


def test_profiles_by_hand() -> None:
    x = np.array([[0.1, 0.5], [0.3, 0.9]])
    runs = aggregate.performance_profile(x, [0.0, 0.3, 0.6, 0.9], reps=50)
    assert runs.value.tolist() == [1.0, 0.5, 0.25, 0.0]
    means = aggregate.performance_profile(x, [0.0, 0.3, 0.6, 0.9], kind="tasks", reps=50)
    assert means.value.tolist() == [1.0, 0.5, 0.5, 0.0]
    assert np.all(runs.low <= runs.value) and np.all(runs.value <= runs.high)


def oracle(statistic: Callable[..., Any], *scores: np.ndarray, reps: int, seed: int) -> list[np.ndarray]:
    """[estimates, lower ends, upper ends] of rliable, which draws from NumPy's global generator."""
    library = pytest.importorskip("rliable.library")
    np.random.seed(seed)
    given = list(scores) if len(scores) > 1 else scores[0]
    points, ends = library.get_interval_estimates({"": given}, lambda *x: np.atleast_1d(statistic(*x)), reps=reps)
    return [points[""], *ends[""]]


@pytest.mark.parametrize(("runs", "tasks"), [(2, 3), (5, 9), (10, 4), (3, 1)])
def test_the_numbers_of_rliable_to_rounding(runs: int, tasks: int) -> None:
    """Points and interval ends: both draw the same resamples, so nothing is left to chance."""
    metrics, library = pytest.importorskip("rliable.metrics"), pytest.importorskip("rliable.library")
    x, draws = scores(runs, tasks), {"reps": 300, "seed": 7}
    found = aggregate.aggregates(x, gamma=0.8, **draws)
    for name, interval in found.items():
        more = {"gamma": 0.8} if name == "optimality_gap" else {}
        expected = oracle(functools.partial(getattr(metrics, f"aggregate_{name}"), **more), x, **draws)
        assert [interval.value, interval.low, interval.high] == pytest.approx(np.concatenate(expected), abs=1e-12)
    draws = {"reps": 60, "seed": 7}
    for y in (scores(runs + 1, tasks, seed=1), scores(runs, tasks, 2)):
        interval = aggregate.probability_of_improvement(x, y, **draws)
        expected = oracle(metrics.probability_of_improvement, x, y, **draws)
        assert [interval.value, interval.low, interval.high] == pytest.approx(np.concatenate(expected), abs=1e-12)
    for kind, theirs in (("runs", library.score_distributions), ("tasks", library.average_score_distributions)):
        curve = aggregate.performance_profile(x, np.linspace(0.0, 1.5, 51), kind=kind, **draws)
        expected = oracle(lambda scores, theirs=theirs, taus=curve.x: theirs(scores, taus), x, **draws)
        for ours, other in zip((curve.value, curve.low, curve.high), expected, strict=True):
            np.testing.assert_allclose(ours, other, rtol=0, atol=1e-12)


def test_parts_of_a_long_bootstrap_draw_the_same_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    x = scores(5, 6)
    whole = aggregate.aggregates(x, reps=500)
    monkeypatch.setattr(bootstrap, "CHUNK", 30 * 7)
    assert aggregate.aggregates(x, reps=500) == whole
    assert aggregate.aggregates(x, reps=500, seed=1) != whole


def test_unequal_numbers_of_runs_give_each_task_the_same_weight() -> None:
    ragged = [np.array([0.0]), np.array([1.0, 1.0, 1.0, 1.0])]
    as_matrix = np.array([[0.0, 1.0], [np.nan, 1.0], [np.nan, 1.0], [np.nan, 1.0]])
    assert (
        aggregate.aggregates(as_matrix, reps=10)["mean"].value
        == aggregate.aggregates(ragged, reps=10)["mean"].value
        == 0.5
    )
    assert aggregate.aggregates(ragged, reps=10)["optimality_gap"].value == 0.5
    assert aggregate.performance_profile(ragged, [0.5], reps=10).value.tolist() == [0.5]
    assert aggregate.probability_of_improvement(ragged, [[-1.0, -1.0], [2.0]], reps=10).value == 0.5
    # five runs: floor(5/4) / 5 = 0.2 of the weight goes at either end; 0 keeps 0.3 of its 0.5, the ones 0.3 of theirs
    assert aggregate.aggregates(ragged, reps=10)["iqm"].value == pytest.approx(0.5)
    # doubling the runs of five of six tasks changes nothing: a quarter of the weight, 6 of 24 or 11 of 44 scores, still
    # goes at either end
    x = scores(4, 6)
    tasks = [t[None] for t in aggregate.tasks_of(x)]
    uneven = [np.concatenate([t, t], 1) if i else t for i, t in enumerate(tasks)]
    assert aggregate._iqm(uneven)[0] == pytest.approx(aggregate._iqm(tasks)[0], abs=1e-12)
    assert aggregate._iqm(tasks)[0] == pytest.approx(np.sort(x.reshape(-1))[6:18].mean(), abs=1e-12)


def test_one_run_has_no_interval() -> None:
    found = aggregate.aggregates(scores(1, 6), reps=20)["iqm"]
    assert math.isfinite(found.value) and math.isnan(found.low) and math.isnan(found.high)
    assert math.isnan(aggregate.probability_of_improvement(scores(1, 6), scores(1, 6, 1), reps=20).low)
    assert math.isfinite(aggregate.probability_of_improvement(scores(1, 6), scores(3, 6, 1), reps=20).low)


def test_expected_online_performance_by_enumeration() -> None:
    settings = [0.3, 0.9, 0.1, 0.9, 0.5]
    found = aggregate.expected_online_performance(np.array([settings]), (1, 2, 3, 5), reps=5)
    for k, value in zip(found.x, found.value, strict=True):
        best = [max(draw) for draw in itertools.combinations(settings, k)]
        assert value == pytest.approx(sum(best) / len(best))
    assert np.isnan(found.low).all()


def test_expected_online_performance_over_seeds() -> None:
    table = np.array([[0.2, 0.8], [0.4, np.nan]])  # [runs, settings]: means 0.3 and 0.8
    found = aggregate.expected_online_performance(table, (1, 2, 15), reps=400)
    assert found.x.tolist() == [1, 2] and found.value.tolist() == pytest.approx([0.55, 0.8])
    assert (
        found.low[0] == pytest.approx(0.5)
        and found.high[0] == pytest.approx(0.6)
        and found.low[1] == found.high[1] == 0.8
    )
    with pytest.raises(ValueError, match="no number of draws"):
        aggregate.expected_online_performance(table, (3,))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros((0, 2)), "task 0 has no scores"),
        (np.zeros((2, 0)), "no tasks"),
        (np.array([[1.0, np.nan], [1.0, np.nan]]), "task 1 has no scores"),
        (np.array([[1.0, np.inf]]), "infinite"),
        (np.zeros(3), r"\[runs, tasks\]"),
    ],
)
def test_what_has_no_answer(bad: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        aggregate.aggregates(bad)


def test_different_tasks_are_not_compared() -> None:
    with pytest.raises(ValueError, match="same tasks"):
        aggregate.probability_of_improvement(np.zeros((2, 3)), np.zeros((2, 4)))


def test_coverage_of_the_interval() -> None:
    """The share of experiments whose 95% interval holds the true mean, 10 tasks: below 95% for 3 seeds, near it for 10.

    For the mean the truth is known exactly. A bootstrap of n runs sees (n - 1) / n of their variance, so the interval
    of 3 seeds is sqrt(2/3) as wide as it should be, and covers about 2 Phi(1.96 sqrt(2/3)) - 1 = 0.89; of 10 about
    0.94. 600 experiments tell shares apart to 0.013 (standard error).
    """
    rng = np.random.default_rng(5)
    covered = {}
    for seeds in (3, 10):
        inside = 0
        for experiment in range(600):
            x = np.linspace(0.2, 1.0, 10) + 0.15 * rng.standard_normal((seeds, 10))
            found = aggregate.aggregates(x, reps=200, seed=experiment)["mean"]
            inside += found.low <= 0.6 <= found.high
        covered[seeds] = inside / 600
    assert 0.84 < covered[3] < 0.92
    assert 0.91 < covered[10] < 0.97
    assert covered[3] + 0.02 < covered[10]
