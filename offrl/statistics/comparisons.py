"""Many comparisons at once: p-values from resamples, and Holm's correction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


def holm(p: Sequence[float] | Any) -> list[float]:
    """p-values adjusted for their number (Holm 1979): the family-wise error is at most alpha where those below alpha
    are rejected.

    Sorted ascending, p_(i) becomes max over j <= i of min(1, (m - j + 1) p_(j)), of m values; NaN stays NaN and is not
    counted. Raises ValueError for a value outside 0..1.
    """
    values = [float(x) for x in p]
    if any(x < 0.0 or x > 1.0 for x in values):
        raise ValueError("p-values must lie between 0 and 1")
    known = sorted((i for i, x in enumerate(values) if not math.isnan(x)), key=lambda i: values[i])
    adjusted, floor = list(values), 0.0
    for place, i in enumerate(known):
        floor = max(floor, min(1.0, (len(known) - place) * values[i]))
        adjusted[i] = floor
    return adjusted


def two_sided_p(draws: Sequence[float] | Any) -> float:
    """p-value of "the difference is 0" from resamples of the difference [R]: twice the smaller share on either side of
    0, with one resample added to both sides, so that it is never 0. NaN draws are left out; NaN where none is left."""
    x = np.asarray(draws, np.float64)
    x = x[~np.isnan(x)]
    if not len(x):
        return math.nan
    side = min(int((x <= 0.0).sum()), int((x >= 0.0).sum()))
    return min(1.0, 2.0 * (side + 1) / (len(x) + 1))
