"""The columns that samplers take rows of: packed into one table where they can be, and with the streams beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.data.history import PastRows, history_of
from offrl.data.store import Store
from offrl.tasks.entries import VECTOR

Batch = dict[str, Tensor]  # observations of several streams: dictionaries of tensors by the streams' names

Layout = dict[str, tuple[int, int, tuple[int, ...], torch.dtype]]  # column -> (first, last + 1, row shape, type)


@dataclass(frozen=True)
class Packed:
    """Several columns side by side as one float32 table [R, W], so that one gather reads a whole row from one place."""

    table: Tensor
    layout: Layout

    @property
    def device(self) -> torch.device:
        return self.table.device

    def take(self, rows: Tensor) -> Batch:
        """The columns of rows [B]."""
        return split(self.table[rows], self.layout)

    def column(self, name: str, rows: Tensor) -> Tensor:
        """One column of rows [...]: [..., *shape]."""
        first, last, shape, dtype = self.layout[name]
        return self.table[:, first:last][rows].reshape(*rows.shape, *shape).to(dtype)


@dataclass(frozen=True)
class Unpacked:
    """Columns left where they are, in memory-mapped files say, each with the rows of it that count (None: all)."""

    columns: dict[str, tuple[Tensor, Tensor | None]]
    layout: Layout | None  # of the same columns packed; None: they cannot be

    @property
    def device(self) -> torch.device:
        return next(iter(self.columns.values()))[0].device

    def take(self, rows: Tensor) -> Batch:
        """The columns of rows [B], with the strides of `Packed.take`: products may round by them."""
        batch = {name: self.column(name, rows) for name in self.columns}
        if self.layout is None:
            return batch
        table = [column.reshape(len(rows), -1).float() for column in batch.values()]
        return split(torch.cat(table, 1), self.layout)

    def column(self, name: str, rows: Tensor) -> Tensor:
        """One column of rows [...]: [..., *shape]."""
        column, chosen = self.columns[name]
        return column[rows if chosen is None else chosen[rows]]


@dataclass(frozen=True)
class Streamed:
    """A table, and the streams of the same rows, with which its observations are dictionaries, or their windows."""

    table: Packed | Unpacked
    stores: Mapping[str, Store]
    frames: int
    history: PastRows | None
    encoded: bool  # the vector alone is a dictionary, too

    @property
    def device(self) -> torch.device:
        return self.table.device

    def take(self, rows: Tensor) -> Batch:
        """The columns of rows [B]."""
        return {name: self._observed(name, column, rows) for name, column in self.table.take(rows).items()}

    def column(self, name: str, rows: Tensor) -> Any:
        """One column of rows [...]: [..., *shape], or a dictionary of such."""
        return self._observed(name, self.table.column(name, rows), rows)

    def _observed(self, name: str, column: Tensor, rows: Tensor) -> Any:
        if name not in ("observations", "next_observations"):
            return column
        following = name[:4] == "next"
        images = {n: s.frames(rows, self.frames, following) for n, s in self.stores.items()}
        if self.history is not None:
            column = self.history.windows(column, rows, following)
        if not images and not self.encoded:
            return column
        return {VECTOR: column, **images} if column.shape[-1] else images


Table = Packed | Unpacked | Streamed


class Experience(NamedTuple):
    """All transitions, or windows of states, that there are to learn from while policies play: the data's, and of those
    that were played the first `filled`. Streams are columns by themselves, "observations/NAME".
    """

    data: Batch  # columns [D, ...]; {}: none
    played: Batch  # columns [C, ...]
    filled: Tensor  # [] int64

    def mean_size(self, column: str) -> Tensor:
        """The mean absolute value of a column over the first steps of all windows that were played, []."""
        sizes = self.played[column][:, 0].abs()
        known = torch.arange(len(sizes), device=sizes.device) < self.filled
        return torch.where(known, sizes, 0.0).sum() / self.filled


def nested(columns: Batch) -> Batch:
    """Columns of a batch with those of streams, "observations/NAME", in dictionaries."""
    batch: Batch = {}
    for name, values in columns.items():
        column, _, stream = name.partition("/")
        target: Any = batch.setdefault(column, {}) if stream else batch  # type: ignore[arg-type]
        target[stream or column] = values
    return batch


def split(table: Tensor, layout: Layout) -> Batch:
    """The columns of a packed table [B, W]."""
    return {
        name: table[:, first:last].reshape(len(table), *shape).to(dtype)
        for name, (first, last, shape, dtype) in layout.items()
    }


def table_of(
    dataset: Dataset,
    columns: dict[str, Tensor],
    rows: Tensor | None = None,
    extra_rows: Mapping[str, tuple[Tensor, Tensor | None]] | None = None,
) -> Table:
    """The rows `rows` (None: all) of columns as one table, packed where they are in memory and can be.

    extra_rows: further names, each with its column and the rows of it that stand beside `rows`.
    """
    parts = {name: (column, rows) for name, column in columns.items()} | dict(extra_rows or {})
    layout = layout_of(parts)
    table = Unpacked(parts, layout) if dataset.mapped or layout is None else pack(parts, layout)
    history = history_of(dataset, rows)
    if not dataset.stores and history is None:
        return table
    stores = {name: store if rows is None else store.take(rows) for name, store in dataset.stores.items()}
    return Streamed(table, stores, dataset.spec.frames, history, dataset.spec.encoder is not None)


def layout_of(columns: Mapping[str, tuple[Tensor, Tensor | None]]) -> Layout | None:
    """Places of float32 and small-integer columns in a packed table; None if some column does not fit a float32 exactly
    or compactly.
    """
    layout: Layout = {}
    width = 0
    for name, (column, _) in columns.items():
        if column.dtype == torch.int64:
            if column.numel() and max(abs(int(bound)) for bound in column.aminmax()) >= 1 << 24:
                return None
        elif column.dtype != torch.float32:
            return None
        shape = column.shape[1:]
        layout[name] = (width, width + shape.numel(), shape, column.dtype)
        width += shape.numel()
    return layout


def pack(columns: Mapping[str, tuple[Tensor, Tensor | None]], layout: Layout) -> Packed:
    """Rows (None: all) of columns, packed."""
    column, rows = next(iter(columns.values()))
    width = max(last for _, last, _, _ in layout.values())
    table = torch.empty(len(column if rows is None else rows), width, device=column.device)
    for name, (start, end, _, _) in layout.items():
        column, rows = columns[name]
        table[:, start:end] = (column if rows is None else column[rows]).reshape(len(table), -1)
    return Packed(table, layout)
