"""Windows of states, for world models of latent states: what is seen, done and received at K moments in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.tables import Experience, Table, nested, table_of
from offrl.data.samplers.transitions import (
    NEXT_ACTIONS,
    SPAN,
    VALID,
    Batch,
    Episodes,
    column_of,
    draw_rows,
    weighted_stretches,
)
from offrl.errors import UserError

IS_FIRST, IS_LAST, IS_TERMINAL = "is_first", "is_last", "is_terminal"
PREVIOUS_ACTIONS, ARRIVAL_REWARDS = "previous_actions", "arrival_rewards"
FLAGS = (IS_FIRST, IS_LAST, IS_TERMINAL, VALID)


@dataclass(frozen=True)
class StateWindows:
    """The source of StateSampler: the states of episodes that are drawn, one after another."""

    begins: Tensor  # [W] int64: the states that windows may begin at
    table: Table  # [S]
    final: Tensor  # [S] bool: the state is the successor of its row
    weighted: Episodes | None = None  # where some windows are drawn more often than others
    ends: Tensor | None = None  # [W] int64: the last states of their episodes, where windows may reach beyond

    @property
    def count(self) -> int:
        """How many windows there are."""
        return len(self.begins)

    def mean_size(self, column: str) -> Tensor:
        """The mean absolute value of a column over all steps, []."""
        return self.table.column(column, (~self.final).nonzero().squeeze(-1)).abs().mean()


StateSource = StateWindows | Experience


@dataclass(frozen=True)
class StateSampler:
    """Windows of K states: observations [B, K, O], or of several streams a dictionary; actions and rewards [B, K], of
    the step from each state on; previous_actions and arrival_rewards, of the step that led to it; is_first, is_last,
    is_terminal and valid bool [B, K].

    An episode of L rows has L + 1 states where its last row's successor is known or was a terminal, else L. The last of
    L + 1 has the actions and rewards of the row before, which nobody did there; the first has no arrival: zeros. A
    terminal state that the data lack repeats the observation before it and is not `valid`.

    kind: "strict": a window lies in one episode, all such alike, as in TD-MPC2 (arXiv 2310.16828); "chain": a window
    goes on into the next episode, as in Dreamer (arXiv 2301.04104), and its first state counts as an episode's first.
    past_end: strict windows may also begin at every row of an episode that ends in a terminal; its last state is
    repeated to their ends (MR.Q, arXiv 2501.16142).
    extra: columns that are taken along; the last of L + 1 states has the values of the row before.
    Where `Dataset.weights` says so, windows are drawn in proportion to the weight of the row that they begin at; of an
    `Experience` all that were played alike.
    """

    length: int
    kind: str = "strict"
    past_end: bool = False
    extra: tuple[str, ...] = ()

    @property
    def n_step(self) -> int:
        """The most steps that targets may sum from a window's first state on."""
        return self.length - 1

    def prepare(self, dataset: Dataset) -> StateWindows:
        """Raises UserError where no window fits into the data."""
        columns, device = dataset.columns, dataset.device
        weights, weighed = dataset.row_weights().to(device), dataset.episode_shares().to(device) > 0.0
        starts, last = dataset.episode_start.to(device)[weighed], dataset.episode_end.to(device)[weighed] - 1
        counts = last - starts + 1 + (columns["successor_known"] | columns["terminations"])[last].long()
        step, episode = _steps(counts)
        final = step > (last - starts)[episode]
        rows = starts[episode] + step - final.long()
        before = (starts[episode] + step - 1).clamp(min=0)
        terminal = final & columns["terminations"][rows]
        flags = {
            IS_FIRST: step == 0,
            IS_LAST: step == counts[episode] - 1,
            IS_TERMINAL: terminal,
            VALID: ~terminal | columns["successor_known"][rows],
        }
        table = table_of(
            dataset,
            {name: columns[name] for name in ("observations", "next_observations", "actions", "rewards")}
            | {name: column_of(dataset, name) for name in self.extra},
            rows,
            {
                PREVIOUS_ACTIONS: (columns["actions"], before),
                ARRIVAL_REWARDS: (columns["rewards"], before),
                **{name: (flag.to(torch.float32), None) for name, flag in flags.items()},
            },
        )
        ahead = counts[episode] - step if self.kind == "strict" else len(step) - _numbers(step)
        enough = ahead >= self.length
        if self.past_end:
            enough |= columns["terminations"][last][episode] & ~final
        begins = torch.nonzero(enough & (weights[rows] > 0.0)).squeeze(-1)
        if not len(begins):
            raise UserError(
                f"{dataset.spec.name}: no window of {self.length} states is in the data, of which at most "
                f"{int(ahead.max())} follow one another: a smaller algo.horizon, length or representation_horizon"
            )
        weighted = None if dataset.weights is None else weighted_stretches(weights[rows[begins]], episode[begins])
        ends = (counts.cumsum(0) - 1)[episode[begins]] if self.past_end else None
        return StateWindows(begins, table, final, weighted, ends)

    def __call__(self, source: StateSource, key: Tensor, batch_size: int) -> Batch:
        if isinstance(source, Experience):
            rows = rng.randint(key, (batch_size,), source.filled)
            return nested({name: column[rows] for name, column in source.played.items()})
        windows = draw_rows(key, batch_size, len(source.begins), source.weighted).unsqueeze(-1)
        at = source.begins[windows] + torch.arange(self.length, device=windows.device)
        if source.ends is not None:
            at = torch.minimum(at, source.ends[windows])
        taken = source.table.take(at.flatten())
        batch: Batch = pytree.tree_map(lambda x: x.unflatten(0, at.shape), taken)
        pairs = batch.pop("next_observations"), batch["observations"]
        final = source.final[at]
        batch["observations"] = pytree.tree_map(lambda after, x: torch.where(_beside(final, x), after, x), *pairs)
        batch |= {name: batch[name] > 0.0 for name in FLAGS}
        return opened(batch, self.kind == "chain")


