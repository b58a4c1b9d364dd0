"""A chain of states with a reward at its end alone, whose state can be set, and a recording of some of its states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
from gymnasium import spaces

LENGTH = 40  # states


class Corridor(gym.Env[Any, Any]):
    """One step to the left or to the right; the last state pays 1 and ends the episode, as do `limit` steps. Which
    action goes to the right differs from state to state, so that a policy with one favourite action gets nowhere."""

    action_space = spaces.Discrete(2)

    def __init__(self, length: int = LENGTH, limit: int = 100) -> None:
        self.length, self.limit = length, limit
        self.right = np.random.default_rng(0).integers(0, 2, length)  # the action, of each state
        self.observation_space = spaces.Box(0.0, 1.0, (length,))

    def _get_obs(self) -> np.ndarray:
        return np.eye(self.length, dtype=np.float32)[self.x]

    def set_state(self, qpos: np.ndarray, qvel: np.ndarray) -> None:
        """As Gymnasium's MuJoCo environments."""
        assert qpos.shape == qvel.shape == (1,)
        self.x = int(qpos[0])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x = self.t = 0
        return self._get_obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x, self.t = max(0, self.x + (1 if action == self.right[self.x] else -1)), self.t + 1
        over = self.x == self.length - 1
        return self._get_obs(), float(over), over, self.t >= self.limit, {"success": over}


def record(path: Path, cells: Any, length: int = LENGTH, **columns: Any) -> Path:
    """Write rows in some cells as D4RL HDF5, each an episode that stays there, with the state of each row. columns: in
    place of others; None: left out."""
    cells = np.asarray(cells)
    eye = np.eye(length, dtype=np.float32)
    values = {
        "observations": eye[cells],
        "actions": np.arange(len(cells)) % 2,
        "rewards": np.zeros(len(cells), np.float32),
        "next_observations": eye[cells],
        "terminals": np.zeros(len(cells), bool),
        "timeouts": np.ones(len(cells), bool),
        "infos/qpos": cells[:, None].astype(float),
        "infos/qvel": np.zeros((len(cells), 1)),
        **columns,
    }
    with h5py.File(path, "w") as file:
        for name, column in values.items():
            if column is not None:
                file[name] = column
    return path
