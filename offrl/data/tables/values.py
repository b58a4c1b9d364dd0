"""Cells of a table as what a column of ours holds: numbers, flags, the numbers of episodes, times in seconds."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from offrl.data.raw import RawData
from offrl.errors import UserError

WHOLE = re.compile(r"-?[1-9][0-9]*|0")  # a whole number as one writes it: 007, +1 and 1_000 are names
CODE = re.compile(r"[+-]?0[0-9]+")  # a name of digits
THOUSANDS = {mark: re.compile(rf"[+-]?[1-9]\d{{0,2}}(\{mark}\d{{3}})+") for mark in ".,"}
DECIMAL_COMMA = re.compile(r"[+-]?(\d{1,3}(\.\d{3})+|\d*),\d+([eE][+-]?\d+)?")
EMPTY = frozenset({"", "na", "n/a", "#n/a", "nan", "null", "none", "-", "?"})  # lower case: no value
# where a value is missing
SENTINELS = tuple(sign * float(digits) for digits in ("999", "9999", "99999", "999999") for sign in (1, -1))
FAR = 3.0  # times the range of the other numbers, that one of these is away from them
TRUE, FALSE = frozenset({"true", "t", "yes", "y", "1", "1.0"}), frozenset({"false", "f", "no", "n", "0", "0.0"})


def number_of(text: str) -> float:
    """The number that a text is. Raises ValueError, for 1_000 too, which Python would read."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


def is_number(text: Any) -> bool:
    """Whether a text is a number, with a point or a comma."""
    try:
        number_of(str(text).replace(",", "."))
    except ValueError:
        return False
    return str(text).lower() not in ("nan", "inf", "infinity")


class Marks:
    """The marks in the numbers of a file: points or commas before decimals, and the other ones between thousands."""

    def __init__(self, where: str, decimal: str) -> None:
        """decimal: as `dataset.decimal`."""
        self.where, self.decimal, self.comma = where, decimal, decimal == "comma"
        self.begin()

    def begin(self) -> None:
        """Forget what was seen: the file is read from its first row."""
        self.points_are_decimal = False  # some can be nothing else
        self.whole: set[str] = set()  # columns with whole numbers
        self.thousands: dict[str, str] = {}  # column -> a number of it whose points may stand between thousands

    def see(self, name: str, values: Sequence[str]) -> None:
        """Look at the numbers of a column, of which none has a comma."""
        if self.points_are_decimal or self.decimal != "auto":
            return
        pointed = [v.strip() for v in values if "." in v]
        self.points_are_decimal = any(not THOUSANDS["."].fullmatch(v) for v in pointed)
        if pointed:
            self.thousands.setdefault(name, pointed[0])
        if len(pointed) < len(values):
            self.whole.add(name)

    def with_point(self, name: str, text: str) -> str:
        """A number as Python writes it. Raises UserError for one with a decimal point where others have decimal
        commas.
        """
        if not self.comma:
            digits, point, decimals = text.partition(".")
            return (
                digits.replace(",", "") + point + decimals
                if self.decimal == "point" and THOUSANDS[","].fullmatch(digits)
                else text
            )
        if THOUSANDS["."].fullmatch(text):
            self.thousands.setdefault(name, text)
            return text.replace(".", "")
        if "." in text and is_number(text) and not DECIMAL_COMMA.fullmatch(text):
            raise UserError(
                f"{self.where}: column '{name}' holds {text}, with a decimal point, and other numbers have decimal "
                "commas: write all alike"
            )
        return text.replace(".", "").replace(",", ".") if DECIMAL_COMMA.fullmatch(text) else text

    def notes(self) -> list[str]:
        """What to say of the marks in a file that was read. Raises UserError where its numbers may be read in two
        ways.
        """
        if self.decimal != "auto":
            return []
        if self.comma:
            number = next(iter(self.thousands.values()), "")
            more = f"; points stand between thousands: {number} is {number.replace('.', '')}" if number else ""
            return [f"numbers have decimal commas{more}"]
        unclear = [] if self.points_are_decimal else [n for n in self.thousands if n in self.whole]
        if unclear:
            text = self.thousands[unclear[0]]
            raise UserError(
                f"{self.where}: {text} in column '{unclear[0]}' may be {text.replace('.', '')}, with points between "
                f"thousands, or {float(text):g}: say dataset.decimal=comma or dataset.decimal=point"
            )
        return []


def numbers(values: np.ndarray, name: str, where: str) -> np.ndarray:
    """The values [R] as numbers; NaN where there is none. Raises UserError, naming row and text, for a text that is
    none.
    """
    if values.dtype.kind in "biuf":
        return values
    if values.dtype.kind in "mM":
        raise UserError(
            f"{where}: column '{name}' holds times, where numbers are due; leave it out, or give it as "
            "dataset.fields.time"
        )
    out = np.empty(len(values))
    for row, value in enumerate(values):
        if missing(value) or (isinstance(value, str) and value.strip().lower() in EMPTY):
            out[row] = np.nan
            continue
        try:
            out[row] = number_of(value) if isinstance(value, str) else float(value)
        except (TypeError, ValueError):
            shown = str(value)[:40]
            hint = "rows count from 0" if row else "a row of units?"
            raise UserError(
                f"{where}: column '{name}' holds '{shown}' in row {row}, which is no number ({hint})"
            ) from None
    return out


