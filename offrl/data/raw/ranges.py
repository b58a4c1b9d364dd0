"""Ranges of rows and episodes as settings name them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from offrl.errors import UserError

NUMBER = r"-?\d{1,18}"


def range_of(text: Any, count: int, setting: str, where: str = "the dataset") -> tuple[int, int]:
    """Bounds of "a:b", of which either may be left out, within 0 .. count; negative ones count from the end. Raises
    UserError for another text, and for a range that is empty or not all there.
    """
    text, things = str(text).replace(" ", ""), setting.removeprefix("dataset.")
    if not (match := re.fullmatch(f"({NUMBER})?:({NUMBER})?", text)):
        raise UserError(f"{setting}={text} must be a range such as 0:100 (0 to 99), :100 or 100:")
    first, stop = (_from_start(int(match[k] or default), count) for k, default in ((1, 0), (2, count)))
    if not 0 <= first < stop <= count:
        fault = "not all of these" if first < stop else "none of these"
        raise UserError(f"{setting}={text}: {where} has the {things} 0 to {count - 1}, and {fault}")
    return first, stop


def numbers_of(value: Any, count: int, setting: str = "episodes", where: str = "the dataset") -> np.ndarray:
    """The numbers, int64 and in the order given, of the episodes that `value` names among `count`: a range ("29:32": 29
    to 31), a number, or several ("3,5,9", or a list); negative numbers count from the end.

    Raises UserError for another value, and for episodes that are not there, or twice.
    """
    if isinstance(value, str) and ":" in value:
        return np.arange(*range_of(value, count, setting, where))
    values = value.split(",") if isinstance(value, str) else value if hasattr(value, "__iter__") else [value]
    texts = [str(v).strip() for v in values]
    known = f"{where} has the episodes 0 to {count - 1}"
    if wrong := [text for text in texts if not re.fullmatch(NUMBER, text)]:
        raise UserError(f"{setting}={value}: '{wrong[0]}' is no number; {known}, and a range is written 29:32")
    numbers = np.array([_from_start(int(text), count) for text in texts], np.int64)
    if absent := [text for text, number in zip(texts, numbers, strict=True) if not 0 <= number < count]:
        raise UserError(f"{setting}={value}: {known}, and none is {absent[0]}")
    if len(np.unique(numbers)) < len(numbers):
        raise UserError(f"{setting}={value} names an episode twice")
    return numbers


def _from_start(number: int, count: int) -> int:
    return number + count * (number < 0)
