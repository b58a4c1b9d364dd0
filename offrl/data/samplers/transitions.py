"""Samplers: pure functions from a dataset and a key to a batch. Same key, same batch, on any device and from memory or
disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.data.costs import refuse_costless
from offrl.data.dataset import Dataset
from offrl.data.raw import AMOUNTS
from offrl.data.samplers.tables import Batch, Table, table_of
from offrl.errors import UserError, nearest


class Sampler(Protocol):
    """Draws batches: `prepare` is called once, and what it returns is handed to every call."""

    def prepare(self, dataset: Dataset) -> Any:
        """Whatever makes sampling fast; holds the dataset's columns or copies of them."""

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
        """A batch with leading dimension `batch_size`."""


def draw_rows(key: Tensor, size: int, count: int, weighted: Episodes | None) -> Tensor:
    """`size` of `count` rows, all alike, or as `weighted` says."""
    return rng.randint(key, (size,), count) if weighted is None else weighted.draw(key, size)


@dataclass(frozen=True)
class Episodes:
    """Draws a row in two steps that cost the same however many there are: an episode, or a stretch of one, by Walker's
    alias method, and one of its rows.

    Episodes without a row that may be drawn are not in it. Rows are numbered among those that may be drawn.
    """

    alias_prob: Tensor  # [E] int64: see `alias_draw`
    alias_index: Tensor  # [E] int64
    first: Tensor  # [E] int64: its first row
    rows: Tensor  # [E] int64: how many it has

    def draw(self, key: Tensor, count: int) -> Tensor:
        """Row numbers [count]."""
        keys = rng.split(key, 3)
        column = rng.randint(keys[0], (count,), len(self.alias_prob))
        episode = alias_draw(keys[1], column, self.alias_prob, self.alias_index)
        return self.first[episode] + rng.randint(keys[2], (count,), self.rows[episode])


COIN = 1 << 53


def alias_draw(key: Tensor, columns: Tensor, alias_prob: Tensor, alias_index: Tensor) -> Tensor:
    """Each of columns e [B] with probability alias_prob[e] / 2**53, else alias_index[e]."""
    stays = rng.randint(key, tuple(columns.shape), COIN) < alias_prob[columns]
    return torch.where(stays, columns, alias_index[columns])


