"""Whole runs on an imitated GPU: data, groups, metrics, checkpoints, a resume and what is left at the end, as on the
CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.system import files as checkpoint
from tests.support.imitated import META, Machine, imitated

SMALL: dict[str, dict[str, Any]] = {
    "iql": {"algo.hidden": [8, 8], "algo.batch_size": 16},
    "dt": {"algo.width": 8, "algo.heads": 1, "algo.context": 3, "algo.batch_size": 8},
    "dynamics": {"algo.hidden": [8], "algo.members": 3, "algo.elites": 2, "algo.epoch": 5, "algo.batch_size": 16},
}


def data() -> Dataset:
    g, n = np.random.default_rng(0), 300
    ends = np.arange(n) % 30 == 29
    return from_arrays(
        g.normal(size=(n, 4)), g.uniform(-1, 1, (n, 2)), g.normal(size=n), ends, action_low=-1.0, action_high=1.0
    )


def train(folder: Path, algo: str, steps: int, name: str, **more: Any) -> offrl.Run:
    own = {**SMALL[algo], "eval.every": 0, "checkpoint.every": 5, "log_every": 5, "group": 2, **more}
    return offrl.train(
        algo=algo, dataset=data(), seeds=3, steps=steps, runs_dir=str(folder), name=name, quiet=True, **own
    )


def left(run: offrl.Run) -> dict[str, dict[str, torch.Tensor]]:
    """The files of tensors that a run ends with."""
    files = sorted(p for kind in ("policies", "models") for p in (run.dir / kind).glob("*.safetensors"))
    return {path.name: checkpoint.read(path)[0] for path in files}


@pytest.mark.nightly
@pytest.mark.parametrize("algo", ["iql", "dt", "dynamics"])
def test_a_run_and_its_resume(algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(tmp_path, algo, 20, "cpu", device="cpu", compile="eager")
    for module in ("offrl.training.setup", "offrl.api"):
        monkeypatch.setattr(f"{module}.pick_device", lambda name: META)
    monkeypatch.setattr("offrl.training.execution.choose_mode", lambda *a: "cudagraph")
    monkeypatch.setattr("offrl.system.backend.configure", lambda *a: "imitated")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with imitated(), Machine():
        train(tmp_path, algo, 10, "there")
        found = train(tmp_path, algo, 20, "there")
    assert found.record["mode"] == "cudagraph"
    ours, theirs = left(expected), left(found)
    assert len(ours) == 3 and list(ours) == list(theirs)
    for name, tensors in ours.items():
        for key, value in tensors.items():
            torch.testing.assert_close(theirs[name][key], value, atol=1e-5, rtol=0)
    rows = [
        [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()] for run in (expected, found)
    ]
    assert [row["step"] for row in rows[1]] == [5, 10, 15, 20]
    for a, b in zip(*rows, strict=True):
        assert a.keys() == b.keys()
        for name, value in a.items():
            assert b[name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
