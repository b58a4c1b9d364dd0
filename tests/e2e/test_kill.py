"""A run that is killed again and again ends bit for bit like one that was not; Ctrl-C and SIGTERM save and say so."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from offrl.system import files as checkpoint

from .conftest import Offrl

STEPS, KILLS = 2_500, 4
# two processes train and a third one evaluates; how many replicas share a program is given, as it shows in last bits
COMMAND = shlex.split(
    "group=1 workers=2 eval.workers=1 algo=bc dataset=builtin compare=[] seeds=2 compile=eager device=cpu "
    "algo.hidden=[32,32] algo.batch_size=32 log_every=100 quiet=true eval.every=500 eval.episodes=2 eval.max_steps=40 "
    "checkpoint.every=100"
)


def start(runs_dir: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "offrl.cli", "train", *COMMAND, f"runs_dir={runs_dir}", "name=run", *more]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def last_step(run_dir: Path) -> int:
    """The step of the last whole line of metrics."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_for(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    """Until the run has logged `step`, or has ended."""
    deadline = time.monotonic() + 120
    while process.poll() is None and last_step(run_dir) < step and time.monotonic() < deadline:
        time.sleep(0.005)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out


def series(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    finish(start(folder, f"steps={STEPS}"))
    return folder / "run"


def assert_same(run: Path, whole: Path) -> None:
    path = Path(checkpoint.FOLDER) / f"step_{STEPS:09d}.safetensors"
    (tensors, meta), (expected, expected_meta) = checkpoint.read(run / path), checkpoint.read(whole / path)
    assert meta == expected_meta
    assert list(tensors) == list(expected)
    assert {name.split("/")[1] for name in tensors if name.startswith("state/")} >= {"params", "opt", "step", "key"}
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    for name in (
        "metrics.jsonl",
        "scores.csv",
        "episodes.jsonl",
        "policies/seed_0.safetensors",
        "policies/seed_1.safetensors",
    ):
        assert (run / name).read_bytes() == (whole / name).read_bytes(), name
    assert len((run / "scores.csv").read_text().splitlines()) == 1 + 2 * STEPS // 500
    assert series(run) == series(whole)


@pytest.mark.slow
def test_kills_at_any_time(whole: Path, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"random seed {seed}")  # pytest shows it when the test fails
    rng = random.Random(seed)
    run = tmp_path / "run"
    moments = sorted(rng.randrange(1, STEPS - 500) for _ in range(KILLS - 1))
    killed_at = []
    for moment in [0, *moments]:
        process = start(tmp_path, f"steps={STEPS}")
        if moment:
            wait_for(process, run, moment)
            time.sleep(rng.uniform(0.0, 0.1))
        else:  # any time while it starts
            time.sleep(rng.uniform(0.0, 4.0))
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL, f"over before it could be killed at step {moment}"
        killed_at.append(last_step(run))
        saved = checkpoint.steps(run)
        for step in saved:
            checkpoint.read(run / checkpoint.FOLDER / f"step_{step:09d}.safetensors")
        assert not saved or saved[-1] >= last_step(run) - 100
    print(f"killed after steps {killed_at}")
    assert len({*killed_at}) > KILLS // 2
    finish(start(tmp_path, f"steps={STEPS}"))
    assert_same(run, whole)


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_signals")
def test_signals_in_this_process_leave_no_trace(offrl: Offrl) -> None:
    """Ctrl-C and then SIGTERM, in one process and without workers: the run ends as one that nobody disturbed, and can
    be lengthened.
    """
    command = "train algo=bc seeds=2 algo.batch_size=8 log_every=20 checkpoint.every=100 eval.every=300 compare=[]"
    assert offrl(f"{command} steps=600 name=whole").status == 0
    run, expected = Path("runs/run"), Path("runs/whole")

    def send(number: int, step: int) -> None:
        while last_step(run) < step:
            time.sleep(0.002)
        os.kill(os.getpid(), number)

    for number, step in ((signal.SIGINT, 60), (signal.SIGTERM, 120)):
        sender = threading.Thread(target=send, args=(number, step))
        sender.start()
        result = offrl(f"{command} steps=400 name=run")
        sender.join()
        assert result.status == 130 and len(result.err.splitlines()) == 1
        assert "all is saved" in result.err and "the same command continues" in result.err
        assert f"step {checkpoint.steps(run)[-1]:,};" in result.err
    assert offrl(f"{command} steps=400 name=run").status == 0 and checkpoint.steps(run)[-1] == 400
    longer = offrl("train resume=runs/run steps=600")
    assert longer.status == 0 and "continuing from step 400" in longer.out
    lines, whole = [(r / "metrics.jsonl").read_text().splitlines() for r in (run, expected)]
    assert [json.loads(x) for x in lines] == [json.loads(x) for x in whole] and json.loads(lines[-1])["step"] == 600
    state, other = [checkpoint.read(r / checkpoint.FOLDER / "step_000000600.safetensors")[0] for r in (run, expected)]
    assert list(state) == list(other) and all(torch.equal(state[k], other[k]) for k in state)


@pytest.mark.nightly
@pytest.mark.usefixtures("heeds_signals")
def test_signals_save_and_a_longer_run_continues(whole: Path, tmp_path: Path) -> None:
    run, alone = tmp_path / "run", ("workers=1", "eval.workers=0")  # one process ends with what several do
    for number, step in ((signal.SIGINT, 300), (signal.SIGTERM, 900)):
        process = start(tmp_path, "steps=1500", *alone)
        wait_for(process, run, step)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert len(err.splitlines()) == 1
        assert "all is saved" in err and "the same command continues" in err
        assert f"step {checkpoint.steps(run)[-1]:,};" in err
    finish(start(tmp_path, "steps=1500", *alone))
    assert checkpoint.steps(run)[-1] == 1500
    again = subprocess.run(
        [sys.executable, "-m", "offrl.cli", "train", f"resume={run}", "steps=2000"],
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert again.returncode == 0, again.stderr
    assert "continuing from step 1,500" in again.stdout
    lines, expected = [(r / "metrics.jsonl").read_text().splitlines() for r in (run, whole)]
    assert json.loads(lines[-1])["step"] == 2000
    assert lines == expected[: len(lines)]  # neither the interrupts nor the two ends left a trace
    assert (run / "scores.csv").read_text().splitlines()[:3] == (whole / "scores.csv").read_text().splitlines()[:3]


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_signals")
def test_a_second_signal_quits_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, "steps=1000000", "checkpoint.every=1000000", "eval.every=0", "quiet=false")
    wait_for(process, tmp_path / "run", 100)
    process.send_signal(signal.SIGSTOP)  # so that both arrive together
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)
    assert "once more quits" in out
    assert not checkpoint.steps(tmp_path / "run")
