"""Windows of consecutive steps of one episode, for sequence models. Pure, like all samplers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.goals import ACTOR_GOALS
from offrl.data.samplers.stitches import Stitches, later, stitches
from offrl.data.samplers.tables import Table, table_of
from offrl.data.samplers.transitions import Batch, Episodes, column_of, draw_rows, masked, weighted_stretches
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError

RETURNS, COSTS = "returns_to_go", "costs_to_go"
STEPS = "timesteps"
VALID = "valid"


@dataclass(frozen=True)
class Sequences:
    """The source of SequenceSampler. Rows are numbered among those of the episodes that are drawn, which stand one
    after another.
    """

    count: int
    last: Tensor  # [R] int64: the last row of each row's episode
    table: Table
    weighted: Episodes | None = None  # where some episodes are drawn more often than others


@dataclass(frozen=True)
class GoalSequences(Sequences):
    """The source of GoalSequenceSampler."""

    stitches: Stitches | None = None  # where goals are also of other episodes


@dataclass(frozen=True)
class SequenceSampler:
    """Windows of K steps: observations [B, K, O], actions, rewards, returns_to_go, timesteps int64 and valid bool [B,
    K].

    A window starts at a row drawn uniformly, or in proportion to the weight of its episode where `Dataset.weights` says
    so: so an episode is drawn in proportion to its length, as in the authors' code (arXiv 2106.01345). Where the
    episode ends inside the window the rest is zeros that are not `valid`, at the end, or with `left_padded` at the
    beginning.

    returns_to_go is the undiscounted sum of the recorded rewards from this step to the episode's end, rewards are the
    transformed ones. Episodes of which the data lack the end (`Dataset.complete`) have no such sum; they are left out,
    unless there are no others.

    length: K. extra: more columns; costs_to_go is made of the costs as returns_to_go of the rewards. derived_columns:
    gives columns that an algorithm makes itself, float32 or int64, for all R rows of the data."""

    length: int
    extra: tuple[str, ...] = ()
    left_padded: bool = False
    derived_columns: Callable[[Dataset], Mapping[str, Tensor]] | None = None

    def prepare(self, dataset: Dataset) -> Sequences:
        """Raises UserError for a column that the data lack, and where no episode may be drawn."""
        all_rows, last, weighted = drawn_rows(dataset)
        rows = None if len(all_rows) == len(dataset) else all_rows
        columns = {name: dataset.columns[name] for name in ("observations", "actions", "rewards")}
        columns |= {name: column_of(dataset, name) for name in self.extra if name != COSTS}
        derived = {
            RETURNS: recorded_returns_to_go(dataset),
            **({COSTS: costs_to_go(dataset)} if COSTS in self.extra else {}),
            **(self.derived_columns(dataset) if self.derived_columns else {}),
            STEPS: dataset.steps(),
        }
        table = table_of(dataset, columns, rows, {name: (c.to(all_rows.device), rows) for name, c in derived.items()})
        return Sequences(len(all_rows), last, table, weighted)

    def __call__(self, source: Sequences, key: Tensor, batch_size: int) -> Batch:
        return windows(source, self.draw(source, key, batch_size), self.length, self.left_padded)

    @staticmethod
    def draw(source: Sequences, key: Tensor, batch_size: int) -> Tensor:
        """The first rows [B] of windows."""
        return draw_rows(key, batch_size, source.count, source.weighted)


@dataclass(frozen=True)
class GoalSequenceSampler(SequenceSampler):
    """SequenceSampler's windows, each with one goal for all of its steps, ACTOR_GOALS [B, G]: where the episode is
    after the window, any of the later rows alike, or at its end where the window reaches that.

    Of data with clusters (`Dataset.stitch`) a share of the windows is stitched as in arXiv 2401.11237. A later row j of
    the episode gives way to another row w of its cluster. Where j lies in the window, it goes on at w to its full
    length; the goal is of what follows, in w's episode. (j, w) are drawn up to eight times, until there is something to
    follow; where there never is, the window stays as it was.

    goals: the column that goals are taken from.
    """

    goals: str = "observations"

    stitching: ClassVar[bool] = True

    def prepare(self, dataset: Dataset) -> GoalSequences:
        return GoalSequences(**vars(super().prepare(dataset)), stitches=stitches(dataset, drawn_rows(dataset)[0]))

    def __call__(self, source: Sequences, key: Tensor, batch_size: int) -> Batch:
        assert isinstance(source, GoalSequences)
        keys = rng.split(key, 3)
        begin = self.draw(source, keys[0], batch_size)
        rows, valid = window_rows(source, begin, self.length, self.left_padded)
        last = source.last[begin]
        goals = later(keys[1], torch.minimum(begin + self.length, last), last)
        if source.stitches is not None:
            rows, valid, goals = self._stitched(source, source.stitches, keys[2], begin, rows, valid, goals)
        return {**gather(source, rows, valid), ACTOR_GOALS: source.table.take(goals)[self.goals].flatten(1).float()}

    def _stitched(
        self, source: Sequences, known: Stitches, key: Tensor, begin: Tensor, rows: Tensor, valid: Tensor, goals: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, tries = rng.split(key, 4), (TRIES, len(begin))
        ahead = (source.last[begin] - begin).expand(tries)
        steps = 1 + rng.randint(keys[0], tries, ahead.clamp(min=1))  # from the window's first row to j
        other = known.through(keys[1], torch.minimum(begin + steps, source.last[begin]))
        after = other + (self.length - steps).clamp(min=0)  # the first row that may be the goal
        fits = (after <= source.last[other]) & (ahead > 0)
        chosen = fits.int().argmax(0, keepdim=True)  # the first try of those that fit
        steps, other, after = (x.gather(0, chosen).squeeze(0) for x in (steps, other, after))
        use = fits.any(0) & rng.bernoulli(keys[2], (len(begin),), known.probability)
        index = torch.arange(self.length, device=begin.device)
        original, join = begin.unsqueeze(-1) + index, steps.unsqueeze(-1)
        pieces = torch.where(index < join, original, other.unsqueeze(-1) + index - join)
        end = source.last[other]
        goal = later(keys[3], torch.minimum(after, end), end)
        wide = use.unsqueeze(-1)
        return torch.where(wide, pieces, rows), valid | wide, torch.where(use, goal, goals)


TRIES = 8


def windows(source: Sequences, begin: Tensor, length: int, left_padded: bool = False) -> Batch:
    """The windows of `length` steps that start at rows `begin` [B]; see SequenceSampler."""
    return gather(source, *window_rows(source, begin, length, left_padded))


def window_rows(source: Sequences, begin: Tensor, length: int, left_padded: bool) -> tuple[Tensor, Tensor]:
    """(rows int64, valid bool) [B, length] of such windows."""
    index = torch.arange(length, device=begin.device)
    last = source.last[begin].unsqueeze(-1)  # [B, 1]
    if left_padded:
        index = index - (length - (last - begin.unsqueeze(-1) + 1)).clamp(min=0)
    at = begin.unsqueeze(-1) + index
    valid = (at <= last) & (index >= 0)
    return torch.minimum(torch.maximum(at, begin.unsqueeze(-1)), last), valid


def gather(source: Sequences, rows: Tensor, valid: Tensor) -> Batch:
    """The columns of rows [B, K], zeros where they are not `valid` [B, K], and `valid`."""
    batch = source.table.take(rows.flatten())
    return {name: masked(column.unflatten(0, rows.shape), valid) for name, column in batch.items()} | {VALID: valid}


def drawn_episodes(dataset: Dataset) -> Tensor:
    """Numbers of the episodes that sequence models learn from, int64. Raises UserError where there is none."""
    usable = torch.ones(dataset.num_episodes, dtype=torch.bool, device=dataset.device)
    if len(dataset.complete) and bool(dataset.complete.any()):
        usable = dataset.complete.to(dataset.device)
    if dataset.weights is not None:
        usable = usable & (dataset.episode_shares().to(dataset.device) > 0.0)
    if not bool(usable.any()):
        raise UserError(f"{dataset.spec.name}: no whole episode has a weight above 0: take another dataset.weighting")
    return torch.nonzero(usable).squeeze(-1)


def recorded_returns_to_go(dataset: Dataset) -> Tensor:
    """Sums of the rewards, as they were recorded, from each row to the end of its episode, [R] float32 on the CPU."""
    spec = dataset.spec
    rewards = (dataset.columns["rewards"].cpu().double().numpy() - spec.reward_shift) / (spec.reward_scale or 1.0)
    return _to_go(dataset, rewards)


def costs_to_go(dataset: Dataset) -> Tensor:
    """Sums of the costs, likewise. Raises UserError where the data have none."""
    return _to_go(dataset, column_of(dataset, "costs").cpu().double().numpy())


def _to_go(dataset: Dataset, amounts: np.ndarray) -> Tensor:
    values = returns_to_go(amounts, np.zeros(len(amounts)), *dataset.bounds(), 1.0)  # an episode ends where it ends
    return torch.from_numpy(values.astype(np.float32))


def drawn_rows(dataset: Dataset) -> tuple[Tensor, Tensor, Episodes | None]:
    """(rows [R] int64 of `drawn_episodes`; for each of them the place among them of its episode's last one, [R] int64;
    their distribution where `Dataset.weights` differ, None: uniform). Raises UserError where there is none."""
    episodes = drawn_episodes(dataset)
    lengths = dataset.episode_lengths()[episodes]
    ends = torch.cumsum(lengths, 0)
    rows, weighted = dataset.rows_of(episodes), None
    if dataset.weights is not None:
        weights = dataset.row_weights().to(rows.device)[rows]
        weighted = weighted_stretches(weights, torch.repeat_interleave(episodes, lengths))
    return rows, torch.repeat_interleave(ends - 1, lengths), weighted
