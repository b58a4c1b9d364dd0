"""`offrl finetune` as a user runs it: from a run, from fresh parameters, killed, and with mistakes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offrl.api import Run
from offrl.system import files as checkpoint

from .conftest import Offrl, Result

FAST = "compile=eager device=cpu eval.episodes=1 eval.workers=0 max_steps=12 log_every=10 runs_dir=runs quiet=true"
DATA = (
    "dataset=hopper.hdf5 eval.env=Hopper-v4 dataset.action_low=[-1,-1,-1] dataset.action_high=[1,1,1] "
    "algo.batch_size=16 seeds=2"
)


@pytest.fixture
def trained(offrl: Offrl, write: Callable[..., Path]) -> Offrl:
    """A run `runs/a` of IQL on data of Hopper's shape."""
    write("hopper.hdf5")
    assert offrl(f"train algo=iql {DATA} name=a quiet=true").status == 0
    return offrl


def tune(offrl: Offrl, command: str) -> Result:
    return offrl(f"finetune {FAST} {command}")


def test_a_run_goes_on_and_every_command_takes_it(trained: Offrl) -> None:
    result = tune(trained, "runs/a steps=30 name=b eval.every=15")
    assert result.status == 0, result.err
    assert (
        "start score" in result.out
        and "gain" in result.out
        and "budget: 30 environment steps of each seed" in result.out
        and "runs/b/" in result.out
    )
    for name in (
        "scores.csv",
        "finetune.png",
        "finetune.json",
        "episodes.csv",
        "policies",
        "tensorboard",
        "checkpoints",
        "replay",
        "config.yaml",
        "run.json",
    ):
        assert (Path("runs/b") / name).exists(), name
    assert [r["step"] for r in Run("runs/b").score_rows] == [0, 0, 15, 15, 30, 30]
    shown = trained("evaluate runs/b episodes=1 max_steps=12")
    assert shown.status == 0 and "iql+online" in shown.out, shown.err
    assert trained("export runs/b format=pt2").status == 0
    reported = trained("report runs/a runs/b")
    assert reported.status == 0, reported.err
    page = next(word for word in reported.out.split() if word.endswith(".html"))
    assert "iql+online" in Path(page).read_text()
    again = tune(trained, "runs/a steps=30 name=b eval.every=15").out
    assert again == result.out  # nothing is played, the same table
    more = tune(trained, "resume=runs/b steps=40")
    assert more.status == 0 and Run("runs/b").score_rows[-1]["step"] == 40, more.err


@pytest.mark.slow
def test_a_residual_on_a_run_and_every_command_takes_it(trained: Offrl) -> None:
    result = tune(
        trained,
        "runs/a mode=residual steps=40 envs=2 algo.horizon=10 algo.passes=2 algo.hidden=[8] name=r eval.every=20",
    )
    assert result.status == 0, result.err
    assert "start score" in result.out and "iql+residual" in result.out
    assert [r["step"] for r in Run("runs/r").score_rows] == [0, 0, 20, 20, 40, 40]
    shown = trained("evaluate runs/r episodes=1 max_steps=12 acting.scale=0")
    assert shown.status == 0, shown.err
    assert trained("export runs/r format=pt2").status == 0
    reported = trained("report runs/a runs/r")
    assert reported.status == 0, reported.err
    assert tune(trained, "resume=runs/r steps=60").status == 0
    for command, words in (
        ("runs/r mode=residual", "learnt online"),
        ("runs/a mode=residual algo.scale=0", "algo.scale=0 must be above 0"),
        ("runs/a mode=residual env=Walker2d-v4", "observations of shape"),
        ("runs/a mode=residual utd=2", "belongs to mode=transitions"),
        ("algo=residual env=Hopper-v4 mixing=0", "mode=residual"),
    ):
        result = tune(trained, command)
        assert result.status == 2 and result.err.count("\n") == 1 and words in result.err, (command, result.err)


