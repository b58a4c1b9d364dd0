"""Ranges of rows and episodes as settings name them."""

from __future__ import annotations

import re
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


def episode_numbers(text: str, count: int, where: str) -> np.ndarray:
    """The numbers, int64 and ascending, of the episodes that `text` names among `count`: "29:32" (29 to 31, of which
    either end may be left out) or "3,5,9".

    Raises UserError for another text, and for episodes that are not there.
    """
    text = text.replace(" ", "")
    failure = f"dataset.episodes={text}: {where} has the episodes 0 to {count - 1}"
    if match := re.fullmatch(r"(\d{0,18}):(\d{0,18})", text):
        first, stop = int(match[1] or 0), int(match[2] or count)
        if first >= stop:
            raise UserError(f"{failure}, and none are from {first} up to, without it, {stop}")
        if stop > count:
            raise UserError(f"{failure}, and none is {stop - 1}")
        return np.arange(first, stop)
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", text):
        raise UserError(f"{failure}; a part of them is written 29:32 (29 to 31) or 3,5,9")
    numbers = np.sort(np.array([int(number) for number in text.split(",")], np.int64))
    if numbers[-1] >= count:
        raise UserError(f"{failure}, and none is {numbers[-1]}")
    if (twice := numbers[1:][np.diff(numbers) == 0]).size:
        raise UserError(f"dataset.episodes={text} names episode {twice[0]} twice")
    return numbers
