"""Trajectory segments as one transition each, for policies that decide once in H steps. Pure, like all samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Episodes, Packed, Unpacked, by_weight, draw_rows, table_of
from offrl.errors import UserError


@dataclass(frozen=True)
class Segments:
    """The source of SegmentSampler; segments are numbered among those that may be drawn."""

    count: int
    table: Packed | Unpacked
    weighted: Episodes | None = None  # where some episodes are drawn more often than others


@dataclass(frozen=True)
class SegmentSampler:
    """Segments of `length` steps: observations at the first, next_observations after the last, rewards [B, length] of
    every step, and masks = 1 - whether the episode terminated within.

    A segment that terminates is shorter, and its rewards beyond that are 0. One that the data cut short in another way,
    by a time limit or the end of a recording, is never drawn: what its last steps would have led to is not known.

    made: columns that an algorithm makes itself, for all R rows of the data; a segment has the row where it begins.
    """

    length: int
    made: Callable[[Dataset], Mapping[str, Tensor]] | None = None

    def prepare(self, dataset: Dataset) -> Segments:
        """The source of segments. Raises UserError where no episode is long enough."""
        device = dataset.device
        starts, ends, rewards, masks = segments(dataset, self.length)
        if not len(starts):
            raise UserError(
                f"{dataset.spec.name}: no segment of {self.length} steps to train on: every episode is shorter, and "
                "none terminates; "
                f"the longest has {int(dataset.episode_lengths().max())} steps"
            )
        # which are drawn follows from the episodes' weights
        weighted, first, order = by_weight(dataset, starts.to(device), torch.arange(len(starts), device=device))
        order = torch.arange(len(starts), device=device) if order is None else order
        made = {name: column.to(device)[order] for name, column in (("rewards", rewards), ("masks", masks))}
        made |= {name: column.to(device)[first] for name, column in (self.made(dataset) if self.made else {}).items()}
        more: dict[str, tuple[Tensor, Tensor | None]] = {
            "next_observations": (dataset.columns["next_observations"], ends.to(device)[order]),
            **{name: (column, None) for name, column in made.items()},
        }
        table = table_of(dataset, {"observations": dataset.columns["observations"]}, first, more)
        return Segments(len(first), table, weighted)

    def __call__(self, source: Segments, key: Tensor, batch_size: int) -> Batch:
        return source.table.take(draw_rows(key, batch_size, source.count, source.weighted))


def segments(dataset: Dataset, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(first rows [S], last rows [S], rewards [S, length], masks [S] float32) of all segments that may be drawn, on the
    CPU.
    """
    columns = {name: dataset.columns[name].cpu() for name in ("rewards", "terminations", "successor_known")}
    lengths = dataset.episode_lengths().cpu()
    stop = torch.repeat_interleave(dataset.episode_end.cpu(), lengths)  # exclusive
    row = torch.arange(len(stop))
    terminated = torch.zeros(len(stop), dtype=torch.bool)
    count, rewards = torch.zeros_like(row), []
    for j in range(length):
        index = (row + j).clamp(max=len(row) - 1)
        inside = ~terminated & (row + j < stop)
        rewards.append(torch.where(inside, columns["rewards"][index], 0.0))
        count = count + inside
        terminated = terminated | (inside & columns["terminations"][index])
    last = row + count - 1
    complete = terminated | ((count == length) & columns["successor_known"][last])
    return row[complete], last[complete], torch.stack(rewards, 1)[complete], (~terminated[complete]).float()
