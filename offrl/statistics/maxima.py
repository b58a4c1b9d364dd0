"""The largest of several noisy estimates: how much it promises too much, and whether it belongs to the best.

Estimates are normal and independent. Everything is an integral over one variable, by the trapezoid rule, whose error on
such smooth functions is far below 1e-6.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

NODES = 2001
REACH = 9.0  # standard deviations on either side; beyond lies 1e-19

_erfc = np.frompyfunc(math.erfc, 1, 1)


def normal_cdf(x: Any) -> np.ndarray:
    """P(Z <= x) of a standard normal Z, for every entry of x."""
    return 0.5 * np.asarray(_erfc(np.asarray(x, np.float64) / -math.sqrt(2.0)), np.float64)


def expected_maximum(count: int) -> float:
    """Mean of the largest of `count` independent standard normals: 0, .564, .846, 1.029, ... sqrt(2 ln count) is only a
    bound.

    Raises ValueError for count below 1.
    """
    if count < 1:
        raise ValueError(f"count={count} must be at least 1")
    z, step = np.linspace(-REACH, REACH, NODES, retstep=True)
    return float((z * count * _density(z) * normal_cdf(z) ** (count - 1)).sum() * step)


def selection_optimism(means: np.ndarray, errors: np.ndarray) -> float:
    """Expected estimate less true mean of the arm whose estimate is largest, when the estimate of arm i is normal with
    mean `means[i]` and standard error `errors[i]` (above 0). For K equal arms it is error * expected_maximum(K)."""
    return float(sum(_against(means, errors, i, 0.0, 1) * errors[i] for i in range(len(means))))


def chance_within(means: np.ndarray, errors: np.ndarray, arm: int, margin: float) -> float:
    """The probability that the value of `arm` is at least that of the best less `margin`.

    The values are independent normals with `means` [K] and standard deviations `errors` [K], above 0."""
    return _against(means, errors, arm, margin, 0)


def _against(m: np.ndarray, s: np.ndarray, i: int, margin: float, power: int) -> float:
    """Mean of z^power over the draws m_i + s_i z of arm i that exceed every other's less the margin.

    Where others are much narrower, the integrand has steps, which need nodes as narrow as they are.
    """
    other_arms = np.arange(len(m)) != i
    fine = min(8.0, max(1.0, 0.2 * s[i] / float(s[other_arms].min()))) if other_arms.any() else 1.0
    z, step = np.linspace(-REACH, REACH, int(NODES * fine), retstep=True)
    below = normal_cdf((m[i] + s[i] * z[:, None] + margin - m[other_arms]) / s[other_arms]).prod(1)
    return float((z**power * _density(z) * below).sum() * step)


def _density(z: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
