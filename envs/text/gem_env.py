"""The environments of gem-llm (arXiv 2510.01051; PyPI gem-llm, Apache-2.0) as text environments of Gymnasium."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from offrl.envs.generated import BaseEnvironment, Info, TextStep
from offrl.envs.text.optional import package
from offrl.envs.text.space import AnyText
from offrl.errors import UserError, nearest

ENV = "offrl/TextGem-v0"


class TextGem(BaseEnvironment):
    """`gem.make(name, **settings)`: "game:GuessTheNumber-v0-easy", "game:Sokoban-v0-easy", ... Texts, rewards and
    endings are gem's own.

    gem's games draw from Python's and NumPy's global generators. Here each environment has states of its own for both,
    set by the seed of `reset`, so that an episode depends on its seed alone and nobody else's numbers change. What gem
    calls terminated and truncated at once (it does so where the last turn decides the reward) is terminated. `settings`
    go to gem. Raises UserError where gem-llm is not installed or has no such environment.
    """

    def __init__(
        self, name: str = "game:GuessTheNumber-v0-easy", render_mode: str | None = None, **settings: Any
    ) -> None:
        gem = package("gem", f"environment {name}", "gem-llm")
        self.name, self.render_mode = name, render_mode
        self.observation_space, self.action_space = AnyText(), AnyText()
        self._states: tuple[Any, Any] = _states_of(0)
        try:
            with self._own_numbers():
                self.game = gem.make(name, **settings)
        except Exception as error:  # gem raises ValueError for an unknown name, and whatever a wrong setting leads to
            known = _names()
            hint = nearest(name, known) if name not in known else ""
            raise UserError(f"gem-llm could not make '{name}': {type(error).__name__}: {error}.{hint}") from error

    def begin(self, options: Info) -> tuple[str, Info]:
        number = int(self.np_random.integers(2**31))
        self._states = _states_of(number)
        with self._own_numbers():
            observation, info = self.game.reset(seed=number)
        return str(observation), dict(info)

    def step(self, action: str) -> TextStep:
        with self._own_numbers():
            observation, reward, terminated, truncated, info = self.game.step(action)
        return str(observation), float(reward), bool(terminated), bool(truncated) and not terminated, dict(info)

    @contextlib.contextmanager
    def _own_numbers(self) -> Iterator[None]:
        """Inside, the global generators are in this environment's states; outside they are as they were."""
        before = random.getstate(), np.random.get_state()
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        try:
            yield
        finally:
            self._states = random.getstate(), np.random.get_state()
            random.setstate(before[0])
            np.random.set_state(before[1])


def _states_of(seed: int) -> tuple[Any, Any]:
    return random.Random(seed).getstate(), np.random.RandomState(seed).get_state()


def _names() -> list[str]:
    """The environments that gem knows; none where its table is no longer where it was."""
    try:
        return sorted(package("gem.envs.registration", "gem's list of environments", "gem-llm").ENV_REGISTRY)
    except (UserError, AttributeError):
        return []


gym.register(ENV, entry_point="offrl.envs.text.gem_env:TextGem")
