"""The command line, in process: `offrl("train steps=20")` gives its exit status, output and errors."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import h5py
import numpy as np
import pytest

from offrl.cli.main import main
from offrl.system import devices

# each test has a cache of its own, in which the library of products would be measured anew, and under load come out
# another one, which rounds differently
os.environ.setdefault(devices.PRODUCTS, devices.products_library())
SMALL = shlex.split("steps=20 compile=eager compare=[] algo.hidden=[8] eval.episodes=1 eval.every=0 log_every=10")


class Result(NamedTuple):
    status: int
    out: str
    err: str


Offrl = Callable[..., Result]


@pytest.fixture
def offrl(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Offrl:
    """Runs a command in an empty directory. `train` gets small settings, which those in the command override."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path / "cache"))

    def run(command: str, *more: str) -> Result:
        words = [*shlex.split(command), *more]
        if words[:1] == ["train"] and not any(w.startswith("resume=") for w in words):
            words[1:1] = SMALL
        capfd.readouterr()
        status = main(words)
        return Result(status, *capfd.readouterr())

    return run


def hopper_like(rows: int = 300) -> dict[str, np.ndarray]:
    """Columns of Hopper's shapes in D4RL's layout: episodes of 100 steps that time out."""
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(rows, 11)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (rows, 3)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminals": np.zeros(rows, bool),
        "timeouts": np.arange(rows) % 100 == 99,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """`write("x.hdf5", rewards=...)`: a file of `hopper_like`, with other columns in place of, or beside, its own."""

    def make(name: str, **columns: np.ndarray | None) -> Path:
        with h5py.File(tmp_path / name, "w") as file:
            for key, value in {**hopper_like(), **columns}.items():
                if value is not None:
                    file[key] = value
        return tmp_path / name

    return make
