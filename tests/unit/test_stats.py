"""The mean over seeds and its interval."""

from __future__ import annotations

import math

import pytest

from offrl.statistics.intervals import mean_interval, student_t


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (7, 2.36462),
        (10, 2.22814),
        (30, 2.04227),
        (120, 1.97993),
    ],
)
def test_student_quantiles_of_the_tables(freedom: int, quantile: float) -> None:
    assert student_t(0.95, freedom) == pytest.approx(quantile, abs=1e-4)


def test_interval() -> None:
    mean, low, high = mean_interval([1.0, 2.0, 3.0, 4.0])  # deviation 1.29099, half width 3.18245 * 1.29099 / 2
    assert (mean, low, high) == pytest.approx((2.5, 0.44574, 4.55426), abs=1e-4)
    assert mean_interval([5.0, 5.0, 5.0]) == (5.0, 5.0, 5.0)
    assert mean_interval([7.0])[0] == 7.0 and all(map(math.isnan, mean_interval([7.0])[1:]))
    assert all(map(math.isnan, mean_interval([]))) and all(map(math.isnan, mean_interval([1.0, math.nan])))
