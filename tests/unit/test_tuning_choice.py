"""Choosing among judged settings: ranks, the one-standard-error rule, fronts, all by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from offrl.tuning import choice
from offrl.tuning.choice import Tie

NAN = math.nan


def setting_values(values: Any) -> np.ndarray:
    return choice.setting_values(np.array(values))


def ranking(values: Any) -> list[int]:
    return choice.ranking(np.array(values))


def pooled_sd(values: Any) -> float:
    return choice.pooled_sd(np.array(values))


def pareto_front(points: Any) -> list[int]:
    return choice.pareto_front(np.array(points))


def one_se(values: Any, caution: list[float], distance: Any = None, resampled: Any = None) -> Tie:
    far = np.zeros(len(caution)) if distance is None else np.array(distance)
    fits = None if resampled is None else np.array(resampled)
    return choice.one_se(np.array(values), np.array(caution), far, fits)


def test_values_and_ranks_with_diverged_seeds() -> None:
    values = [[1.0, 3.0], [9.0, NAN], [NAN, NAN], [4.0, 2.0], [NAN, 11.0], [2.0, 2.0]]
    np.testing.assert_array_equal(setting_values(values), [2.0, NAN, NAN, 3.0, NAN, 2.0])
    # 2 is dropped; equal ones: the first; diverged ones last, the better one first
    assert ranking(values) == [3, 0, 5, 4, 1]
    five = [[1.0, 2.0, 3.0, 4.0, 99.0], [5.0, 5.0, 0.0, NAN, 5.0], [9.0, 9.0, NAN, NAN, NAN], [NAN] * 5]
    # medians, a diverged seed being the worst
    np.testing.assert_array_equal(setting_values(five), [3.0, 5.0, NAN, NAN])
    assert ranking(five) == [1, 0, 2]
    six = [[1.0, 2.0, 3.0, 5.0, 6.0, 7.0], [1.0, 1.0, 1.0, NAN, NAN, NAN]]
    np.testing.assert_array_equal(setting_values(six), [4.0, NAN])


def test_places_by_a_limit() -> None:
    """2 and 0 keep the limit of 5, then 4 and 1 that exceed it by 1 and 3; 3 has no value, 5 no cost."""
    values, costs = [1.0, 9.0, 2.0, NAN, 7.0, 8.0], [5.0, 8.0, 0.0, 1.0, 6.0, NAN]
    np.testing.assert_array_equal(choice.places(np.array(values), np.array(costs), 5.0), [2, 0, 3, NAN, 1, NAN])


def test_pooled_spread() -> None:
    assert pooled_sd([[1.0, 3.0], [10.0, 14.0], [5.0, NAN]]) == pytest.approx(math.sqrt((2.0 + 8.0) / 2))
    assert pooled_sd([[1.0, 2.0, 3.0], [0.0, 4.0, NAN]]) == pytest.approx(math.sqrt((2.0 + 8.0) / 3))
    assert math.isnan(pooled_sd([[1.0], [2.0]]))


def test_one_standard_error_with_shared_seeds() -> None:
    # differences to the best -.2, -.4 (variance .02) and -5, -6 (.5): pooled .26, of means of two .13, root .360555
    values = [[10.0, 12.0], [9.8, 11.6], [5.0, 6.0]]
    tie = one_se(values, caution=[1.0, 2.0, 3.0])
    assert (tie.chosen, tie.best, tie.members) == (1, 0, (0, 1))
    assert tie.errors == pytest.approx([0.0, math.sqrt(0.13), math.sqrt(0.13)])
    assert one_se(values, caution=[2.0, 1.0, 3.0]).chosen == 0
    assert one_se(values, caution=[1.0, 1.0, 1.0]).chosen == 0  # equal: the larger value
    assert one_se(values, caution=[1.0, 1.0, 1.0], distance=[0.5, 0.4, 0.0]).chosen == 1
    # gap .5 against root((0.02 + .5) / 2 / 2) -> se .3606 again: differences -.4, -.6
    just_outside = [[10.0, 12.0], [9.6, 11.4], [5.0, 6.0]]
    assert one_se(just_outside, caution=[1.0, 2.0, 3.0]).members == (0,)


def test_many_seeds_have_their_own_spread() -> None:
    best = np.array([5.0, 6.0, 7.0, 8.0, 9.0])
    noisy, steady = best - np.array([-4.0, 6.0, -4.0, 6.0, 1.0]), best - 1.0
    tie = one_se([best, noisy, steady], caution=[0.0, 1.0, 2.0])  # both 1 below: one with se root(25 / 5), one with 0
    assert tie.errors == pytest.approx([0.0, math.sqrt(25.0 / 5), 0.0])
    assert tie.members == (0, 1) and tie.chosen == 1


def test_bootstraps_add_their_spread() -> None:
    values, resampled = [[12.0], [11.5]], [[[10.0, 14.0]], [[9.0, 14.0]]]  # differences -1, 0: variance .5
    tie = one_se(values, caution=[0.0, 1.0], resampled=resampled)
    assert tie.errors == pytest.approx([0.0, math.sqrt(0.5)]) and tie.chosen == 1
    # with seeds as well: seeds .13 as above; bootstraps of means over seeds: differences -.5 and .5, variance .5
    two = [[10.0, 12.0], [9.8, 11.6]]
    q = [[[10.0, 10.0], [12.0, 12.0]], [[10.0, 10.0], [11.0, 13.0]]]
    assert one_se(two, caution=[0.0, 1.0], resampled=q).errors[1] == pytest.approx(math.sqrt(0.02 / 2 + 0.5))


def test_a_setting_with_a_diverged_seed_is_no_member() -> None:
    tie = one_se([[1.0, 2.0], [9.0, NAN], [0.9, 2.1]], caution=[0.0, 9.0, 1.0])
    assert tie.best == 0 and tie.members == (0, 2) and tie.chosen == 2 and math.isnan(tie.errors[1])
    assert one_se([[1.0, 2.0], [NAN, NAN]], caution=[0.0, 9.0]).members == (0,)


def test_fronts_by_hand() -> None:
    assert pareto_front([[1.0, 1.0], [2.0, 0.5], [1.0, 0.9], [2.0, 0.5], [NAN, 9.0], [0.0, 1.5]]) == [0, 1, 3, 5]
    assert pareto_front([[1.0], [3.0], [2.0]]) == [1]
    assert pareto_front([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, 2.0]]) == [0, 1]