@pytest.mark.slow
def test_students_of_a_run_and_every_command_takes_them(trained: Offrl) -> None:
    student = "student.observation_keys=[0:5,7] student.history=3 algo.hidden=[8] algo.batch_size=16"
    result = tune(trained, f"runs/a mode=distill {student} steps=20 name=s eval.every=10")
    assert result.status == 0, result.err
    assert "bc+distill" in result.out and "after 0 offline updates" in result.out
    assert [r["step"] for r in Run("runs/s").score_rows] == [0, 0, 10, 10, 20, 20]
    Path("runs/a").rename("runs/gone")
    shown = trained("evaluate runs/s episodes=1 max_steps=12")
    assert shown.status == 0, shown.err
    assert trained("export runs/s format=pt2").status == 0
    described = json.loads(Path("runs/s/export/seed_0/policy.json").read_text())["inputs"][0]
    assert described["shape"] == ["batch", 18] and described["dimensions"][5]["name"] == "rooty velocity"
    assert tune(trained, "resume=runs/s steps=30").status == 0
    Path("runs/gone").rename("runs/a")
    for command, words in (
        ("runs/a mode=distill student.observation_keys=[11]", "there is no number '11' among the 11"),
        ("runs/a mode=distill env=Walker2d-v4", "observations of shape"),
        ("runs/a mode=distill mixing=0.5", "has no place with mode=distill"),
        ("runs/a student.history=2", "settings of mode=distill"),
        ("resume=runs/s student.history=4 steps=40", "student.history"),
    ):
        result = tune(trained, command)
        assert result.status == 2 and words in result.err.splitlines()[-1], (command, result.err)


@pytest.mark.slow
def test_ppo_and_every_command_takes_it(offrl: Offrl) -> None:
    small = "algo=ppo env=Pendulum-v1 envs=2 seeds=2 algo.horizon=8 algo.passes=2 algo.batch_size=8 algo.hidden=[8]"
    result = tune(offrl, f"{small} steps=32 eval.every=16 name=p")
    assert result.status == 0, result.err
    assert "ppo+online" in result.out and "envs=2, after 0 offline updates" in result.out
    assert [r["step"] for r in Run("runs/p").score_rows] == [0, 0, 16, 16, 32, 32]
    shown = offrl("evaluate runs/p episodes=1 max_steps=12")
    assert shown.status == 0, shown.err
    assert offrl("export runs/p format=pt2").status == 0
    reported = offrl("report runs/p")
    assert reported.status == 0, reported.err
    more = tune(offrl, "resume=runs/p steps=48")
    assert more.status == 2 and "steps: 32 there, 48 here" in more.err  # over which its rate falls
    assert tune(offrl, f"{small} steps=32 name=q algo.schedule=constant").status == 0
    assert tune(offrl, "resume=runs/q steps=48").status == 0
    for command, words in (
        (f"{small} algo.batch_size=5", "does not divide the 16 steps"),
        (f"{small} algo.desired_kl=0", "desired_kl"),
        (f"{small} algo.std_start=1e-7", "std_start"),
        ("algo=ppo env=CartPole-v1", "needs continuous actions"),
        ("algo=ppo env=Pendulum-v1 mixing=0.5", "belongs to mode=transitions"),
        ("runs/p mode=on_policy", "learnt online"),
        ("mode=on_policy", "the environment must be named"),
    ):
        result = tune(offrl, command)
        assert result.status == 2 and result.err.count("\n") == 1 and words in result.err, (command, result.err)


def test_from_fresh_parameters_with_and_without_data(offrl: Offrl, write: Callable[..., Path]) -> None:
    write("hopper.hdf5")
    small = (
        "algo=sac_n algo.critics=2 algo.hidden=[8] algo.batch_size=16 seeds=2 env=Hopper-v4 steps=24 warmup=12 "
        "eval.every=0"
    )
    mixed = tune(
        offrl,
        f"from=none {small} dataset=hopper.hdf5 dataset.action_low=[-1,-1,-1] dataset.action_high=[1,1,1] name=mixed",
    )
    assert mixed.status == 0, mixed.err
    alone = tune(offrl, f"{small} mixing=0 name=alone")
    assert alone.status == 0, alone.err
    assert Run("runs/mixed").record["identity"]["finetune"]["mixing"] == 0.5
    assert Run("runs/alone").record["spec"]["action_high"] == [1.0, 1.0, 1.0]


