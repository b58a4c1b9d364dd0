"""Observations of the episodes that are played side by side, as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.tasks.entries import VECTOR


def finite_rows(rows: np.ndarray) -> np.ndarray:
    """Which of observations [E, ...] hold neither NaN nor infinity, bool [E]; images hold none."""
    if rows.dtype.names:
        if VECTOR not in rows.dtype.names:
            return np.ones(len(rows), bool)
        rows = rows[VECTOR]
    return np.asarray(np.isfinite(rows).reshape(len(rows), -1).all(axis=1))


def aligned_zeros(shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Zeros that begin at a multiple of 64 bytes: the last bits of a matrix product can depend on where its factors
    lie.
    """
    size = int(np.prod(shape)) * np.dtype(kind).itemsize
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(kind).reshape(shape)
