"""An environment for stops: it counts its steps, and a signal may come at one of them."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Walk(gym.Env[Any, Any]):
    """x moves by half the action and a drift; success beyond 0.8, which pays nothing, and a time-out after 9 steps.
    Counts all steps.
    """

    observation_space = spaces.Box(-9, 9, (2,))
    action_space: Any = spaces.Box(-2.0, 2.0, (1,))
    steps, at = 0, -1

    def __init__(self, reports: bool = True) -> None:
        self.reports = reports

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = float(self.np_random.uniform(-0.5, 0.5)), 0
        return np.array([self.x, self.t], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Walk.steps += 1
        if Walk.steps == Walk.at:
            os.kill(os.getpid(), signal.SIGINT)
        self.x += float(action[0]) / 2 + 0.05
        self.t += 1
        info = {"success": self.x > 0.8} if self.reports else {}
        return np.array([self.x, self.t], np.float32), -abs(self.x), False, self.t >= 9, info
