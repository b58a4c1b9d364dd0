"""A residual learns to correct what a clone of demonstrations cannot: a push that they lack, within chunks that are
played open-loop.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import offrl
from offrl.data.arrays import from_arrays

pytestmark = pytest.mark.nightly
PUSH = np.array([0.25, -0.2])


class Pushed(gym.Env[Any, Any]):
    """A point in the plane goes to a target within 25 steps, against a push that nothing observes."""

    observation_space = spaces.Box(-9.0, 9.0, (4,))
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, push: float = 1.0) -> None:
        self.push = push * PUSH

    def _see(self) -> np.ndarray:
        return np.concatenate([self.x, self.target - self.x]).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.target = self.np_random.uniform(-1.0, 1.0, 2), self.np_random.uniform(-1.0, 1.0, 2)
        self.t = 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x = self.x + 0.15 * (np.clip(action, -1.0, 1.0) + self.push)
        self.t += 1
        success = bool(np.abs(self.target - self.x).max() < 0.06)
        return self._see(), float(success), success, self.t >= 25, {"success": success}


def demonstrations() -> Any:
    env, g, rows = Pushed(0.0), np.random.default_rng(0), []
    for episode in range(60):
        seen, over = env.reset(seed=episode)[0], False
        while not over:
            action = np.clip(3.0 * (env.target - env.x) + 0.1 * g.normal(size=2), -1.0, 1.0)
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((seen, action, reward, terminated, truncated and not terminated, after))
            seen, over = after, terminated or truncated
    return from_arrays(*(np.array(column) for column in zip(*rows, strict=True)), action_low=-1.0, action_high=1.0)


def test_a_residual_lifts_a_clone(tmp_path: Path) -> None:
    common: dict[str, Any] = {
        "quiet": True,
        "device": "cpu",
        "eval.episodes": 100,
        "eval.workers": 0,
        "compile": "eager",
    }
    shape = {
        "algo.length": 8,
        "algo.hidden": [32, 32],
        "dataset.normalize_observations": True,
        "algo.learning_rate": 1e-3,
    }
    clone = offrl.train(
        "flow_bc",
        demonstrations(),
        seeds=2,
        steps=1500,
        env=Pushed,
        runs_dir=str(tmp_path),
        name="clone",
        settings={**common, **shape},
    )
    more = {
        "mode": "residual",
        "algo.scale": 0.5,
        "algo.actor_learning_rate": 1e-3,
        "algo.hidden": [32, 32],
        "algo.horizon": 50,
        "eval.every": 0,
    }
    done = offrl.finetune(clone, env=Pushed, settings={**common, **more, "runs_dir": str(tmp_path), "steps": 16_000})
    before, after, plain = (
        np.array(rates)
        for rates in (
            [row["success"] for row in clone.final_scores],
            [row["success"] for row in done.final_scores],
            clone.evaluate(episodes=100, env=functools.partial(Pushed, 0.0)).successes.mean(1),  # type: ignore[union-attr]
        )
    )
    print(before, after, plain)
    assert (plain > 0.7).all() and (before < 0.5).all()
    assert (after > before + 0.2).all()
