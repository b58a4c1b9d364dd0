"""Samplers: pure functions from a data set and a key to a batch. Same key, same batch, on any device and from memory or disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset

Batch = dict[str, Tensor]


class Sampler(Protocol):
    """Draws batches: `prepare` is called once, and what it returns is handed to every call."""

    def prepare(self, dataset: Dataset) -> Any:
        """Whatever makes sampling fast; holds the data set's columns or copies of them."""

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
        """A batch with leading dimension `batch_size`."""


@dataclass(frozen=True)
class Packed:
    """Several columns side by side as one float32 table [R, W], so that one gather reads a whole row from one place."""

    table: Tensor
    layout: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]]  # column -> (first, last + 1, row shape, type)

    def take(self, rows: Tensor) -> Batch:
        """The columns of rows [B]."""
        picked = self.table[rows]
        return {name: picked[:, first:last].reshape(-1, *shape).to(dtype) for name, (first, last, shape, dtype) in self.layout.items()}


def pack(columns: dict[str, Tensor], rows: Tensor) -> Packed | None:
    """Pack the rows `rows` of float32 and small-integer columns; None if some column does not fit a float32 exactly or compactly."""
    layout: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
    width = 0
    for name, column in columns.items():
        if column.dtype == torch.int64:
            if column.numel() and int(column.abs().max()) >= 1 << 24:
                return None
        elif column.dtype != torch.float32:
            return None
        shape = tuple(column.shape[1:])
        size = torch.Size(shape).numel()
        layout[name] = (width, width + size, shape, column.dtype)
        width += size
    table = torch.empty(len(rows), width, dtype=torch.float32, device=rows.device)
    for name, (start, end, _, _) in layout.items():
        table[:, start:end] = columns[name][rows].reshape(len(rows), -1)
    return Packed(table, layout)


@dataclass(frozen=True)
class Transitions:
    """What TransitionSampler draws from: a packed table, or columns left where they are and the rows that may be drawn."""

    count: int
    packed: Packed | None
    columns: dict[str, Tensor]
    rows: Tensor | None


@dataclass(frozen=True)
class TransitionSampler:
    """Uniform transitions, with replacement: observations, actions, rewards, masks = 1 - terminations, next_observations.

    Rows without a known successor (the last of a time-out in a file without next observations) are never drawn: what follows them
    belongs to the next episode. A terminal row needs no successor.
    """

    extra: tuple[str, ...] = ()  # more columns to put into the batch

    def prepare(self, dataset: Dataset) -> Transitions:
        names = ("observations", "actions", "rewards", "next_observations", *self.extra)
        columns = {name: dataset.columns[name] for name in names}
        rows = dataset.transition_rows()
        columns["masks"] = (~dataset.columns["terminations"]).to(torch.float32)
        packed = None if dataset.mapped else pack(columns, rows)
        if packed is not None:
            return Transitions(len(rows), packed, {}, None)
        return Transitions(len(rows), None, columns, rows)

    def __call__(self, source: Transitions, key: Tensor, batch_size: int) -> Batch:
        pick = rng.randint(key, (batch_size,), source.count)
        if source.packed is not None:
            return source.packed.take(pick)
        assert source.rows is not None
        rows = source.rows[pick]
        return {name: column[rows] for name, column in source.columns.items()}
