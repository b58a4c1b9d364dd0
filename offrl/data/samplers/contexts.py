"""Data of several tasks: which task an episode belongs to, and a task's transitions as a context to learn in.

The column `tasks` (integers, the same in all rows of an episode) holds it. The number of a task is also what its
environment is told: one that can be set to a task takes `task=NUMBER` (see `offrl.evaluation.in_context`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.sequences import drawn_episodes
from offrl.data.samplers.tables import Table, table_of
from offrl.data.samplers.transitions import Batch, Episodes, by_weight, draw_rows
from offrl.errors import UserError, nearest

TASKS = "tasks"
OPTIMAL = "optimal_actions"
CONTEXT = ("observations", "actions", "next_observations", "rewards")


def episode_tasks(dataset: Dataset) -> Tensor:
    """The task of each episode, [E] int64. Raises UserError where the data do not say it, or an episode has two."""
    column = whole_numbers(dataset, TASKS, "which task each row belongs to")
    first = column[dataset.episode_start]
    wrong = torch.nonzero(column != dataset.per_row(first)).squeeze(-1)
    if len(wrong):
        row = int(wrong[0])
        episode = int(torch.searchsorted(dataset.episode_start, row, right=True)) - 1
        raise UserError(
            f"{dataset.spec.name}: episode {episode} belongs to two tasks, {int(first[episode])} and in row {row} "
            f"{int(column[row])}: the column '{TASKS}' must be the same in all rows of an episode"
        )
    return first


def ranked_episodes(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """(tasks, ranked): the task of each episode, and whether its return says what can be earned there, both [E]: of the
    episodes that sequence models learn from, or of all where a task has none of them."""
    tasks = episode_tasks(dataset)
    ranked = torch.zeros_like(tasks, dtype=torch.bool)
    ranked[drawn_episodes(dataset)] = True
    return tasks, ranked | ~torch.isin(tasks, tasks[ranked])


def whole_numbers(dataset: Dataset, name: str, meaning: str) -> Tensor:
    """A column [R] as int64. Raises UserError where the data lack it, or it holds anything else."""
    if name not in dataset.columns:
        hint = nearest(name, dataset.columns) or f" A file that calls it otherwise: dataset.fields.{name}=KEY"
        raise UserError(
            f"{dataset.spec.name}: the algorithm needs the column '{name}', {meaning}, which the data lack.{hint}"
        )
    column = dataset.columns[name]
    column = column.squeeze(-1) if column.ndim == 2 and column.shape[1] == 1 else column
    if column.ndim != 1 or (column.is_floating_point() and not bool((column == column.round()).all())):
        raise UserError(f"{dataset.spec.name}: the column '{name}' must hold one whole number for each row")
    return column.long()


def optimal_actions(dataset: Dataset) -> tuple[Tensor, Tensor]:
    """(labels, rows): the column of optimal actions as networks see actions, int64 [R] or float32 [R, A] in [-1, 1],
    and the rows that have one: a negative integer means that it is not known. Raises UserError for a column that is
    missing or unfit."""
    spec = dataset.spec
    if spec.discrete:
        labels = whole_numbers(dataset, OPTIMAL, "the task's best action at each observation (-1: not known)")
        if int(labels.max()) >= spec.num_actions:
            raise UserError(
                f"{spec.name}: the column '{OPTIMAL}' holds action {int(labels.max())}, and the data have actions 0 to "
                f"{spec.num_actions - 1}"
            )
        rows = torch.nonzero(labels >= 0).squeeze(-1)
    else:
        if OPTIMAL not in dataset.columns:
            whole_numbers(dataset, OPTIMAL, "the task's best action at each observation")
        labels = dataset.columns[OPTIMAL].float()
        labels = labels.unsqueeze(-1) if labels.ndim == 1 else labels
        if labels.shape[1:] != (spec.action_dim,):
            raise UserError(
                f"{spec.name}: the column '{OPTIMAL}' has {labels.shape[1:].numel()} numbers a row, actions "
                f"{spec.action_dim}"
            )
        low, high = (torch.from_numpy(x).to(labels.device) for x in spec.action_bounds)
        labels = (2.0 * (labels - low) / (high - low) - 1.0).clamp(-1.0, 1.0)
        rows = torch.arange(len(labels), device=labels.device)
    if not len(rows):
        raise UserError(f"{spec.name}: no row has an optimal action: the column '{OPTIMAL}' is negative everywhere")
    return labels, rows


@dataclass(frozen=True)
class Contexts:
    """The source of ContextSampler. Rows are sorted by task; `begin` and `size` say where a row's task is."""

    table: Table
    order: Tensor  # [n] rows that may be in a context, sorted by task, in their order within it
    queries: Tensor  # [q] rows that may be queries
    begin: Tensor  # [q] where in `order` the query's task begins
    size: Tensor  # [q] how many rows of `order` it has
    labels: Tensor  # of the queries
    weighted: Episodes | None


