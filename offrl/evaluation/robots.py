"""Observations, rewards and endings of Gymnasium's plain MuJoCo robots, of many environments in a few array operations: its numbers, bit
for bit. `offrl.evaluation.steppers` steps their physics, and compares before it relies on this."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np


class RobotState:
    """All environments' state after a step. K environments, P positions, V velocities, A actions."""

    __slots__ = ("actions", "contact", "qpos", "qvel", "speed")

    def __init__(self, actions: np.ndarray, qpos: np.ndarray, qvel: np.ndarray, contact: np.ndarray | None, speed: np.ndarray) -> None:
        self.actions = actions  # [K, A], in the action space's own type
        self.qpos, self.qvel = qpos, qvel  # [K, P], [K, V]
        self.contact = contact  # [K, bodies, 6] forces on the bodies; None where nobody asks
        self.speed = speed  # [K] of the body along x


class Robot:
    """The arithmetic of one family of environments after a step of their physics. One object per environment's settings."""

    FIELDS: tuple[str, ...] = ()  # attributes of the environment that decide what is computed
    SKIP = 1  # leading positions that are not observed
    contact = False  # whether the bodies' contact forces are needed

    def __init__(self, base: Any, version: int) -> None:
        self.version = version
        self.values = tuple(getattr(base, name) for name in self.FIELDS)
        self.p: Any = SimpleNamespace(**dict(zip((name[1:] for name in self.FIELDS), self.values, strict=True)))

    def position(self, base: Any) -> np.ndarray:
        """A view whose first number is where the environment is along x."""
        return base.data.qpos

    def observe(self, s: RobotState) -> np.ndarray:
        """[K, O]"""
        return np.concatenate((self._positions(s), s.qvel), axis=1)

    def reward(self, s: RobotState, healthy: np.ndarray | None) -> np.ndarray:
        """[K]"""
        return self.p.forward_reward_weight * s.speed - self._control_cost(s)

    def healthy(self, s: RobotState, observations: np.ndarray) -> np.ndarray | None:
        """[K] bool; None: always."""
        return None

    def over(self, healthy: np.ndarray | None, count: int) -> np.ndarray:
        """[K] bool"""
        if healthy is None or not getattr(self.p, "terminate_when_unhealthy", True):
            return np.zeros(count, bool)
        return ~healthy

    def _positions(self, s: RobotState) -> np.ndarray:
        return s.qpos[:, self.SKIP :] if self.p.exclude_current_positions_from_observation else s.qpos

    def _control_cost(self, s: RobotState) -> np.ndarray:
        weight = self.p.ctrl_cost_weight
        # Gymnasium multiplies one number by another, and which type that gives depends on the version of NumPy
        kind = np.asarray(weight * s.actions.dtype.type(1)).dtype
        return kind.type(weight) * np.square(s.actions).sum(axis=1).astype(kind)

    def _bonus(self, healthy: np.ndarray) -> Any:
        """The reward for being healthy, [K] or one number for all."""
        weight = self.p.healthy_reward
        if self.version == 4 and self.p.terminate_when_unhealthy:
            return 1.0 * weight
        return healthy * weight


class Runner(Robot):
    """HalfCheetah."""

    FIELDS: tuple[str, ...] = ("_forward_reward_weight", "_ctrl_cost_weight", "_exclude_current_positions_from_observation")


class Swimmer(Runner):
    SKIP = 2


class Walker(Robot):
    FIELDS: tuple[str, ...] = (
        *Runner.FIELDS,
        "_healthy_reward",
        "_terminate_when_unhealthy",
        "_healthy_z_range",
        "_healthy_angle_range",
    )

    def observe(self, s: RobotState) -> np.ndarray:
        return np.concatenate((self._positions(s), np.clip(s.qvel, -10, 10)), axis=1)

    def reward(self, s: RobotState, healthy: np.ndarray | None) -> np.ndarray:
        assert healthy is not None
        return (self.p.forward_reward_weight * s.speed + self._bonus(healthy)) - self._control_cost(s)

    def healthy(self, s: RobotState, observations: np.ndarray) -> np.ndarray | None:
        (low, high), (least, most) = self.p.healthy_z_range, self.p.healthy_angle_range
        z, angle = s.qpos[:, 1], s.qpos[:, 2]
        return (low < z) & (z < high) & (least < angle) & (angle < most)


