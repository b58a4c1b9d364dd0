"""Several steps of an episode as one transition, for what decides once in so many steps. Pure, like all samplers."""

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
class Spans:
    """What SpanSampler draws from; spans are numbered among those that may be drawn."""

    count: int
    packed: Packed | None
    columns: dict[str, Tensor] = field(default_factory=dict)  # where they are not packed: of all rows of the data,
    rows: Tensor | None = None  # of which a span begins at these [S]
    ends: Tensor | None = None  # and has its last step at these
    made: dict[str, Tensor] = field(default_factory=dict)  # of the S spans
    weighted: Episodes | None = None  # where some episodes are drawn more often than others

    def take(self, picked: Tensor) -> Batch:
        """The spans numbered `picked` [B]."""
        if self.packed is not None:
            return self.packed.take(picked)
        assert self.rows is not None and self.ends is not None
        here = {"observations": self.columns["observations"][self.rows[picked]]}
        after = {"next_observations": self.columns["next_observations"][self.ends[picked]]}
        return {**here, **after, **{name: column[picked] for name, column in self.made.items()}}


@dataclass(frozen=True)
class SpanSampler:
    """Spans of `length` steps: observations at the first, next_observations after the last, rewards [B, length] of every step, and masks
    = 1 - whether the episode terminated within.

    A span that terminates is shorter, and its rewards beyond that are 0. One that the data cut short in another way, by a time limit
    or the end of a recording, is never drawn: what its last steps would have led to is not known.

    made: gives columns that an algorithm makes itself, for all R rows of the data; of each span there is the row where it begins.
    """

    length: int
    made: Callable[[Dataset], Mapping[str, Tensor]] | None = None

    def prepare(self, dataset: Dataset) -> Spans:
        """Raises UserError where no episode is long enough."""
        device = dataset.device
        starts, ends, rewards, masks = spans(dataset, self.length)
        if not len(starts):
            raise UserError(
                f"{dataset.spec.name}: no span of {self.length} steps to train on: every episode is shorter, and none terminates; "
                f"the longest has {int(dataset.episode_lengths().max())} steps"
            )
        # which are drawn follows from the episodes' weights
        weighted, kept, at = by_weight(dataset, starts.to(device), torch.arange(len(starts), device=device))
        at = torch.arange(len(starts), device=device) if at is None else at
        own = {"rewards": rewards, "masks": masks}
        made = {name: column.to(device)[at] for name, column in own.items()}
        made |= {name: column.to(device)[kept] for name, column in (self.made(dataset) if self.made else {}).items()}
        columns = {name: dataset.columns[name] for name in ("observations", "next_observations")}
        last = ends.to(device)[at]
        if not dataset.mapped:
            here = torch.arange(len(kept), device=device)
            late = {"next_observations": (columns["next_observations"], last), **{name: (c, here) for name, c in made.items()}}
            packed = pack({"observations": columns["observations"]}, kept, late)
            if packed is not None:
                return Spans(len(kept), packed, weighted=weighted)
        return Spans(len(kept), None, columns, kept, last, made, weighted)

    def __call__(self, source: Spans, key: Tensor, batch_size: int) -> Batch:
        picked = rng.randint(key, (batch_size,), source.count) if source.weighted is None else source.weighted.draw(key, batch_size)
        return source.take(picked)


def spans(dataset: Dataset, length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(first rows [S], last rows [S], rewards [S, length], masks [S] float32) of all spans that may be drawn, on the CPU."""
    columns = {name: dataset.columns[name].cpu() for name in ("rewards", "terminations", "successor_known")}
    lengths = dataset.episode_lengths().cpu()
    stop = torch.repeat_interleave(dataset.episode_end.cpu(), lengths)  # exclusive
    row = torch.arange(len(stop))
    ended = torch.zeros(len(stop), dtype=torch.bool)
    count, gains = torch.zeros_like(row), []
    for j in range(length):
        at = (row + j).clamp(max=len(row) - 1)
        going = ~ended & (row + j < stop)
        gains.append(torch.where(going, columns["rewards"][at], 0.0))
        count = count + going
        ended = ended | (going & columns["terminations"][at])
    last = row + count - 1
    whole = ended | ((count == length) & columns["successor_known"][last])
    return row[whole], last[whole], torch.stack(gains, 1)[whole], (~ended[whole]).float()
