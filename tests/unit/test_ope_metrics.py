"""Measures of a ranking, against numbers worked by hand and all orders of equal estimates."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from offrl.ope.metrics import absolute_error, precision, ranks, regret, spearman


def test_spearman_by_hand() -> None:
    # rank differences 1, 1, 0, 1, 1: 1 - 6 * 4 / (5 * 24)
    assert spearman([10, 20, 30, 40, 50], [2, 1, 3, 5, 4]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [5, 7, 100]) == pytest.approx(1.0)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)


def test_ties_share_their_ranks() -> None:
    np.testing.assert_array_equal(ranks([5.0, 1.0, 5.0, 7.0]), [2.5, 1.0, 2.5, 4.0])
    # ranks 1 2 3 4 against 1.5 1.5 3.5 3.5: Pearson 4 / sqrt(5 * 4)
    assert spearman([1, 2, 3, 4], [0, 0, 9, 9]) == pytest.approx(4 / math.sqrt(20))
    assert (
        math.isnan(spearman([1, 2], [3, 3]))
        and math.isnan(spearman([1], [1]))
        and math.isnan(spearman([1, 2], [1, math.nan]))
    )


def test_regret_by_hand() -> None:
    truth, estimate = [0.0, 10.0, 8.0, 2.0], [0.1, 0.2, 0.9, 0.5]
    assert regret(truth, estimate, 1) == pytest.approx(0.2)  # takes 8 of 10, range 10
    assert regret(truth, estimate, 2) == pytest.approx(0.2)
    assert regret(truth, estimate, 3) == 0.0
    assert regret(truth, estimate, 9) == 0.0
    assert regret(truth, [3, 1, 2, math.nan], 1) == pytest.approx(1.0)
    assert regret([4.0, 4.0], [0.0, 1.0]) == 0.0
    with pytest.raises(ValueError, match="k of at least 1"):
        regret(truth, estimate, 0)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_regret_of_equal_estimates_is_the_mean_over_orders(k: int) -> None:
    truth, estimate = np.array([3.0, 9.0, 1.0, 5.0, 2.0]), np.array([1.0, 1.0, 1.0, 0.0, 2.0])
    losses = []
    for order in itertools.permutations(range(5)):
        top = sorted(order, key=lambda i: -estimate[i])[:k]  # stable: the permutation breaks ties
        losses.append((9.0 - truth[top].max()) / 8.0)
    assert regret(truth, estimate, k) == pytest.approx(np.mean(losses))


def test_precision_and_error_by_hand() -> None:
    truth, estimate = [1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 2.0, 3.0]
    assert precision(truth, estimate, 1) == 0.0
    assert precision(truth, estimate, 2) == 0.5
    assert precision(truth, estimate, 4) == 1.0
    assert absolute_error(truth, estimate) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="one length"):
        absolute_error([1.0], [1.0, 2.0])
