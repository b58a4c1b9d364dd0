"""Cells of a table as what a column of ours holds: numbers, flags, the numbers of episodes, times in seconds."""

from __future__ import annotations

import warnings

import numpy as np

from offrl.data.tables.csv_file import EMPTY
from offrl.errors import UserError

TRUE, FALSE = frozenset({"true", "t", "yes", "y", "1", "1.0"}), frozenset({"false", "f", "no", "n", "0", "0.0"})


def numbers(values: np.ndarray, name: str, where: str) -> np.ndarray:
    """The values [R] as numbers; NaN where there is none. Raises UserError, naming row and text, for a text that is none."""
    if values.dtype.kind in "biuf":
        return values
    if values.dtype.kind in "mM":
        raise UserError(f"{where}: column '{name}' holds times, where numbers are due; leave it out, or give it as dataset.fields.time")
    out = np.empty(len(values))
    for row, value in enumerate(values):
        if value is None or (isinstance(value, str) and value.strip().lower() in EMPTY):
            out[row] = np.nan
            continue
        try:
            out[row] = float(value)
        except (TypeError, ValueError):
            shown = str(value)[:40]
            hint = "; the first of these is row 0"
            raise UserError(f"{where}: column '{name}' holds '{shown}' in row {row}, which is no number{hint if row else ''}") from None
    return out


def flags(values: np.ndarray, name: str, where: str) -> np.ndarray:
    """The values [R] as flags or numbers that may be some (see `offrl.data.raw.canonical`). Raises UserError for other texts."""
    if values.dtype.kind in "biuf":
        return values
    lower = np.array([str(v).strip().lower() for v in values], object)
    words, index = np.unique(lower.astype(str), return_inverse=True)
    if wrong := [w for w in words if w not in TRUE | FALSE]:
        row = int(np.flatnonzero(words[index] == wrong[0])[0])
        raise UserError(f"{where}: column '{name}' holds '{wrong[0]}' in row {row}, which is no flag: write 0 or 1, or true or false")
    return np.array([w in TRUE for w in words])[index]


def codes(values: np.ndarray, name: str, where: str) -> np.ndarray:
    """Numbers of episodes, int64 [R]: equal values are one, numbered as they first come. Raises UserError for gaps."""
    if values.dtype.kind == "O":
        empty = np.array([v is None or v != v or (isinstance(v, str) and v.strip() == "") for v in values])
        values = np.array([str(v) for v in values])
    else:
        empty = np.isnat(values) if values.dtype.kind in "mM" else values != values
    if empty.any():
        raise UserError(f"{where}: column '{name}' has no value in row {int(np.argmax(empty))} ({int(empty.sum()):,} such rows)")
    _, first, index = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[index.reshape(-1)]


def seconds(values: np.ndarray, name: str, where: str) -> tuple[np.ndarray, bool]:
    """(times [R] float64, whether they are dates, in seconds). Numbers stay as they are. Raises UserError for what is no time."""
    dates = False
    if values.dtype.kind == "O":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # NumPy's, of time zones, which it converts
                values = np.array([str(v).strip() for v in values], "datetime64[us]")
        except ValueError as error:
            raise UserError(
                f"{where}: column '{name}' ({' '.join(str(error).split())[:80]}): times are numbers, or written 2024-03-01 12:30:00; in "
                f"pandas pandas.to_datetime(df['{name}'], dayfirst=True) reads others"
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
        raise UserError(f"{where}: column '{name}' has no time in row {int(np.argmax(empty))} ({int(empty.sum()):,} such rows)")
    return times, dates


def shown_time(time: float, dates: bool) -> str:
    """A time for a message."""
    return str(np.datetime64(round(time * 1e6), "us")).removesuffix(".000000").replace("T", " ") if dates else f"{time:g}"


def shown_span(span: float, dates: bool) -> str:
    """A length of time for a message."""
    if not dates:
        return f"{span:g}"
    for unit, factor in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if span >= 2 * factor:
            return f"{span / factor:.3g} {unit}"
    return f"{span:.3g} s"
