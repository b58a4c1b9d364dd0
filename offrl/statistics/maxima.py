"""The largest of several noisy estimates: how much it promises too much, and whether it belongs to the best.

Estimates are normal and independent. Everything is an integral over one variable, by the trapezoid rule, whose error on
such smooth functions is far below 1e-6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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


def selection_optimism(means: Sequence[float] | Any, errors: Sequence[float] | Any) -> float:
    """Expected estimate less true mean of the arm whose estimate is largest, when the estimate of arm i is normal with
    mean `means[i]` and standard error `errors[i]` (above 0). For K equal arms it is error * expected_maximum(K). Raises
    ValueError as `chance_best`."""
    m, s = _pair(means, errors)
    return float(sum(_against(m, s, i, 0.0, 1) * s[i] for i in range(len(m))))


def chance_best(means: Sequence[float] | Any, errors: Sequence[float] | Any, margin: float = 0.0) -> np.ndarray:
    """For each arm the probability that its value is at least that of the best less `margin`: float64 [K].

    The values are independent normals with `means` and standard deviations `errors`, both [K]. With margin 0 they sum
    to 1. Raises ValueError where the two differ in length, are not finite, are empty, or an error is not above 0.
    """
    m, s = _pair(means, errors)
    return np.array([_against(m, s, i, margin, 0) for i in range(len(m))])


def chance_within(means: Sequence[float] | Any, errors: Sequence[float] | Any, arm: int, margin: float) -> float:
    """`chance_best` of one arm."""
    return _against(*_pair(means, errors), arm, margin, 0)


def _against(m: np.ndarray, s: np.ndarray, i: int, margin: float, power: int) -> float:
    """Mean of z^power over the draws m_i + s_i z of arm i that exceed every other's less the margin.

    Where others are much narrower, the integrand has steps, which need nodes as narrow as they are.
    """
    others = np.arange(len(m)) != i
    fine = min(8.0, max(1.0, 0.2 * s[i] / float(s[others].min()))) if others.any() else 1.0
    z, step = np.linspace(-REACH, REACH, int(NODES * fine), retstep=True)
    below = normal_cdf((m[i] + s[i] * z[:, None] + margin - m[others]) / s[others]).prod(1)
    return float((z**power * _density(z) * below).sum() * step)


def _density(z: np.ndarray) -> np.ndarray:
    return np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


def _pair(means: Any, errors: Any) -> tuple[np.ndarray, np.ndarray]:
    m, s = np.asarray(means, np.float64), np.asarray(errors, np.float64)
    if m.ndim != 1 or m.shape != s.shape or not len(m):
        raise ValueError(
            f"means of shape {m.shape} and errors of shape {s.shape}: both must be lists of one length, not empty"
        )
    if not (np.isfinite(m).all() and np.isfinite(s).all() and (s > 0.0).all()):
        raise ValueError("means must be finite, and errors finite and above 0")
    return m, s
