"""A stranger's run.json: whatever its entries are, reading it ends in one line that names the file and the entry,
soon.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offrl.cli.main import main
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.pretrained import Requirement
from offrl.runs.run import SavedRun
from offrl.runs.settings import run_settings
from offrl.settings.kinds import misfit
from offrl.training.stages import load_run
from offrl.world_models.model import load

ODD = (None, [], {}, "x", -1, 1.5, [1], True)
SAVED = Path(__file__).parents[2] / "data" / "run"


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Any], Path]:
    """`run(record)`: a run with this run.json, an object or its text."""

    def make(record: Any) -> Path:
        folder = tmp_path / "run"
        if not folder.exists():
            shutil.copytree(SAVED, folder, ignore=shutil.ignore_patterns("tensorboard", "*.png"))
        (folder / "run.json").write_text(record if isinstance(record, str) else json.dumps(record))
        return folder

    return make


def old() -> Any:
    return json.loads((SAVED / "run.json").read_text())


def looked_at(folder: Path) -> None:
    """All that commands take from a record without data or an environment."""
    saved = SavedRun(folder)
    assert repr(saved) and saved.spec and saved.scored_in and saved.fingerprint is not None
    assert saved.acts in (True, False) and saved.goal_conditioned in (True, False)


def entries(node: Any, at: tuple[Any, ...] = ()) -> Any:
    """The ways to all entries of a record, and to the first one of each list."""
    yield at
    for key, value in (
        node.items() if isinstance(node, dict) else list(enumerate(node))[:1] if isinstance(node, list) else ()
    ):
        yield from entries(value, (*at, key))


@pytest.mark.parametrize("odds", [(None, [1]), pytest.param(ODD, marks=pytest.mark.nightly)], ids=["some", "all"])
def test_every_entry_may_be_anything(odds: tuple[Any, ...], run: Any) -> None:
    """Row 21: `[]`, and every entry in turn replaced by values of other kinds."""
    refused = 0
    shutil.rmtree(run(old()) / "checkpoints")  # to be quick
    for at in entries(old()):
        for odd in odds:
            record = node = {"": old()}
            for key in (*("",), *at)[:-1]:
                node = node[key]
            node[(*("",), *at)[-1]] = odd
            try:
                looked_at(run(record[""]))
            except UserError as error:
                refused += 1
                assert "\n" not in str(error)
                known = str(error).startswith("unknown algorithm") or at[:2] == ("identity", "algo")
                assert known or "run.json" in str(error)
    assert refused > 30 * len(odds)


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("text", ["[]", "null", '"x"', "", "{", "\0", "[" * 100_000, '{"a":' * 100_000, "1" * 10_000])
def test_what_is_no_record(text: str, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 21: no object, damaged, or nested so deeply that a parser gives up."""
    folder = run(text)
    for command in (
        "evaluate RUN",
        "train resume=RUN",
        "select RUN",
        "finetune RUN env=Hopper-v5",
        "finetune resume=RUN",
        "export RUN",
    ):
        assert main(command.replace("RUN", str(folder)).split()) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"{folder / 'run.json'} " in error
    with pytest.raises(UserError, match="holds no world model"):
        load(folder)


@pytest.mark.parametrize(
    "grid, seeds",
    [
        ([[f"f{i}", [1.0, 2.0]] for i in range(30)], [0]),
        (
            [
                ["temperature", list(range(1, 1001))],
                ["expectile", [i / 1000 for i in range(1000)]],
                ["discount", [0.9] * 1000],
            ],
            [0, 1],
        ),
        ([], list(range(10_001))),
        ([["temperature", []]], [0]),
        ([], []),
        ([], [0, 0]),
        ([], [-1]),
    ],
)
def test_replicas_are_counted_before_they_are_made(grid: Any, seeds: Any, run: Any) -> None:
    """Row 20: a grid of 10^9 cells, or as many seeds, in run.json."""
    record = old()
    record["identity"] |= {"grid": grid, "seeds": seeds}
    folder = run(record)
    spec = DataSpec((11,), 3)
    for read in (
        lambda: SavedRun(folder),
        lambda: run_settings(folder),
        lambda: load_run(folder, spec, "algo.values", Requirement("iql", {})),
    ):
        with pytest.raises(
            UserError,
            match=r"run\.json is not what offrl writes \((.*replicas|seeds=|grid\.temperature has no|identity\.seeds "
            r"has 10,001)",
        ):
            read()


