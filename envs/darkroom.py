"""Darkroom: a room whose goal is not shown; where it is makes a task (arXiv 2306.14892, section 5; arXiv
2210.14215).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import BaseEnvironment, Info, Step, raw_data, register_generated, side_by_side, task_number
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from offrl.data.raw import RawData

NAME = "darkroom"
ENV = "offrl/Darkroom-v0"
SIZE, LIMIT = 10, 100
TRAINED = 0.8  # share of the goals that data hold
EPISODES = 20  # of each task, in the data
MOVES = np.array([[1, 0], [-1, 0], [0, 1], [0, -1], [0, 0]])


def goals(size: int = SIZE) -> np.ndarray:
    """The goals [size**2, 2] by the number of the task, in a fixed random order."""
    cells = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1).reshape(-1, 2)
    return np.random.default_rng(0).permutation(cells)


def best(positions: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """The optimal actions [...] at positions [..., 2]: along the first axis, then the second, then stay (as the authors
    label them).
    """
    gap = goal - positions
    first = np.where(gap[..., 0] > 0, 0, 1)
    second = np.where(gap[..., 1] > 0, 2, 3)
    return np.where(gap[..., 0] != 0, first, np.where(gap[..., 1] != 0, second, 4))


class Darkroom(BaseEnvironment):
    """Observation: x and y of a cell. Actions: x + 1, x - 1, y + 1, y - 1, stay. Reward: 1 in the goal's cell, else 0.
    It begins at (0, 0) and never ends by itself.

    task: the number of the goal; None: another one in each episode, of those that are `held_out`. `info["success"]`:
    whether it is there."""

    def __init__(self, size: int = SIZE, task: int | None = None, render_mode: str | None = None) -> None:
        self.size, self.task, self.render_mode = size, task, render_mode
        self.goals = goals(size)
        self.held_out = range(int(TRAINED * len(self.goals)), len(self.goals))
        if task is not None and not 0 <= task < len(self.goals):
            raise ValueError(f"task={task}: a room of {size} x {size} has the tasks 0 to {len(self.goals) - 1}")
        self.observation_space = spaces.Box(0.0, size - 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(len(MOVES))
        self.goal, self.position = self.goals[task or 0], np.zeros(2, np.int64)
        self.tables: dict[Any, Any] = {}  # device -> the goals and moves as tensors

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        number = task_number(self)
        self.goal, self.position = self.goals[number], np.zeros(2, np.int64)
        return self.position.astype(np.float32), {"task": number, "success": False}

    def step(self, action: int) -> Step:
        self.position = np.clip(self.position + MOVES[action], 0, self.size - 1)
        success = bool((self.position == self.goal).all())
        return self.position.astype(np.float32), float(success), False, False, {"success": success}

    def contexts(self, key: Tensor, batch: int, length: int) -> dict[str, Tensor]:
        """Contexts of goals that are not held out, as `offrl.data.samplers.contexts.FreshContexts` asks for them: every
        transition begins in a random cell with a random action, as the authors' "uniform" ones do, and so does the
        query."""
        import torch

        from offrl import rng

        keys, size = rng.split(key, 4), self.size
        if key.device not in self.tables:  # once: while an update is captured for a GPU nothing can be copied there
            self.tables[key.device] = tuple(
                torch.tensor(x, device=key.device) for x in (self.goals[: self.held_out.start], MOVES)
            )
        known, moves = self.tables[key.device]
        goal = known[rng.randint(keys[0], (batch,), len(known))]
        actions = rng.randint(keys[1], (batch, length), len(MOVES))
        cells = rng.randint(keys[2], (batch, length, 2), size)
        after = (cells + moves[actions]).clamp(0, size - 1)
        query = rng.randint(keys[3], (batch, 2), size)
        x, y = (goal - query).unbind(-1)
        first, second = torch.where(x > 0, 0, 1), torch.where(y > 0, 2, 3)
        return {
            "observations": cells.float(),
            "actions": actions,
            "next_observations": after.float(),
            "rewards": (after == goal.unsqueeze(-2)).all(-1).float(),
            "valid": torch.ones(batch, length, dtype=torch.bool, device=key.device),
            "queries": query.float(),
            "labels": torch.where(x != 0, first, torch.where(y != 0, second, 4)),
        }


gym.register(ENV, entry_point="offrl.envs.darkroom:Darkroom", max_episode_steps=LIMIT)


_HELD_OUT = goals()[int(TRAINED * SIZE**2) :]
TASK = Task(
    name=NAME,
    env_id=f"offrl.envs.darkroom:{ENV}",
    max_episode_steps=LIMIT,
    ref_min=0.0,
    # 1 for each step from the one that reaches the goal
    ref_max=float(np.minimum(LIMIT + 1 - _HELD_OUT.sum(-1), LIMIT).mean()),
    ref_label="offrl",
    observation_dim=2,
    note="100 is the return of who knows the goal, on average over the held-out goals; each episode has one of them",
)
register_generated(TASK, lambda: generate(0, EPISODES))


def generate(seed: int, episodes: int, limit: int = LIMIT) -> RawData:
    """`episodes` random walks of `limit` steps from random cells in each of the 80 rooms that are not held out, with
    the columns tasks and optimal_actions."""
    draw, known = np.random.Generator(np.random.PCG64(seed)), goals()[: int(TRAINED * SIZE**2)]
    number = np.repeat(np.arange(len(known)), episodes)
    goal = known[number]  # [E, 2]
    position, parts = draw.integers(0, SIZE, (len(number), 2)), []
    for _ in range(limit):
        action = draw.integers(0, len(MOVES), len(number))
        after = np.clip(position + MOVES[action], 0, SIZE - 1)
        parts.append(
            {
                "observations": position,
                "next_observations": after,
                "actions": action,
                "rewards": (after == goal).all(-1),
                "tasks": number,
                "optimal_actions": best(position, goal),
            }
        )
        position = after
    return raw_data(side_by_side(parts), TASK, seed, num_actions=len(MOVES))
