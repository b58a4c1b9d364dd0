"""Choosing among judged settings: ranks, the one-standard-error rule, priors, fronts, all by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from offrl.errors import UserError
from offrl.tuning.choice import (
    calibrated,
    hypervolume,
    on_unit_axes,
    one_se,
    pareto_front,
    pooled_sd,
    ranking,
    setting_values,
)

NAN = math.nan


def test_values_and_ranks_with_diverged_seeds() -> None:
    values = [[1.0, 3.0], [9.0, NAN], [NAN, NAN], [4.0, 2.0], [NAN, 11.0], [2.0, 2.0]]
    np.testing.assert_array_equal(setting_values(values), [2.0, NAN, NAN, 3.0, NAN, 2.0])
    assert ranking(values) == [
        3,
        0,
        5,
        4,
        1,
    ]  # 2 is dropped; equal ones: the first; diverged ones last, the better one first
    five = [[1.0, 2.0, 3.0, 4.0, 99.0], [5.0, 5.0, 0.0, NAN, 5.0], [9.0, 9.0, NAN, NAN, NAN], [NAN] * 5]
    np.testing.assert_array_equal(
        setting_values(five), [3.0, 5.0, NAN, NAN]
    )  # medians, a diverged seed being the worst
    assert ranking(five) == [1, 0, 2]
    six = [[1.0, 2.0, 3.0, 5.0, 6.0, 7.0], [1.0, 1.0, 1.0, NAN, NAN, NAN]]
    np.testing.assert_array_equal(setting_values(six), [4.0, NAN])
    with pytest.raises(UserError, match="every seed of every setting diverged"):
        ranking([[NAN], [NAN]])


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
    # not paired: variances 2, 1.62, .5, pooled 1.373333; twice that for a difference, by two seeds
    apart = one_se(values, caution=[1.0, 2.0, 3.0], paired=False)
    assert apart.errors == pytest.approx([0.0, math.sqrt(4.12 / 3), math.sqrt(4.12 / 3)])
    just_outside = [
        [10.0, 12.0],
        [9.6, 11.4],
        [5.0, 6.0],
    ]  # gap .5 against root((0.02 + .5) / 2 / 2) -> se .3606 again: differences -.4, -.6
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
    assert one_se(values, caution=[0.0, 1.0], resampled=resampled, paired=False).errors[1] == pytest.approx(
        math.sqrt(8.0 + 12.5)
    )
    # with seeds as well: seeds .13 as above; bootstraps of means over seeds: differences -.5 and .5, variance .5
    two = [[10.0, 12.0], [9.8, 11.6]]
    q = [[[10.0, 10.0], [12.0, 12.0]], [[10.0, 10.0], [11.0, 13.0]]]
    assert one_se(two, caution=[0.0, 1.0], resampled=q).errors[1] == pytest.approx(math.sqrt(0.02 / 2 + 0.5))


def test_a_setting_with_a_diverged_seed_is_no_member() -> None:
    tie = one_se([[1.0, 2.0], [9.0, NAN], [0.9, 2.1]], caution=[0.0, 9.0, 1.0])
    assert tie.best == 0 and tie.members == (0, 2) and tie.chosen == 2 and math.isnan(tie.errors[1])
    assert one_se([[1.0, 2.0], [NAN, NAN]], caution=[0.0, 9.0]).members == (0,)


def test_priors_by_least_squares() -> None:
    # returns 1, 3, 2 at 0, 1, 2: slope 1/2, mean 2; residuals -.5, 1, -.5, squares 1.5, one degree of freedom
    means, sd = calibrated([0.0, 1.0, 2.0, 10.0], [1.0, 3.0, 2.0, NAN])
    assert means == pytest.approx([1.5, 2.0, 2.5, 6.5]) and sd == pytest.approx(math.sqrt(1.5))
    means, sd = calibrated(
        [0.0, 1.0, 2.0, 10.0], [3.0, 1.0, 2.0, NAN]
    )  # a slope of -1/2 says nothing: mean 2, squares 2
    assert means == pytest.approx([2.0] * 4) and sd == pytest.approx(math.sqrt(2.0))
    assert calibrated([1.0, 1.0, 1.0], [1.0, 2.0, 6.0])[0] == pytest.approx([3.0] * 3)


def test_fronts_by_hand() -> None:
    assert pareto_front([[1.0, 1.0], [2.0, 0.5], [1.0, 0.9], [2.0, 0.5], [NAN, 9.0], [0.0, 1.5]]) == [0, 1, 3, 5]
    assert pareto_front([[1.0], [3.0], [2.0]]) == [1]
    assert pareto_front([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 2.0, 2.0]]) == [0, 1]


def test_hypervolume_by_hand() -> None:
    assert hypervolume([[1.0, 1.0], [2.0, 0.5]]) == 1.5
    assert hypervolume([[2.0, 0.5], [1.0, 1.0], [0.5, 0.5], [1.0, 0.2], [-1.0, 5.0], [NAN, 1.0]]) == 1.5  # nothing more
    assert hypervolume([[2.0, 0.5], [2.0, 1.0]]) == 2.0 and hypervolume([[1.0, 1.0], [3.0, 1.0]]) == 3.0
    assert hypervolume([[1.0, 1.0], [2.0, 0.5]], reference=(0.0, 0.5)) == 0.5
    assert hypervolume([[0.0, 0.0]]) == 0.0
    # returns 0..200 up, costs 50..0 down
    scaled = on_unit_axes([[100.0, 25.0], [250.0, 0.0], [50.0, 75.0]], worst=[0.0, 50.0], best=[200.0, 0.0])
    assert scaled.tolist() == [[0.5, 0.5], [1.25, 1.0], [0.25, -0.5]]
    assert hypervolume(scaled[:1]) == 0.25


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ranking([1.0, 2.0]), r"give a matrix \[settings, seeds\]"),
        (lambda: ranking([[math.inf]]), "mark it as NaN"),
        (lambda: one_se([[1.0], [2.0]], [0.0, 0.0]), "take rule=best, or seeds=2"),
        (lambda: one_se([[1.0, NAN], [NAN, 2.0]], [0.0, 0.0]), "every setting has a diverged seed"),
        (lambda: one_se([[1.0, 2.0]], [NAN]), "caution must be 1 finite numbers"),
        (lambda: one_se([[1.0, 2.0]], [0.0], distance=[0.0, 1.0]), "distance must be 1 finite"),
        (lambda: one_se([[1.0], [2.0]], [0.0, 0.0], resampled=[[[1.0]], [[1.0]]]), "with Q of at least 2"),
        (lambda: one_se([[1.0], [2.0]], [0.0, 0.0], resampled=[[[1.0, NAN]], [[1.0, 1.0]]]), "not finite where"),
        (lambda: calibrated([1.0, 2.0, 3.0], [1.0, 2.0, NAN]), "3 settings whose returns are known, not 2"),
        (lambda: calibrated([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), "give prior_sd"),
        (lambda: calibrated([1.0, NAN, 3.0], [1.0, 2.0, 3.0]), "estimates must be 3 finite"),
        (lambda: on_unit_axes([[1.0, 2.0]], [0.0, 1.0], [1.0, 1.0]), "must be finite and differ"),
        (lambda: on_unit_axes([[1.0, 2.0]], [0.0], [1.0]), "2 criteria need as many"),
        (lambda: hypervolume([[1.0, 2.0, 3.0]]), "of two criteria"),
        (lambda: hypervolume([[1.0, math.inf]]), "needs finite criteria"),
        (lambda: pareto_front([]), "give a matrix"),
    ],
)
def test_bad_input(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
