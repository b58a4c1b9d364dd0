"""Each mistake: one line on standard error that names it, exit status 2, and nothing lost."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.algorithms.bc import BC, BCConfig
from offrl.system import files as checkpoint

from .conftest import Offrl, hopper_like


def refused(result: Any, *words: str) -> None:
    """One line, status 2, and each of `words` in it."""
    assert result.status == 2, result
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("offrl: error: "), result.err
    for word in words:
        assert word in lines[0]


NAMES = {
    "trian": ["unknown command 'trian'", "'train'"],
    "train algo=iqll": ["unknown algorithm 'iqll'", "Did you mean 'iql'"],
    "train dataset=hopper-mediun-v2": ["unknown dataset 'hopper-mediun-v2'", "Did you mean 'hopper-medium-v2'"],
    "train stepss=10": ["unknown setting 'stepss'", "Did you mean 'steps'"],
    "train algo.expectil=0.7": ["Did you mean 'algo.expectile'"],
    "train dataset.normalise_observations=true": ["Did you mean 'dataset.normalize_observations'"],
    "train experiment=iql/d4rl-gim": ["Did you mean 'iql/d4rl-gym'"],
    "train algo=bc experiment=iql/d4rl-gym": ["for another algorithm"],
    "train eval.env=Hoper-v4": ["unknown environment 'Hoper-v4'", "Did you mean 'Hopper-v4'"],
    "train compare=[bcc]": ["unknown algorithm 'bcc'"],
    "train steps": ["'steps' is not a setting"],
    "data inspct builtin": ["Did you mean 'inspect'"],
    "evaluate": ["usage"],
    "list algo=iqll": ["Did you mean 'iql'"],
}
VALUES = {
    "train steps=abc": ["steps=abc", "whole number"],
    "train steps=1.5": ["whole number"],
    "train steps=null": ["steps=null"],
    "train steps=0": ["smallest allowed value is 1"],
    "train steps=1,2": ["a whole number, not several values"],
    "select x method=fqe,wis": ["method=fqe,wis must be one value, not several values"],
    "train steps=[1": ["cannot read"],
    "train algo=": ["no value"],
    "train algo.learning_rate=fast": ["a number"],
    "train algo.learning_rate=nan": ["NaN"],
    "train algo.expectile=2": ["largest allowed value is 1"],
    "train algo.hidden=wide": ["algo.hidden"],
    "train algo.hidden=[0]": ["smallest allowed value is 1"],
    "train algo.policy=gausian": ["Did you mean 'gaussian'"],
    "train quiet=maybe": ["true or false"],
    "train eval=none": ["eval.every"],
    "train seeds=0": ["at least one seed"],
    "train seeds=[]": ["at least one seed"],
    "train seeds=[1,1]": ["twice"],
    "train seeds=abc": ["seeds='abc'"],
    "train seeds=[100000000000000000000]": ["2**63"],
    "train dataset.top_fraction=0": ["above 0"],
    "train dataset.format=colums": ["Did you mean 'columns'"],
    "train device=tpu": ["device=tpu"],
    "train name=../x": ["plain name"],
    "train algo=hiql dataset=point-robot": ["hiql acts towards goals", "gives none", "eval.env=none"],
}


@pytest.mark.parametrize(("command", "words"), [*NAMES.items(), *VALUES.items()], ids=[*NAMES, *VALUES])
def test_names_and_values(offrl: Offrl, command: str, words: list[str]) -> None:
    refused(offrl(command), *words)


def test_what_does_not_fit_into_memory(offrl: Offrl) -> None:
    result = offrl("train algo=bc algo.batch_size=1000000000000")
    doubt, error = result.err.splitlines()
    assert result.status == 2 and "more than the 60,396 rows" in doubt and "out of memory" in error
    for size in ("9000000000000", "9000000000000000000"):
        refused(offrl(f"train algo=bc algo.hidden=[{size},8]"), "networks of bc do not fit", f"algo.hidden=[{size},8]")


def test_config_files(offrl: Offrl, tmp_path: Path) -> None:
    refused(offrl("train config=none.yaml"), "none.yaml", "No such file")
    for text, words in {
        "algo: [unclosed\nsteps: 3: 4\n": ["not valid YAML", "line 1"],
        "- 1\n": ["name: value"],
        "algo:\n  name: iql\n  expectil: 0.8\n": ["Did you mean 'algo.expectile'"],
        "threads: many\n": ["threads=many", "whole number"],
    }.items():
        (tmp_path / "my.yaml").write_text(text)
        refused(offrl("train config=my.yaml"), *words)


def nan_at(row: int) -> np.ndarray:
    rewards = hopper_like()["rewards"]
    rewards[row] = math.nan
    return rewards


COLUMNS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "nan": ({"rewards": nan_at(123)}, ["'rewards' has NaN", "episode 1, row 123"]),
    "lengths": ({"rewards": np.zeros(293, np.float32)}, ["293 rows", "300"]),
    "range": ({"actions": np.full((300, 3), 5.0)}, ["dimension 0 is 5", "[-1, 1]", "dataset.clip_actions=true"]),
    "missing": ({"actions": None}, ["dataset.fields.actions=COLUMN", "its columns are observations, rewards"]),
    "unmarked": ({"terminals": None, "timeouts": None}, ["episodes end"]),
    "empty": ({k: v[:0] for k, v in hopper_like().items()}, ["no rows"]),
}


@pytest.mark.parametrize("case", COLUMNS)
def test_columns(offrl: Offrl, write: Any, case: str) -> None:
    columns, words = COLUMNS[case]
    file = write("mine.hdf5", **columns)
    refused(offrl(f"train dataset={file} eval.env=none"), str(file), *words)
    assert not Path("runs").exists()


def test_windows_longer_than_episodes(offrl: Offrl) -> None:
    refused(offrl("train algo=tdmpc2 algo.horizon=3000 eval.env=none"), "no window of 3001 states", "algo.horizon")
    assert not Path("runs").exists()


def test_broken_files(offrl: Offrl, write: Any, tmp_path: Path) -> None:
    whole = write("good.hdf5").read_bytes()
    for name, content, word in (
        ("truncated.hdf5", whole[: len(whole) // 2], "truncated"),
        ("zero.hdf5", b"", "empty"),
        ("page.hdf5", b"<html>not found</html>", "neither HDF5"),
        ("zero.npz", b"", "empty"),
        ("text.parquet", b"hello", "neither HDF5"),
    ):
        (tmp_path / name).write_bytes(content)
        refused(offrl(f"train dataset={name}"), name, word)
        refused(offrl(f"data inspect {name}"), name, word)
    refused(offrl("train dataset=goood.hdf5"), "goood.hdf5", "Did you mean 'good.hdf5'")


def test_inspect_fails_on_corrupting_faults_only(offrl: Offrl, write: Any) -> None:
    result = offrl(f"data inspect {write('nan.hdf5', rewards=nan_at(7))}")
    assert result.status == 1 and "row 7" in result.out
    result = offrl(f"data inspect {write('good.hdf5')}")
    assert result.status == 0 and "no faults found" in result.out


def test_data_and_environment_disagree(offrl: Offrl, write: Any) -> None:
    refused(offrl("train eval.env=HalfCheetah-v4"), "(11,)", "(17,)", "HalfCheetah-v4")
    file = write("choices.hdf5", actions=np.arange(300) % 3)
    refused(offrl(f"train algo=td3_bc dataset={file} eval.env=none"), "td3_bc", "discrete", "bc")
    refused(offrl(f"train algo=bc dataset={file} eval.env=Hopper-v4"), "discrete", "continuous")
    assert offrl(f"train algo=iql dataset={file} eval.env=none").status == 0


@pytest.mark.slow
def test_resume_of_something_else(offrl: Offrl, write: Any, tmp_path: Path) -> None:
    assert offrl("train algo=bc name=mine seeds=1").status == 0
    before = {p: p.read_bytes() for p in Path("runs/mine").rglob("*") if p.is_file()}
    other = write("other.hdf5")
    refused(offrl("train resume=runs/mine algo=iql"), "algo=bc", "iql")
    refused(offrl(f"train resume=runs/mine dataset={other}"), "hopper-mixed", "other")
    refused(offrl("train resume=runs/mine algo.learning_rate=0.1"), "algo.learning_rate", "0.0003", "0.1")
    refused(offrl("train resume=runs/mine seeds=2"), "seeds: [0] there, [0, 1] here")
    refused(offrl("train algo=iql name=mine seeds=1"), "runs/mine", "bc there, iql here")
    refused(offrl("train resume=runs/mein"), "runs/mein", "Did you mean 'mine'")
    refused(offrl("train resume=runs"), "not a run directory")
    refused(offrl("evaluate runs/mein"), "Did you mean 'mine'")
    refused(offrl("evaluate runs/mine episodes=0"), "episodes=0")
    refused(offrl("evaluate runs/mine env=HalfCheetah-v4"), "(17,)")
    assert {p: p.read_bytes() for p in Path("runs/mine").rglob("*") if p.is_file()} == before


def test_a_folder_that_is_no_run_is_left_alone(offrl: Offrl, tmp_path: Path) -> None:
    (tmp_path / "runs" / "thesis").mkdir(parents=True)
    (tmp_path / "runs" / "thesis" / "metrics.jsonl").write_text("precious")
    refused(offrl("train algo=bc name=thesis"), "runs/thesis", "metrics.jsonl")
    assert (tmp_path / "runs" / "thesis" / "metrics.jsonl").read_text() == "precious"


def test_unwritable_run_directory(offrl: Offrl, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(offrl("train algo=bc runs_dir=file"), "file", "Not a directory", "runs_dir=")
    refused(offrl("train algo=bc runs_dir=file/deeper"), "Not a directory")


def test_two_processes_in_one_run(offrl: Offrl) -> None:
    import fcntl

    assert offrl("train algo=bc name=mine").status == 0
    with open("runs/mine/.lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        refused(offrl("train algo=bc name=mine"), "another process", "runs/mine")
        refused(offrl("train resume=runs/mine"), "another process")


def test_disk_full_during_a_checkpoint(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second checkpoint does not fit: the first one stands, and the run goes on from it once there is room."""
    command = "train algo=bc seeds=1 checkpoint.every=10 checkpoint.keep=0 name="
    assert offrl(command + "whole").status == 0
    with monkeypatch.context() as patch:
        replace = os.replace

        def full(source: Any, target: Any) -> None:
            if Path(target).name == "step_000000020.safetensors":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            replace(source, target)

        patch.setattr(checkpoint.os, "replace", full)
        refused(offrl(command + "mine"), "No space left", "step 10 survives")
    assert checkpoint.steps(Path("runs/mine")) == [10]
    result = offrl(command + "mine")
    assert result.status == 0 and "continuing from step 10" in result.out
    assert_equal_runs(Path("runs/mine"), Path("runs/whole"), 20)


