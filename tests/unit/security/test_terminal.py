"""Names in files of strangers on their way to a terminal: control characters are shown, not sent, and no name begins a
line of its own.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.benchmark import cell, plan
from offrl.cli.main import _show_traceback, main
from offrl.errors import UserError, say, warn
from offrl.runs.tables import print_table
from offrl.system.progress import Progress, TrainingProgress

ROOT = Path(__file__).resolve().parents[3]
# the clipboard, an empty screen, a line up, a forged line
NAME = "x\x1b]52;c;cm0gLXJm\x07\x1b[2J\x9b1A\r\u202e\ud800\n  no faults found\n"
SHOWN = "x\\x1b]52;c;cm0gLXJm\\x07\\x1b[2J\\x9b1A\\r\\u202e\\ud800\\n  no faults found\\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(text: str) -> list[str]:
    """The lines of a command's output, none of which is the forged one."""
    result = text.split("\n")
    assert "no faults found" not in [line.strip() for line in result]
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\r", "\u202e", "\ud800"}, text
    return result


def test_offrl_prints_through_one_function() -> None:
    """Row 18: `errors.say` (and rich's consoles, of a bar and of a table, whose texts are made printable where they are
    handed over).
    """
    known = {"offrl/errors.py": 1, "offrl/system/progress.py": 1, "offrl/runs/tables.py": 1}
    for top in ("offrl", "algorithms", "world_models", "envs"):
        for folder, _, names in os.walk(ROOT / top):  # which does not follow offrl's links to the others
            for path in (Path(folder, name) for name in names if name.endswith(".py")):
                prints = len(re.findall(r"\bprint\(|\bstd(?:out|err)\.write\(", path.read_text(encoding="utf-8")))
                assert prints == known.get(str(path.relative_to(ROOT)), 0), f"{path}: print with offrl.errors.say"


def test_messages(capsys: pytest.CaptureFixture[str]) -> None:
    """Row 18: lines, warnings, mistakes, the traceback of a bug."""
    say(f"name: {NAME}", "second")
    assert lines(capsys.readouterr().out) == [f"name: {SHOWN}", "second", ""]
    warn(NAME)
    assert lines(capsys.readouterr().err) == [f"offrl: warning: {SHOWN}", ""]
    error = UserError(f"no key {NAME}")
    assert "\x1b" not in str(error) and "\\x1b]52" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)  # of a worker process
    assert main(["train", f"algo={NAME}"]) == 2
    assert len(lines(capsys.readouterr().err)) == 2
    try:
        raise KeyError("\x1b[2J\x07", NAME)
    except KeyError as bug:
        _show_traceback(type(bug), bug, bug.__traceback__)
    assert "KeyError" in lines(capsys.readouterr().err)[-2]


def test_a_mistake_in_a_strangers_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 18: keys of an HDF5 file in an error message."""
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["x\x1b]52;c;cm0gLXJm\x07\n"] = np.zeros(3)
        file["actions"] = np.zeros((3, 1))
    assert main(["data", "inspect", str(tmp_path / "a.hdf5")]) == 2
    assert "\\x1b]52" in "".join(lines(capsys.readouterr().err))


def test_a_strangers_data_set_says_nothing_for_us(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 18: `offrl data inspect` of a file whose attribute says that it has no fault. It has one."""
    rng = np.random.default_rng(0)
    place = tmp_path / "set" / "data"
    place.mkdir(parents=True)
    with h5py.File(place / "main_data.hdf5", "w") as file:
        group = file.create_group("episode_0")
        group["observations"], group["actions"] = rng.normal(size=(21, 2)), rng.uniform(-1, 1, (20, 1))
        group["rewards"], group["terminations"], group["truncations"] = (
            np.full(20, np.nan),
            np.zeros(20, bool),
            np.arange(20) == 19,
        )
    box = {"type": "Box", "dtype": "float64"}
    spaces = {
        "observation_space": json.dumps({**box, "shape": [2], "low": [-9, -9], "high": [9, 9]}),
        "action_space": json.dumps({**box, "shape": [1], "low": [-1], "high": [1]}),
    }
    name = "a\x1b]52;c;x\x07\r\n\n  no faults found\n"
    about = {
        "dataset_id": name,
        "author": name,
        "algorithm_name": name,
        "total_episodes": 1,
        "total_steps": 20,
        **spaces,
    }
    (place / "metadata.json").write_text(json.dumps(about))
    assert main(["data", "inspect", str(tmp_path / "set")]) == 1
    captured = capsys.readouterr()
    assert "FAULT" in "".join(lines(captured.out))
    lines(captured.err)


def test_tables_and_bars(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 18: off a terminal, and on one, where rich sends escape sequences of its own around the texts."""
    print_table([NAME], [[NAME]], NAME)
    TrainingProgress(f"a\n{SHOWN}", 3).update(3, 1.0, NAME)
    output = capsys.readouterr().out
    lines(output)
    assert output.count(SHOWN) == 5
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("TERM", "xterm")
    print_table([NAME], [[NAME]], NAME)
    with Progress(NAME, 3, NAME, False) as bar:
        bar.update(1, NAME)
        bar.say(NAME)
        say(NAME)
        bar.update(3, NAME)
    sent = terminal.getvalue()
    assert sent.count(SHOWN) >= 6
    assert not any(text in sent for text in ("\x1b]52", "\x07", "\x9b", "\u202e", "\ud800", "\n  no faults found"))


def test_the_log_of_a_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 18: cells/*.log, which people read with cat and less -R."""

    def fails(*_: Any) -> None:
        raise ValueError(f"bad {NAME}")

    monkeypatch.setattr(cell, "_train", fails)
    (tmp_path / plan.CELLS).mkdir()
    cell.train(tmp_path, "x", {"steps": 1, "values": {}, "dataset": "d"}, "token", in_parallel=False)
    text = (tmp_path / plan.CELLS / "x.log").read_text(encoding="utf-8")
    assert "ValueError: bad x\\x1b]52" in text and not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
