"""Links, hard links and FIFOs in folders of strangers: nothing outside the folder is written, emptied or deleted, and
nobody waits.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offrl.benchmark import launch, plan
from offrl.cli.main import main
from offrl.collect.config import CollectConfig
from offrl.collect.record import claim
from offrl.errors import UserError
from offrl.figures import style
from offrl.labelling.cache import Answers
from offrl.runs import results
from offrl.runs.log import LineFile, json_step
from offrl.runs.run import SavedRun
from offrl.runs.score import Results
from offrl.system import files, locks
from offrl.world_models.model import load as load_model

SAVED = Path(__file__).parents[2] / "data" / "run"
TEXT = "the user's own\n"
LINE = '{"step": 1}\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's files, which none of these tests may change; the working folder lies beside them."""
    home, work = tmp_path / "home", tmp_path / "work"
    (home / "thesis" / "hparams").mkdir(parents=True)
    work.mkdir()
    for name in ("bashrc", "thesis/chapter.tex", "thesis/hparams/mine.txt"):
        (home / name).write_text(TEXT)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(work)
    return home


def untouched(home: Path) -> bool:
    texts = {str(p.relative_to(home)): p.read_text() for p in home.rglob("*") if p.is_file()}
    return texts == dict.fromkeys(("bashrc", "thesis/chapter.tex", "thesis/hparams/mine.txt"), TEXT)


def stranger(place: Path) -> Path:
    return Path(shutil.copytree(SAVED, place))


