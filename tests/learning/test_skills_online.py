"""Skills of slow data, which do not reach the end of a maze in time, learn to in an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import offrl
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset

pytestmark = pytest.mark.nightly


class Bends(gym.Env[Any, Any]):
    """A point in a corridor with four bends, which begins at one end; the third bend pays 1 and ends the episode, as 45
    steps do, of which the way takes 25 at full speed.
    """

    maze = ("#######", "#.....#", "#####.#", "#.....#", "#.#####", "#.....#", "#######")
    free = np.array([[cell == "." for cell in row] for row in maze])
    goal = np.array([3.0, 1.0])
    observation_space = spaces.Box(-2.0, 2.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def _get_obs(self) -> np.ndarray:
        return ((self.point - 3.0) / 2.0).astype(np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.point, self.t = 1.0 + self.np_random.uniform(-0.2, 0.2, 2), 0
        return self._get_obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        for axis in (0, 1):
            after = self.point.copy()
            after[axis] += 0.4 * float(np.clip(action[axis], -1, 1))
            if self.free[tuple(np.rint(after).astype(int))]:
                self.point = after
        over = bool(np.abs(self.point - self.goal).max() < 0.5)
        return self._get_obs(), float(over), over, self.t >= 45, {"success": over}


def recorded(rows: int = 8000) -> Dataset:
    """Play between random cells of the corridor at half speed, with noise."""
    g, env, cells = np.random.default_rng(0), Bends(), [np.array([1.0, 1.0])]
    for corner in ((1, 5), (3, 5), (3, 1), (5, 1), (5, 5)):
        way = np.array(corner, float) - cells[-1]
        count = int(np.abs(way).max())
        cells += [cells[-1] + way * (i + 1) / count for i in range(count)]
    columns: list[tuple[Any, ...]] = []
    while len(columns) < rows:
        cell, end = g.integers(0, len(cells), 2)
        env.point, env.t, towards = cells[cell] + g.uniform(-0.3, 0.3, 2), 0, 1 if end > cell else -1
        for t in range(60):
            before = env._get_obs()
            while cell != end and np.abs(env.point - cells[cell]).max() < 0.4:
                cell += towards
            way = cells[cell] - env.point
            way = 0.5 * way / max(np.abs(way).max(), 1e-6)
            action = np.clip(way + 0.3 * g.normal(size=2), -1, 1).astype(np.float32)
            after, reward, terminal, *_ = env.step(action)
            over = terminal or t == 59 or (cell == end and np.abs(env.point - cells[cell]).max() < 0.3)
            columns.append((before, action, reward, terminal, over and not terminal, after))
            if over:
                break
    return from_arrays(*map(np.array, zip(*columns, strict=True)), action_low=-1.0, action_high=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("train_low", [True, False])
def test_skills_become_faster(train_low: bool, tmp_path: Path) -> None:
    """From 0 to 100% of three seeds with either when it was written."""
    where: dict[str, Any] = {"runs_dir": str(tmp_path), "quiet": True, "device": "cpu"}
    settings = {
        "algo.hidden": [64, 64], "algo.batch_size": 128, "algo.learning_rate": 1e-3, "algo.discount": 0.98,
        "algo.expectile": 0.9, "algo.skill_hidden": [64, 64], "algo.recurrent_width": 32, "algo.skill_dim": 4,
        "algo.skill_length": 8, "algo.skill_steps": 3000, "dataset.normalize_observations": False, "eval.env": "none",
    }  # fmt: skip
    offline = offrl.train("skill_iql", recorded(), seeds=3, steps=3000, name="offline", settings=settings, **where)
    own = {"algo.divergence_weight": 0.01, "algo.train_low": train_low, "eval.episodes": 50, "eval.every": 0}
    run = offrl.finetune(offline, env=Bends, steps=4000, warmup=1000, utd=0.25, settings=own, **where)
    first, last = ([float(r["success"]) for r in run.score_rows if r["step"] == step] for step in (0, 4000))
    assert max(first) <= 0.2 and min(last) >= 0.7
