"""Two processes that share the batches of one model, as `torchrun` starts them, train what one process trains."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offrl.system import files as checkpoint

SETTINGS = shlex.split(
    "train algo=iql dataset=builtin compare=[] seeds=1 steps=60 device=cpu algo.hidden=[32,32] algo.batch_size=64 "
    "log_every=20 quiet=true eval.every=0 eval.episodes=1 eval.max_steps=20 checkpoint.every=20 compile=eager"
)


def call(processes: int, runs_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *start, "-m", "offrl.cli", *SETTINGS, f"runs_dir={runs_dir}", "name=run", *more]
    return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=240)


@pytest.mark.nightly
def test_two_processes_train_what_one_does(tmp_path: Path) -> None:
    for processes in (1, 2):
        result = call(processes, tmp_path / str(processes))
        assert result.returncode == 0, result.stdout + result.stderr
        assert result.stdout.count("algorithm ") == 1, result.stdout
    (one, _), (two, meta) = (checkpoint.load_latest(tmp_path / str(n) / "run") or ({}, {}) for n in (1, 2))
    assert meta["step"] == 60 and list(one) == list(two)
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert any(not torch.equal(value, two[name]) for name, value in one.items())  # or nothing was shared
    lines = [(tmp_path / str(n) / "run" / "metrics.jsonl").read_text().splitlines() for n in (1, 2)]
    assert len(lines[0]) == len(lines[1]) == 3
    assert len((tmp_path / "2" / "run" / "scores.csv").read_text().splitlines()) == 2  # written once


@pytest.mark.nightly
def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    result = call(2, tmp_path, "algo.batch_size=63")
    assert result.returncode != 0
    assert "algo.batch_size=63 cannot be shared by 2 processes" in result.stderr
