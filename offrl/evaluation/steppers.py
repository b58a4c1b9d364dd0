"""One step of many environments, whatever they are: `env.step`, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.tasks.episodes import success_of

if TYPE_CHECKING:
    import gymnasium as gym


@dataclass
class Steps:
    """The answers of K environments to one action each."""

    observations: np.ndarray  # [K, ...] after flattening
    rewards: np.ndarray  # [K] float64
    over: np.ndarray  # [K] bool: terminated or truncated
    successes: np.ndarray | None  # [K] float64 in [0, 1], NaN where nothing was said; None: nobody said anything
    # index -> what MuJoCo said about physics that blew up; that environment was silently reset
    unstable: dict[int, str]


class StepFailed(Exception):
    """The step of environment `index` raised `__cause__`."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


def step_all(
    envs: Sequence[gym.Env], actions: np.ndarray, flatten: Callable[[Any], np.ndarray], warnings: list[str]
) -> Steps:
    """One step of each environment with its row of `actions`. `warnings`: see `mujoco_warnings`; emptied here.

    Raises StepFailed where an environment raises.
    """
    observations: list[np.ndarray] = []
    rewards, over, successes = np.zeros(len(envs)), np.zeros(len(envs), bool), np.full(len(envs), np.nan)
    unstable: dict[int, str] = {}
    reports_success = False
    for k, env in enumerate(envs):
        try:
            observation, reward, terminated, truncated, info = env.step(actions[k])
            observations.append(flatten(observation))
            rewards[k], over[k] = np.asarray(reward, float).item(), bool(terminated or truncated)
        except Exception as error:  # a third-party environment
            raise StepFailed(k) from error
        success = success_of(info)
        if success is not None:
            successes[k], reports_success = success, True
        if warnings:
            unstable[k] = warnings[0]
            warnings.clear()
    return Steps(np.stack(observations), rewards, over, successes if reports_success else None, unstable)
