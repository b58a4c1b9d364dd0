"""`offrl collect` killed on the way, and recording from an offrl run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from .conftest import Offrl


@pytest.mark.slow
def test_killed_and_run_again_ends_with_whole_sets(offrl: Offrl) -> None:
    """kill -9 after the second checkpoint of four: every set is whole, no episode is there twice, and a third run
    changes nothing.
    """
    pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
    words = (
        "env=Pendulum-v1 recipe=d4rl steps=320 max_steps=25 snapshot_every=80 rows=100 eval_episodes=1 out=a quiet=true"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "offrl.cli", "collect", *words.split()], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    place, until = Path("a/train/checkpoints/step_000000160.safetensors"), time.monotonic() + 120
    while not place.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    assert not list(Path("a").glob("*.hdf5"))
    assert offrl(f"collect {words}").status == 0
    stamps = {p.name: p.stat().st_mtime_ns for p in Path("a").glob("*.hdf5")}
    assert len(stamps) == 6
    for name in stamps:
        with h5py.File(f"a/{name}") as file:
            ends = np.flatnonzero(file["timeouts"][()] | file["terminals"][()])
            observations = file["observations"][()]
        np.testing.assert_array_equal(np.diff(np.concatenate([[-1], ends])), 25)  # Pendulum never terminates
        assert len(observations) == ends[-1] + 1
        if name != "pendulum-v1-medium-expert.hdf5":  # where training gained nothing, both are the same policy
            starts = observations[np.concatenate([[0], ends[:-1] + 1])]
            assert len(np.unique(starts, axis=0)) == len(starts)
    with h5py.File("a/pendulum-v1-full-replay.hdf5") as file:
        assert len(file["rewards"]) == 300  # 320 steps less two unfinished episodes: at the kill and at the end
    assert offrl(f"collect {words}").status == 0
    assert stamps == {p.name: p.stat().st_mtime_ns for p in Path("a").glob("*.hdf5")}


def test_a_run_is_recorded_with_all_its_replicas(offrl: Offrl) -> None:
    assert offrl("train algo=bc seeds=2 name=r").status == 0
    done = offrl("collect env=Hopper-v5 policy=runs/r episodes=4 max_steps=5 out=a explore=false")
    assert done.status == 0 and "data" in done.out
    with h5py.File("a/hopper-v5-data.hdf5") as file:
        assert file["timeouts"][()].sum() == 4 and len(file["rewards"]) == 20 and file["infos/qpos"].shape == (20, 6)
    refused = offrl("collect env=HalfCheetah-v5 policy=runs/r episodes=4 out=b")
    assert refused.status == 2 and "11 numbers" in refused.err and not Path("b").exists()
