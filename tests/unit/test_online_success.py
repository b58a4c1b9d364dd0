"""Rewards of a classifier of success while policies play: which steps it rewards, what it ends, what is refused."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from offrl.cli.main import main
from offrl.data.dataset import DataSpec
from offrl.data.store import StreamSpec
from offrl.envs.drawn import WORLDS
from offrl.errors import UserError
from offrl.evaluation.steppers import Steps
from offrl.finetuning.play import success
from offrl.finetuning.play.success import SuccessRewards

SPEC = DataSpec((0,), 1, streams=(StreamSpec("pixels", (4, 4, 3)),))


class Bright:
    """Success is a bright first pixel."""

    threshold: float | None = 0.5
    spec = SPEC

    def __call__(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        return (columns["next_pixels"][:, 0, 0, 0] > 128).astype(np.float32)


def test_success_is_rewarded_and_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(success, "load_labels", lambda path: Bright())
    rows = np.zeros(3, [("pixels", np.uint8, (4, 4, 3))])
    rows["pixels"][1] = 255
    unknown, ends = np.full(3, np.nan), np.array([False, False, True])
    steps = Steps(list(rows), np.array([5.0, 6.0, 7.0]), ends.copy(), ends.copy(), unknown, unknown.copy(), {})
    SuccessRewards("success.safetensors", SPEC).judge(rows, steps)
    assert steps.rewards.tolist() == [0.0, 1.0, 0.0]
    assert steps.terminated.tolist() == steps.over.tolist() == [False, True, True]  # also as the environment ended


@pytest.mark.parametrize(
    ("threshold", "spec", "words"),
    [
        (None, SPEC, "success=s.safetensors gives probabilities, .* fit.reward=success"),
        (0.5, DataSpec((2,), 1), r"learnt on images pixels \[4, 4, 3\], and the policy's are none"),
        (0.5, DataSpec((0,), 1, streams=(StreamSpec("pixels", (8, 8, 3)),)), r"the policy's are \[8, 8, 3\]"),
    ],
)
def test_what_cannot_judge(
    threshold: float | None, spec: DataSpec, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bright = Bright()
    bright.threshold = threshold
    monkeypatch.setattr(success, "load_labels", lambda path: bright)
    with pytest.raises(UserError, match=words):
        SuccessRewards("s.safetensors", spec)


def test_other_labels_are_no_classifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(success, "load_labels", lambda path: len)
    with pytest.raises(UserError, match="no classifier of success: offrl data label DATA kind=success"):
        SuccessRewards("labels.safetensors", SPEC)


@pytest.mark.nightly
def test_a_run_learns_from_a_learnt_classifier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of the page, small; and a stop leaves no trace."""
    monkeypatch.chdir(tmp_path)
    world, g = WORLDS["pendulum"], np.random.default_rng(0)
    angle, rows = g.uniform(-np.pi, np.pi, 600), np.arange(600)
    states = np.stack([np.cos(angle), np.sin(angle), np.zeros(600)], 1).astype(np.float32)
    last = rows % 20 == 19
    np.savez(
        "drawn-pendulum.npz",
        observations=world.pictures(states),
        actions=g.uniform(-1, 1, (600, 1)).astype(np.float32),
        rewards=np.zeros(600),
        terminations=np.zeros(600, bool),
        truncations=last,
        success=np.append(np.abs(angle[1:]) < 0.5, False) & ~last,
    )
    label = (
        "data label drawn-pendulum.npz kind=success labels=success out=s.safetensors fit.updates=150 fit.threshold=0.9"
    )
    assert main([*label.split(), "fit.batch_size=32", "fit.learning_rate=0.002", "encoder.width=8"]) == 0
    train = (
        "train algo=iql dataset=drawn-pendulum.npz dataset.reward_labels=s.safetensors steps=6 seeds=2 algo.hidden=[8] "
        "algo.batch_size=4 encoder.width=8 eval.episodes=1 eval.max_steps=4 name=run"
    )
    assert main(train.split()) == 0
    online = "finetune runs/run success=s.safetensors eval.episodes=1 eval.every=99 max_steps=9 mixing=0.5 envs=2"
    assert main([*online.split(), "steps=80", "name=long"]) == 0
    assert "1 where s.safetensors sees success, which ends the episode" in capsys.readouterr().out
    with open("runs/long/episodes.csv", newline="") as file:
        episodes = list(csv.DictReader(file))
    assert {float(row["return"]) for row in episodes} == {0.0, 1.0}
    assert all((float(row["return"]) == 1.0) == (int(row["length"]) < 9) for row in episodes if int(row["length"]) < 9)
    assert main([*online.split(), "steps=25", "name=short"]) == 0
    assert main(["finetune", "resume=runs/short", "steps=80"]) == 0
    for path in sorted(Path("runs/long/policies").iterdir()):
        a, b = load_file(path), load_file(Path("runs/short/policies") / path.name)
        assert all(np.array_equal(a[k], b[k]) for k in a) and a.keys() == b.keys()
    record: Any = json.loads(Path("runs/long/run.json").read_text())
    assert record["identity"]["finetune"]["success"] == "s.safetensors" and record["identity"]["success"]
    assert main(["finetune", "runs/run", "success=other.safetensors", "mixing=0.5", "steps=80"]) == 2
    assert "the data's are others" in capsys.readouterr().err
