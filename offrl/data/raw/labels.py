"""The names of choices and of dimensions in several datasets: joined, and compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offrl.data.dataset import ColumnSpec
from offrl.errors import UserError


def joined_labels(parts: Sequence[tuple[str, tuple[str, ...]]]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """(the labels of all choices, sorted; for each part the new number of each of its choices).

    parts: names of data and their labels. Raises UserError where the choices of some are numbers and those of others
    are not.
    """
    if len({bool(labels) for _, labels in parts}) > 1:
        (a, first), (b, _) = sorted(parts, key=lambda part: not part[1])[:: len(parts) - 1]
        raise UserError(
            f"the choices of actions in {a} are called {listed_labels(first)}, and those in {b} are numbers: which is "
            "which is not known; write the same names, or the same numbers, into all"
        )
    labels = tuple(sorted({label for _, part in parts for label in part}))
    return labels, [np.array([labels.index(label) for label in part], np.int64) for _, part in parts]


def other_columns(columns: Sequence[ColumnSpec], reference: Sequence[ColumnSpec]) -> tuple[str, str] | None:
    """Both for a message, where dimensions were read from other columns, or in other units; None where they are the
    same, or not known.
    """

    def same(a: ColumnSpec, b: ColumnSpec) -> bool:
        return replace(a, unit="") == replace(b, unit="") and (a.unit == b.unit or not a.unit or not b.unit)

    def shown(c: ColumnSpec) -> str:
        return (
            c.name
            + f" in {c.unit}" * bool(c.unit)
            + f" * {c.scale:g}" * (c.scale != 1.0)
            + f" + {c.offset:g}" * bool(c.offset)
        )

    differ = [(a, b) for a, b in zip(columns, reference, strict=False) if not same(a, b)][:5]
    return (", ".join(shown(a) for a, _ in differ), ", ".join(shown(b) for _, b in differ)) if differ else None


def refuse_other_columns(reference: Sequence[ColumnSpec], columns: Sequence[ColumnSpec], failure: str) -> None:
    """Raises UserError, which begins with `failure`, where `columns` are others than those of `reference`."""
    if text := other_columns(columns, reference):
        raise UserError(
            f"{failure}: its columns are {text[0]} instead of {text[1]}; name those of both in one order and unit with "
            "dataset.fields"
        )


def listed_labels(labels: Sequence[str]) -> str:
    """Choices by number for a message."""
    return ", ".join(f"{i} {label}" for i, label in enumerate(labels[:10])) + (", ..." if len(labels) > 10 else "")
