"""Regret curves and the quality of a ranking: known returns, the searches of `offrl.tuning.best_arm`, exact shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
from bench.regret import halving, quality, regret_curve

from offrl.ope.metrics import spearman
from offrl.tuning.best_arm import SequentialHalving

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("arms", [2, 3, 5, 8, 11])
def test_halving_of_many_trials_is_the_search(arms: int) -> None:
    draws = RNG.integers(0, 4, (20, arms, 60)).astype(float)  # many equal means
    ns = [0, 1, 2, 3, 5, 10, 17, 20, 59]
    chosen = halving(draws, ns)
    assert (chosen[:, 0] == 0).all()  # the best prior
    for trial in range(20):
        for column, n in enumerate(ns[1:], 1):
            search = SequentialHalving(min(arms, 8, max(2, n // 2)), n)
            while todo := search.pulls():
                for arm, episode in todo:
                    search.add(arm, episode, draws[trial, arm, episode])
            assert chosen[trial, column] == search.best()


def test_two_settings_of_known_returns() -> None:
    returns = [[0.5, 0.5], [0.9, 0.9]]
    curve = regret_curve(returns, [0, 2, 5], trials=400, resamples=20)
    assert curve.value[0] == pytest.approx(1.0, abs=0.2)  # drawn at random: 0 or 2, four standard errors
    assert curve.value[1:].tolist() == [0.0, 0.0]
    small = regret_curve(returns, [0], prior=[2.0, 1.0], trials=3, resamples=3)
    assert small.value[0] == pytest.approx(2.0)  # .4 of .9 - .7
    assert regret_curve(returns, [0], prior=[math.nan, 1.0], trials=3, resamples=3).value[0] == 0.0
    equal = regret_curve([[1.0, 1.0]] * 3, [0, 5], trials=3, resamples=3)
    assert equal.value.tolist() == [0.0, 0.0]  # nothing to lose


def test_chance_is_one_and_a_perfect_judge_zero() -> None:
    means = np.arange(10.0)
    returns = means[:, None] + np.zeros(4)
    curve = regret_curve(returns, [0], trials=4000, resamples=5)
    assert curve.value[0] == pytest.approx(1.0, abs=0.04)  # spread .64 over 4000 trials: four standard errors
    assert regret_curve(returns, [0, 1, 2, 50], prior=means, trials=50, resamples=5).value.tolist() == [0.0] * 4


def test_the_interval_is_about_settings_and_not_about_trials() -> None:
    returns = RNG.normal(size=(16, 1)) + RNG.normal(size=(16, 20))
    few, many = (regret_curve(returns, [5], prior=returns.mean(1), trials=t, resamples=100) for t in (200, 2000))
    width = [float(c.high[0] - c.low[0]) for c in (few, many)]
    assert width[1] > 0.5 * width[0] and few.low[0] <= few.value[0] <= few.high[0]
    again = regret_curve(returns, [5], prior=returns.mean(1), trials=200, resamples=100)
    assert again.value == few.value and again.low == few.low


def test_quality_of_a_judge() -> None:
    truth = np.arange(12.0)
    returns = truth[:, None] + np.zeros(2)
    for measure, best in (("spearman", 1.0), ("regret@1", 0.0), ("regret@5", 0.0)):
        interval = quality(returns, 3.0 * truth, measure, reps=200)
        assert (interval.value, interval.low, interval.high) == tuple(pytest.approx(best) for _ in range(3))
    # a setting drawn twice with two truths has one estimate
    assert quality(returns + [-0.1, 0.1], truth, "spearman", reps=200).low > 0.95
    noisy = truth + np.array([3, -2, 4, 0, -3, 1, -4, 2, 3, -1, 0, -2])
    interval = quality(returns, noisy, "spearman", reps=500)
    assert interval.value == pytest.approx(spearman(truth, noisy))
    assert interval.low < interval.value < interval.high < 1.0
    assert quality(returns, -truth, "regret@3", reps=50).value == pytest.approx(9 / 11)
    holed = np.where(truth == 5.0, math.nan, truth)
    assert quality(returns, holed, "spearman", reps=50).value == pytest.approx(1.0)
    small = quality(returns[:7], truth[:7], "spearman", reps=50)
    assert small.value == pytest.approx(1.0) and math.isnan(small.low) and math.isnan(small.high)  # it says nothing
    assert math.isnan(quality(returns, np.zeros(12), "spearman", reps=20).value)


@pytest.mark.nightly
def test_the_interval_of_a_correlation_holds_the_truth() -> None:
    """Normal settings and estimates of correlation .6, whose rank correlation is 6 / pi asin(.3)."""
    true, inside = 6 / math.pi * math.asin(0.3), 0
    for number in range(100):
        rng = np.random.default_rng(number)
        x = rng.standard_normal(30)
        estimate = 0.6 * x + 0.8 * rng.standard_normal(30)
        interval = quality(x[:, None], estimate, "spearman", reps=200, seed=number)
        inside += interval.low <= true <= interval.high
    assert 84 <= inside <= 100  # 95 expected, five standard errors
