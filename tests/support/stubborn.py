"""An environment that other processes can make, in which what may go wrong does so at actions of one's choice."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
from gymnasium import spaces

# actions: an error, an error at the next reset, MuJoCo's warning, the end of the process
BREAK, STICK, EXPLODE, DIE = 0.875, 0.75, 0.5, 0.25


class Stubborn(gym.Env[Any, Any]):
    """x moves by negative actions; a terminal below -1, a time-out after 5 steps."""

    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Box(-1.0, 1.0, (1,))
    stuck = False

    def _get_obs(self) -> np.ndarray:
        return np.array([self.x, self.t], np.float32)

    def set_state(self, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """As Gymnasium's MuJoCo environments."""
        self.x = float(qpos[0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if self.stuck:
            self.stuck = False
            raise RuntimeError("it sticks")
        self.x, self.t = float(self.np_random.uniform(-0.5, 0.5)), 0
        return self._get_obs(), {"goal": np.array([self.x, 9.0])}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        value = float(action[0])
        if value == BREAK:
            raise ValueError("it broke")
        if value == DIE:
            os._exit(3)
        if value == EXPLODE:
            mujoco.get_mju_user_warning()("the simulation is unstable")
        self.stuck = value == STICK
        self.x, self.t = self.x + min(value, 0.0), self.t + 1
        info = {"success": self.x < -0.5, "cost": self.t}
        return self._get_obs(), self.x / 3, self.x < -1.0, self.t >= 5 or self.stuck, info


def stubborn() -> Stubborn:
    """One of them."""
    return Stubborn()
