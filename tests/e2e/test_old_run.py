"""A run directory of version 0.1, committed as that version wrote it, serves the commands of this one."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import offrl as library
from offrl.system import files as checkpoint

from .conftest import Offrl

OLD = Path(__file__).parents[1] / "data" / "run-0.1"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy, for commands add to it."""
    return Path(shutil.copytree(OLD, tmp_path / "run"))


def scores(run: Path) -> list[dict[str, str]]:
    with open(run / "scores.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_it_loads_and_is_evaluated(offrl: Offrl, run: Path) -> None:
    observations = np.random.default_rng(0).normal(size=(3, 11)).astype(np.float32)
    for seed in (0, 1):
        actions = library.load(run).policy(seed=seed).act(observations)
        assert actions.shape == (3, 3) and np.abs(actions).max() <= 1.0 and np.ptp(actions, axis=0).min() > 0.0
    result = offrl(f"evaluate {run} episodes=1 max_steps=10")
    assert result.status == 0 and not result.err
    for row in scores(run)[-2:]:  # of its last step: the same policies play the same episodes
        assert f"{float(row['return_mean']):.1f}" in result.out


def test_it_is_resumed(offrl: Offrl, run: Path) -> None:
    lines, rows = (run / "metrics.jsonl").read_text(), scores(run)
    before, _ = checkpoint.read(run / checkpoint.FOLDER / "step_000000020.safetensors")
    result = offrl(f"train resume={run} steps=30")
    assert result.status == 0, result.err
    assert "continuing from step 20" in result.out
    after, meta = checkpoint.read(run / checkpoint.FOLDER / "step_000000030.safetensors")
    assert meta["step"] == 30
    names = {k for k in before if k.startswith("state/")}
    assert names == {k for k in after if k.startswith("state/")}
    assert all(not torch.equal(before[k], after[k]) for k in names if k.startswith("state/params/")), (
        "every parameter goes on learning"
    )
    assert (run / "metrics.jsonl").read_text().startswith(lines)
    assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 30
    longer = scores(run)
    assert [{k: row[k] for k in old} for row, old in zip(longer, rows, strict=False)] == rows
    assert [int(row["step"]) for row in longer] == [10, 10, 20, 20, 30, 30]