def alias_table(shares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's tables for probabilities proportional to `shares` [E]: (alias_prob, alias_index) of `alias_draw`.

    Column e of E equally likely ones holds e's own share and what another one has too much (Vose, 1991).
    """
    scaled = (shares.astype(np.float64) * (len(shares) / shares.sum())).tolist()
    alias_prob, alias_index = [COIN] * len(scaled), list(range(len(scaled)))
    small, large = [i for i, s in enumerate(scaled) if s < 1.0], [i for i, s in enumerate(scaled) if s >= 1.0]
    while small and large:
        low, high = small.pop(), large[-1]
        alias_prob[low], alias_index[low] = round(scaled[low] * COIN), high
        scaled[high] -= 1.0 - scaled[low]
        if scaled[high] < 1.0:
            small.append(large.pop())
    # what is left over has share 1, but for rounding
    return np.array(alias_prob, np.int64), np.array(alias_index, np.int64)


def weighted_rows(weights: Tensor, first: Tensor, rows: Tensor) -> Episodes | None:
    """The distribution of the rows of episodes with these weights, first rows and numbers of rows [E]; None where the
    weights are equal, so that rows are uniform.
    """
    if bool((weights == weights[0]).all()):
        return None
    alias_prob, alias_index = map(torch.from_numpy, alias_table((weights * rows).cpu().numpy()))
    return Episodes(alias_prob.to(rows.device), alias_index.to(rows.device), first, rows)


@dataclass(frozen=True)
class Transitions:
    """The source of TransitionSampler: the rows that may be drawn."""

    count: int
    table: Table
    weighted: Episodes | None = None  # where some episodes are drawn more often than others
    last: Tensor | None = (
        None  # for windows of several steps: the last of the rows that may be drawn in each one's episode
    )

    def take(self, indices: Tensor) -> Batch:
        """The transitions at indices [B] among the rows that may be drawn."""
        return self.table.take(indices)


# made of others, not stored: the action at the next observation, and the first observation of the row's episode, with
# the weight by which all episodes count alike, their mean number of rows over its own
NEXT_ACTIONS, FIRST, FIRST_WEIGHTS = "next_actions", "first_observations", "first_weights"
# of windows of n steps, beside step_rewards (and step_costs, where extra names costs), those of each step, 0 after the
# window's end [B, n]: which steps there are [B, n] bool; their number [B]
VALID, SPAN = "valid", "span"
FOLLOWING = "following_observations"  # of such windows too: the next observations of their first steps [B, O]
AT_END = ("next_observations", "masks", NEXT_ACTIONS)  # columns of a window's last step, not of its first


@dataclass(frozen=True)
class TransitionSampler:
    """Transitions, with replacement: observations, actions, rewards, masks = 1 - terminations, next_observations.

    Uniform, or where `Dataset.weights` says so, in proportion to the weight of the row or its episode.

    Rows without a known successor (the last of a time-out in a file without next observations) are never drawn: what
    follows them belongs to the next episode. A terminal row needs no successor.

    extra: more columns to put into the batch. "next_actions" is the action that the data take at the next observation;
    the last row of an episode that did not end in a terminal has none, and is not drawn then. A terminal row, whose
    mask is 0, repeats its own action. "first_observations" are those that the rows' episodes begin with, and come with
    "first_weights", under which each episode counts as much as another, whatever its length.

    n_step: above 1, windows of up to so many steps of one episode begin at each row: next_observations, masks and
    next_actions are those of the window's last step, and step_rewards, valid and span are added, of which `discounted`
    makes an n-step target; the state after the first step is following_observations. A window that the episode's end
    cuts is shorter, whether that is a terminal or a time-out.

    ordered: the source knows where episodes end (`Transitions.last`) though n_step is 1, for windows that others make.
    """

    extra: tuple[str, ...] = ()
    n_step: int = 1
    ordered: bool = False

    def prepare(self, dataset: Dataset) -> Transitions:
        """Raises UserError for a column that the data lack, and where no row may be drawn."""
        rows, ends = dataset.transition_rows(), dataset.per_row(dataset.episode_end - 1)
        columns = {name: dataset.columns[name] for name in ("observations", "actions", "rewards", "next_observations")}
        columns |= {name: column_of(dataset, name) for name in self.extra if name not in (NEXT_ACTIONS, FIRST)}
        if NEXT_ACTIONS in self.extra:
            rows = rows[(rows < ends[rows]) | dataset.columns["terminations"][rows]]
        refuse_none(dataset, rows)
        weighted, rows = by_weight(dataset, rows)
        last = last_of_episodes(dataset, rows) if self.n_step > 1 or self.ordered else None
        if last is not None:
            check_order(dataset, last, self.n_step)
        columns["masks"] = (~dataset.columns["terminations"]).to(torch.float32)
        extra_rows: dict[str, tuple[Tensor, Tensor | None]] = {}
        if NEXT_ACTIONS in self.extra:
            extra_rows[NEXT_ACTIONS] = columns["actions"], torch.minimum(rows + 1, ends[rows])
        if FIRST in self.extra:
            extra_rows[FIRST] = columns["observations"], dataset.per_row(dataset.episode_start)[rows]
            _, counts = torch.unique_consecutive(episode_of(dataset, rows), return_counts=True)
            extra_rows[FIRST_WEIGHTS] = torch.repeat_interleave(counts.float().mean() / counts, counts), None
        return Transitions(len(rows), table_of(dataset, columns, rows, extra_rows), weighted, last)

    def __call__(self, source: Transitions, key: Tensor, batch_size: int) -> Batch:
        indices = self.draw(source, key, batch_size)
        return source.take(indices) if source.last is None else windows(source, indices, self.n_step)

    @staticmethod
    def draw(source: Transitions, key: Tensor, batch_size: int) -> Tensor:
        """Places [B] among the rows that may be drawn."""
        return draw_rows(key, batch_size, source.count, source.weighted)


def windows(source: Transitions, indices: Tensor, length: int) -> Batch:
    """The windows of up to `length` steps that begin at indices [B]; see TransitionSampler."""
    positions, valid = places_ahead(source, indices, length)
    first, later = source.take(indices), source.take(positions[:, -1])
    batch = {name: later[name] if name in AT_END else column for name, column in first.items()}
    steps = {
        f"step_{name}": torch.where(valid, source.table.column(name, positions), 0.0)
        for name in AMOUNTS
        if name in first
    }
    return {**batch, **steps, VALID: valid, SPAN: valid.sum(-1), FOLLOWING: first["next_observations"]}


def places_ahead(source: Transitions, indices: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Places [B, length] of the steps from `indices` [B] on, after the episode's end its last one again and again; and
    bool: not yet.
    """
    assert source.last is not None
    at = indices.unsqueeze(-1) + torch.arange(length, device=indices.device)
    last = source.last[indices].unsqueeze(-1)
    return torch.minimum(at, last), at <= last


def episode_of(dataset: Dataset, rows: Tensor) -> Tensor:
    """The number of the episode of each of `rows` [...], int64."""
    return torch.searchsorted(dataset.episode_start.to(rows.device), rows, right=True) - 1


def last_of_episodes(dataset: Dataset, rows: Tensor) -> Tensor:
    """For each of `rows` [R], which may be drawn: the place among them of its episode's last one, int64 [R]."""
    _, counts = torch.unique_consecutive(episode_of(dataset, rows), return_counts=True)
    return torch.repeat_interleave(torch.cumsum(counts, 0) - 1, counts)


def check_order(dataset: Dataset, last: Tensor, n_step: int) -> None:
    """Raise UserError for windows of `n_step` steps where each episode has one transition alone. last: see
    `last_of_episodes`.
    """
    if n_step > 1 and is_single(last):
        raise UserError(
            f"{dataset.spec.name}: algo.n_step={n_step} sums the rewards of steps in a row, and each episode of the "
            "data has one transition: their order is not known; leave it at 1, or say where episodes end "
            "(dataset.fields.truncations or episode_ends)"
        )


def discounted(batch: Batch, discount: float | Tensor, column: str = "rewards") -> tuple[Tensor, Tensor | float]:
    """(rewards [B], the discount of what follows [B]) of a batch: of a window of m steps sum_k discount^k r_k and
    discount^m; of single transitions their rewards and `discount`. column: "costs" for costs."""
    if SPAN not in batch:
        return batch[column], discount
    amounts = batch[f"step_{column}"]
    powers = discount ** torch.arange(amounts.shape[-1], device=amounts.device)
    return (amounts * powers).sum(-1), discount ** batch[SPAN]


def is_single(last: Tensor) -> bool:
    """Whether each episode has one row alone. last: see `last_of_episodes`."""
    return bool((last == torch.arange(len(last), device=last.device)).all())


def masked(column: Tensor, valid: Tensor) -> Tensor:
    """A column [..., *shape] with zeros where `valid` [...] is False."""
    mask = valid.reshape(*valid.shape, *[1] * (column.ndim - valid.ndim))
    return torch.where(mask, column, torch.zeros((), dtype=column.dtype, device=column.device))


def refuse_none(dataset: Dataset, rows: Tensor) -> None:
    """Raise UserError where there are no rows to draw."""
    if not len(rows):
        raise UserError(
            f"{dataset.spec.name}: no transition to train on: no row has a successor in its episode, or is a terminal"
        )


def by_weight(dataset: Dataset, rows: Tensor) -> tuple[Episodes | None, Tensor]:
    """The weighted distribution of `rows`; those of weight 0 are left out. Raises UserError where none is left."""
    if dataset.weights is None:
        return None, rows
    weights = dataset.row_weights().to(rows.device)[rows]
    rows, weights = rows[weights > 0.0], weights[weights > 0.0]
    if not len(rows):
        raise UserError(f"{dataset.spec.name}: no transition has a weight above 0: take another dataset.weighting")
    return weighted_stretches(weights, episode_of(dataset, rows)), rows


def weighted_stretches(weights: Tensor, episode: Tensor) -> Episodes | None:
    """The distribution of rows with these weights and episodes' numbers [R], drawn by stretches of one episode and
    weight; None where the weights are equal.
    """
    begins = torch.ones_like(episode, dtype=torch.bool)
    begins[1:] = (episode[1:] != episode[:-1]) | (weights[1:] != weights[:-1])
    first = torch.nonzero(begins).squeeze(-1)
    return weighted_rows(weights[first], first, torch.diff(first, append=first.new_tensor([len(episode)])))


def column_of(dataset: Dataset, name: str) -> Tensor:
    """An extra column. Raises UserError where the data lack it."""
    if name in dataset.columns:
        return dataset.columns[name]
    if name == "costs":
        refuse_costless(dataset, "the algorithm")
    if name == "returns_to_go":
        raise UserError(
            f"{dataset.spec.name}: the algorithm needs discounted returns to go: dataset.discount_returns=DISCOUNT, "
            "with its own discount"
        )
    raise UserError(
        f"{dataset.spec.name}: the algorithm needs the column '{name}', which the data "
        f"lack.{nearest(name, dataset.columns)}"
    )
