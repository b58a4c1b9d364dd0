"""`offrl model` of runs with latent models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.cli import main as cli
from offrl.report.models.data import reading_of
from tests.unit.test_open_loop import SMALL

RANGE = ("dataset.action_low=[-1]", "dataset.action_high=[1]")
TITLE = "median error of 64 windows of data"


def write(path: Path, seed: int, actions: int = 2) -> None:
    """Twelve episodes of ten rows, with a column that no policy sees."""
    random, rows = np.random.default_rng(seed), 120
    columns: dict[str, Any] = {
        "observations": random.normal(size=(rows, 3)).astype(np.float32),
        "actions": random.uniform(-1.0, 1.0, (rows, actions)).astype(np.float32),
        "rewards": random.normal(size=rows).astype(np.float32),
        "terminations": np.zeros(rows, bool),
        "truncations": np.arange(rows) % 10 == 9,
    }
    np.savez(path, hidden=2.0 * columns["observations"][:, :2], **columns)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on half of a file, and other files."""
    folder = tmp_path_factory.mktemp("latent")
    write(folder / "mine.npz", 0)
    write(folder / "far.npz", 1)
    write(folder / "wide.npz", 2, actions=3)
    where = [f"dataset={folder}/mine.npz", *RANGE, f"runs_dir={folder}", "steps=2", "eval.env=none", "quiet=true"]
    settings = [f"algo.{k}={v}".replace(" ", "") for k, v in SMALL["mrq"].items()]
    more = [
        "algo.batch_size=4",
        "algo.horizon=2",
        "algo.target_every=2",
        "compile=eager",
        "seeds=2",
        "name=run",
        "dataset.split=0.5",
    ]
    assert cli.main(["train", "algo=mrq", *settings, *where, *more]) == 0
    return folder


def model(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    status = cli.main(["model", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def read(path: Path) -> dict[str, Any]:
    result = json.loads((path / "open_loop.json").read_text())
    assert isinstance(result, dict)
    return result


def test_a_run_is_measured_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = read(folder / "run")
    status, out, _ = model(capsys, folder / "run", f"out={folder}/again")
    assert status == 0 and f"{TITLE} that it learnt from (mine)" in out
    assert read(folder / "again") == trained and len(trained["models"]) == 2


def test_other_data_and_a_column_of_theirs(
    folder: Path, capsys: pytest.CaptureFixture[str], pictures: dict[str, Any]
) -> None:
    status, out, _ = model(capsys, folder / "run", f"dataset={folder}/far.npz", *RANGE, "probe=hidden")
    assert status == 0 and f"{TITLE} of which it may have learnt some (far)" in out and "hidden[1]" in out
    written = read(folder / "run" / "model-far")
    assert written["probe"] == "hidden" and [len(m["probe"]) for m in written["models"]] == [2, 2]
    assert len(pictures["open_loop.png"].axes) == 2  # rewards, and the probe


@pytest.mark.parametrize(
    "part, more, text",
    [
        ("second", [], "data that it was not trained on"),
        ("first", [], "data of which it may have learnt some"),
        ("second", ["dataset.subsample=0.8"], "data of which it may have learnt some"),
    ],
)
def test_the_other_part_of_split_data_is_unseen(
    folder: Path, capsys: pytest.CaptureFixture[str], part: str, more: list[str], text: str
) -> None:
    split = ("dataset.split=0.5", f"dataset.split_part={part}", *more)
    status, out, _ = model(capsys, folder / "run", f"dataset={folder}/mine.npz", *RANGE, *split)
    assert status == 0 and f"{text} (mine" in out


def test_data_of_several_tasks_are_read() -> None:
    assert reading_of("drawn-pendulum-state", {"dataset.multitask": True}).multitask


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["ood=x"], "ood= is of ensembles"),
        (["probe=nix"], r"has no column 'nix' (probe=)"),
        (["dataset=wide.npz", *RANGE], "observations numbers 3 and 2 action dimensions; wide has"),
        (["dataset=far.npz", "dataset.action_low=[-2]", "dataset.action_high=[2]"], "dataset.action_low=[-1] dataset"),
        (["dataset=drawn-pendulum-state", "probe=x"], "name data of the same spaces"),
    ],
)
def test_mistakes_take_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    arguments = [
        a.replace("dataset=wide", f"dataset={folder}/wide").replace("dataset=far", f"dataset={folder}/far")
        for a in arguments
    ]
    status, _, err = model(capsys, folder / "run", *arguments)
    assert status == 2 and text in err and err.count("error") == 1


def test_a_run_without_its_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run" / "checkpoints").rename(folder / "checkpoints")
    try:
        status, _, err = model(capsys, folder / "run")
    finally:
        (folder / "checkpoints").rename(folder / "run" / "checkpoints")
    assert status == 2 and "its model is in the checkpoint of update 2 under" in err
