"""What the environments of this package have in common, and the tasks and data that a program generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from offrl.registry import register
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

Info = dict[str, Any]
Colour = tuple[int, int, int]
GREY, GREEN, RED = (160, 160, 160), (80, 180, 90), (200, 40, 40)  # of walls, goals and the point
# observation, reward, terminated, truncated, info
Step = tuple[np.ndarray, float, bool, bool, Info]
TextStep = tuple[str, float, bool, bool, Info]

STEP = ("observations", "actions", "rewards", "terminations", "truncations", "next_observations")


class BaseEnvironment(gym.Env):
    """The base of environments: `begin` begins an episode, once the seed of `reset` is that of `np_random`."""

    metadata: Info = {"render_modes": []}  # noqa: RUF012  # Gymnasium declares it so

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        return self.begin(options or {})

    def begin(self, options: Info) -> tuple[Any, Info]:
        """The first observation and info of an episode."""
        raise NotImplementedError


def register_generated(task: Task, generate: Callable[[], RawData]) -> None:
    """Register a task, and the data that `generate` makes, the same each time, under the task's name."""
    register("task", task.name)(lambda name: task if name == task.name else None)
    register("dataset", task.name)(lambda config: generate())


def raw_data(columns: Mapping[str, np.ndarray], task: Task, seed: int, **actions: Any) -> RawData:
    """Columns that were generated from a seed as data of a task. actions: their number or range, as `RawData` has
    it."""
    from offrl.data.raw import RawData

    return RawData(dict(columns), name=task.name, source="offrl", version=str(seed), task=task, **actions)


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


def discs(edge: np.ndarray, size: tuple[int, int], spots: Sequence[tuple[Any, float, Colour]]) -> np.ndarray:
    """A picture [height, width, 3] uint8 of |x| and |y| up to `edge` [2]: discs by centre [2], radius and colour."""
    at = np.stack(np.meshgrid(np.linspace(-edge[0], edge[0], size[1]), np.linspace(edge[1], -edge[1], size[0])), -1)
    picture = np.full((*size, 3), 255, np.uint8)
    for centre, radius, colour in spots:
        picture[np.linalg.norm(at - centre, axis=-1) < radius] = colour
    return picture


def task_number(env: Any) -> int:
    """The number of the next episode's task: `env.task`, or, where that is None, one of those that are held out."""
    if env.task is not None:
        return int(env.task)
    return int(env.np_random.integers(env.held_out.start, env.held_out.stop))
