"""Losses that several papers share, with their derivatives, in float64 NumPy. Knows nothing of offrl."""

from __future__ import annotations

import numpy as np


def gumbel(
    u: np.ndarray, beta: float, clip: float, scale_rows: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and its derivative with respect to V. scale_rows: more rows that the common factor
    counts.
    """
    z = np.minimum(u / beta, clip)
    counted = z if scale_rows is None else np.concatenate([z, np.minimum(scale_rows / beta, clip)])
    m = max(counted.max(), -1.0)
    slope = -(np.exp(z - m) - np.exp(-m)) / beta
    return np.exp(z - m) - z * np.exp(-m) - np.exp(-m), np.where(u / beta > clip, 0.0, slope)


def logsumexp(x: np.ndarray, axis: int) -> np.ndarray:
    top = x.max(axis, keepdims=True)
    return np.log(np.exp(x - top).sum(axis)) + top.squeeze(axis)
