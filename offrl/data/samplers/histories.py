"""Data of several tasks with a past: the steps before a transition, and segments of a task's best episodes as a
prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.contexts import CONTEXT, TASKS, ranked_episodes
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID, SequenceSampler, recorded_returns_to_go
from offrl.data.samplers.transitions import (
    Batch,
    Episodes,
    alias_draw,
    alias_table,
    by_weight,
    draw_rows,
    masked,
    refuse_none,
)

PROMPT = "prompt_"  # before the names of a prompt's columns


@dataclass(frozen=True)
class Histories:
    """The source of HistorySampler."""

    columns: dict[str, Tensor]  # of the data, all rows
    step: Tensor  # [R] int64: the row's step within its episode
    rows: Tensor  # [n] rows that may be drawn
    weighted: Episodes | None = None


@dataclass(frozen=True)
class HistorySampler:
    """Transitions with the `length` ones before them in their episode: past_observations [B, h, O], past_actions,
    past_rewards [B, h], zeros where there are none, which past_valid [B, h] marks, always at the front."""

    length: int

    def prepare(self, dataset: Dataset) -> Histories:
        """Raises UserError where there is no transition."""
        weighted, rows = by_weight(dataset, dataset.transition_rows())
        refuse_none(dataset, rows)
        return replace(self.all_rows(dataset), rows=rows, weighted=weighted)

    def all_rows(self, dataset: Dataset) -> Histories:
        """All rows of the data, for `take`."""
        columns = {name: dataset.columns[name] for name in CONTEXT}
        return Histories(columns, dataset.steps(), torch.arange(len(dataset), device=dataset.device))

    def __call__(self, source: Histories, key: Tensor, batch_size: int) -> Batch:
        return self.take(source, source.rows[draw_rows(key, batch_size, len(source.rows), source.weighted)])

    def take(self, source: Histories, rows: Tensor) -> Batch:
        """The batch of these rows [B]."""
        batch = {name: column[rows] for name, column in source.columns.items()}
        back = torch.arange(-self.length, 0, device=rows.device)
        valid = source.step[rows].unsqueeze(-1) + back >= 0
        at = torch.where(valid, rows.unsqueeze(-1) + back, rows.unsqueeze(-1))
        for name in ("observations", "actions", "rewards"):
            batch["past_" + name] = masked(source.columns[name][at], valid)
        return {**batch, "past_valid": valid}


@dataclass(frozen=True)
class Windows:
    """Rows at which prompts may begin, by task, as Walker's tables."""

    tasks: Tensor  # [R] int64: the number, among tasks, of each row's one
    begin: Tensor  # [W] rows, task by task
    last: Tensor  # [W] the last rows of their episodes
    alias_prob: Tensor  # [W] int64: see `alias_draw`
    alias_index: Tensor  # [W] int64
    first: Tensor  # [T] int64: each task's first window
    size: Tensor  # [T] int64: how many it has

    def draw(self, key: Tensor, tasks: Tensor) -> Tensor:
        """Numbers of windows [B] of tasks [B]."""
        keys = rng.split(key)
        columns = self.first[tasks] + rng.randint(keys[0], tuple(tasks.shape), self.size[tasks])
        return alias_draw(keys[1], columns, self.alias_prob, self.alias_index)


def prompt_windows(dataset: Dataset, error: Tensor, length: int, episodes: int, history: int) -> Windows:
    """`length` consecutive steps of the `episodes` best episodes, by return, of each task, among `ranked_episodes`.

    Each such episode is as likely as another, and in it a window in proportion to the sum of `error` [R], not negative,
    over its rows. It begins `history` steps after its episode at the earliest and ends within it; of an episode that is
    too short for that it is the beginning.
    """
    start, end = dataset.bounds()
    lengths = end - start
    tasks, complete = (x.cpu().numpy() for x in ranked_episodes(dataset))
    returns = dataset.raw_returns.cpu().numpy()
    total = np.concatenate([[0.0], error.double().cpu().numpy().cumsum()])
    names, number = np.unique(tasks, return_inverse=True)
    begin, last, alias_prob, alias_index, first = [], [], [], [], [0]
    for task in range(len(names)):
        indices = np.flatnonzero((number == task) & complete)
        shares = []
        for e in indices[np.argsort(-returns[indices], kind="stable")][:episodes]:
            fits = lengths[e] >= history + length
            at = start[e] + (np.arange(history, lengths[e] - length + 1) if fits else np.zeros(1, np.int64))
            weight = total[np.minimum(at + length, end[e])] - total[at] + 1e-12
            begin.append(at)
            last.append(np.full(len(at), end[e] - 1))
            shares.append(weight / weight.sum())
        threshold, instead = alias_table(np.concatenate(shares))
        alias_prob.append(threshold)
        alias_index.append(instead + first[-1])
        first.append(first[-1] + len(threshold))
    parts = [np.concatenate(x) for x in (begin, last, alias_prob, alias_index)]
    tables = [torch.from_numpy(x.astype(np.int64)) for x in (*parts, np.array(first[:-1]), np.diff(first))]
    return Windows(*(x.to(dataset.device) for x in (dataset.per_row(torch.from_numpy(number)), *tables)))


@dataclass(frozen=True)
class Prompted:
    """The source of PromptSampler."""

    steps: Any  # what the sampler of the windows prepared
    windows: Windows
    columns: dict[str, Tensor]  # of prompts, all rows of the data


@dataclass(frozen=True)
class PromptSampler:
    """The batches of `windows`, and before each of them `length` steps of another, or the same, episode of its task:
    prompt_observations, prompt_actions, prompt_returns_to_go, prompt_timesteps and prompt_valid, [B, L, ...]. choose:
    what says where prompts may begin."""

    windows: SequenceSampler
    length: int
    choose: Callable[[Dataset], Windows]

    def prepare(self, dataset: Dataset) -> Prompted:
        """Raises UserError where the data do not say which task an episode belongs to."""
        episodes = self.choose(dataset)
        base = self.windows.derived_columns

        def made(data: Dataset) -> dict[str, Tensor]:
            return {**(base(data) if base else {}), TASKS: episodes.tasks}

        source = replace(self.windows, derived_columns=made).prepare(dataset)
        columns = {name: dataset.columns[name] for name in ("observations", "actions")}
        columns |= {RETURNS: recorded_returns_to_go(dataset).to(dataset.device), STEPS: dataset.steps()}
        return Prompted(source, episodes, columns)

    def __call__(self, source: Prompted, key: Tensor, batch_size: int) -> Batch:
        keys = rng.split(key)
        batch = self.windows(source.steps, keys[0], batch_size)
        indices = source.windows.draw(keys[1], batch.pop(TASKS).amax(1))  # padding is 0
        at = source.windows.begin[indices].unsqueeze(-1) + torch.arange(self.length, device=key.device)
        valid = at <= source.windows.last[indices].unsqueeze(-1)
        rows = at.minimum(source.windows.last[indices].unsqueeze(-1))
        prompt = {PROMPT + name: column[rows] for name, column in source.columns.items()}
        return {**batch, **prompt, PROMPT + VALID: valid}
