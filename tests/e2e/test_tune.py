"""`offrl tune` as a user runs it: a choice from a file, killed and continued, workers elsewhere, and mistakes."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import offrl as library
from offrl.system import files

from .conftest import Offrl, hopper_like

Write = Callable[..., Path]
SMALL = shlex.split(
    "budget=8x40 algo.hidden=[8,8] algo.batch_size=16 compile=eager proposer=random ope.updates=60 ope.hidden=[8,8] "
    "ope.seeds=2 final_seeds=2 log_every=20 device=cpu"
)


@pytest.fixture
def log(write: Write) -> Path:
    """600 rows, 40 episodes."""
    columns = hopper_like(600)
    columns["terminals"][:] = False
    columns["timeouts"][:] = np.arange(600) % 15 == 14
    return write("log.hdf5", **columns)


@pytest.mark.slow
def test_a_tune_chooses_retrains_and_writes_what_it_says(offrl: Offrl, log: Path, tmp_path: Path) -> None:
    out = tmp_path / "tune"
    words = [f"dataset={log}", f"out={out}", "env=none", *SMALL]
    done = offrl("tune algos=iql,td3_bc --quiet", *words)
    assert done.status == 0, done.err
    result = json.loads((out / "result.json").read_text())
    assert result["brackets"][0][0] == [16, 10] and result["brackets"][0][1][1] == 40
    chosen = result["chosen"]["setting"]
    assert f"chosen: {chosen} " in done.out and done.out.count("chosen:") == 1
    assert f"to train it yourself: {result['command']}" in done.out
    algo = result["settings"][chosen]["algo"]
    for name in (
        "trials.csv",
        "index.html",
        "winner/run.json",
        "winner/policies/seed_2.safetensors",
        "winner/policies/seed_3.safetensors",
    ):
        assert (out / name).exists(), name
    winner = library.load(out / "winner")
    assert winner.seeds == [2, 3] and winner.algorithm == algo
    assert not any("split" in t for t in winner.record["data"]["transforms"]), "on all data"
    for field, value in result["settings"][chosen]["values"].items():
        assert winner.record["identity"]["algo"][field] == pytest.approx(value)
    rows = [r for r in result["rows"] if r["rung"] == "1"]
    assert len(rows) == 16 and sum(r["fate"] == "kept" for r in rows) == 4
    again = offrl("tune algos=iql,td3_bc --quiet", *words)
    assert again.status == 0 and json.loads((out / "result.json").read_text()) == result

    # what goes on from a rung is what the same settings are when they are trained in one go: bit for bit, in programs
    # of one size
    final = library.load(next(p for p in sorted((out / "runs").glob("b0-r1-*")) if library.load(p).grid))
    values = {f"grid.{field}": column for field, column in final.grid.items()}
    values |= {
        "paired": True,
        "dataset": str(log),
        "dataset.split": 0.5,
        "eval.env": "none",
        "seeds": [0, 1],
        "steps": 40,
        "group": 4,
    }
    values |= {"algo.hidden": [8, 8], "algo.batch_size": 16, "compile": "eager", "quiet": True, "logger": "none"}
    values |= {"runs_dir": str(tmp_path / "alone"), "eval.estimate": False}
    alone = library.train(final.algorithm, settings=values)
    left, right = files.load_latest(final.dir), files.load_latest(alone.dir)
    assert left is not None and right is not None and left[0].keys() == right[0].keys()
    exact = len(final.replicas) % 4 == 0
    for name, tensor in left[0].items():
        assert torch.equal(tensor, right[0][name]) if exact else torch.allclose(tensor, right[0][name], atol=1e-5), name


def test_real_episodes_choose_among_the_best(offrl: Offrl, write: Write, tmp_path: Path) -> None:
    g = np.random.default_rng(0)
    rows = 400
    actions = g.uniform(-2, 2, (rows, 1)).astype(np.float32)
    log = write(
        "pendulum.hdf5",
        observations=g.normal(size=(rows, 3)).astype(np.float32),
        actions=actions,
        rewards=-g.random(rows).astype(np.float32),
        terminals=np.zeros(rows, bool),
        timeouts=np.arange(rows) % 10 == 9,
    )
    out = tmp_path / "tune"
    done = offrl(
        "tune algos=iql --quiet eval_episodes=1 truth=1 episodes=6 rule=best env=Pendulum-v1",
        "dataset.action_low=[-2]",
        "dataset.action_high=[2]",
        f"dataset={log}",
        f"out={out}",
        *SMALL,
        "budget=6x20",
        "ope.updates=20",
    )
    assert done.status == 0, done.err
    result = json.loads((out / "result.json").read_text())
    lines = [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()]
    assert len(lines) == 6 == result["chosen"]["episodes"] and all(line["return"] < 0 for line in lines)
    means = {
        n: m for n, m in zip(result["chosen"]["finalists"], result["chosen"]["means"], strict=True) if m is not None
    }
    counts = dict(zip(result["chosen"]["finalists"], result["chosen"]["counts"], strict=True))
    for name, mean in means.items():
        own = [line["return"] for line in lines if line["setting"] == name]
        assert len(own) == counts[name] and np.mean(own) == pytest.approx(mean)
    winner = result["retrained"]["winner"]
    assert (
        not winner["normalised"]
        and len(winner["seeds"]) == 2
        and winner["score"][0] == pytest.approx(np.mean(winner["seeds"]))
    )
    assert all(seed < 0 for seed in winner["seeds"]), "returns, where there are no reference scores"
    assert result["truth"]["regret"]["chosen"] >= 0.0 and result["truth"]["best"] in result["truth"]["means"]
    # a kill in the middle of writing an episode's line: the others are not played again
    (out / "state" / "played.json").unlink()
    (out / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:4]) + '{"setting": "iq')
    assert offrl("tune resume=" + str(out), "quiet=true").status == 0
    assert [json.loads(line) for line in (out / "episodes.jsonl").read_text().splitlines()] == lines
    assert json.loads((out / "result.json").read_text()) == result


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("algos=iql", "needs the data: dataset=FILE"),
        ("algos=bc dataset={log}", "no published ranges are known"),
        ("algos=iql dataset={log} space.temperature=[]", "has no values"),
        ("algos=iql dataset={log} budget=2x10", "cannot be thinned out"),
        ("algos=iql dataset={log} judge=model", "needs a learned model: ope.world_model="),
        ("algos=iql dataset={log} judge=episodes episodes=5 rungs=1", "plays in an environment"),
        ("algos=iql dataset={log} launcher=slurmm", "launcher=slurmm is not allowed"),
        ("algos=iql dataset=nowhere.hdf5", "nowhere.hdf5"),
        ("resume=nowhere", "nowhere holds no tune"),
    ],
)
def test_mistakes_are_one_line(words: str, message: str, offrl: Offrl, log: Path, tmp_path: Path) -> None:
    done = offrl(
        "tune proposer=random",
        *words.format(log=log).split(),
        *([] if "resume" in words else [f"out={tmp_path / 'tune'}"]),
    )
    assert done.status == 2 and message in done.err and len(done.err.strip().splitlines()) == 1, done.err


def tune(out: Path, log: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "offrl.cli",
        "tune",
        "algos=iql,td3_bc",
        "--quiet",
        "env=none",
        f"dataset={log}",
        f"out={out}",
        *SMALL,
        *more,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a tune but locks, clocks and Optuna's journal (which holds times), with its own path replaced."""
    left_out = ("timing.jsonl", "journal.log", ".lock", "run.json", "config.yaml")
    paths = [
        p
        for p in sorted(out.rglob("*"))
        if p.is_file() and p.name not in left_out and p.suffix not in (".png", ".part")
    ]
    return {
        str(p.relative_to(out)): p.read_bytes().replace(str(out).encode(), b"OUT")
        for p in paths
        if "cells" not in p.parts
    }