@dataclass(frozen=True)
class ContextSampler:
    """Transitions of a task as context, and an observation of the same task to act on.

    A query is a row that has an optimal action, drawn uniformly, or by `Dataset.weights`: queries [B, O] and labels,
    int64 [B] or float32 [B, A]. Its context are `length` consecutive transitions of its task, whichever episodes they
    are in, drawn uniformly and, with `shuffle`, shuffled: observations and next_observations [B, H, O], actions,
    rewards [B, H], valid [B, H], which is False at the end where the task has fewer. So no transition is in a context
    twice, and the label depends on the query and the task alone.
    """

    length: int
    shuffle: bool = True

    def prepare(self, dataset: Dataset) -> Contexts:
        """Raises UserError for columns that the data lack."""
        tasks = dataset.per_row(episode_tasks(dataset))
        labels, queries = optimal_actions(dataset)
        rows = dataset.transition_rows()
        order = rows[torch.argsort(tasks[rows], stable=True)]
        present, counts = torch.unique_consecutive(tasks[order], return_counts=True)
        first = torch.cumsum(counts, 0) - counts
        known = torch.isin(tasks[queries], present)
        weighted, queries = by_weight(dataset, queries[known])
        where = torch.searchsorted(present, tasks[queries])
        table = table_of(dataset, {name: dataset.columns[name] for name in CONTEXT})
        return Contexts(table, order, queries, first[where], counts[where], labels[queries], weighted)

    def __call__(self, source: Contexts, key: Tensor, batch_size: int) -> Batch:
        keys = rng.split(key, 3)
        indices = draw_rows(keys[0], batch_size, len(source.queries), source.weighted)
        size = source.size[indices]
        start = rng.randint(keys[1], (batch_size,), (size - self.length + 1).clamp(min=1))
        index = torch.arange(self.length, device=key.device)
        valid = index < size.unsqueeze(-1)
        at = source.begin[indices].unsqueeze(-1) + (start.unsqueeze(-1) + index).minimum(size.unsqueeze(-1) - 1)
        if self.shuffle:  # what is no transition stays at the end
            at = at.gather(-1, (rng.uniform(keys[2], (batch_size, self.length)) + (~valid).float()).argsort(-1))
        rows, query = source.order[at].flatten(), source.queries[indices]
        context, observations = source.table.take(rows), source.table.column("observations", query)
        batch = {name: column.unflatten(0, (batch_size, self.length)) for name, column in context.items()}
        return {**batch, "valid": valid, "queries": observations, "labels": source.labels[indices]}


@dataclass(frozen=True)
class FreshContexts:
    """The same batches, of new tasks every time: from the dataset's environment, where that can make them.

    Such an environment has a method `contexts(key, batch, length)`, a pure function on the key's device that gives a
    batch as `ContextSampler` does, of observations and rewards as the environment has them, actions in [-1, 1] or
    int64. What it needs on the device it puts there in the first call, which is before updates are captured.
    """

    spec: DataSpec
    length: int

    @cached_property
    def environment(self) -> Any:
        from offrl.tasks.environments import make_env

        if self.spec.task is None:
            raise UserError(f"{self.spec.name} has no environment to take contexts from; take algo.contexts=data")
        env = make_env(self.spec.task).unwrapped
        if not hasattr(env, "contexts"):
            raise UserError(
                f"{self.spec.task.env_id or type(env).__name__} makes no contexts (it has no method contexts(key, "
                "batch, length)); take algo.contexts=data"
            )
        return env

    def prepare(self, dataset: Dataset) -> dict[str, Tensor]:
        """The normalisation of observations. Raises UserError where the environment makes no contexts."""
        self.environment.contexts(rng.make_key(0, dataset.device), 1, self.length)
        statistics = {"mean": self.spec.observation_mean, "std": self.spec.observation_std}
        return {name: torch.tensor(x, device=dataset.device) for name, x in statistics.items() if x is not None}

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
        batch, spec = self.environment.contexts(key, batch_size, self.length), self.spec
        for name in ("observations", "next_observations", "queries") if source else ():
            batch[name] = (batch[name] - source["mean"]) / source["std"]
        return {**batch, "rewards": batch["rewards"] * spec.reward_scale + spec.reward_shift}
