"""What tasks and data that a program generates have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from offrl.tasks.task import Task

STEP = ("observations", "actions", "rewards", "terminations", "truncations", "next_observations")


def only(task: Task) -> Callable[[str], Task | None]:
    """A lookup of this task by its exact name; None for any other name."""
    return lambda name: task if name == task.name else None


def of_steps(rows: Sequence[tuple[Any, ...]]) -> dict[str, np.ndarray]:
    """Columns [R, ...] of R steps (observation, action, reward, termination, truncation, next observation)."""
    from offrl.data.raw import canonical  # which imports torch

    return {name: canonical(name, np.array([row[i] for row in rows])) for i, name in enumerate(STEP)}


def side_by_side(steps: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Columns [E * T, ...], episode after episode, of E episodes in which T steps [E, ...] were taken side by side.
    None of them terminates."""
    from offrl.data.raw import canonical

    stacked = {name: np.stack([step[name] for step in steps], 1) for name in steps[0]}
    columns = {name: canonical(name, v.reshape(-1, *v.shape[2:])) for name, v in stacked.items()}
    rows = len(columns["rewards"])
    ends = np.arange(rows) % len(steps) == len(steps) - 1
    return columns | {"terminations": np.zeros(rows, bool), "truncations": ends}


def task_number(env: Any) -> int:
    """The number of the next episode's task: `env.task`, or, where that is None, one of those that are held out."""
    if env.task is not None:
        return int(env.task)
    return int(env.np_random.integers(env.held_out.start, env.held_out.stop))
