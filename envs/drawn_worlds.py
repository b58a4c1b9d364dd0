"""What NumPy draws: dynamics of many episodes side by side, and the pictures of their states."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from offrl.envs import point_mass

SIDE, EDGE = 32, 1.2  # pixels; |x| and |y| of a picture's edge
PIXEL = 2 * EDGE / SIDE

_axis = ((np.arange(SIDE) + 0.5) * PIXEL - EDGE).astype(np.float32)
X, Y = np.meshgrid(_axis, -_axis)  # of each pixel's middle, [32, 32]


def cover(x: np.ndarray, y: np.ndarray, radius: float) -> np.ndarray:
    """The share of each pixel that a disc covers, [E, 32, 32]. x, y: of the disc's middle, [E, 1, 1] or [E, 32, 32]."""
    return np.clip((radius - np.sqrt((X - x) ** 2 + (Y - y) ** 2)) / PIXEL + 0.5, 0.0, 1.0)


class DrawnWorld(ABC):
    """Dynamics and pictures of E episodes side by side: states [E, S] float64, observations [E, O] float32, actions
    [E, A] in [-1, 1], rewards [E]."""

    dims: tuple[int, int]  # O, A
    references: tuple[float, float]  # returns of uniform actions and of `control`
    velocity: slice  # of an observation
    reach: tuple[float, ...]  # differences of a state from the goal's that count as there

    @abstractmethod
    def goals(self, states: np.ndarray) -> np.ndarray:
        """The states in which these episodes are at their goals, at rest."""

    @abstractmethod
    def things(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What is drawn in red, green and blue: the share of each pixel that it covers, [E, 32, 32]; [] for nothing."""

    def reached(self, states: np.ndarray) -> np.ndarray:
        """Whether the goals are reached, bool [E]."""
        return np.asarray((np.abs(states - self.goals(states)) < self.reach).all(-1))

    def pictures(self, observations: np.ndarray) -> np.ndarray:
        """Pictures [E, 32, 32, 3] uint8 of observations."""
        out = np.empty((len(observations), SIDE, SIDE, 3), np.uint8)
        for first in range(0, len(observations), 256):  # what fits a cache
            part = slice(first, first + 256)
            for channel, shares in enumerate(self.things(observations[part])):
                out[part, ..., channel] = 255.0 * shares + 0.5
        return out


class PendulumWorld(DrawnWorld):
    """Gymnasium's Pendulum-v1, each action twice: state (angle, angular velocity), 0 upright, observation (cos, sin,
    angular velocity), reward -(angle² + 0.1 velocity² + 0.001 torque²) summed over both. An action of 1 is a torque of
    2 N m, too little to lift the pendulum without swinging."""

    dims, references = (3, 1), (-1225.5, -149.9)
    velocity = slice(2, 3)
    reach: tuple[float, ...] = (0.2, 1.0)

    def start(self, draw: np.random.Generator, episodes: int) -> np.ndarray:
        """First states."""
        return draw.uniform([-np.pi, -1.0], [np.pi, 1.0], (episodes, 2))

    def move(self, states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states after a step, and its rewards."""
        torque, rewards = 2.0 * np.clip(actions[:, 0], -1.0, 1.0), np.zeros(len(states))
        angle, velocity = states.T
        for _ in range(2):
            rewards -= angle**2 + 0.1 * velocity**2 + 0.001 * torque**2
            velocity = np.clip(velocity + 0.05 * (15.0 * np.sin(angle) + 3.0 * torque), -8.0, 8.0)
            angle = (angle + 0.05 * velocity + np.pi) % (2 * np.pi) - np.pi
        return np.stack([angle, velocity], -1), rewards

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Observations of states."""
        angle, velocity = states.T
        return np.stack([np.cos(angle), np.sin(angle), velocity], -1).astype(np.float32)

    def goals(self, states: np.ndarray) -> np.ndarray:
        return np.zeros_like(states)

    def control(self, observations: np.ndarray) -> np.ndarray:
        """Pump energy until there is enough to stand upright, then hold the pendulum there."""
        cos, sin, velocity = observations.T.astype(np.float64)
        lacking = 15.0 * (1.0 - cos) - velocity**2 / 2
        pump = np.where(velocity < 0.0, -1.0, 1.0) * lacking
        hold = -5.0 * sin - 1.0 * velocity
        return np.clip(np.where((cos > 0.9) & (np.abs(lacking) < 4.0), hold, pump), -1.0, 1.0)[:, None]

    def things(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        y, x = 0.8 * observations.T[:2, :, None, None]  # of the bob: upright is up
        along = np.clip((X * x + Y * y) / 0.64, 0.0, 1.0)  # of the rod, at the point of it that is next to a pixel
        return cover(x, y, 0.18), np.zeros(()), cover(along * x, along * y, 0.06)


class PointMassWorld(DrawnWorld):
    """The point mass of `envs/point_mass.py` and a goal in its box: state (position, velocity, goal), observed with the
    velocity in tenths; the reward is 1 at the goal, and less beyond some 0.2."""

    dims, references = (6, 2), (5.35, 91.16)
    velocity, reach = slice(2, 4), (0.1, 0.1, 0.1, 0.1, 1.0, 1.0)

    def start(self, draw: np.random.Generator, episodes: int) -> np.ndarray:
        """First states, at rest."""
        states = draw.uniform(-1.0, 1.0, (episodes, 6))
        states[:, 2:4] = 0.0
        return states

    def move(self, states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The states after a step, and its rewards."""
        position, velocity = point_mass.move(states[:, :2], states[:, 2:4], actions)
        goal = states[:, 4:]
        rewards = point_mass.near(np.linalg.norm(position - goal, axis=-1), 0.2)
        return np.concatenate([position, velocity, goal], -1), rewards

    def observe(self, states: np.ndarray) -> np.ndarray:
        """Observations of states."""
        return (states * (1.0, 1.0, 10.0, 10.0, 1.0, 1.0)).astype(np.float32)

    def goals(self, states: np.ndarray) -> np.ndarray:
        goal = states[:, 4:]
        return np.concatenate([goal, np.zeros_like(goal), goal], -1)

    def control(self, observations: np.ndarray) -> np.ndarray:
        """Push towards the goal, the less the nearer and the faster."""
        position, velocity, goal = np.split(observations.astype(np.float64), 3, -1)
        return np.clip(5.0 * (goal - position) - velocity, -1.0, 1.0)

    def things(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x, y, _, _, goal_x, goal_y = observations.T[:, :, None, None]
        ring = cover(goal_x, goal_y, 0.2) - cover(goal_x, goal_y, 0.1)
        return cover(x, y, 0.12), ring, np.zeros(())


DISCS = 3  # one in each colour
POSITIONS, PHASES, RATES = slice(3, None), slice(2, 2 + 2 * DISCS), slice(2 + 2 * DISCS, None)


class DistractedPendulumWorld(PendulumWorld):
    """The pendulum before a red, a green and a blue disc of half brightness that swing to and fro, each at its own
    pace, whatever is done: state (angle, angular velocity, 6 phases, 6 rates), observation (cos, sin, angular velocity,
    x and y of the discs)."""

    dims, reach = (3 + 2 * DISCS, 1), (*PendulumWorld.reach, *[1.0] * 4 * DISCS)

    def start(self, draw: np.random.Generator, episodes: int) -> np.ndarray:
        phases = draw.uniform(-np.pi, np.pi, (episodes, 2 * DISCS))
        rates = draw.uniform(0.1, 0.4, (episodes, 2 * DISCS))  # radians a step
        return np.concatenate([super().start(draw, episodes), phases, rates], -1)

    def move(self, states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        pendulum, rewards = super().move(states[:, :2], actions)
        return np.concatenate([pendulum, states[:, PHASES] + states[:, RATES], states[:, RATES]], -1), rewards

    def observe(self, states: np.ndarray) -> np.ndarray:
        positions = 0.9 * np.sin(states[:, PHASES])
        return np.concatenate([super().observe(states[:, :2]), positions.astype(np.float32)], -1)

    def goals(self, states: np.ndarray) -> np.ndarray:
        return np.where(np.arange(states.shape[-1]) < 2, 0.0, states)

    def control(self, observations: np.ndarray) -> np.ndarray:
        return super().control(observations[:, :3])

    def things(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x, y = np.split(observations.T[POSITIONS, :, None, None], 2)
        red, green, blue = (0.5 * cover(*at, 0.5) for at in zip(x, y, strict=True))
        bob, _, rod = super().things(observations)
        return np.maximum(bob, red), green, np.maximum(rod, blue)


WORLDS: dict[str, PendulumWorld | PointMassWorld] = {
    "pendulum": PendulumWorld(),
    "pendulum-distractor": DistractedPendulumWorld(),
    "point-mass": PointMassWorld(),
}
