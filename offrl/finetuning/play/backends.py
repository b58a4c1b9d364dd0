"""The environments of play, numbered, and what is asked of whoever steps them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from offrl.errors import UserError
from offrl.evaluation.steppers import StepFailed, Steps, step_all
from offrl.tasks.environments import flattener, make_env
from offrl.tasks.episodes import goal_of, mujoco_warnings
from offrl.tasks.task import Task


class EnvFailed(Exception):
    """Environment `k` raised an error, which `text` says."""

    def __init__(self, k: int, text: str) -> None:
        super().__init__(k, text)
        self.k, self.text = k, text


class Beginning(NamedTuple):
    """How an episode begins."""

    k: int  # the environment
    seed: int
    options: dict[str, Any] | None  # of `reset`
    enter: Callable[[Any], Any] | None  # puts it into a state of the data then; see `Snapshots.entry`
    towards: bool  # whether the episode has a goal


class Backend(ABC):
    """Environments by their numbers, and what may be kept of them besides the actions."""

    note = ""  # what the reader is to know of the numbers

    @abstractmethod
    def close(self) -> None:
        """Close the environments."""

    @abstractmethod
    def reset(self, beginnings: Sequence[Beginning]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """(first observation, flat, and goal, where there is one) of each episode. Raises EnvFailed, and UserError for
        a state that an environment does not take.
        """

    @abstractmethod
    def step(self, at: Sequence[int], actions: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, Steps]:
        """The observations [K, *O] after one step of the environments `at`, in ascending order, and all else that they
        answered. actions: as they take them. Raises EnvFailed.
        """

    def save(self) -> dict[str, torch.Tensor]:
        """What `load` needs; nothing where episodes that are played again come to the same state."""
        return {}

    def load(self, saved: dict[str, torch.Tensor], ends: np.ndarray) -> None:  # noqa: B027
        """Go on from what `save` gave, after `reset` of all: `step` is about to be asked for the steps of the running
        episodes again. ends: the row behind the last one of each environment but the last.
        """


class Sequential(Backend):
    """Environments of this process, stepped one after the other."""

    def __init__(self, task: Task, numbers: Sequence[int]) -> None:
        """Raises UserError where an environment cannot be made."""
        with contextlib.ExitStack() as stack:
            self.envs: dict[int, Any] = {}
            for k in numbers:
                self.envs[k] = make_env(task)
                stack.callback(self.envs[k].close)
            self.flatten, self.shape, self.kind = flattener(self.envs[numbers[0]], task.observation_keys)
            self.warnings = stack.enter_context(mujoco_warnings())
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Close the environments."""
        self._stack.close()

    def reset(self, beginnings: Sequence[Beginning]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """As `Backend.reset`."""
        return [self._reset(*beginning) for beginning in beginnings]

    def step(self, at: Sequence[int], actions: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, Steps]:
        """As `Backend.step`."""
        self.warnings.clear()
        try:
            steps = step_all([self.envs[k] for k in at], actions, self._read, self.warnings)
        except StepFailed as failure:
            raise _failed(at[failure.index], failure.__cause__) from failure.__cause__
        rows, steps.observations = np.stack(steps.observations), []
        return rows, steps

    def _reset(
        self, k: int, seed: int, options: dict[str, Any] | None, enter: Callable[[Any], Any] | None, towards: bool
    ) -> tuple[np.ndarray, np.ndarray | None]:
        try:
            observation, info = self.envs[k].reset(seed=seed, options=options)
            if enter is not None:
                observation = enter(self.envs[k])
            return np.array(self.flatten(observation)), goal_of(observation, info) if towards else None
        except UserError:
            raise
        except Exception as error:  # a third-party environment
            raise _failed(k, error) from error

    def _read(self, observation: Any, info: Any) -> np.ndarray:
        row = np.zeros(self.shape, self.kind)
        row[...] = self.flatten(observation)
        return row


def _failed(k: int, error: BaseException | None) -> EnvFailed:
    return EnvFailed(k, f"{type(error).__name__}: {error}")
