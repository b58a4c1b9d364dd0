"""Regret curves and the quality of a ranking: known returns, the searches of `offrl.tuning.arms`, exact shares."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from offrl.errors import UserError
from offrl.ope.metrics import kendall, spearman
from offrl.tuning import ranking
from offrl.tuning.arms import SequentialHalving, UpperConfidence
from offrl.tuning.ranking import chance_of_best, compare_judges, quality
from offrl.tuning.regret import _resampled, halving, regret_curve, ucb, uniform

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("arms", [2, 3, 5, 8, 11])
def test_halving_of_many_trials_is_the_search(arms: int) -> None:
    draws = RNG.integers(0, 4, (20, arms, 60)).astype(float)  # many equal means
    ns = [0, 1, 2, 3, 5, 10, 17, 20, 59]
    chosen = halving(draws, ns, RNG)
    assert (chosen[:, 0] == 0).all()  # the best prior
    for trial in range(20):
        for column, n in enumerate(ns[1:], 1):
            search = SequentialHalving(min(arms, 8, max(2, n // 2)), n)
            while todo := search.pulls():
                for arm, episode in todo:
                    search.add(arm, episode, draws[trial, arm, episode])
            assert chosen[trial, column] == search.best()


def test_ucb_of_many_trials_is_the_search() -> None:
    draws = RNG.normal(np.linspace(0, 0.5, 5)[:, None], 0.3, (20, 5, 40))
    ns = [5, 11, 40]  # once each arm was played, the order in which they first were makes no difference
    chosen = ucb(draws, ns, RNG, low=-1.0, high=2.0)
    for trial in range(20):
        search, best = UpperConfidence(5, 40, low=-1.0, high=2.0), []
        while todo := search.pulls():
            ((arm, episode),) = todo
            search.add(arm, episode, draws[trial, arm, episode])
            if search.played in ns:
                best.append(search.best())
        assert chosen[trial].tolist() == best


def test_uniform_by_hand() -> None:
    draws = np.array([[[1.0, 1.0, 9.0], [2.0, 0.0, 0.0], [5.0, 5.0, 5.0]]])
    # n = 1: the first arm; 3: arm 0 twice (1), arm 1 once (2); 6: all three twice, 1, 1, 5
    assert uniform(draws, [0, 1, 3, 6], RNG).tolist() == [[0, 0, 1, 2]]


@pytest.mark.parametrize("rule", ["halving", "ucb", "uniform"])
def test_two_settings_of_known_returns(rule: str) -> None:
    returns = [[0.5, 0.5], [0.9, 0.9]]
    curve = regret_curve(returns, rule, n=[0, 2, 5], trials=400, resamples=20)
    assert curve.value[0] == pytest.approx(1.0, abs=0.2)  # drawn at random: 0 or 2, four standard errors
    assert curve.value[1:].tolist() == [0.0, 0.0]
    assert regret_curve(returns, rule, n=[0], prior=[2.0, 1.0], trials=3, resamples=3).value[0] == pytest.approx(
        2.0
    )  # .4 of .9 - .7
    assert regret_curve(returns, rule, n=[0], prior=[math.nan, 1.0], trials=3, resamples=3).value[0] == 0.0
    assert regret_curve([[1.0, 1.0]] * 3, rule, n=[0, 5], trials=3, resamples=3).value.tolist() == [
        0.0,
        0.0,
    ]  # nothing to lose


def test_chance_is_one_and_a_perfect_judge_zero() -> None:
    means = np.arange(10.0)
    returns = means[:, None] + np.zeros(4)
    curve = regret_curve(returns, "halving", n=[0], trials=4000, resamples=5)
    assert curve.value[0] == pytest.approx(1.0, abs=0.04)  # spread .64 over 4000 trials: four standard errors
    assert regret_curve(returns, n=[0, 1, 2, 50], prior=means, trials=50, resamples=5).value.tolist() == [0.0] * 4
    half = regret_curve(returns, n=[0], prior=-means, settings=5, trials=4000, resamples=5).value[0]
    # the worst of five drawn: (max - min) / (max - mean), about 2 as drawn, no less than 5 / 4 and at most 5
    assert 1.9 < half < 2.3


def test_paired_episodes_cancel_what_they_share() -> None:
    shared = 100.0 * RNG.standard_normal(30)
    returns = np.array([[0.0], [1.0]]) + shared
    paired, alone = (
        regret_curve(returns, "uniform", n=[2, 10], paired=p, trials=400, resamples=3).value for p in (True, False)
    )
    assert paired.tolist() == [0.0, 0.0] and alone.min() > 0.6


def test_the_interval_is_about_settings_and_not_about_trials() -> None:
    returns = RNG.normal(size=(16, 1)) + RNG.normal(size=(16, 20))
    few, many = (
        regret_curve(returns, "uniform", n=[5], prior=returns.mean(1), trials=t, resamples=100) for t in (200, 2000)
    )
    width = [float(c.high[0] - c.low[0]) for c in (few, many)]
    assert width[1] > 0.5 * width[0] and few.low[0] <= few.value[0] <= few.high[0]
    again = regret_curve(returns, "uniform", n=[5], prior=returns.mean(1), trials=200, resamples=100)
    assert again.value == few.value and again.low == few.low
    assert regret_curve(returns, functools.partial(halving, most=16), n=[100], trials=50, resamples=2).value[0] < 1.0


def test_settings_and_episodes_are_drawn_again() -> None:
    truth = np.arange(16.0)
    judge = regret_curve(
        truth[:, None], n=[0], prior=np.roll(truth, 3), trials=1, resamples=200
    )  # one return: only settings can vary
    assert judge.low[0] < judge.value[0] < judge.high[0]
    table = np.arange(12.0).reshape(3, 4)
    for paired in (True, False):
        drawn = _resampled(table, paired, np.random.default_rng(1))
        assert (drawn // 4 == [[0], [1], [2]]).all()  # of their own setting
        assert bool((drawn % 4 == drawn[0] % 4).all()) == paired


def test_ucb_does_not_see_the_unit() -> None:
    returns = RNG.normal(size=(6, 1)) + RNG.normal(size=(6, 20))
    one = regret_curve(returns, "ucb", n=[20], trials=100, resamples=2)
    other = regret_curve(512.0 * returns - 4096.0, "ucb", n=[20], trials=100, resamples=2)
    assert other.value[0] == pytest.approx(one.value[0], abs=1e-6)


# ---- rankings


def test_kendall_by_hand() -> None:
    assert kendall([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)  # five pairs agree, one does not
    assert kendall([1, 2, 3, 4], [0, 0, 9, 9]) == pytest.approx(4 / math.sqrt(6 * 4))
    assert kendall([1, 2, 3], [3, 2, -math.inf]) == pytest.approx(-1.0)
    assert (
        math.isnan(kendall([1, 2], [3, 3]))
        and math.isnan(kendall([1], [1]))
        and math.isnan(kendall([1, 2], [1, math.nan]))
    )


def test_quality_of_a_judge() -> None:
    truth = np.arange(12.0)
    returns = truth[:, None] + np.zeros(2)
    for measure, best in (("spearman", 1.0), ("kendall", 1.0), ("regret@1", 0.0), ("regret@5", 0.0)):
        found = quality(returns, 3.0 * truth, measure, reps=200)
        assert (found.value, found.low, found.high) == (pytest.approx(best), pytest.approx(best), pytest.approx(best))
    assert (
        quality(returns + [-0.1, 0.1], truth, reps=200).low > 0.95
    )  # a setting drawn twice with two truths has one estimate
    noisy = truth + np.array([3, -2, 4, 0, -3, 1, -4, 2, 3, -1, 0, -2])
    found = quality(returns, noisy, reps=500)
    assert found.value == pytest.approx(spearman(truth, noisy)) and found.low < found.value < found.high < 1.0
    assert quality(returns, -truth, "regret@3", reps=50).value == pytest.approx(9 / 11)
    holed = np.where(truth == 5.0, math.nan, truth)
    assert quality(returns, holed, "kendall", reps=50).value == pytest.approx(1.0)
    small = quality(returns[:7], truth[:7], reps=50)
    assert small.value == pytest.approx(1.0) and math.isnan(small.low) and math.isnan(small.high)  # it says nothing
    assert math.isnan(quality(returns, np.zeros(12), reps=20).value)


@pytest.mark.nightly
def test_the_interval_of_a_correlation_holds_the_truth() -> None:
    """Normal settings and estimates of correlation .6, whose rank correlation is 6 / pi asin(.3)."""
    true, inside = 6 / math.pi * math.asin(0.3), 0
    for number in range(100):
        rng = np.random.default_rng(number)
        x = rng.standard_normal(30)
        found = quality(x[:, None], 0.6 * x + 0.8 * rng.standard_normal(30), reps=200, seed=number)
        inside += found.low <= true <= found.high
    assert 84 <= inside <= 100  # 95 expected, five standard errors


def test_chance_of_the_best_by_hand() -> None:
    returns = [[0.0, 2.0], [1.0, 1.0]]  # means of two draws of the first: 0, 1, 1, 2
    assert chance_of_best(returns, [1.0, 0.0], reps=20_000) == pytest.approx(0.25 + 0.5 * 0.5, abs=0.015)
    assert chance_of_best(returns, [1.0, 0.0], 2, reps=10) == 1.0
    assert chance_of_best(returns, [1.0, 1.0], reps=10) == 0.5  # equal estimates
    assert chance_of_best([[1.0], [2.0], [0.0]], [5.0, math.nan, 4.0], 2, reps=10) == 0.0
    assert chance_of_best([[1.0], [2.0], [0.0]], [5.0, 4.0, 4.0], 2, reps=10) == 0.5


def test_judges_against_one_another() -> None:
    truth = np.arange(20.0)
    returns = truth[:, None] + RNG.normal(0, 0.5, (20, 10))
    noise = RNG.permutation(20).astype(float)
    pairs = compare_judges(returns, {"fqe": truth, "td": -truth, "coin": noise, "same": truth}, reps=400)
    assert [(p.first, p.second) for p in pairs][:3] == [("fqe", "td"), ("fqe", "coin"), ("fqe", "same")] and len(
        pairs
    ) == 6
    by = {(p.first, p.second): p for p in pairs}
    assert by["fqe", "td"].p == pytest.approx(2 / 401) and by["fqe", "td"].adjusted == pytest.approx(12 / 401)
    assert by["fqe", "same"].p == 1.0 and by["fqe", "same"].difference.value == 0.0
    assert by["td", "same"].difference.high < 0.0
    assert math.isnan(compare_judges(returns[:5], {"a": truth[:5], "b": noise[:5]}, reps=10)[0].p)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regret_curve([[1.0, math.nan], [1.0, 2.0]]), "setting 0 has a return that is not finite"),
        (lambda: regret_curve([[1.0, 2.0]]), "at least 2 settings"),
        (lambda: regret_curve([1.0, 2.0]), r"shape \(2,\)"),
        (lambda: regret_curve([[1.0], [2.0]], n=[-1]), "none below 0"),
        (lambda: regret_curve([[1.0], [2.0]], "halfing"), "there is no rule 'halfing'.*Did you mean 'halving'"),
        (lambda: regret_curve([[1.0], [2.0]], prior=[1.0]), "2 settings have 1 estimates"),
        (lambda: regret_curve([[1.0], [2.0]], settings=3), "settings=3: a search has from 2 to all 2"),
        (lambda: regret_curve([[1.0], [2.0]], trials=0), "trials=0"),
        (lambda: quality([[1.0], [2.0]], [1.0, 2.0], "sperman"), "Did you mean 'spearman'"),
        (lambda: quality([[1.0], [2.0]], [1.0]), "2 settings have 1 estimates of the judge"),
        (lambda: chance_of_best([[1.0], [2.0]], [1.0, 2.0], 0), "k=0 must be at least 1"),
        (lambda: compare_judges([[1.0], [2.0]], {"fqe": [1.0, 2.0]}), "to compare judges takes at least 2"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_every_measure_has_a_name() -> None:
    assert list(ranking.MEASURES) == ["spearman", "kendall", "regret@1", "regret@3", "regret@5"]
