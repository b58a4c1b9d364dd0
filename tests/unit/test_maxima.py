"""The largest of noisy estimates and the comparison of many, against exact values."""

from __future__ import annotations

import math

import numpy as np
import pytest

from offrl.statistics.maxima import chance_within, expected_maximum, normal_cdf, selection_optimism


def chance_best(means: list[float], errors: list[float], margin: float = 0.0) -> np.ndarray:
    return np.array([chance_within(np.array(means), np.array(errors), i, margin) for i in range(len(means))])


def test_expected_maximum() -> None:
    assert [round(expected_maximum(k), 3) for k in (1, 2, 4, 8, 16, 32)] == [0.0, 0.564, 1.029, 1.424, 1.766, 2.070]
    assert expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-10)  # in closed form
    assert expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi), abs=1e-10)
    # the bound is 43% too large
    assert math.sqrt(2 * math.log(8)) / expected_maximum(8) == pytest.approx(1.43, abs=0.005)
    with pytest.raises(ValueError, match="at least 1"):
        expected_maximum(0)


def test_optimism_of_unequal_arms() -> None:
    assert selection_optimism(np.full(8, 3.0), np.full(8, 0.5)) == pytest.approx(0.5 * expected_maximum(8))
    assert selection_optimism(np.array([3.0]), np.array([0.5])) == pytest.approx(0.0, abs=1e-12)
    assert selection_optimism(np.array([0.0, 99.0]), np.array([1.0, 1.0])) == pytest.approx(0.0, abs=1e-9)
    # two arms a apart with errors s, t: sqrt(s^2 + t^2) times the normal density at a / sqrt(s^2 + t^2)
    spread = math.hypot(1.0, 2.0)
    expected = spread * math.exp(-0.5 * (0.7 / spread) ** 2) / math.sqrt(2 * math.pi)
    assert selection_optimism(np.array([0.0, 0.7]), np.array([1.0, 2.0])) == pytest.approx(expected, abs=1e-8)
    assert selection_optimism(np.array([0.0, 0.7]), np.array([1.0, 0.01])) == pytest.approx(
        math.hypot(1.0, 0.01) * math.exp(-0.5 * 0.49 / 1.0001) / math.sqrt(2 * math.pi), abs=1e-4
    )


def test_chances() -> None:
    np.testing.assert_allclose(normal_cdf([0.0, 1.959964, -40.0]), [0.5, 0.975, 0.0], atol=1e-8)
    low = 0.5 * math.erfc(1.0 / math.hypot(1.0, 2.0) / math.sqrt(2.0))
    assert chance_best([0.0, 1.0], [1.0, 2.0]) == pytest.approx([low, 1 - low], abs=1e-8)
    assert chance_best([0.0] * 5, [2.0] * 5) == pytest.approx([0.2] * 5)
    assert chance_best([0.0, 0.0], [1.0, 1.0], margin=0.5) == pytest.approx(
        [float(normal_cdf(0.5 / math.sqrt(2.0)))] * 2
    )
    assert chance_best([0.0, 1.0, -1.0, 2.0], [1.0, 0.01, 0.02, 3.0]).sum() == pytest.approx(1.0, abs=1e-4)
    draws = np.random.default_rng(0).normal([0.0, 0.5, 0.3], [1.0, 0.2, 0.6], (200_000, 3))
    shares = (draws >= draws.max(1, keepdims=True) - 0.1).mean(0)
    # five standard errors
    assert chance_best([0.0, 0.5, 0.3], [1.0, 0.2, 0.6], 0.1) == pytest.approx(shares, abs=0.006)
