"""Ranges of rows and episodes as settings name them."""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.errors import UserError


def range_of(text: Any, count: int, setting: str) -> tuple[int, int]:
    """Bounds of "a:b" within 0 .. count, Python's way."""
    first, colon, last = str(text).partition(":")
    try:
        if not colon:
            raise ValueError
        start, stop, _ = slice(int(first) if first.strip() else None, int(last) if last.strip() else None).indices(
            count
        )
    except ValueError:
        raise UserError(f"{setting}={text} must be a range such as 0:100 (0 to 99), :100 or 100:") from None
    if start >= stop:
        things = setting.removeprefix("dataset.")
        raise UserError(f"{setting}={text}: there are {count} {things}, and none in that range")
    return start, stop


def numbers_of(value: Any, count: int, setting: str = "episodes") -> np.ndarray:
    """Episode numbers from a range, a number, or a list without repeats; in the order given."""
    if isinstance(value, str) and ":" in value:
        return np.arange(*range_of(value, count, setting))
    values = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    wrong = [v for v in values if isinstance(v, bool) or not isinstance(v, int) or not -count <= v < count]
    if wrong:
        raise UserError(
            f"{setting}={value}: {wrong[0]} is no number of an episode (0 to {count - 1}); a range is written 0:100"
        )
    numbers = np.array([v % count for v in values], np.int64)
    if len(np.unique(numbers)) < len(numbers):
        raise UserError(f"{setting}={value} names an episode twice")
    return numbers