def test_a_pipe_is_no_record(run: Any) -> None:
    """Row 20: it would be read for ever."""
    folder = run("")
    (folder / "run.json").unlink()
    os.mkfifo(folder / "run.json")
    with pytest.raises(UserError, match="is neither a file"):
        SavedRun(folder)


def test_a_record_and_a_checkpoint_of_other_replicas(run: Any) -> None:
    """Row 21: run.json says one seed, the checkpoint has two."""
    record = old()
    record["identity"]["seeds"] = [0]
    with pytest.raises(UserError, match=r"its checkpoint has 2 replicas, and its run\.json 1"):
        _ = SavedRun(run(record)).diverged


def test_types() -> None:
    """Values held against annotations."""
    assert misfit({"a": [1, 2.5]}, dict[str, list[float]], "x") == ""
    assert misfit({"a": [1, "b"]}, dict[str, list[float]], "x") == "x.a[1] is 'b', where a number is due"
    assert (
        misfit(True, int, "x")
        and misfit(1.0, int, "x")
        and not misfit(None, int | None, "x")
        and misfit("1", int | None, "x")
    )
    assert misfit([["a", [1]], ["b"]], list[tuple[str, list[float]]], "x") == "x[1] has 1 entries, where 2 are due"
    assert misfit({"observation_shape": 3}, DataSpec, "spec") == "spec.observation_shape is 3, where a list is due"
    assert misfit([1], DataSpec | None, "spec") == "spec is [1], where entries by name are due" and not misfit(
        lambda: 1, Any, "x"
    )


def test_sparse_files_are_not_read(tmp_path: Path) -> None:
    """A file of 5 GB that costs nothing to make: as benchmark.json, a cell's status, scores.csv and a log."""
    from offrl.benchmark import plan
    from offrl.runs import parse, results
    from offrl.runs.log import LineFile, json_step

    (tmp_path / "b" / "cells").mkdir(parents=True)
    names = {name: tmp_path / "b" / name for name in ("benchmark.json", "cells/x.json", "scores.csv", "metrics.jsonl")}
    for path in names.values():
        path.touch()
        os.truncate(path, 5 << 30)
    with pytest.raises(UserError, match=r"benchmark\.json has 5,368,709,120 bytes"):
        plan.read_record(tmp_path / "b")
    assert plan.read_status(tmp_path / "b", "x") == {}
    told: list[str] = []
    assert list(parse.whole_rows(names["scores.csv"], told.append)) == [] and "of which the disk holds" in told[0]
    assert list(parse.lines_backwards(names["metrics.jsonl"], None)) == []
    with pytest.raises(UserError, match=r"metrics\.jsonl has 5,368,709,120 bytes, of which the disk holds"):
        LineFile(names["metrics.jsonl"], json_step, 0)
    assert len(parse.header(names["scores.csv"])) <= parse.LINE
    with pytest.raises(UserError, match="holds no run"):
        results.collect([str(tmp_path / "b")])


@pytest.mark.parametrize(
    "status", [{"steps": "x"}, {"steps": None}, {"seconds": []}, {"error": 5}, {"status": ["done"]}]
)
def test_a_status_of_other_types_is_none(status: dict[str, Any], tmp_path: Path) -> None:
    from offrl.benchmark import plan

    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "x.json").write_text(
        json.dumps({"status": "done", "steps": 5, "seconds": 1.5, "error": "", **status})
    )
    assert plan.read_status(tmp_path, "x") == {}
    (tmp_path / "cells" / "x.json").write_text(
        json.dumps({"status": "done", "steps": 5, "seconds": 1.5, "error": "", "token": "t"})
    )
    assert plan.read_status(tmp_path, "x")["steps"] == 5
