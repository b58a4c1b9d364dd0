"""The run log: what survives a kill, what never depends on the clock, what is shown."""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.errors import UserError
from offrl.runs import log, tables
from offrl.settings.replicas import Replica, expand
from offrl.system.progress import Pace, duration

FILES = ("metrics.jsonl", "scores.csv", "episodes.jsonl")


@pytest.fixture(autouse=True)
def no_tensorboard(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "tensorboard" not in request.node.name:  # a second to import
        monkeypatch.setattr(log.RunLog, "_shown", lambda *_: None)


def start(path: Path, resume_step: int | None = None, **kwargs: Any) -> log.RunLog:
    options: dict[str, Any] = {
        "quiet": True,
        "total_steps": 100,
        "replicas": [Replica(3), Replica(7)],
        "title": "a run",
    }
    return log.RunLog(path, resume_step=resume_step, **(options | kwargs))


def write(run: log.RunLog, steps: range) -> None:
    for step in steps:
        run.metrics(step, {"critic/loss": [step / 3, 0.1 + 0.2], "actor/loss": [float("nan"), float("inf")]})
        row = {
            "episodes": 10,
            "return_mean": step / 7,
            "return_std": 1e-17,
            "length_mean": 1000.0,
            "success": None,
            "score": float("nan"),
        }
        run.scores(
            step,
            [{"seed": s, **row, "dataset": "d, x", "env_id": "E-v4"} for s in (3, 7)],
            np.array([[step / 7, 0.1]] * 2),
            [[5, 6]] * 2,
        )
        run.timing(step, train=0.5)


def contents(path: Path) -> list[bytes]:
    return [(path / name).read_bytes() for name in FILES]


def test_rows_read_back(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        write(run, range(10, 31, 10))
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] == {"step": 10, "critic/loss": [10 / 3, 0.1 + 0.2], "actor/loss": [None, None]}
    table = list(csv.DictReader(io.StringIO((tmp_path / "scores.csv").read_text())))
    assert len(table) == 6 and tuple(table[0]) == log.SCORE_COLUMNS
    assert float(table[2]["return_mean"]) == 20 / 7 and table[2]["seed"] == "3" and table[2]["dataset"] == "d, x"
    assert table[0]["success"] == "" and table[0]["score"] == ""
    episodes = [json.loads(line) for line in (tmp_path / "episodes.jsonl").read_text().splitlines()]
    assert episodes[1] == {"step": 20, "returns": [[20 / 7, 0.1]] * 2, "lengths": [[5, 6]] * 2}
    assert json.loads((tmp_path / "timing.jsonl").read_text().splitlines()[0]) == {"step": 10, "train": 0.5}


@pytest.mark.parametrize("torn", [b"", b'{"step": 25, "cri', b"\0\0\0\0\n"])
def test_resume_gives_the_same_bytes(tmp_path: Path, torn: bytes) -> None:
    with start(tmp_path / "whole") as run:
        write(run, range(0, 51, 5))
    with start(tmp_path / "cut") as run:
        write(run, range(0, 36, 5))
    for name in FILES:
        with open(tmp_path / "cut" / name, "ab") as file:
            file.write(torn)
    with start(tmp_path / "cut", resume_step=20) as run:
        write(run, range(25, 51, 5))
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        write(run, range(3))
    start(tmp_path).close()
    assert contents(tmp_path) == [b"", (",".join(log.SCORE_COLUMNS) + "\n").encode(), b""]


def test_a_grid_has_columns_of_its_own(tmp_path: Path) -> None:
    grid = expand({"temperature": [1.0, 30.0], "learning_rate": [1e-5]}, [3, 7])
    with start(tmp_path, replicas=grid) as run:
        for step in (1, 2):
            run.scores(step, [{"seed": r.seed, "return_mean": float(i), "dataset": "d"} for i, r in enumerate(grid)])
    lines = (tmp_path / "scores.csv").read_text().splitlines()
    assert lines[0] == ",".join((*log.SCORE_COLUMNS[:2], "temperature", "learning_rate", *log.SCORE_COLUMNS[2:]))
    assert lines[1:4] == [
        f"1,{start},,,,,d,,,,,,," for start in ("3,1.0,1e-05,,0.0", "7,1.0,1e-05,,1.0", "3,30.0,1e-05,,2.0")
    ]
    assert len(lines) == 9
    with start(tmp_path, replicas=grid, resume_step=1) as run, pytest.raises(ValueError, match="zip"):
        run.scores(2, [{"seed": 3}])
    assert (tmp_path / "scores.csv").read_text().splitlines() == lines[:5]
    with pytest.raises(UserError, match=r"grid.score: scores.csv has another column of that name"):
        start(tmp_path, replicas=expand({"score": [1.0]}, [0]))


def test_unknown_score_column_is_an_error(tmp_path: Path) -> None:
    with start(tmp_path) as run, pytest.raises(ValueError, match="retrun"):
        run.scores(1, [{"seed": 0, "retrun": 1.0}])


def test_disk_full_takes_the_line_back(tmp_path: Path) -> None:
    with start(tmp_path) as run:
        write(run, range(1))
        before = contents(tmp_path)
        real = run._metrics.file

        class Full:
            fileno = staticmethod(real.fileno)
            close = staticmethod(real.close)

            def write(self, data: bytes) -> int:
                if len(data) < 20:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real.write(data[:-10])

        run._metrics.file = Full()  # type: ignore[assignment]
        with pytest.raises(UserError, match=r"disk full while writing .*metrics.jsonl; the last checkpoint survives"):
            run.metrics(1, {"loss": [1.0, 2.0]})
    assert contents(tmp_path) == before


def test_unwritable_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        start(tmp_path / "file" / "run")


def test_tensorboard_has_means_and_seeds_and_resumes(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with start(tmp_path) as run:
        for step in (10, 20, 30):
            run.metrics(step, {"loss": [1.0, 3.0]})
    # TensorBoard reads its files in the order of their names: the second, and then a number, 10 before 9
    time.sleep(1.1)
    with start(tmp_path, resume_step=20) as run:
        run.metrics(30, {"loss": [5.0, float("nan")]})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss/mean")] == [(10, 2.0), (20, 2.0), (30, 5.0)]
    assert [e.value for e in board.Scalars("seed_7/loss")] == [3.0, 3.0]


@pytest.mark.parametrize("saved", [20, 25])
def test_scores_that_come_again_after_their_checkpoint_stand_once_in_files_and_tensorboard(
    tmp_path: Path, saved: int
) -> None:
    """The checkpoint of step 20, or of a signal at step 25, was written before the scores of step 20; the run was
    killed after them.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("whole", "killed"):
        with start(tmp_path / name) as run:
            write(run, range(10, 21 if name == "killed" else 41, 10))
    with start(tmp_path / "killed", resume_step=saved, unscored=20) as run:
        assert [line.split(b",")[0] for line in contents(tmp_path / "killed")[1].splitlines()] == [
            b"step",
            b"10",
            b"10",
        ]
        row = {
            "episodes": 10,
            "return_mean": 20 / 7,
            "return_std": 1e-17,
            "length_mean": 1000.0,
            "success": None,
            "score": float("nan"),
        }
        run.scores(
            20,
            [{"seed": s, **row, "dataset": "d, x", "env_id": "E-v4"} for s in (3, 7)],
            np.array([[20 / 7, 0.1]] * 2),
            [[5, 6]] * 2,
        )
        write(run, range(30, 41, 10))
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    shown = []
    for name in ("whole", "killed"):
        events = EventAccumulator(str(tmp_path / name / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        shown.append({tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    assert shown[0] == shown[1] and [s for s, _ in shown[0]["critic/loss/mean"]] == [10, 20, 30, 40]


def test_tensorboard_has_returns_and_hparams(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    grid = expand({"temperature": [1.0, 3.0]}, [0, 1])
    for _ in range(2):  # a run that is continued replaces its row
        with start(tmp_path, replicas=grid) as run:
            rows = [{"return_mean": float(i), "score": 10.0 * i} for i in range(4)]
            run.scores(10, rows, np.array([[0.0, np.nan], [1.0, 1.0], [2.0, 2.0], [3.0, np.inf]]))
            run.hparams({"learning_rate": 1e-3, "hidden": [4, 4], "temperature": 1.0, "name": None})
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert board.Histograms("eval/episode_returns")[0].histogram_value.num == 6
    for cell, mean in (("temperature=1", 5.0), ("temperature=3", 25.0)):
        (file,) = (tmp_path / "tensorboard" / "hparams" / cell).iterdir()
        session = EventAccumulator(str(file.parent))
        session.Reload()
        assert session.Scalars("final/score")[0].value == mean
        content = session.summary_metadata["_hparams_/session_start_info"].plugin_data.content
        given = {
            k: v.number_value or v.string_value
            for k, v in HParamsPluginData.FromString(content).session_start_info.hparams.items()
        }
        assert given == {"learning_rate": 1e-3, "hidden": "[4, 4]", "temperature": float(cell[-1]), "name": "null"}


def test_tensorboard_of_a_grid_has_its_cells(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = {}
    for name, cells, seeds in (("small", 2, 2), ("middle", 16, 2), ("large", 17, 1)):
        grid = expand({"temperature": list(map(float, range(cells))), "expectile": [0.7]}, list(range(seeds)))
        with start(tmp_path / name, replicas=grid) as run:
            run.metrics(10, {"loss": [float("nan"), *map(float, range(1, len(grid)))]})
        board = EventAccumulator(str(tmp_path / name / "tensorboard"))
        board.Reload()
        tags[name] = {tag: board.Scalars(tag)[0].value for tag in board.Tags()["scalars"]}
    names = ["temperature=0,expectile=0.7", "temperature=1,expectile=0.7"]
    assert tags["small"] == {
        "loss/mean": 2.0, f"cell/{names[0]}/loss": 1.0, f"cell/{names[1]}/loss": 2.5,
        f"{names[0]},seed=1/loss": 1.0, f"{names[1]},seed=0/loss": 2.0, f"{names[1]},seed=1/loss": 3.0,
    }  # fmt: skip
    assert len(tags["middle"]) == 17 and not any("seed=" in tag for tag in tags["middle"])
    assert list(tags["large"]) == ["loss/mean"]


def test_progress_of_a_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = expand({"temperature": [1.0, 3.0, 10.0]}, [0, 1])
    text = tables.score_text("score", [60.0, 64.0, 10.0, 14.0, 30.0, 30.0], grid)
    assert text == "score 12.0 .. 62.0 over 3 cells"
    assert tables.score_text("return", [12.0, 14.0], [Replica(0), Replica(1)]) == "return 13.0 [0.3, 25.7]"
    assert tables.score_text("score", [12.0], expand({"temperature": [1.0]}, [0])) == "score 12.0"
    with start(tmp_path, replicas=grid, quiet=False) as run:
        run.progress(50, 10.0, text)
    assert "10 updates/s x 6 replicas = 60/s" in capsys.readouterr().out


def test_plain_progress_says_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path, quiet=False) as run:
        for step in range(10, 101, 10):
            run.progress(step, 50.0, "score 12.0" if step >= 50 else "")
        run.progress(100, 50.0, "score 12.0")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a run"
    assert [line.split()[1] for line in lines[1:]] == ["50/100", "100/100"]
    assert sum("score 12.0" in line for line in lines) == 1
    assert "50 updates/s x 2 seeds = 100/s" in lines[1] and "ETA 1 s" in lines[1] and "ETA" not in lines[-1]


def test_quiet_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path) as run:
        run.progress(10, 5.0, "score")
        run.say("hello")
    assert capsys.readouterr() == ("", "")


def test_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("sys.stdout", screen)
    with start(tmp_path, quiet=False) as run:
        run.progress(50, 25.0, "score 12.0 [8, 16]")
        run.say("resumed [bold]")
    text = screen.getvalue()
    assert "50/100" in text and "score 12.0 [8, 16]" in text and "ETA 2 s" in text
    assert text.count("resumed [bold]") == 1 and text.count("a run") == 1


def test_final_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        tables.Result("iql", 4, (1900.0, 1800.0, 2000.0), (60.0, 55.5, 64.5), None, 22.0),
        tables.Result("bc", 1, (900.0, float("nan"), float("nan")), (25.0, float("nan"), float("nan")), None, 22.0),
    ]
    tables.final_table(rows, "hopper")
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "hopper" and "success" not in text[1]
    assert text[3].split("  ")[0] == "iql" and "60.0 [55.5, 64.5]" in text[3]
    assert "25.0 " in text[4] and "nan" not in text[4]
    assert len({len(line) for line in text[1:]}) == 1 and len(text) == 5


def test_what_to_look_at_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands that a shell takes as they stand; the low scores of the dataset that ships with the package are
    explained.
    """
    import shlex

    from offrl.cli.main import main
    from offrl.runs.run import SavedRun

    from .test_report import level, make

    def saved(name: str, algorithm: str, score: Any, **data: object) -> SavedRun:
        run = make(tmp_path / "my runs", algorithm, "hopper", score, name=name, raw=score is None)
        record = json.loads((run / "run.json").read_text())
        record["data"].update({"rows": 60_396, **data})
        record["spec"] |= {"observation_shape": [2], "action_dim": 1, "name": "hopper", "discrete": False}
        (run / "run.json").write_text(json.dumps(record))
        return SavedRun(run)

    iql, bc = saved("a", "iql", level(18), source="builtin"), saved("b", "bc", level(1))
    lines = tables.next_commands([iql, bc])
    commands = [line.split(": ", 1)[1].split(None) for line in lines]
    assert [c[1] for c in commands] == ["report", "evaluate", "train"] and lines[2].endswith("steps=600")
    places = shlex.split(lines[0].split(":", 1)[1])[2:]
    assert places == [str(iql.dir), str(bc.dir)]
    assert main(["report", *places, f"out={tmp_path / 'out'}", "bootstrap=100", "quiet=true"]) == 0  # as it stands
    assert len(tables.next_commands([iql, *[bc] * 9])[0]) < len(lines[0])  # of many runs their folder
    # the updates it had: nothing is left to learn
    iql.record["identity"]["algo"] |= {"actor_schedule": "cosine", "decay_steps": 300}
    assert len(tables.next_commands([iql])) == 2
    unscored = tables.next_commands([saved("c", "bc", None)])
    assert ["select" in unscored[0], "env=ID" in unscored[1]] == [True, True]
    capsys.readouterr()
    tables.explain(bc)
    assert capsys.readouterr().out == ""
    tables.explain(iql)
    assert "300 updates (papers: 1,000,000) on 60,396 rows" in capsys.readouterr().out


def test_final_table_of_a_grid(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        tables.Result(
            "iql",
            2,
            (0.0, 0.0, 0.0),
            (score, score - 1, score + 1),
            None,
            22.0,
            (("temperature", t), ("expectile", 0.7)),
        )
        for t, score in ((10.0, 5.0), (1.0, 60.0))
    ]
    tables.final_table([*rows, tables.Result("bc", 2, (0.0, 0.0, 0.0), (20.0, 19.0, 21.0))])
    header, _, *lines, note = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["algorithm", "temperature", "expectile", "score"]
    assert [line.split()[:4] for line in lines] == [
        ["iql", "10", "0.7", "5.0"],
        ["iql", "1", "0.7", "60.0"],
        ["bc", "20.0", "[19.0,", "21.0]"],
    ]
    assert note == tables.CHOICE


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.4, "3 s"), (75, "1 min 15 s"), (7500, "2 h 05 min"), (float("inf"), "?")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_pace_is_that_of_the_whole_where_work_comes_in_turns() -> None:
    pace, shown = Pace(), []
    for _ in range(20):  # ten seconds of rollouts with 50 updates, then 1,000 updates in five
        shown.append(pace.add(50, 10.0))
        shown += [pace.add(100, 0.5) for _ in range(10)]
    late = shown[110:]
    assert 50 < min(late) < 1050 / 15 < max(late) < 90  # the stretches alone have 5 and 200 a second
    assert math.isclose(sum(late) / len(late), 70, rel_tol=0.1)
    for _ in range(120):  # and it forgets
        rate = pace.add(10, 5.0)
    assert math.isclose(rate, 2.0, rel_tol=0.05)