@pytest.mark.slow
def test_a_disk_that_is_really_full(offrl: Offrl, tmp_path: Path) -> None:
    """A file system of 300 kB: whatever it is that does not fit, the run ends in one line and goes on after there is
    room.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs more rights")
    command = (
        "train algo=bc seeds=1 algo.hidden=[128] checkpoint.every=2 checkpoint.keep=0 steps=60 name=mine runs_dir="
    )
    try:
        refused(offrl(f"{command}{disk}"), "free some space")
        saved = checkpoint.steps(disk / "mine")
        assert saved and checkpoint.read(disk / "mine" / checkpoint.FOLDER / f"step_{saved[-1]:09d}.safetensors")
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        assert f"continuing from step {saved[-1]}" in offrl(f"{command}{disk}").out
        assert offrl(f"{command}whole").status == 0
        assert_equal_runs(disk / "mine", Path("whole/mine"), 60)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def assert_equal_runs(run: Path, other: Path, step: int) -> None:
    name = f"{checkpoint.FOLDER}/step_{step:09d}.safetensors"
    (tensors, meta), (expected, expected_meta) = checkpoint.read(run / name), checkpoint.read(other / name)
    assert meta == expected_meta
    assert all(torch.equal(tensors[k], expected[k]) for k in expected)
    for file in ("metrics.jsonl", "scores.csv"):
        assert (run / file).read_bytes() == (other / file).read_bytes()


def test_damaged_checkpoints(offrl: Offrl) -> None:
    assert offrl("train algo=bc name=mine checkpoint.every=10").status == 0
    folder = Path("runs/mine") / checkpoint.FOLDER
    first, second = sorted(folder.glob("step_*"))
    second.write_bytes(second.read_bytes()[:-8])
    result = offrl("train resume=runs/mine")
    assert result.status == 0 and "continuing from step 10" in result.out
    assert "step_000000020.safetensors is damaged" in result.err and "going on from step 10" in result.err
    for path in (first, second):
        path.write_bytes(b"garbage")
    refused(offrl("train resume=runs/mine steps=30"), "is damaged", "nor any")
    assert {p.name for p in folder.iterdir()} >= {first.name, second.name}


def test_a_checkpoint_of_a_newer_version(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "VERSION", 99)
        assert offrl("train algo=bc name=mine").status == 0
    refused(offrl("train resume=runs/mine steps=30"), "newer offrl", "upgrade")


def test_damaged_record(offrl: Offrl) -> None:
    assert offrl("train algo=bc name=mine").status == 0
    saved = Path("runs/mine/config.yaml").read_text()
    Path("runs/mine/config.yaml").write_text(saved.replace("learning_rate", "rate"))
    refused(offrl("train resume=runs/mine"), "config.yaml", "rate")
    Path("runs/mine/run.json").write_text("{")
    refused(offrl("train resume=runs/mine"), "run.json", "cannot be read")


def test_finished_runs_without_checkpoints_are_not_overwritten(offrl: Offrl) -> None:
    assert offrl("train algo=bc name=mine").status == 0
    shutil.rmtree(Path("runs/mine") / checkpoint.FOLDER)
    refused(offrl("train algo=bc name=mine"), "runs/mine", "overwrite")
    assert list(Path("runs/mine/policies").iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["garbage", "egl"])
def test_no_rendering_back_end(tmp_path: Path, backend: str) -> None:
    """Training and scoring need no pictures, whatever MUJOCO_GL asks for."""
    command = [
        sys.executable,
        "-m",
        "offrl.cli",
        "train",
        "algo=bc",
        "seeds=1",
        "steps=5",
        "compile=eager",
        "compare=[]",
        "eval.every=0",
    ]
    environment = {**os.environ, "MUJOCO_GL": backend, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "eval.episodes=1", "eval.max_steps=5", f"runs_dir={tmp_path}"],
        env=environment,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert "in Hopper-v5" in done.stdout
    if backend == "garbage":
        assert len(done.stderr.splitlines()) == 1 and "video is skipped" in done.stderr


def test_divergence_of_everything(offrl: Offrl) -> None:
    result = offrl("train algo=iql seeds=2 algo.learning_rate=1e30 steps=30 name=mine")
    assert result.status == 1
    assert "seed 0 diverged" in result.err and "seed 1 diverged" in result.err
    assert "Traceback" not in result.err


def test_losses_beyond_all_measure_are_divergence_too(offrl: Offrl) -> None:
    result = offrl("train algo=iql seeds=2 algo.learning_rate=3e4 steps=20 name=mine")  # stays finite
    assert (
        result.status == 1
        and "algo.learning_rate=30000 moves every parameter" in result.err
        and "is 0.0003 meant?" in result.err
    )
    assert result.err.splitlines()[-1] == "offrl: warning: diverged and frozen: seed 0, seed 1"
    assert re.search(
        r"seed 1 diverged between step 0 and \d+ \(\w+/loss is \S+e\+\d+, which no loss on such data is\)", result.err
    )


class Poisoned(BC):
    """BC in which one seed's loss becomes NaN at update 25."""

    def actor_loss(self, actor: Any, state: Any, batch: Any, key: Any) -> Any:
        loss, metrics = super().actor_loss(actor, state, batch, key)
        poisoned = (state.key == self.poisoned_key) & (state.step >= 25)
        loss = loss * torch.where(poisoned, math.nan, 1.0)
        return loss, {**metrics, "actor/loss": loss}


