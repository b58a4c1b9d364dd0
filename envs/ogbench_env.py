"""OGBench's environments under names of their own, "offrl/pointmaze-medium-v0", so that the seed of a reset decides all
of an episode.

They draw from NumPy's global generator; these have a generator each. Importing this imports the package ogbench.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import ogbench  # noqa: F401 - registers the environments

from offrl.system import trust
from offrl.tasks.environments import import_mujoco, quiet

import_mujoco()


class OwnRandom(gym.Wrapper):
    """An environment of OGBench whose global random numbers are its own, from the seed of its last reset."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        self._state: Any = np.random.RandomState(0).get_state()
        base: Any = env.unwrapped
        # mazes draw in steps only where they teleport, and to change the generator takes five times as long as a step
        # of the point
        self._draws = getattr(base, "_teleport_info", None) is not None or not hasattr(base, "maze_map")
        # arms make their spaces anew at each look, and Gymnasium complains of their float64 each time
        if not hasattr(base, "maze_map"):
            self.observation_space, self.action_space = env.observation_space, env.action_space

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        outside = np.random.get_state()
        np.random.set_state(self._state)
        try:
            yield
        finally:
            self._state = np.random.get_state()
            np.random.set_state(outside)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._state = np.random.RandomState(seed).get_state()
            self.action_space.seed(seed)  # a reset takes a few random steps
        with quiet(), self._own():
            return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        with self._own() if self._draws else contextlib.nullcontext():
            return self.env.step(action)


class Sparse(gym.RewardWrapper):
    """Rewards of -1 until all parts of the task are done, then 0, in place of one less for each part."""

    def reward(self, reward: Any) -> float:
        return -float(reward != 0.0)


def make(name: str, sparse: bool = False, **arguments: Any) -> gym.Env:
    """The environment of that OGBench name, without its limit of steps."""
    trust.check_environment(name)
    with quiet():
        env = OwnRandom(gym.make(name, disable_env_checker=True, **arguments).unwrapped)
    return Sparse(env) if sparse else env


def _register() -> None:
    for name, spec in list(gym.registry.items()):
        if str(spec.entry_point).startswith("ogbench.") and "online" not in str(spec.entry_point):
            gym.register(
                f"offrl/{name}",
                entry_point="offrl.envs.ogbench_env:make",
                max_episode_steps=spec.max_episode_steps,
                kwargs={"name": name},
            )


_register()
