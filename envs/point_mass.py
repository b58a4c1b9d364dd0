"""A point mass on a table, and data of it being pushed about at random: for zero-shot RL, where data explore and the
reward comes later.

Its own reward draws it to the centre; `peak`, `corner`, `side`, `band` and `ring` are others, which the data's rewards
know nothing of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import BaseEnvironment, Info, Step, raw_data, register_generated, side_by_side
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

NAME = "point-mass"
ENV = "offrl/PointMass-v0"
LIMIT, EDGE = 50, 1.0  # steps; the table is [-1, 1]**2
# what is kept of the velocity at each step; what the strongest push adds: at most 0.1 a step in the end
KEPT, PUSH = (0.7, 0.03)
EPISODES, HELD = 400, 6  # in the data, and how long a push is held on average


def near(distance: np.ndarray, width: float) -> np.ndarray:
    """1 at distance 0, less beyond `width`."""
    return np.exp(-0.5 * (distance / width) ** 2)


def at_centre(position: np.ndarray) -> np.ndarray:
    """At positions [..., 2]: the environment's own reward."""
    return near(np.linalg.norm(position, axis=-1), 0.25)


def at_corner(position: np.ndarray) -> np.ndarray:
    """Be near the corner (1, 1)."""
    return near(np.linalg.norm(position - EDGE, axis=-1), 0.35)


def at_peak(position: np.ndarray) -> np.ndarray:
    """Be near (0.7, 0.7)."""
    return near(np.linalg.norm(position - 0.7, axis=-1), 0.25)


def at_side(position: np.ndarray) -> np.ndarray:
    """Be near the side x = -1."""
    return near(position[..., 0] + EDGE, 0.25)


def at_band(position: np.ndarray) -> np.ndarray:
    """Be near the line y = -0.6."""
    return near(position[..., 1] + 0.6, 0.15)


def at_ring(position: np.ndarray) -> np.ndarray:
    """Be at a distance of 0.6 from the centre."""
    return near(np.linalg.norm(position, axis=-1) - 0.6, 0.12)


REWARDS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "centre": at_centre,
    "peak": at_peak,
    "corner": at_corner,
    "side": at_side,
    "band": at_band,
    "ring": at_ring,
}


def _labels(reward: Callable[[np.ndarray], np.ndarray]) -> Callable[[dict[str, np.ndarray]], np.ndarray]:
    """A reward as labels of an episode's columns."""
    return lambda columns: reward(columns["next_observations"][:, :2])


peak, corner, side, band, ring = (_labels(at) for at in (at_peak, at_corner, at_side, at_band, at_ring))


def move(position: np.ndarray, velocity: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positions and velocities [..., 2] after a step with actions in [-1, 1]. The table's edge stops it."""
    velocity = KEPT * velocity + PUSH * np.clip(action, -1.0, 1.0)
    free = position + velocity
    position = np.clip(free, -EDGE, EDGE)
    return position, np.where(free == position, velocity, 0.0)


def observe(position: np.ndarray, velocity: np.ndarray) -> np.ndarray:
    """Observations [..., 4] at positions and velocities [..., 2]."""
    return np.concatenate([position, 10.0 * velocity], -1)


class PointMass(BaseEnvironment):
    """Observation: x, y and the velocity, in tenths. Action: the push along each axis, in [-1, 1]. It begins anywhere,
    at rest.

    reward: one of `REWARDS`.
    """

    def __init__(self, reward: str = "centre", render_mode: str | None = None) -> None:
        self.reward, self.render_mode = REWARDS[reward], render_mode
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.position, self.velocity = np.zeros(2), np.zeros(2)

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        self.position, self.velocity = self.np_random.uniform(-EDGE, EDGE, 2), np.zeros(2)
        return self._observe(), {}

    def step(self, action: np.ndarray) -> Step:
        self.position, self.velocity = move(self.position, self.velocity, np.asarray(action, np.float64))
        return self._observe(), float(self.reward(self.position)), False, False, {}

    def _observe(self) -> np.ndarray:
        return observe(self.position, self.velocity).astype(np.float32)


gym.register(ENV, entry_point="offrl.envs.point_mass:PointMass", max_episode_steps=LIMIT)


TASK = Task(name=NAME, env_id=f"offrl.envs.point_mass:{ENV}", max_episode_steps=LIMIT, observation_dim=4, action_dim=2)
register_generated(TASK, lambda: generate(0, EPISODES))


def generate(seed: int, episodes: int) -> RawData:
    """`episodes` that begin anywhere, of pushes uniform in [-1, 1]**2 that are held for a while."""
    draw = np.random.Generator(np.random.PCG64(seed))
    position, velocity = draw.uniform(-EDGE, EDGE, (episodes, 2)), np.zeros((episodes, 2))
    action, parts = draw.uniform(-1.0, 1.0, (episodes, 2)), []
    for _ in range(LIMIT):
        anew = draw.random((episodes, 1)) < 1.0 / HELD
        action = np.where(anew, draw.uniform(-1.0, 1.0, (episodes, 2)), action)
        step = {"observations": observe(position, velocity), "actions": action}
        position, velocity = move(position, velocity, action)
        parts.append({**step, "next_observations": observe(position, velocity), "rewards": at_centre(position)})
    return raw_data(side_by_side(parts), TASK, seed, action_low=np.float32(-1.0), action_high=np.float32(1.0))
