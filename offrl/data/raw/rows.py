"""Rows of columns that hold what they should not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from offrl.data.memory import chunks

TOLERANCE = 1e-4  # of the action range: float32 files of float64 actions


def _rows_where(column: np.ndarray, rows_of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The rows of a column that `rows_of` gives of each part of it, int64."""
    parts = [part.start + rows_of(column[part]) for part in chunks(len(column))]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def not_finite_rows(column: np.ndarray) -> np.ndarray:
    """The rows of a column [R, ...] that hold NaN or infinite values."""

    def rows_of(block: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            # one pass without a temporary; the exact search only where it pays, or where the sum overflowed
            finite = np.ones(1, bool) if np.isfinite(block.sum()) else np.isfinite(block)
        return np.flatnonzero(~finite.reshape(len(finite), -1).all(1))

    return _rows_where(column, rows_of) if column.dtype.kind == "f" else np.zeros(0, np.int64)


def outside_rows(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The rows of actions [R, A] beyond the range [A], lowest and highest, by more than rounding."""
    return _rows_where(actions, lambda block: np.flatnonzero(outside(block, low, high).any(1)))


def outside(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Which entries of actions [..., A] lie beyond the range [A], by more than rounding."""
    slack = TOLERANCE * (high - low)
    return (actions < low - slack) | (actions > high + slack)