def missing(value: Any) -> bool:
    """Whether a cell holds no value: None, NaN, pandas' NA and NaT, an empty text."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or type(value).__name__ in ("NAType", "NaTType") or value != value


def plain_numbers(values: np.ndarray) -> np.ndarray | None:
    """Texts [R] that are all whole numbers, int64 [R], or all numbers, float64 [R]; None for other texts, and where one
    is a name of digits such as 007."""
    texts = [str(v).strip() for v in values]
    if all(map(WHOLE.fullmatch, texts)) and all(abs(int(text)) < 1 << 63 for text in texts):
        return np.array(list(map(int, texts)), np.int64)
    if all(map(is_number, texts)) and not any(
        CODE.fullmatch(text) or (WHOLE.fullmatch(text) and len(text) > 15) for text in texts
    ):
        return np.array([number_of(text.replace(",", ".")) for text in texts])
    return None


def flags(values: np.ndarray, name: str, where: str) -> np.ndarray:
    """The values [R] as flags or numbers that may be some (see `offrl.data.raw.canonical`). Raises UserError for other
    texts.
    """
    if values.dtype.kind in "biuf":
        return values
    lower = np.array([str(v).strip().lower() for v in values], object)
    texts, index = np.unique(lower.astype(str), return_inverse=True)
    if wrong := [w for w in texts if w not in TRUE | FALSE]:
        row = int(np.flatnonzero(texts[index] == wrong[0])[0])
        raise UserError(
            f"{where}: column '{name}' holds '{wrong[0]}' in row {row}, which is no flag: write 0 or 1, or true or "
            "false"
        )
    return np.array([w in TRUE for w in texts])[index]


def codes(values: np.ndarray, name: str, where: str) -> np.ndarray:
    """Numbers of episodes, int64 [R]: equal values are one, numbered as they first come. Raises UserError for gaps and
    for times, which differ from row to row.
    """
    if values.dtype.kind in "mM":
        raise UserError(
            f"{where}: column '{name}' holds times, where ids of episodes are due: give it as dataset.fields.time, or "
            "write the ids as texts"
        )
    if values.dtype.kind == "O":
        empty = np.array([missing(v) for v in values], bool)
        texts = [str(v) for v in values]
        gaps = np.array([t.strip().lower() in EMPTY for t in texts], bool)
        if gaps.any() and all(is_number(t) for t, gap in zip(texts, gaps, strict=True) if not gap):
            empty |= gaps  # NA among numbers is no name
        number = {text: i for i, text in enumerate(dict.fromkeys(texts))}  # NumPy's own texts end at a NUL
        values = np.array([number[t] for t in texts], np.int64)
    else:
        empty = ~np.isfinite(values)
    if empty.any():
        raise UserError(
            f"{where}: column '{name}' has no value in row {int(np.argmax(empty))} ({int(empty.sum()):,} such rows)"
        )
    _, first, index = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[index.reshape(-1)]


def seconds(values: np.ndarray, name: str, where: str) -> tuple[np.ndarray, bool]:
    """(times [R] float64, whether they are dates, in seconds). Numbers stay as they are. Raises UserError for what is
    no time.
    """
    dates = False
    if values.dtype.kind == "O":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's, of time zones, which it converts
                values = np.array(["NaT" if missing(v) else str(v).strip() for v in values], "datetime64[us]")
        except ValueError as error:
            raise UserError(
                f"{where}: column '{name}' ({' '.join(str(error).split())[:80]}): times are numbers, or written "
                f"2024-03-01 12:30:00; in pandas pandas.to_datetime(df['{name}'], dayfirst=True) reads others"
            ) from None
    if values.dtype.kind in "mM":
        dates = values.dtype.kind == "M"
        empty = np.isnat(values)
        unit = "datetime64[us]" if dates else "timedelta64[us]"
        times = values.astype(unit).astype(np.int64) / 1e6
    else:
        times = values.astype(np.float64)
        empty = np.isnan(times)
    if empty.any():
        raise UserError(
            f"{where}: column '{name}' has no time in row {int(np.argmax(empty))} ({int(empty.sum()):,} such rows)"
        )
    return times, dates


def shown_time(time: float, dates: bool) -> str:
    """A time for a message."""
    return (
        str(np.datetime64(round(time * 1e6), "us")).removesuffix(".000000").replace("T", " ") if dates else f"{time:g}"
    )


def shown_span(span: float, dates: bool) -> str:
    """A length of time for a message."""
    if not dates:
        return f"{span:g}"
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if span >= 2 * factor:
            return f"{span / factor:.3g} {unit}"
    return f"{span:.3g} s"


def sentinels(raw: RawData) -> list[tuple[str, int, str]]:
    """(what, first row, cure) for numbers that loggers write where a value is missing (-999), far from all others of
    their column.
    """
    result = []
    for name in ("observations", "actions", "rewards"):
        column = raw.columns[name].reshape(raw.rows, -1)
        if column.dtype.kind != "f" or not column.size:
            continue
        for d in np.flatnonzero(np.isin(column.min(0), SENTINELS) | np.isin(column.max(0), SENTINELS)):
            values = column[:, d]
            for number in SENTINELS:
                at = values == number
                remaining = values[~at & np.isfinite(values)]
                if not at.any() or not len(remaining):
                    continue
                low, high = float(remaining.min()), float(remaining.max())
                if low <= number <= high or min(abs(number - low), abs(number - high)) < FAR * (high - low):
                    continue
                names = raw.dimension_names(name)
                label = (
                    f"column '{names[d]}'"
                    if names
                    else f"'{name}'" + (f", dimension {d}," if column.shape[1] > 1 else "")
                )
                text = (
                    f"{label} holds {number:g} in {int(at.sum()):,} rows, otherwise {low:g} to {high:g}: a missing "
                    "value?"
                )
                cure = "write nothing (NaN) there" + (
                    ", and say dataset.missing=forward" if name == "observations" else ""
                )
                result.append((text, int(np.argmax(at)), cure))
    return result
