"""Episodes that begin in recorded states find a reward that play from the task's start never sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import offrl
from scripts.bench.sparse_goal import PointMaze
from tests.support.corridor import LENGTH, Corridor, record

pytestmark = pytest.mark.nightly
SEEDS = 10


@pytest.mark.parametrize("starts", ["data", "task"])
def test_a_chain_with_a_reward_at_its_end(starts: str, tmp_path: Path) -> None:
    """Discrete SAC from fresh parameters, without a row of the data in any batch; states of every fourth cell, in
    which the episodes of the first 8,000 of 12,000 steps begin.
    """
    file = record(tmp_path / "chain.hdf5", np.arange(0, LENGTH, 4))
    online: dict[str, Any] = {"mixing": 0, "envs": 16, "max_steps": 100, "utd": 0.1, "update_every": 160, "noise": 0.5}
    if starts == "data":
        online |= {"starts": "data", "start_limit": 30, "start_steps": 8_000}
    settings = {
        "algo.critics": 2, "algo.hidden": [32], "algo.batch_size": 256, "algo.discount": 0.95, "algo.polyak": 0.1,
        "algo.learning_rate": 3e-3, "algo.target_entropy": 0.3, "algo.entropy_in_target": False,
        "dataset.reward_scale": 100.0, "eval.episodes": 1, "eval.every": 0, "eval.workers": 0,
    }  # fmt: skip
    run = offrl.finetune(
        algo="sac_n", dataset=str(file), env=Corridor, steps=12_000, seeds=SEEDS, quiet=True, device="cpu",
        compile="eager", name=starts, runs_dir=str(tmp_path), settings=settings, **online,
    )  # fmt: skip
    solved = sum(row["return_mean"] == 1.0 for row in run.final_scores)
    print(f"{starts}: {solved} of {SEEDS} from the first state")
    assert solved >= 7 if starts == "data" else solved <= 2


@pytest.mark.parametrize("starts", ["data", "task"])
def test_a_point_maze_with_a_reward_at_its_end(starts: str, tmp_path: Path) -> None:
    """SAC from fresh parameters; states from everywhere in the maze, for the first 6,667 of 10,000 steps."""
    g, rows = np.random.default_rng(0), 300
    cells = np.argwhere(PointMaze().free)
    points = cells[g.integers(0, len(cells), rows)] + g.uniform(-0.3, 0.3, (rows, 2))
    seen = ((points - 3.0) / 2.0).astype(np.float32)
    columns = {
        "observations": seen, "next_observations": seen, "actions": g.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": np.zeros(rows, np.float32), "terminals": np.zeros(rows, bool), "timeouts": np.ones(rows, bool),
        "infos/qpos": points, "infos/qvel": np.zeros((rows, 2)),
    }  # fmt: skip
    with h5py.File(tmp_path / "maze.hdf5", "w") as file:
        for name, column in columns.items():
            file[name] = column
    online: dict[str, Any] = {"mixing": 0, "envs": 16, "max_steps": 120, "utd": 0.12, "update_every": 160}
    if starts == "data":
        online |= {"starts": "data", "start_limit": 40, "start_steps": 6_667}
    settings = {
        "algo.critics": 2, "algo.hidden": [64, 64], "algo.batch_size": 512, "algo.discount": 0.97, "algo.polyak": 0.2,
        "algo.learning_rate": 3e-3, "algo.n_step": 5, "algo.entropy_in_target": False, "dataset.reward_scale": 100.0,
        "dataset.action_low": [-1.0, -1.0], "dataset.action_high": [1.0, 1.0],
        "eval.episodes": 3, "eval.every": 0, "eval.workers": 0,
    }  # fmt: skip
    run = offrl.finetune(
        algo="sac_n", dataset=str(tmp_path / "maze.hdf5"), env=PointMaze, steps=10_000, seeds=3, quiet=True,
        device="cpu", compile="eager", name=starts, runs_dir=str(tmp_path), settings=settings, **online,
    )  # fmt: skip
    successes = [row["success"] for row in run.final_scores]
    print(f"{starts}: success rates {successes}")
    assert np.mean(successes) >= 0.6 if starts == "data" else np.mean(successes) <= 0.2