class Hopper(Walker):
    FIELDS = (*Walker.FIELDS, "_healthy_state_range")

    def healthy(self, s: RobotState, observations: np.ndarray) -> np.ndarray | None:
        upright = super().healthy(s, observations)
        assert upright is not None
        low, high = self.p.healthy_state_range
        inside = [((low < x) & (x < high)).all(axis=1) for x in (s.qpos[:, 2:], s.qvel)]
        return upright & inside[0] & inside[1]


class Ant(Robot):
    SKIP = 2
    FIELDS: tuple[str, ...] = (
        "_ctrl_cost_weight",
        "_contact_cost_weight",
        "_healthy_reward",
        "_terminate_when_unhealthy",
        "_healthy_z_range",
        "_contact_force_range",
        "_exclude_current_positions_from_observation",
    )

    def __init__(self, base: Any, version: int) -> None:
        more = ("_use_contact_forces",) if version == 4 else ("_forward_reward_weight", "_include_cfrc_ext_in_observation", "_main_body")
        self.FIELDS = (*self.FIELDS, *more)
        super().__init__(base, version)
        self.contact = version == 5 or self.p.use_contact_forces

    def position(self, base: Any) -> np.ndarray:
        return base.data.body("torso" if self.version == 4 else self.p.main_body).xpos

    def observe(self, s: RobotState) -> np.ndarray:
        parts = [self._positions(s), s.qvel]
        if self.version == 4 and self.contact:
            parts.append(self._forces(s))
        elif self.version == 5 and self.p.include_cfrc_ext_in_observation:
            parts.append(self._forces(s)[:, 6:])  # without the world's
        return np.concatenate(parts, axis=1)

    def reward(self, s: RobotState, healthy: np.ndarray | None) -> np.ndarray:
        assert healthy is not None
        gain = s.speed if self.version == 4 else s.speed * self.p.forward_reward_weight
        cost = self._control_cost(s)
        if self.contact:
            cost = cost + self.p.contact_cost_weight * np.square(self._forces(s)).sum(axis=1)
        return (gain + self._bonus(healthy)) - cost

    def healthy(self, s: RobotState, observations: np.ndarray) -> np.ndarray | None:
        low, high = self.p.healthy_z_range
        z = s.qpos[:, 2]
        return np.isfinite(s.qpos).all(axis=1) & np.isfinite(s.qvel).all(axis=1) & (low <= z) & (z <= high)

    def _forces(self, s: RobotState) -> np.ndarray:
        assert s.contact is not None
        low, high = self.p.contact_force_range
        return np.clip(s.contact, low, high).reshape(len(s.contact), -1)


class Pendulum(Robot):
    """InvertedPendulum."""

    def observe(self, s: RobotState) -> np.ndarray:
        return np.concatenate((s.qpos, s.qvel), axis=1)

    def reward(self, s: RobotState, healthy: np.ndarray | None) -> np.ndarray:
        assert healthy is not None
        return np.ones(len(healthy)) if self.version == 4 else healthy.astype(np.float64)

    def healthy(self, s: RobotState, observations: np.ndarray) -> np.ndarray | None:
        return np.isfinite(observations).all(axis=1) & ~(np.abs(observations[:, 1]) > 0.2)


ROBOTS: dict[str, tuple[type[Robot], int]] = {
    f"gymnasium.envs.mujoco.{module}_v{version}:{name}": (kind, version)
    for module, name, kind in (
        ("hopper", "HopperEnv", Hopper),
        ("half_cheetah", "HalfCheetahEnv", Runner),
        ("walker2d", "Walker2dEnv", Walker),
        ("ant", "AntEnv", Ant),
        ("swimmer", "SwimmerEnv", Swimmer),
        ("inverted_pendulum", "InvertedPendulumEnv", Pendulum),
    )
    for version in (4, 5)
}
