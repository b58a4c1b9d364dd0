"""Trajectory segments as one transition each, for policies that decide once in H steps. Pure, like all samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Episodes, Packed, by_weight, pack
from offrl.errors import UserError


@dataclass(frozen=True)
class Segments:
    """The source of SegmentSampler; segments are numbered among those that may be drawn."""

    count: int
    packed: Packed | None
    columns: dict[str, Tensor] = field(default_factory=dict)  # where they are not packed: of all rows of the data,
    rows: Tensor | None = None  # of which a segment begins at these [S]
    ends: Tensor | None = None  # and has its last step at these
    made: dict[str, Tensor] = field(default_factory=dict)  # of the S segments
    weighted: Episodes | None = None  # where some episodes are drawn more often than others

    def take(self, index: Tensor) -> Batch:
        """The segments numbered `picked` [B]."""
        if self.packed is not None:
            return self.packed.take(index)
        assert self.rows is not None and self.ends is not None
        first = {"observations": self.columns["observations"][self.rows[index]]}
        last = {"next_observations": self.columns["next_observations"][self.ends[index]]}
        return {**first, **last, **{name: column[index] for name, column in self.made.items()}}


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
        columns = {name: dataset.columns[name] for name in ("observations", "next_observations")}
        last = ends.to(device)[order]
        if not dataset.mapped:
            numbers = torch.arange(len(first), device=device)
            later_columns = {
                "next_observations": (columns["next_observations"], last),
                **{name: (c, numbers) for name, c in made.items()},
            }
            packed = pack({"observations": columns["observations"]}, first, later_columns)
            if packed is not None:
                return Segments(len(first), packed, weighted=weighted)
        return Segments(len(first), None, columns, first, last, made, weighted)

    def __call__(self, source: Segments, key: Tensor, batch_size: int) -> Batch:
        index = (
            rng.randint(key, (batch_size,), source.count)
            if source.weighted is None
            else source.weighted.draw(key, batch_size)
        )
        return source.take(index)


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
