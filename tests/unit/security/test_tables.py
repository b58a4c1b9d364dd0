"""Row 19: names that a spreadsheet would take for formulas are texts in CSV files, and are read back as they were."""

from __future__ import annotations

import csv
import json
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.errors import one_line
from offrl.figures.curves import read_curves
from offrl.ope.selection import read_returns
from offrl.report.rows import TABLE, entries, table
from offrl.runs.log import RunLog
from offrl.runs.parse import whole_rows
from offrl.runs.results import collect, write
from offrl.runs.run import SavedRun
from offrl.runs.score import Results, Score
from offrl.settings.replicas import expand
from offrl.system.csv_text import read, rows_of, text_of

ROOT = Path(__file__).resolve().parents[3]
SAVED = ROOT / "tests" / "data" / "run"
FORMULA = "=cmd|' /C calc'!A0"
NAMES = (
    "=cmd|' /C calc'!A0",
    "-x",
    "+1+1",
    "@a",
    "'=x",
    "'x",
    "a,b",
    'a"b',
    "a;=b",
    "-1.5",
    "-",
    "'",
    "''-",
    "\t=x",
    "\uff1dx",
)


def formulas(text: str) -> list[str]:
    """Cells of a CSV file as a spreadsheet would read it, parted by commas or by semicolons, that are formulas and no
    numbers.
    """
    cells = [x for mark in ",;" for row in csv.reader(text.splitlines(), delimiter=mark) for x in row]
    return [x for x in cells if re.match(r"[=+\-@\t\r\uff1d]", x) and not re.fullmatch(r"[+-]\d[-+\d.,e]*", x)]


def test_offrl_reads_and_writes_csv_in_one_place() -> None:
    for top in ("offrl", "algorithms", "world_models", "envs"):
        for folder, _, names in os.walk(ROOT / top):
            for path in (Path(folder, name) for name in names if name.endswith(".py") and name != "csv_text.py"):
                known = re.search(
                    r"csv\.(writer|reader|DictWriter|DictReader)\(|to_csv|savetxt", path.read_text(encoding="utf-8")
                )
                assert not known, f"{path}: use offrl.system.csv_text"


@pytest.mark.parametrize("name", NAMES)
def test_names_come_back(tmp_path: Path, name: str) -> None:
    text = text_of([["name", "value"], [name, -0.5], [name, None], [name, np.float64(-1e-30)]])
    assert not formulas(text)
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    assert read(tmp_path / "a.csv") == [{"name": name, "value": x} for x in ("-0.5", "", "-1e-30")]
    assert list(whole_rows(tmp_path / "a.csv", lambda _: None)) == read(tmp_path / "a.csv")


def test_old_files_read_as_before_and_honest_ones_keep_their_bytes(tmp_path: Path) -> None:
    old = (SAVED / "scores.csv").read_text()
    assert text_of([row for row in rows_of(old) if row]) == old
    (tmp_path / "a.csv").write_text("candidate,return\n=a,-3\r\n-b,4\n\n", newline="")
    assert {name: values[0] for name, values in read_returns(tmp_path / "a.csv").items()} == {"=a": -3.0, "-b": 4.0}
    (tmp_path / "excel.csv").write_text("candidate,return\n'=a,-3\n", encoding="utf-8-sig")
    assert list(read_returns(tmp_path / "excel.csv")) == ["=a"]


def test_scores_of_a_run(tmp_path: Path) -> None:
    """As training writes them and as runs, curves and reports read them."""
    numbers = {"seed": 0, "episodes": 1, "return_mean": -2.5, "return_std": 0.0, "length_mean": 3, "score": -1.0}
    about = {"dataset": FORMULA, "env_id": "@x", "packages": "+y", "reference": "-z", "scored_by": "return"}
    with RunLog(tmp_path, resume_step=None, quiet=True, total_steps=1, replicas=expand({}, [0]), title="") as log:
        log.scores(1, [{**numbers, **about}])
    text = (tmp_path / "scores.csv").read_text()
    assert not formulas(text) and ",-2.5," in text
    record = json.loads((SAVED / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**record, "label": FORMULA}))
    (scores,) = SavedRun(tmp_path).score_rows
    assert scores["return_mean"] == -2.5 and {k: scores[k] for k in about} == about
    assert read_curves(tmp_path / "scores.csv", "score") == {(): {0: {1: -1.0}}}


def test_tables_of_a_report(tmp_path: Path) -> None:
    """scores.csv and table.csv, and a report made of that scores.csv."""
    texts = {f.name: FORMULA for f in fields(Score) if str(f.type) == "str"}
    score = Score(**texts, seed=0, step=1, episodes=1, raw=-1.0, normalised=-0.5, success=None, final=True)  # type: ignore[arg-type]
    scores = [score, replace(score, algorithm="-b", seed=1)]
    results = Results(scores, [], [], [], {}, {}, "", 1)
    write(results, tmp_path / "scores.csv")
    again = collect([tmp_path / "scores.csv"])
    assert again.scores == scores
    lines = table(entries(again))
    assert not formulas((tmp_path / "scores.csv").read_text()) and not formulas(lines)
    assert {row[TABLE.index("algorithm")] for row in list(rows_of(lines))[1:] if row} == {FORMULA, "-b"}


def test_control_characters_of_names(tmp_path: Path) -> None:
    """A table is also looked at with cat."""
    name: Any = "a\x1b[2J\x07\nb\ud800"
    text = text_of([[name]])
    assert text == "a\\x1b[2J\\x07 b\\ud800\n" and one_line(name) == "a\\x1b[2J\\x07\\nb\\ud800"