@pytest.mark.nightly
@pytest.mark.parametrize("more", [(), ("proposer=tpe", "bracket=4")], ids=["random", "tpe"])
def test_killed_ten_times_it_comes_to_the_same_choice_and_files(
    log: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    if more:
        pytest.importorskip("optuna")
    began = time.monotonic()
    once = tune(tmp_path / "once", log, *more)
    _, errors = once.communicate(timeout=1200)
    assert once.returncode == 0, errors
    length, chance = time.monotonic() - began, random.Random(7)
    for _ in range(10):
        process = tune(tmp_path / "killed", log, *more)
        try:
            process.wait(timeout=chance.uniform(0.15, 0.6) * length)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    last = tune(tmp_path / "killed", log, *more)
    _, errors = last.communicate(timeout=1200)
    assert last.returncode == 0, errors
    one, other = contents(tmp_path / "once"), contents(tmp_path / "killed")
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == set()


@pytest.mark.nightly
@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_workers_elsewhere_make_the_same_bits(launcher: str, log: Path, tmp_path: Path) -> None:
    if launcher == "ray":
        pytest.importorskip("ray")
    for name, more in (("here", ()), (launcher, (f"launcher={launcher}", "jobs=2"))):
        process = tune(tmp_path / name, log, "retrain=false", *more)
        _, errors = process.communicate(timeout=1200)
        assert process.returncode == 0, errors
    one, other = contents(tmp_path / "here"), contents(tmp_path / launcher)
    assert {n for n in one if one[n] != other.get(n)} == set()