def opened(batch: Batch, chain: bool) -> Batch:
    """Windows [..., K, ...] without what led to the first states of episodes; with `chain` a window's first state is
    one.
    """
    first = batch[IS_FIRST]
    if chain:
        batch[IS_FIRST] = first | (torch.arange(first.shape[-1], device=first.device) == 0)
    for name in (PREVIOUS_ACTIONS, ARRIVAL_REWARDS):
        batch[name] = torch.where(_beside(batch[IS_FIRST], batch[name]), 0, batch[name])
    return batch


def in_time(batch: Batch) -> Batch:
    """A batch of windows [B, K, ...] with the steps first: [K, B, ...]."""
    return pytree.tree_map(lambda column: column.transpose(0, 1), batch)


def steps_of(columns: Any, index: int | slice) -> Any:
    """Some of the steps of a column [K, ...], or of all in a dictionary."""
    return pytree.tree_map(lambda x: x[index], columns)


def going_on(batch: Batch) -> Tensor:
    """1 for the states of windows with the steps first that no terminal came before or at, else 0: [K, B]."""
    return (1.0 - batch[IS_TERMINAL].float()).cumprod(0)


def first_steps(batch: Batch, count: int) -> Batch:
    """The first steps of windows of states, with the steps first, as `TransitionSampler` gives transitions, or for a
    count above 1 windows of so many steps; next_actions too. The windows have at least count + 2 states, so that these
    actions were done.
    """
    goes_on = going_on(batch)[: count + 1]
    rows: Batch = {name: steps_of(batch[name], 0) for name in ("observations", "actions", "rewards")}
    rows |= {"next_observations": steps_of(batch["observations"], count), "masks": goes_on[count]}
    rows[NEXT_ACTIONS] = batch["actions"][count]
    if count > 1:
        valid = goes_on[:count].T > 0.0
        rows |= {"step_rewards": torch.where(valid, batch["rewards"][:count].T, 0.0), VALID: valid}
        rows[SPAN] = valid.sum(-1)
    return rows


def _beside(mask: Tensor, column: Tensor) -> Tensor:
    """A mask [..., K] that broadcasts over a column [..., K, ...]."""
    return mask.reshape(*mask.shape, *[1] * (column.ndim - mask.ndim))


def _numbers(values: Tensor) -> Tensor:
    return torch.arange(len(values), device=values.device)


def _steps(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of the states of episodes that have so many [E]: each one's number in its episode, and the episode's, [S]
    int64.
    """
    episode = torch.repeat_interleave(_numbers(counts), counts)
    return _numbers(episode) - (counts.cumsum(0) - counts)[episode], episode
