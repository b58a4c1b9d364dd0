"""Multi-task data: datasets of other tasks in one form, which tells of which task a row is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offrl.data.dataset import CORE, Dataset
from offrl.data.samplers.contexts import TASKS, episode_tasks
from offrl.errors import UserError
from offrl.tasks.task import Task, TaskPart

MOST = 5  # names of tasks that a name lists


def as_tasks(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The datasets, each of a task of its own, with observations and actions of one size: a task's own numbers, zeros,
    and behind an observation the number of the task. Of one dataset alone the column `tasks` says it.

    Rows have the core columns alone, and actions the range [-1, 1]. Raises UserError for data of texts, choices or
    images, and where nothing tells tasks apart.
    """
    for dataset in datasets:
        _check(dataset)
    if len(datasets) == 1:
        return [_by_column(datasets[0])]
    parts = tuple(_part(d, d.spec.task or Task(d.spec.name)) for d in datasets)
    width = max(part.observation_dim for part in parts)
    size = max(len(part.action_low) for part in parts)
    task, names = _joined(parts), dict.fromkeys(d.spec.name for d in datasets)
    name = f"{' + '.join([*names][:MOST])}{' + ...' if len(names) > MOST else ''} ({len(parts)} tasks)"
    return [
        _padded(d, torch.full((len(d), 1), float(number)), width, size, task, name) for number, d in enumerate(datasets)
    ]


def _by_column(dataset: Dataset) -> Dataset:
    if TASKS not in dataset.columns:
        raise UserError(
            f"dataset.multitask=true: nothing says of which task a row of {dataset.spec.name} is: "
            f"dataset.fields.{TASKS}=KEY names the column, or dataset.concatenate=[...] the data of other tasks"
        )
    names, numbers = episode_tasks(dataset).unique(return_inverse=True)
    base = dataset.spec.task or Task(dataset.spec.name)
    parts = tuple(
        _part(dataset, replace(base, name=f"{base.name} task {name}", env_kwargs={**base.env_kwargs, "task": name}))
        for name in names.tolist()
    )
    column = dataset.per_row(numbers).float().unsqueeze(-1)
    name = f"{dataset.spec.name} ({len(parts)} tasks)"
    return _padded(dataset, column, parts[0].observation_dim, len(parts[0].action_low), _joined(parts), name)


def _part(dataset: Dataset, task: Task) -> TaskPart:
    spec = dataset.spec
    return TaskPart(task, spec.observation_dim, spec.action_low, spec.action_high)


def _joined(parts: tuple[TaskPart, ...]) -> Task:
    """The task that plays all tasks in turn. Its episodes are as long as the longest, where all have a limit."""
    limits = [part.task.max_episode_steps for part in parts]
    return Task(
        " + ".join(dict.fromkeys(part.task.name for part in parts[:MOST])) + (" + ..." if len(parts) > MOST else ""),
        max_episode_steps=None if None in limits else max(limit for limit in limits if limit),
        starts=tuple({"task": number} for number in range(len(parts))),
        parts=parts,
    )


def _padded(dataset: Dataset, numbers: Tensor, width: int, size: int, task: Task, name: str) -> Dataset:
    """The data with observations of `width` numbers and the task's number [R, 1], and actions of `size` numbers. name:
    of the data of all tasks, whose scores are none of those of a single task."""

    def wide(name: str, columns: int, *more: Tensor) -> Tensor:
        column = dataset.flat(name).float()
        return torch.cat([column, column.new_zeros(len(column), columns - column.shape[1]), *more], 1)

    columns: dict[str, Any] = {name: dataset.columns[name] for name in CORE}
    columns |= {name: wide(name, width, numbers) for name in ("observations", "next_observations")}
    columns["actions"] = wide("actions", size)
    spec = replace(
        dataset.spec,
        name=name,
        observation_shape=(width + 1,),
        action_dim=size,
        action_low=(-1.0,) * size,
        action_high=(1.0,) * size,
        task=task,
        observation_columns=(),
        action_columns=(),
        goal_dim=0,
        costs=False,
    )
    return replace(dataset, columns=columns, spec=spec, transforms=(*dataset.transforms, "multitask"), mapped=False)


def _check(dataset: Dataset) -> None:
    """Raise UserError for data of texts, choices or images, and of an environment that a function makes."""
    spec = dataset.spec
    streams = ", ".join(stream.name for stream in spec.streams)
    kind = "texts" if spec.text else "discrete actions" if spec.discrete else streams
    if kind:
        raise UserError(f"dataset.multitask=true is for vectors and continuous actions, and {spec.name} has {kind}")
    if spec.task is not None and spec.task.env_factory is not None:
        raise UserError(
            f"dataset.multitask=true: the environment of {spec.name} is made by a function; give it a name that "
            "gymnasium.make knows (env_id)"
        )
