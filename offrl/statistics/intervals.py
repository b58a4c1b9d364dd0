"""Statistics for reports: a mean over seeds and a share of them with their confidence intervals."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any


@functools.lru_cache(4096)
def student_t(probability: float, freedom: int) -> float:
    """The t for which a Student variable with `freedom` (>= 1) degrees lies in [-t, t] with the given probability (0 <
    p < 1).
    """
    if freedom < 1 or not 0.0 < probability < 1.0:
        raise ValueError(f"need freedom >= 1 and 0 < probability < 1, got {freedom} and {probability}")
    low, high = 0.0, math.pi / 2  # bisect on the angle atan(t / sqrt(freedom)), which is bounded where t is not
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, freedom) < probability else (low, middle)
    return math.tan((low + high) / 2) * math.sqrt(freedom)


def _central(angle: float, freedom: int) -> float:
    """P(|T| <= tan(angle) sqrt(freedom)): the finite series for whole degrees of freedom (Abramowitz and Stegun, 26.7.3
    and 26.7.4).
    """
    cosine, odd = math.cos(angle), freedom % 2 == 1
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if odd else 2, freedom - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def mean_interval(values: Sequence[float] | Any) -> tuple[float, float, float]:
    """(mean, low, high): the mean of `values` [n], one per seed, and its 95% interval (Student-t).

    One value has no spread: low and high are then NaN. A NaN among the values makes all three NaN; a lost seed is not
    hidden.
    """
    numbers = [float(v) for v in values]
    if not numbers:
        return math.nan, math.nan, math.nan
    n = len(numbers)
    mean = math.fsum(numbers) / n if all(map(math.isfinite, numbers)) else math.nan
    if n == 1 or math.isnan(mean):
        return mean, math.nan, math.nan
    deviation = math.sqrt(math.fsum((v - mean) ** 2 for v in numbers) / (n - 1))
    half = student_t(0.95, n - 1) * deviation / math.sqrt(n)
    return mean, mean - half, mean + half


def share_interval(hits: int, count: int) -> tuple[float, float, float]:
    """(share, low, high): the share of `count` trials that hit, and its 95% interval (Wilson's score interval, which
    stays within 0 and 1 and has a width where all or none hit).
    """
    z = 1.959964
    share, spread = hits / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z * math.sqrt(share * (1 - share) / count + spread / (4 * count)) / (1 + spread)
    return share, max(0.0, middle - half), min(1.0, middle + half)
