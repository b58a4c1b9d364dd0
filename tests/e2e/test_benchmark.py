"""A small grid: killed and started again, stopped, with cells that fail; and the same bits from every launcher."""

from __future__ import annotations

import csv
import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest

from offrl.cli.main import main
from offrl.runs.results import collect
from offrl.system import files as checkpoint

from .conftest import Offrl, hopper_like

CELLS = ("bc-hopper_a", "iql-hopper_a", "bc-hopper_b", "iql-hopper_b")
SMALL = shlex.split(
    "algos=[bc,iql] seeds=3 steps=60 compile=eager device=cpu algo.hidden=[8] algo.batch_size=16 eval.episodes=1 "
    "eval.every=30 log_every=10 checkpoint.every=10 quiet=true"
)


def arguments(data: Path, runs_dir: Path, *more: str) -> list[str]:
    files = ",".join(str(data / f"{name}.hdf5") for name in ("hopper_a", "hopper_b"))
    return ["benchmark", "suite=own", f"datasets=[{files}]", f"runs_dir={runs_dir}", "name=grid", *SMALL, *more]


def start(data: Path, runs_dir: Path, *more: str, path: Path | None = None) -> subprocess.Popen[str]:
    search = [*([str(path)] if path else []), *sys.path]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(search)}
    command = [sys.executable, "-m", "offrl.cli", *arguments(data, runs_dir, *more)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process: subprocess.Popen[str], status: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=600)
    assert process.returncode == status, out + err
    return out, err


def status(runs_dir: Path, run: str) -> dict[str, object]:
    path = runs_dir / "grid" / "cells" / f"{run}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def wait_for(process: subprocess.Popen[str], seen: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not seen() and process.poll() is None and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.005)
    assert process.poll() is None and seen(), process.communicate()  # type: ignore[operator]


def assert_same(runs_dir: Path, other: Path, cells: tuple[str, ...] = CELLS) -> None:
    for cell in cells:
        one, two = runs_dir / "grid" / cell, other / "grid" / cell
        for name in ("scores.csv", "metrics.jsonl", *(f"policies/seed_{s}.safetensors" for s in range(3))):
            assert (one / name).read_bytes() == (two / name).read_bytes(), f"{cell} {name}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for name, rows in (("hopper_a", 300), ("hopper_b", 400)):
        with h5py.File(folder / f"{name}.hdf5", "w") as file:
            for key, value in hopper_like(rows).items():
                file[key] = value
    return folder


