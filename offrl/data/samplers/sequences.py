"""Windows of consecutive steps of one episode, for sequence models. Pure, like all samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Episodes, Packed, alias_table, pack
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError

RETURNS = "returns_to_go"
STEPS = "timesteps"
VALID = "valid"


@dataclass(frozen=True)
class Sequences:
    """The source of SequenceSampler. Rows are numbered among those of the episodes that are drawn, which stand one after another."""

    count: int
    last: Tensor  # [R] int64: the last row of each row's episode
    packed: Packed | None
    columns: dict[str, Tensor] = field(default_factory=dict)  # where they are not packed: of all rows of the data, of which
    rows: Tensor | None = None  # [R] these are meant
    made: dict[str, Tensor] = field(default_factory=dict)  # columns of the R rows
    weighted: Episodes | None = None  # where some episodes are drawn more often than others

    def take(self, rows: Tensor) -> Batch:
        """The columns of rows [B]."""
        if self.packed is not None:
            return self.packed.take(rows)
        at = rows if self.rows is None else self.rows[rows]
        return {name: c[at] for name, c in self.columns.items()} | {name: c[rows] for name, c in self.made.items()}


@dataclass(frozen=True)
class SequenceSampler:
    """Windows of K steps: observations [B, K, O], actions, rewards, returns_to_go, timesteps int64 and valid bool [B, K].

    A window starts at a row drawn uniformly, or in proportion to the weight of its episode where `Dataset.weights` says so: so an episode
    is drawn in proportion to its length, as in the authors' code (arXiv 2106.01345). Where the episode ends inside the window the rest is
    zeros that are not `valid`, at the end, or with `left` at the beginning.

    returns_to_go is the undiscounted sum of the recorded rewards from this step to the episode's end, rewards are the transformed ones.
    Episodes of which the data lack the end (`Dataset.complete`) have no such sum; they are left out, unless there are no others.

    length: K. extra: more columns. made: gives columns that an algorithm makes itself, float32 or int64, for all R rows of the data.
    """

    length: int
    extra: tuple[str, ...] = ()
    left: bool = False
    made: Callable[[Dataset], Mapping[str, Tensor]] | None = None

    def prepare(self, dataset: Dataset) -> Sequences:
        """Raises UserError for a column that the data lack, and where no episode may be drawn."""
        device = dataset.device
        start, end = dataset.episode_start, dataset.episode_end
        drawn = drawn_episodes(dataset)
        lengths = (end - start)[drawn]
        total = int(lengths.sum())
        first = torch.cumsum(lengths, 0) - lengths
        every = len(drawn) == dataset.num_episodes
        steps = torch.arange(total, device=device) - torch.repeat_interleave(first, lengths)
        rows = None if every else torch.repeat_interleave(start[drawn], lengths) + steps
        last = torch.repeat_interleave(first + lengths - 1, lengths)
        columns = {name: dataset.columns[name] for name in ("observations", "actions", "rewards")}
        for name in self.extra:
            if name not in dataset.columns:
                raise UserError(f"{dataset.spec.name}: the algorithm needs the column '{name}', which the data lack")
            columns[name] = dataset.columns[name]
        extra = {RETURNS: recorded_returns_to_go(dataset), **(self.made(dataset) if self.made else {})}
        made = {name: (c.to(device) if rows is None else c.to(device)[rows]) for name, c in extra.items()} | {STEPS: steps}
        packed = None
        if not dataset.mapped:
            position = torch.arange(total, device=device)
            packed = pack(columns, position if rows is None else rows, {name: (c, position) for name, c in made.items()})
        weighted = weighted_episodes(dataset, drawn, lengths, first)
        if packed is not None:
            return Sequences(total, last, packed, weighted=weighted)
        return Sequences(total, last, None, columns, rows, made, weighted)

    def __call__(self, source: Sequences, key: Tensor, batch_size: int) -> Batch:
        if source.weighted is None:
            begin = rng.randint(key, (batch_size,), source.count)
        else:
            begin = source.weighted.draw(key, batch_size)
        return windows(source, begin, self.length, self.left)


def windows(source: Sequences, begin: Tensor, length: int, left: bool = False) -> Batch:
    """The windows of `length` steps that start at rows `begin` [B]; see SequenceSampler."""
    index = torch.arange(length, device=begin.device)
    last = source.last[begin].unsqueeze(-1)  # [B, 1]
    if left:
        index = index - (length - (last - begin.unsqueeze(-1) + 1)).clamp(min=0)
    at = begin.unsqueeze(-1) + index
    valid = (at <= last) & (index >= 0)
    rows = torch.minimum(torch.maximum(at, begin.unsqueeze(-1)), last)
    batch = source.take(rows.flatten())
    shaped = {}
    for name, column in batch.items():
        column = column.unflatten(0, rows.shape)
        mask = valid.reshape(*valid.shape, *[1] * (column.ndim - 2))
        shaped[name] = torch.where(mask, column, torch.zeros((), dtype=column.dtype, device=column.device))
    return {**shaped, VALID: valid}


def drawn_episodes(dataset: Dataset) -> Tensor:
    """Numbers of the episodes that sequence models learn from, int64. Raises UserError where there is none."""
    usable = torch.ones(dataset.num_episodes, dtype=torch.bool, device=dataset.device)
    if len(dataset.complete) and bool(dataset.complete.any()):
        usable = dataset.complete.to(dataset.device)
    if dataset.weights is not None:
        usable = usable & (dataset.weights.to(dataset.device) > 0.0)
    if not bool(usable.any()):
        raise UserError(f"{dataset.spec.name}: no whole episode has a weight above 0: take another dataset.weighting")
    return torch.nonzero(usable).squeeze(-1)


def recorded_returns_to_go(dataset: Dataset) -> Tensor:
    """Sums of the rewards, as they were recorded, from each row to the end of its episode, [R] float32 on the CPU."""
    spec = dataset.spec
    rewards = (dataset.columns["rewards"].cpu().double().numpy() - spec.reward_shift) / (spec.reward_scale or 1.0)
    start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    values = returns_to_go(rewards, np.zeros(len(rewards)), start, end, 1.0)  # an episode ends where it ends
    return torch.from_numpy(values.astype(np.float32))


def weighted_episodes(dataset: Dataset, drawn: Tensor, lengths: Tensor, first: Tensor) -> Episodes | None:
    """The distribution of rows where `Dataset.weights` differ: `drawn` episodes [E], their lengths and first rows; None: uniformly."""
    if dataset.weights is None:
        return None
    weights = dataset.weights.to(drawn.device)[drawn]
    if bool((weights == weights[0]).all()):
        return None
    keep, other = alias_table((weights * lengths).cpu().numpy())
    return Episodes(torch.from_numpy(keep).to(drawn.device), torch.from_numpy(other).to(drawn.device), first, lengths)
