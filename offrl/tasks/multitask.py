"""The environment of multi-task data: in each episode one of the tasks, shown and moved as the data have it."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.errors import UserError
from offrl.tasks.environments import action_kind, flattener, make_env, time_limit, to_space
from offrl.tasks.task import Task, listed_parts


class MultiTaskEnv(gym.Env):
    """The tasks of `task.parts`. Observation: the task's own, zeros, and last its number. Action: the task's own, each
    from [-1, 1], before numbers that do nothing.

    `reset(options={"task": NUMBER})` begins an episode of that task, without it one of a task drawn at random among
    those of `task.starts`. A task's environment is made when it is first needed.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.width = max(part.observation_dim for part in task.parts)
        size = max(len(part.action_low) for part in task.parts)
        self.observation_space = spaces.Box(-np.inf, np.inf, (self.width + 1,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.envs: dict[int, tuple[gym.Env, Any]] = {}
        self.number = task.starts[0]["task"]

    def env_of(self, number: int) -> gym.Env:
        """The environment of a task. Raises UserError where it does not fit the task's data."""
        if number not in self.envs:
            part = self.task.parts[number]
            env = make_env(part.task)
            flatten, shape, kind = flattener(env, part.task.observation_keys)
            size = action_kind(env)
            width, count = part.observation_dim, len(part.action_low)
            if (shape, size) != ((width,), (False, count)) or np.dtype(kind).names:
                env.close()
                raise UserError(
                    f"task {number}, {part.task.name}, has observations of {width} numbers and {count} actions, and "
                    f"{part.task.env_id} observations of shape {shape} and {size[1]} actions: such data are "
                    "trained on without an environment alone (offrl train: eval.env=none)"
                )
            self.envs[number] = env, flatten
        return self.envs[number][0]

    @property
    def limit_of_tasks(self) -> int | None:
        """The limit on the steps of the longest task's episodes; None where a task has none. An environment is opened
        for it only where the data do not tell. Raises UserError as `env_of` does."""
        numbers = [start["task"] for start in self.task.starts]
        limits = [self.task.parts[n].task.max_episode_steps or time_limit(self.env_of(n)) for n in numbers]
        return None if None in limits else max(limit for limit in limits if limit)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        options = dict(options or {})
        number = options.pop("task", None)
        if number is None:
            number = self.task.starts[int(self.np_random.integers(len(self.task.starts)))]["task"]
        if number not in range(len(self.task.parts)):
            raise UserError(f"there is no task {number}: {listed_parts(self.task.parts)}")
        self.number = int(number)
        observation, info = self.env_of(self.number).reset(seed=seed, options=options or None)
        return self._shown(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        env, part = self.envs[self.number][0], self.task.parts[self.number]
        low, high = np.asarray(part.action_low, np.float32), np.asarray(part.action_high, np.float32)
        scaled = np.clip(np.asarray(action, np.float32)[: len(low)], -1.0, 1.0)
        chosen = to_space(env.action_space, (low + (scaled + 1.0) * 0.5 * (high - low))[None])[0]
        observation, *outcome = env.step(chosen)
        return self._shown(observation), *outcome  # type: ignore[return-value]

    def render(self) -> Any:
        return self.env_of(self.number).render()

    def close(self) -> None:
        for env, _ in self.envs.values():
            env.close()
        self.envs.clear()

    def _shown(self, observation: Any) -> np.ndarray:
        row = np.zeros(self.width + 1, np.float32)
        numbers = self.envs[self.number][1](observation)
        row[: numbers.size], row[-1] = numbers.reshape(-1), self.number
        return row