@pytest.fixture(scope="module")
def serial(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The grid that nobody disturbs, in this process."""
    folder = tmp_path_factory.mktemp("serial")
    assert main(arguments(data, folder)) == 0
    yield folder


@pytest.mark.slow
def test_what_a_grid_leaves(
    serial: Path, data: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = serial / "grid"
    assert {p.name for p in folder.iterdir() if not p.name.startswith(".")} == {
        "benchmark.json", "cells", "results.csv", "results.parquet", *CELLS,
    }  # fmt: skip
    with open(folder / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 3 * 2
    assert {r["dataset"] for r in rows} == {"hopper_a", "hopper_b"} and {r["algorithm"] for r in rows} == {"bc", "iql"}
    assert sum(r["final"].lower() == "true" for r in rows) == 4 * 3
    groups = {json.loads((folder / c / "run.json").read_text())["group"] for c in CELLS}
    assert groups == {2}
    # again: nothing is trained, and the table is the same
    before = {p: p.stat().st_mtime_ns for p in folder.glob("*/checkpoints/*")}
    assert main(arguments(data, serial)) == 0
    out = capfd.readouterr().out
    title, header, _, *table = [line for line in out.splitlines() if line]
    assert title == "own: last evaluation, mean over 3 seeds [95% interval], after 60 updates"
    assert header.split() == ["dataset", "bc", "iql"] and [line.split()[0] for line in table] == [
        "hopper_a",
        "hopper_b",
    ]
    assert {p: p.stat().st_mtime_ns for p in folder.glob("*/checkpoints/*")} == before
    # one by one, as offrl train would
    monkeypatch.chdir(serial)
    config = folder / "iql-hopper_b" / "config.yaml"
    assert main(["train", f"config={config}", "runs_dir=alone/grid", "name=iql-hopper_b", "group=2"]) == 0
    assert_same(serial, serial / "alone", ("iql-hopper_b",))


def test_failed_cells_are_named_and_tried_again(offrl: Offrl, data: Path, tmp_path: Path) -> None:
    small = " ".join(shlex.quote(s) for s in SMALL if s not in ("quiet=true", "algos=[bc,iql]"))
    command = (
        f"benchmark suite=own datasets=[{data}/hopper_a.hdf5,other.hdf5,empty.hdf5] algos=[bc] {small} "
        "eval.env=Hopper-v4"
    )
    (tmp_path / "empty.hdf5").touch()
    result = offrl(command)
    assert result.status == 1
    assert "[1/3] bc on hopper_a ..." in result.out and "bc on hopper_a: score" in result.out
    lines = result.err.splitlines()
    assert len(lines) == 2 and lines[0].startswith("offrl: bc-other: failed: there is no file other.hdf5.")
    assert (
        lines[1] == f"offrl: bc-empty: failed: {tmp_path / 'empty.hdf5'} is empty (0 bytes): download or copy it again"
    )
    assert "failed" in result.out.split("own: last evaluation")[1]
    (tmp_path / "other.hdf5").write_bytes((data / "hopper_b.hdf5").read_bytes())
    result = offrl(f"{command} retry=false")
    assert "1 done, 2 failed; 0 to train" in result.out and result.status == 1
    result = offrl(command)
    assert "1 done; 2 to train" in result.out and "bc on other: return" in result.out
    assert result.status == 1 and len(result.err.splitlines()) == 1
    (tmp_path / "runs" / "own" / "cells" / "bc-other.json").write_text('{"status": "do')  # half-written
    result = offrl(command)
    assert "1 done; 2 to train" in result.out and "this run has its 60 updates already" in result.out
    assert "r raw return: no reference scores are known" in result.out


@pytest.mark.slow
def test_what_a_cell_needs_is_trained_first(offrl: Offrl, data: Path, tmp_path: Path) -> None:
    own = " ".join(f"vadt.{s}" for s in ("context=2", "width=8", "layers=1", "value_hidden=[8]", "value_batch_size=16"))
    small = " ".join(shlex.quote(s) for s in SMALL if s not in ("algos=[bc,iql]", "algo.hidden=[8]"))
    command = f"benchmark suite=own datasets=[{data}/hopper_a.hdf5] algos=[vadt] {own} {small}"
    result = offrl(command)
    assert result.status == 0, result.err
    folder = tmp_path / "runs" / "own"
    (part,) = (folder / "parts").iterdir()
    assert part.name.startswith("values-iql-hopper_a") and (part / "run.json").is_file()
    config = (folder / "vadt-hopper_a" / "config.yaml").read_text()
    assert f"values: {part}" in config and f"runs_dir: {folder}\n" in config
    assert offrl(command).status == 0 and [p.name for p in (folder / "parts").iterdir()] == [part.name]
    results = collect([folder])
    assert {s.algorithm for s in results.scores} == {"vadt"} and not results.missing, "what came first is no result"


def test_mistakes_end_before_anything_is_written(offrl: Offrl, tmp_path: Path) -> None:
    for command, words in (
        ("benchmark suite=d4rl-jim", "unknown suite 'd4rl-jim'. Did you mean 'd4rl-gym'"),
        ("benchmark algos=[bc,sac]", "unknown algorithm 'sac'"),
        ("benchmark launcher=rey", "unknown launcher 'rey'. Did you mean 'ray'"),
        ("benchmark jobs=many", "jobs=many must be a whole number"),
        ("benchmark suite=own datasets=[a.hdf5] steps=10 eval.epsodes=3", "Did you mean 'eval.episodes'"),
        ("benchmark suite=missing.yaml", "cannot read missing.yaml"),
    ):
        result = offrl(command)
        assert result.status == 2 and words in result.err and len(result.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("heeds_signals")
def test_killed_and_started_again(serial: Path, data: Path, tmp_path: Path) -> None:
    """SIGKILL while the second cell trains, and Ctrl-C while the third one does."""
    process = start(data, tmp_path)
    wait_for(process, lambda: checkpoint.steps(tmp_path / "grid" / CELLS[1]))
    process.kill()
    process.communicate()
    assert status(tmp_path, CELLS[0])["status"] == "done" and status(tmp_path, CELLS[1])["status"] == "running"
    process = start(data, tmp_path, "quiet=false")
    wait_for(process, lambda: checkpoint.steps(tmp_path / "grid" / CELLS[2]))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode == 130:  # it may have been faster than the signal
        assert "the same command continues it" in err.splitlines()[-1]
    assert "continuing from step" in out and "1 done; 3 to train" in out
    finish(start(data, tmp_path))
    assert_same(tmp_path, serial)


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_signals")
def test_local_processes_train_the_same_and_stop_when_asked(serial: Path, data: Path, tmp_path: Path) -> None:
    process = start(data, tmp_path, "launcher=local", "jobs=2", "quiet=false", "iql.steps=100000", "iql.eval.every=30")
    wait_for(process, lambda: any((tmp_path / "grid" / c / "metrics.jsonl").exists() for c in (CELLS[1], CELLS[3])))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "the same command continues it" in err.splitlines()[-1] and "Traceback" not in err
    stopped = [c for c in CELLS if "interrupted" in str(status(tmp_path, c).get("error"))]
    assert stopped and any(checkpoint.steps(tmp_path / "grid" / c) for c in stopped)  # the other may not have begun
    finish(start(data, tmp_path / "again", "launcher=local", "jobs=2"))
    assert_same(tmp_path / "again", serial)
    assert not list(tmp_path.rglob("multirun")) and not list(tmp_path.rglob(".hydra"))


@pytest.mark.nightly
def test_slurms_jobs_train_the_same(serial: Path, data: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    finish(start(data, tmp_path, "launcher=slurm-local", "jobs=2", f"datasets=[{data}/hopper_a.hdf5]"))
    assert_same(tmp_path, serial, CELLS[:2])
    assert list((tmp_path / "grid" / "cells" / ".submitit").iterdir())  # what sbatch's jobs wrote


def deadly(folder: Path, marker: Path, data: Path) -> Path:
    """A package that registers the dataset `deadly`: loading it kills the process, once."""
    (folder / "deadly-1.dist-info").mkdir(parents=True)
    (folder / "deadly-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1\n")
    (folder / "deadly-1.dist-info" / "entry_points.txt").write_text("[offrl.plugins]\ndeadly = deadly\n")
    (folder / "deadly.py").write_text(
        textwrap.dedent(f"""
        import os, pathlib, signal
        from offrl.data import load_dataset
        from offrl.registry import register

        @register("dataset", "deadly")
        def load(config):
            marker = pathlib.Path({str(marker)!r})
            if marker.exists():
                marker.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return load_dataset({str(data / "hopper_a.hdf5")!r})
        """)
    )
    return folder


@pytest.mark.nightly
def test_ray_on_two_workers_trains_the_same_and_a_dead_worker_is_a_failed_cell(
    serial: Path, data: Path, tmp_path: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    marker = tmp_path / "marker"
    marker.touch()
    package = deadly(tmp_path / "package", marker, data)
    files = f"datasets=[{data}/hopper_a.hdf5,deadly,{data}/hopper_b.hdf5]"
    out, err = finish(start(data, tmp_path, files, "launcher=ray", "jobs=2", "quiet=false", path=package), status=1)
    assert not marker.exists()
    (lost,) = [r for r in ("bc-deadly", "iql-deadly") if status(tmp_path, r)["status"] == "failed"]
    assert "its worker died" in str(status(tmp_path, lost)["error"])
    (line,) = [one for one in err.splitlines() if "failed" in one]
    assert line.startswith(f"offrl: {lost}: failed: its worker died (") and "the next command goes on" in line
    assert "Traceback" not in err and "6 to train" in out
    assert_same(tmp_path, serial)
    hosts = {status(tmp_path, c)["pid"] for c in CELLS}
    assert len(hosts) >= 2
    # the failed cell, in the command's own process
    out, err = finish(start(data, tmp_path, files, "quiet=false", path=package))
    assert "5 done; 1 to train" in out and "failed" not in out + err
    assert_same(tmp_path, serial)
