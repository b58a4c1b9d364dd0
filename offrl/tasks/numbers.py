"""Environments of which policies see some numbers of an observation alone."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.errors import UserError


class SomeNumbers(gym.ObservationWrapper):
    """An environment that observes [O], of which the numbers at `positions` are left, in that order: [S]."""

    def __init__(self, env: gym.Env, positions: Sequence[int], name: str) -> None:
        """Raises UserError for an environment, called `name`, that observes no row of so many numbers."""
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1 or not 0 <= min(positions) <= max(positions) < (
            space.shape[0]
        ):  # fmt: skip
            raise UserError(
                f"the policy sees the numbers {', '.join(map(str, positions))} of a row of them, and {name} observes "
                f"{space}"
            )
        self.positions = list(positions)
        ends = space.low[self.positions], space.high[self.positions]
        self.observation_space = spaces.Box(*ends, dtype=space.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.asarray(observation)[self.positions]


def seen_through(env: gym.Env, positions: Sequence[int], name: str) -> gym.Env:
    """`env` as policies see it that see `positions`; as it is where it is seen so already, within a wrapper."""
    inner = env
    while isinstance(inner, gym.Wrapper):
        if isinstance(inner, SomeNumbers):
            return env
        inner = inner.env
    return SomeNumbers(env, positions, name)
