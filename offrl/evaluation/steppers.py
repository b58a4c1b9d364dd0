"""One step of many environments, whatever they are: `env.step`, one after the other. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offrl.tasks.episodes import cost_of, step, success_of


@dataclass
class Steps:
    """The answers of K environments to one action each."""

    observations: list[Any]  # [K] as they were read
    rewards: np.ndarray  # [K] float64
    terminated: np.ndarray  # [K] bool
    over: np.ndarray  # [K] bool: terminated or truncated
    successes: np.ndarray  # [K] float64 in [0, 1], NaN where nothing was said
    costs: np.ndarray  # [K] float64, NaN where nothing was said
    # index -> what MuJoCo said about physics that blew up; that environment was silently reset
    unstable: dict[int, str]


class StepFailed(Exception):
    """The step of environment `index` raised `__cause__`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Observed(str):
    """A text that an environment said, with the legal actions that it named, if it did."""

    legal_actions: tuple[str, ...] | None = None


def observed(text: Any, info: Any) -> Observed:
    """An environment's observation and info as one text."""
    observation = Observed(text)
    legal = info.get("legal_actions") if isinstance(info, Mapping) else None
    observation.legal_actions = None if legal is None else tuple(str(action) for action in legal)
    return observation


def step_all(
    envs: Sequence[Any], actions: Sequence[Any] | np.ndarray, read: Callable[[Any, Any], Any], warnings: list[str]
) -> Steps:
    """One step of each environment with its row of `actions`. read: of an observation and its info. warnings: see
    `mujoco_warnings`; emptied here.

    Raises StepFailed where an environment raises.
    """
    observations: list[Any] = []
    rewards, successes, costs = np.zeros(len(envs)), np.full(len(envs), np.nan), np.full(len(envs), np.nan)
    terminated, over = np.zeros(len(envs), bool), np.zeros(len(envs), bool)
    unstable: dict[int, str] = {}
    for k, env in enumerate(envs):
        try:
            observation, reward, terminal, truncated, info = step(env, actions[k])
            observations.append(read(observation, info))
            rewards[k] = np.asarray(reward, float).item()
            terminated[k], over[k] = bool(terminal), bool(terminal or truncated)
            costs[k] = cost_of(info)
        except Exception as error:  # a third-party environment
            raise StepFailed(k) from error
        success = success_of(info)
        successes[k] = np.nan if success is None else success
        if warnings:
            unstable[k] = warnings[0]
            warnings.clear()
    return Steps(observations, rewards, terminated, over, successes, costs, unstable)
