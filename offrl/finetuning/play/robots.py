"""Observations, rewards and ends of Gymnasium's plain robots, of many after one step of their physics: its numbers, to
the bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Motion:
    """K robots after a step."""

    actions: np.ndarray  # [K, A] as their spaces have them
    speeds: np.ndarray  # [K] along x
    qpos: np.ndarray  # [K, P]
    qvel: np.ndarray  # [K, V]
    forces: np.ndarray  # [K, bodies, 6] on the bodies; zeros where `Robot.feels` is False


class Robot:
    """HalfCheetah, and what others have in common with it. Weights and ranges are those of the environment `base`."""

    skip = 1  # leading positions that are not observed
    bound = np.inf  # of the velocities that are observed
    feels = False  # whether forces are needed
    body: int | None = None  # whose place along x counts; None: the first position

    def __init__(self, base: Any) -> None:
        self.base, self.old = base, type(base).__module__.endswith("_v4")

    def position(self, base: Any) -> np.ndarray:
        """A view whose first number is where an environment is along x."""
        return base.data.qpos if self.body is None else base.data.xpos[self.body]

    def observe(self, motion: Motion) -> np.ndarray:
        """[K, O]"""
        skip = self.skip * bool(self.base._exclude_current_positions_from_observation)
        return np.concatenate((motion.qpos[:, skip:], np.clip(motion.qvel, -self.bound, self.bound)), axis=1)

    def healthy(self, motion: Motion) -> np.ndarray | None:
        """[K] bool; None: always."""
        return None

    def ends(self, healthy: np.ndarray) -> np.ndarray:
        """[K] bool"""
        return ~healthy & bool(self.base._terminate_when_unhealthy)

    def rewards(self, motion: Motion, healthy: np.ndarray | None) -> np.ndarray:
        """[K]"""
        gain = getattr(self.base, "_forward_reward_weight", 1.0) * motion.speeds
        if healthy is not None:
            unconditional = self.old and self.base._terminate_when_unhealthy
            gain = gain + (healthy | unconditional) * self.base._healthy_reward
        return gain - self._cost(motion)

    def _cost(self, motion: Motion) -> np.ndarray:
        weight, actions = self.base._ctrl_cost_weight, motion.actions
        # Gymnasium multiplies two numbers, of which NumPy before 2 makes one of another type than 2 does
        kind = np.asarray(weight * actions.dtype.type(1)).dtype
        return kind.type(weight) * np.square(actions).sum(axis=1).astype(kind)


class Swimmer(Robot):
    """Two positions are not observed."""

    skip = 2


class Walker(Robot):
    """Falls."""

    bound = 10.0

    def healthy(self, motion: Motion) -> np.ndarray:
        ranges = (self.base._healthy_z_range, self.base._healthy_angle_range)
        return _within(motion.qpos[:, 1:3], *np.array(ranges).T)


class Hopper(Walker):
    """Falls, or is too fast."""

    def healthy(self, motion: Motion) -> np.ndarray:
        state = np.concatenate((motion.qpos[:, 2:], motion.qvel), axis=1)
        return super().healthy(motion) & _within(state, *self.base._healthy_state_range)


class Ant(Robot):
    """Falls, or jumps; feels forces, from v5 on."""

    skip = 2

    def __init__(self, base: Any) -> None:
        super().__init__(base)
        self.feels = not self.old or base._use_contact_forces
        self.body = base.data.body("torso" if self.old else base._main_body).id

    def observe(self, motion: Motion) -> np.ndarray:
        parts = [super().observe(motion)]
        if self.feels and (self.old or self.base._include_cfrc_ext_in_observation):
            parts.append(self._forces(motion)[:, 0 if self.old else 6 :])  # v5 without the world's
        return np.concatenate(parts, axis=1)

    def healthy(self, motion: Motion) -> np.ndarray:
        low, high = self.base._healthy_z_range
        finite = np.isfinite(motion.qpos).all(axis=1) & np.isfinite(motion.qvel).all(axis=1)
        return finite & (low <= motion.qpos[:, 2]) & (motion.qpos[:, 2] <= high)

    def _cost(self, motion: Motion) -> np.ndarray:
        cost = super()._cost(motion)
        if not self.feels:
            return cost
        return cost + self.base._contact_cost_weight * np.square(self._forces(motion)).sum(axis=1)

    def _forces(self, motion: Motion) -> np.ndarray:
        return np.clip(motion.forces, *self.base._contact_force_range).reshape(len(motion.forces), -1)


class Pendulum(Robot):
    """InvertedPendulum."""

    def observe(self, motion: Motion) -> np.ndarray:
        return np.concatenate((motion.qpos, motion.qvel), axis=1)

    def healthy(self, motion: Motion) -> np.ndarray:
        return np.isfinite(self.observe(motion)).all(axis=1) & ~(np.abs(motion.qpos[:, 1]) > 0.2)

    def ends(self, healthy: np.ndarray) -> np.ndarray:
        return ~healthy

    def rewards(self, motion: Motion, healthy: np.ndarray | None) -> np.ndarray:
        return np.ones(len(motion.qpos)) if self.old or healthy is None else healthy.astype(float)


def _within(values: np.ndarray, low: Any, high: Any) -> np.ndarray:
    return ((low < values) & (values < high)).all(axis=1)


ROBOTS: dict[str, type[Robot]] = {  # by their ids but for the version
    "HalfCheetah": Robot,
    "Swimmer": Swimmer,
    "Walker2d": Walker,
    "Hopper": Hopper,
    "Ant": Ant,
    "InvertedPendulum": Pendulum,
}
VERSIONS = ("4", "5")