@pytest.mark.slow
def test_one_seed_diverges(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is frozen, named and reported; the others end bit for bit as without it, and resuming keeps it frozen."""
    from offrl import rng

    monkeypatch.setitem(registry._table["algo"], "poisoned", Poisoned)
    monkeypatch.setattr(Poisoned, "Config", BCConfig)
    runs = {}
    for name, seed in (("poisoned", 1), ("healthy", 99)):
        Poisoned.poisoned_key = rng.make_key(seed)  # type: ignore[attr-defined]
        command = f"train algo=poisoned seeds=3 log_every=10 eval.every=20 checkpoint.every=20 name={name} steps="
        runs[name] = [offrl(command + "40"), offrl(command + "60")]
    first, second = runs["poisoned"]
    assert first.status == second.status == 0
    assert "seed 1 diverged between step 20 and 30" in first.err
    assert first.err.count("diverged between") == 1 and "diverged between" not in second.err
    assert "frozen: seed 1" in first.err and "frozen: seed 1" in second.err
    (row,) = [line for line in second.out.splitlines() if line.startswith("poisoned  ")]
    assert row.split()[-1] == "2", "means are over the seeds that trained to the end"
    assert not runs["healthy"][0].err and not runs["healthy"][1].err
    name = f"{checkpoint.FOLDER}/step_000000060.safetensors"
    tensors, healthy = checkpoint.read(Path("runs/poisoned") / name)[0], checkpoint.read(Path("runs/healthy") / name)[0]
    assert tensors["alive"].tolist() == [True, False, True]
    for key in healthy:
        if key.startswith("state/"):
            assert torch.equal(tensors[key][[0, 2]], healthy[key][[0, 2]]), key
            assert tensors[key].isfinite().all()
    assert tensors["state/step"].tolist() == [60, 20, 60]
    rows = [json.loads(line) for line in Path("runs/poisoned/metrics.jsonl").read_text().splitlines()]
    assert [row["actor/loss"][1] is None for row in rows] == [False, False, True, True, True, True]
    assert all(row["actor/loss"][0] is not None for row in rows)
    ours, others = (
        [line for line in Path(f"runs/{name}/scores.csv").read_text().splitlines() if ",1,1," not in line]
        for name in ("poisoned", "healthy")
    )
    assert ours == others