def test_mistakes_are_one_line(trained: Offrl) -> None:
    for command, words in {
        "runs/a env=CartPole-v1": "observations of shape (11,), CartPole-v1 of (4,)",
        "runs/a env=Hoper-v4": "Did you mean 'Hopper-v4'?",
        "runs/a steps=0": "steps=0 is out of range",
        "runs/none": "runs/none is not a run directory",
        "runs/a eval.env=Hopper-v4": "write env=",
        "runs/a runs/b": "takes one run, and 2 are given",
        "runs/a --steps=0": "steps=0 is out of range",
        "--resume": "'resume=' has no value",
        "algo=bc dataset=hopper.hdf5 env=Hopper-v4": "bc has no form that learns from an environment's rewards",
        "algo=sac_n env=Hopper-v4": "name them, dataset=NAME",
        "algo=sac_n mixing=0": "the environment must be named",
        "env=Hopper-v4 mixing=0": "usage: offrl finetune RUN",
        "runs/a resume=runs/a": "is no fine-tuning run",
    }.items():
        result = tune(trained, command)
        assert result.status == 2 and words in result.err, (command, result.err)
        assert result.err.count("\n") == 1


@pytest.mark.slow
def test_data_that_are_gone_are_needed_only_for_mixing(trained: Offrl) -> None:
    Path("hopper.hdf5").rename("elsewhere.hdf5")
    result = tune(trained, "runs/a steps=12 eval.every=0")
    assert result.status == 2 and "mixing=0 goes on without them" in result.err, result.err
    assert tune(trained, "runs/a steps=12 eval.every=0 mixing=0").status == 0
    moved = tune(trained, "runs/a steps=12 eval.every=0 dataset=elsewhere.hdf5")
    assert moved.status == 0, moved.err


def test_help_shows_the_settings(offrl: Offrl) -> None:
    result = offrl("finetune --help")
    assert result.status == 0 and "mixing=auto" in result.out and "eval.env" not in result.out


@pytest.mark.nightly
@pytest.mark.parametrize(
    "algo", ["qc algo.length=3 algo.candidates=2", "qc algo.actor_type=distil algo.length=3", "iql algo.n_step=3"]
)
def test_windows_and_chunks_go_on_where_they_were(offrl: Offrl, write: Callable[..., Path], algo: str) -> None:
    """Stopped inside episodes, chunks and windows, a run ends as one that was not."""
    write("hopper.hdf5")
    assert offrl(f"train algo={algo} algo.hidden=[16] {DATA} name=a quiet=true steps=5 eval.every=0").status == 0
    for name, steps in {"whole": "37", "parts": "25"}.items():
        result = tune(offrl, f"runs/a steps={steps} envs=2 name={name} eval.every=0")
        assert result.status == 0, result.err
    assert tune(offrl, "resume=runs/parts steps=37").status == 0
    states = [checkpoint.load_latest(Path("runs") / name) for name in ("whole", "parts")]
    assert states[0] is not None and states[1] is not None
    for name, tensor in states[0][0].items():
        assert name.startswith("play/") or tensor.equal(states[1][0][name]), name
    for seed in (0, 1):
        assert (
            Path(f"runs/parts/policies/seed_{seed}.safetensors").read_bytes()
            == Path(f"runs/whole/policies/seed_{seed}.safetensors").read_bytes()
        )


@pytest.mark.nightly
def test_killed_twice_it_ends_the_same(trained: Offrl) -> None:
    command = f"finetune runs/a steps=400 eval.every=100 checkpoint.every=20 {FAST}"

    def start(name: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "offrl.cli", *shlex.split(command), f"name={name}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(words, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def finish(name: str) -> None:
        process = start(name)
        out, err = process.communicate(timeout=600)
        assert process.returncode == 0, out + err

    finish("whole")
    for step in (60, 200):
        process = start("killed")
        deadline = time.monotonic() + 300
        while (
            process.poll() is None
            and max(checkpoint.steps(Path("runs/killed")), default=0) < step
            and time.monotonic() < deadline
        ):
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    finish("killed")
    whole, killed = (checkpoint.load_latest(Path("runs") / name) for name in ("whole", "killed"))
    assert whole is not None and killed is not None and whole[1]["sha256"] == killed[1]["sha256"]
    for name in ("metrics.jsonl", "scores.csv", "policies/seed_0.safetensors", "policies/seed_1.safetensors"):
        assert (Path("runs/killed") / name).read_bytes() == (Path("runs/whole") / name).read_bytes(), name
