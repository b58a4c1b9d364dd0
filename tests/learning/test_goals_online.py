"""Hindsight online: without data, towards goals that are never met by chance twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import offrl

pytestmark = pytest.mark.nightly


class Point(gym.Env[Any, Any]):
    """A point in the square, which moves by up to 0.15 in each direction and has 30 steps to come within 0.15 of a goal
    anywhere in it.
    """

    observation_space = spaces.Box(-1.0, 1.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.goal = self.np_random.uniform(-1.0, 1.0, (2, 2)).astype(np.float32)
        self.t = 0
        return self.x.copy(), {"goal": self.goal}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x, self.t = np.clip(self.x + 0.15 * action, -1.0, 1.0).astype(np.float32), self.t + 1
        success = bool(np.linalg.norm(self.x - self.goal) < 0.15)
        return self.x.copy(), float(success), success, self.t >= 30, {"success": success}


def rates(folder: Path, algo: str, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """The success of three seeds before and after 3,000 steps."""
    small = {"algo.hidden": [64, 64], "algo.batch_size": 64, "eval.episodes": 50, "eval.every": 0, "mixing": 0}
    run = offrl.finetune(
        algo=algo, env=Point, seeds=3, steps=3000, warmup=300, runs_dir=str(folder), quiet=True,
        settings={**small, **settings},
    )  # fmt: skip
    first, last = (np.array([float(r["success"]) for r in run.score_rows if r["step"] == step]) for step in (0, 3000))
    return first, last


def test_goals_in_hindsight_are_learnt(tmp_path: Path) -> None:
    """From 0 to 100% when it was written."""
    first, last = rates(tmp_path, "gciql")
    assert first.max() <= 0.2 and last.min() >= 0.7
