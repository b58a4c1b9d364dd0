"""Columns of actions of a table: amounts, one choice, a one-hot choice, several choices, or a mixture, and what can be
done with each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offrl.data.raw import MOST_VALUES
from offrl.data.raw.labels import listed_labels
from offrl.data.tables import values as cells
from offrl.errors import UserError

FEW = 16  # values that a column of whole numbers from 0 may have to be taken for a choice beside others


def is_one_hot(columns: np.ndarray) -> bool:
    """Whether each row of [R, A], A > 1, has a single 1 among zeros."""
    if columns.ndim != 2 or columns.shape[1] < 2 or not len(columns):
        return False
    return bool(_single_ones(columns).all())


def _single_ones(columns: np.ndarray) -> np.ndarray:
    """Which rows of [R, A] have a single 1 among zeros, bool [R]."""
    return ((columns == 0) | (columns == 1)).all(1) & (columns.sum(1) == 1)


def as_actions(
    columns: Sequence[np.ndarray], names: Sequence[str], kind: str, where: str
) -> tuple[np.ndarray, int, tuple[str, ...], str]:
    """(actions, number of choices or 0, what they are called, a note or ""): int64 [R] for a choice, else floats [R,
    A].

    columns: [R] each, integers where they are whole numbers, texts (object) where they are names. kind:
    `dataset.action_kind`. Raises UserError where choices and amounts, or several choices, stand side by side and `kind`
    does not say what to do.
    """
    setting = "dataset.action_kind"
    for name, column in zip(names, columns, strict=True):
        if column.dtype.kind in "mM":
            cells.numbers(column, name, where)  # refuses times
    if (
        len(columns) == 1
        and columns[0].dtype.kind not in "biuf"
        and (plain := cells.plain_numbers(columns[0])) is not None
    ):
        columns = [plain]
    texts = [n for n, c in zip(names, columns, strict=True) if c.dtype.kind not in "biuf"]
    if len(columns) == 1 and texts:
        labels, index = np.unique(
            np.array(["" if cells.missing(v) else str(v).strip() for v in columns[0]]), return_inverse=True
        )
        if "" in labels:
            raise UserError(f"{where}: column '{names[0]}' has no action in row {int(np.argmax(index == 0))}")
        if len(labels) > MOST_VALUES or kind == "continuous":
            raise UserError(f"{where}: column '{names[0]}' of actions holds texts, such as '{labels[0]}', not numbers")
        called = tuple(labels.tolist())
        return (
            index.reshape(-1).astype(np.int64),
            len(called),
            called,
            f"actions: the choices of '{names[0]}' are numbered {listed_labels(called)}",
        )
    if texts:
        raise UserError(
            f"{where}: column '{texts[0]}' of actions holds texts; beside other columns only numbers can be actions: "
            f"number its choices from 0, and say {setting}=multi_discrete where all columns are choices"
        )
    stacked = np.stack(columns, 1)
    integer = [c.dtype.kind in "biu" for c in columns]
    if kind == "one_hot" or (kind == "auto" and is_one_hot(stacked)):
        if not is_one_hot(stacked):
            row = int(np.argmin(_single_ones(stacked))) if len(stacked) else 0
            raise UserError(f"{where}: {setting}=one_hot, and row {row} of the actions has no single 1 among zeros")
        called = () if all(n.endswith(f"[{i}]") for i, n in enumerate(names)) else tuple(names)  # of an array: no names
        note = f"actions: one-hot columns, taken for one discrete choice: {listed_labels(names)}"
        return stacked.argmax(1).astype(np.int64), len(names), called, note
    if kind == "multi_discrete":
        return _combinations(stacked, names, where)
    if len(columns) == 1 and kind != "continuous" and integer[0]:
        return stacked[:, 0].astype(np.int64), 0, (), ""
    if kind == "discrete":
        if len(columns) == 1 and (stacked == np.rint(stacked)).all():
            return stacked[:, 0].astype(np.int64), 0, (), ""
        contents = "several columns" if len(columns) > 1 else "numbers with fractions"
        raise UserError(
            f"{where}: {setting}=discrete, and the actions are {contents}; one column of whole numbers from 0 is due"
        )
    if kind == "auto" and len(columns) > 1:
        choices = [n for n, c, w in zip(names, columns, integer, strict=True) if w and _choice(c)]
        if len(choices) == len(names):
            raise UserError(
                f"{where}: the actions are {len(names)} columns of whole numbers from 0 ({', '.join(names[:4])}), "
                f"several choices at once: {setting}=multi_discrete numbers their combinations as one choice, "
                f"{setting}=continuous takes them for amounts"
            )
        if choices:
            unknown = [n for n in names if n not in choices]
            raise UserError(
                f"{where}: the actions mix a choice ({', '.join(choices[:3])}: numbers from 0) with amounts "
                f"({', '.join(unknown[:3])}), which no algorithm here learns together: {setting}=continuous takes all "
                "for amounts (where more of the choice means more of something), or train on one of the two, with the "
                "other among the observations"
            )
    return stacked, 0, (), ""


def _choice(column: np.ndarray) -> bool:
    """Whether whole numbers look like a choice: 0 to a few, each of which occurs; not just off and on."""
    values = np.unique(column)
    return bool(2 <= len(values) <= FEW and values[0] == 0 and values[-1] == len(values) - 1)


def _combinations(
    stacked: np.ndarray, names: Sequence[str], where: str
) -> tuple[np.ndarray, int, tuple[str, ...], str]:
    """The numbers of the combinations of several choices; see `as_actions`."""
    bad = ~np.isfinite(stacked) | (stacked != np.rint(stacked)) | (stacked < 0)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise UserError(
            f"{where}: dataset.action_kind=multi_discrete, and column '{names[column]}' holds "
            f"{stacked[row, column]:g} in row {row}: number choices from 0"
        )
    sizes = tuple(int(v) + 1 for v in stacked.max(0))
    total = int(np.prod(np.array(sizes, object)))
    if total > MOST_VALUES:
        raise UserError(
            f"{where}: {' x '.join(map(str, sizes))} combinations of choices are {total:,}; at most {MOST_VALUES:,} "
            "are possible"
        )
    index = np.ravel_multi_index(tuple(stacked.astype(np.int64).T), sizes)
    note = (
        f"actions: {' x '.join(map(str, sizes))} choices ({', '.join(names[:4])}) as one of {total:,}; "
        f"numpy.unravel_index(a, {sizes}) gives them back"
    )
    called = tuple(", ".join(f"{n}={v}" for n, v in zip(names, choice, strict=True)) for choice in np.ndindex(sizes))
    return index.astype(np.int64), total, called, note
