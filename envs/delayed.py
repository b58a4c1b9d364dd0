"""A plant that answers late: actions act some steps after they were chosen."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.drawn import LIMIT, DrawnEnvironment, generate
from offrl.envs.generated import Info, register_generated
from offrl.tasks.task import Task

DELAY = 3  # steps
ROWS = 40_000  # of the data


class Delay(gym.Wrapper):
    """An environment of continuous actions in which an action acts `delay` steps later; until the first does, the
    middle of their range acts."""

    def __init__(self, env: gym.Env, delay: int) -> None:
        super().__init__(env)
        self.delay, self.waiting = delay, list[np.ndarray]()

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        space = self.env.action_space
        assert isinstance(space, spaces.Box)
        self.waiting = [(space.low + space.high) / 2] * self.delay
        return self.env.reset(seed=seed, options=options)

    def step(self, action: np.ndarray) -> Any:
        self.waiting.append(np.array(action))  # a caller may write over its own
        return self.env.step(self.waiting.pop(0))


def pendulum(delay: int = DELAY, render_mode: str | None = None) -> Delay:
    """The pendulum of `offrl.envs.drawn`, by its states, with delayed torques."""
    return Delay(DrawnEnvironment("pendulum", "state", render_mode), delay)


gym.register(
    "offrl/DelayedPendulum-v0", entry_point="offrl.envs.delayed:pendulum", max_episode_steps=LIMIT, order_enforce=False
)
TASK = Task(
    name="delayed-pendulum",
    env_id="offrl.envs.delayed:offrl/DelayedPendulum-v0",
    env_kwargs={"delay": DELAY},
    max_episode_steps=LIMIT,
    ref_min=-1225.5,
    ref_max=-170.8,
    ref_label="offrl",
    observation_dim=3,
    action_dim=1,
    note=f"an action acts {DELAY} steps later; 0 is uniform actions, 100 the controller that made the data, which "
    "looks ahead, without pushes",
)
register_generated(TASK, lambda: generate("pendulum", 0, ROWS, TASK, DELAY))