LINKS = [
    ".run.json.part",
    "metrics.jsonl.part",
    ".metrics.jsonl.part",
    "metrics.jsonl",
    ".select.csv.part",
    "select.csv",
    ".lock",
    "checkpoints/latest",
    "export/seed_0/.policy.onnx.part",
    "learning_curve.png.part",
    "new.json",
]
FOLDERS = ["tensorboard", "policies", "checkpoints", "export"]
COMMANDS = [
    "train resume=run steps=30",
    "select run",
    "export run",
    "evaluate run",
    "finetune run env=Hopper-v5",
    "finetune resume=run",
    "train name=run runs_dir=. steps=20",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_refuse_links_out_of_a_run(home: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows 3, 4 and 5: the link is named before anything is written."""
    stranger(Path("run"))
    (Path("run") / "tensorboard").symlink_to(home / "thesis")
    before = sorted(os.listdir("run"))
    assert main(command.split()) == 2
    assert "tensorboard is a link that leads out of the run" in capsys.readouterr().err
    assert untouched(home) and sorted(os.listdir("run")) == before


@pytest.mark.parametrize("link", LINKS + FOLDERS)
def test_a_run_with_any_link_out_of_it_is_not_opened(home: Path, link: str) -> None:
    """Rows 3, 4 and 5, for readers, for training in place, and for a model's folder."""
    place = stranger(Path("run")) / link
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(home / ("thesis" if link in FOLDERS else "bashrc"))
    for opening in (
        lambda: SavedRun("run"),
        lambda: load_model("run"),
        lambda: locks.exclusive(Path("run")).__enter__(),
    ):
        with pytest.raises(UserError, match=f"{link} is a link that leads out of the run"):
            opening()
    assert untouched(home)


def test_links_of_the_user_and_within_a_run_are_followed(home: Path) -> None:
    """The run directory may be a link that a person typed; files may be links to others of the run."""
    stranger(home.parent / "scratch")
    Path("run").symlink_to(home.parent / "scratch")
    Path("run/metrics.jsonl").rename("run/lines.jsonl")
    Path("run/metrics.jsonl").symlink_to("lines.jsonl")
    assert SavedRun("run").seeds == [0, 1]
    before = Path("run/lines.jsonl").read_text()
    with locks.exclusive(Path("run")):
        lines = LineFile(Path("run/metrics.jsonl"), json_step, 10**9)
    lines.write(LINE)
    assert Path("run/metrics.jsonl").read_text() == before + LINE and Path("run/lines.jsonl").read_text() == before


def png(path: Path) -> None:
    pytest.importorskip("matplotlib")
    style.save(style.new_figure("")[0], path)


def parquet(path: Path) -> None:
    pytest.importorskip("pyarrow")
    results.write(Results([], [], [], [], {}, {}, "", 1), path.with_suffix(".csv"))


def npz(path: Path) -> None:
    from offrl.collect.ogbench import _write

    _write(path, {})


def film(path: Path) -> None:
    pytest.importorskip("imageio")
    pytest.importorskip("imageio_ffmpeg")
    import numpy as np

    from offrl.video import frames

    frames.write(path, iter([np.zeros((32, 32, 3), np.uint8)] * 2), 2)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "run.json": lambda path: files.write_text(path, "{}"),
    "metrics.jsonl": lambda path: LineFile(path, json_step, 10**9).write(LINE),
    "curve.png": png,
    "results.parquet": parquet,
    "data.npz": npz,
    "film.mp4": film,
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_follows_a_link(home: Path, name: str) -> None:
    """Row 3: what an older version wrote through, `X.part`, `.X.part` and X itself, leads to a file of the user."""
    stem, _, end = name.rpartition(".")
    for link in (name, f"{name}.part", f".{name}.part", f".{stem}.part.{end}"):
        os.symlink(home / "bashrc", link)
    WRITERS[name](Path(name))
    assert untouched(home) and not os.path.islink(name) and Path(name).stat().st_size > 0
    assert not os.path.lexists(f".{name}.part")


@pytest.mark.parametrize("lock", ["exclusive", "alone", "hold"])
def test_locks_are_not_emptied(home: Path, lock: str) -> None:
    """Row 4: a lock file that is a link is refused; one with other names keeps what it holds."""
    run = Path("run")
    run.mkdir()
    holding: Callable[[], Any] = {
        "exclusive": lambda: locks.exclusive(run),
        "alone": lambda: locks.alone(run / "x", "x", True),
        "hold": lambda: plan.hold(run / ".lock"),
    }[lock]
    name = run / {"alone": "x.lock"}.get(lock, ".lock")
    name.symlink_to(home / "bashrc")
    with pytest.raises(UserError, match="is a link"), holding():
        pass
    name.unlink()
    os.link(home / "bashrc", name)
    with holding():
        pass
    assert untouched(home)


def test_lines_are_not_added_through_links(home: Path) -> None:
    """Row 3: files that grow, a cell's log and kept answers among them."""
    (Path("bench") / plan.CELLS).mkdir(parents=True)
    for name in ("answers.jsonl", f"bench/{plan.CELLS}/x.log"):
        os.symlink(home / "bashrc", name)
    with pytest.raises(UserError, match="is a link"):
        Answers("answers.jsonl").put("key", "prompt", "answer")
    with pytest.raises(UserError, match="is a link"):
        launch.LocalJobs("local", Path("bench"), 1)._start("x")
    assert untouched(home)


def test_a_backup_by_hard_links_keeps_its_lines(tmp_path: Path) -> None:
    """Row 3: `cp -l` gives a file a second name; what is added to a run is not added there."""
    for name, add in {
        "metrics.jsonl": lambda path: LineFile(path, json_step, 10**9).write(LINE),
        "answers.jsonl": lambda path: Answers(path).put("key", "prompt", "answer"),
    }.items():
        path, backup = tmp_path / name, tmp_path / f"backup-{name}"
        path.write_text(LINE)
        os.link(path, backup)
        add(path)
        assert backup.read_text() == LINE and path.read_text().startswith(LINE) and len(path.read_text()) > len(LINE)


def test_tensorboard_deletes_its_own_files_only(home: Path) -> None:
    """Row 5: `hparams` is written anew, and what others put there stays."""
    pytest.importorskip("tensorboard")
    from offrl.runs.loggers import TensorboardLogger
    from offrl.settings.replicas import Replica

    place = home / "tensorboard"
    (home / "thesis").rename(place)
    (place / "hparams" / "run").mkdir()
    (place / "hparams" / "run" / "events.out.tfevents.1.old").write_text("")
    (place / "hparams" / "photos").symlink_to(home)
    board = TensorboardLogger(home, [Replica(0)], 0)
    board.hparams(1, {"a": 1}, {"score": [1.0]})
    board.close()
    assert (place / "hparams" / "mine.txt").read_text() == TEXT and (home / "bashrc").read_text() == TEXT
    assert [p.name for p in (place / "hparams" / "run").iterdir() if p.name.endswith(".old")] == []


def test_a_prepared_collection_or_benchmark_is_not_continued(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 3 ("not tried: collect's resume from a prepared folder"), and the same for a benchmark's folder."""
    Path("out").mkdir()
    Path("out/collect.json").symlink_to(home / "bashrc")
    with pytest.raises(UserError, match=r"collect\.json is a link that leads out"):
        claim(Path("out"), CollectConfig(), {})
    Path("runs/own/cells/.submitit").mkdir(parents=True)
    # of a folder that has moved
    Path("runs/own/cells/.submitit/job.sh").symlink_to("/cluster/runs/own/cells/.submitit/1/job.sh")
    dry = "benchmark suite=own datasets=[builtin] algos=[bc] steps=5 dry_run=true"
    assert main(dry.split()) == 0
    shutil.rmtree("runs/own/cells")
    Path("runs/own/parts").symlink_to(home / "thesis")
    for more in ("dry_run=true", "dry_run=false"):
        assert main(f"benchmark suite=own datasets=[builtin] algos=[bc] steps=5 {more}".split()) == 2
        assert "parts is a link that leads out" in capsys.readouterr().err
    assert untouched(home) and os.listdir("runs/own") == ["parts"]


def test_a_fifo_is_not_waited_for(home: Path) -> None:
    """Row 20: a FIFO as scores.csv, run.json, benchmark.json, results.csv or a cell's status; `report` names what it
    leaves out.
    """
    stranger(Path("runs/good"))
    for name in ("scores.csv", "run.json", "timing.jsonl"):
        place = stranger(Path("runs") / f"fifo-{name}") / name
        place.unlink()
        os.mkfifo(place)
    for folder, name in (("a", "benchmark.json"), ("b", "results.csv"), ("c", "scores.csv"), ("d", "cells/x.json")):
        Path("runs", folder, "cells").mkdir(parents=True)
        os.mkfifo(Path("runs", folder, name))
    cells = [{"dataset": "x", "algorithm": "bc", "run": "x"}]
    Path("runs/d/benchmark.json").write_text(json.dumps({"suite": "d", "seeds": [0], "steps": 1, "cells": cells}))
    collected = results.collect(["runs"])
    assert [str(run.dir) for run in collected.runs] == ["runs/good"]
    assert sum("is neither a file nor a folder" in text for text in collected.problems) == 3


def test_a_stale_temporary_folder_is_not_followed(home: Path) -> None:
    """Row 5, for the folders that a killed process left: `.owned` may be a link, and so may the folder."""
    place = Path("shm")
    (place / "offrl-a").mkdir(parents=True)
    (place / "offrl-a" / locks.OWNED).symlink_to(home / "bashrc")
    (place / "offrl-b").symlink_to(home / "thesis")
    locks.TemporaryFolder("offrl-", place).close()
    assert untouched(home)


@pytest.mark.parametrize("run", ["../../home/thesis", "/etc", "..", "a/b"])
def test_a_benchmark_names_runs_of_its_own_folder(home: Path, run: str) -> None:
    """Row 15, for the names of runs in benchmark.json."""
    Path("bench").mkdir()
    stranger(home.parent / "elsewhere")
    cells = [{"dataset": "x", "algorithm": "bc", "run": run, "steps": 1, "settings": {}}]
    Path("bench/benchmark.json").write_text(json.dumps({"suite": "d", "seeds": [0], "steps": 1, "cells": cells}))
    with pytest.raises(UserError, match="is not in this folder"):
        plan.read_record(Path("bench"))
    stranger(Path("bench/good"))
    collected = results.collect(["bench"])
    assert [str(one.dir) for one in collected.runs] == ["bench/good"] and "is not in this folder" in collected.problems[
        0
    ]


@pytest.mark.parametrize(
    ("old", "new"),
    [('"seeds": [', '"seeds": ["../../../home/thesis/x", '), ('"grid": [', '"grid": [["../x", [1.0]], ')],
)
def test_a_record_names_files_of_its_own_folder(home: Path, old: str, new: str) -> None:
    """Row 15, for seeds and the fields of a grid, of which the names of a run's policies are made."""
    record = json.loads((stranger(Path("run")) / "run.json").read_text())
    record["identity"] = {"grid": [], **record["identity"]}
    text = json.dumps(record).replace(old, new)
    Path("run/run.json").write_text(text.replace("], ]", "]]"))
    with pytest.raises(UserError, match=r"run\.json is not what offrl writes"):
        SavedRun("run")
