"""What is printed: each line stays one, what a reading guessed is said once, and a time says what it is of."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from offrl.errors import unsaid, warn
from offrl.training.loop import time_text

ROOT = Path(__file__).resolve().parents[2]
PRINTS = re.compile(r"(say|warn|note|UserError)\($")


def test_no_printed_line_has_a_newline_of_its_own() -> None:
    """`say` shows one as a backslash and an n: names in files of strangers may hold any."""
    found, calls = [], 0
    for folder in ("offrl", "algorithms", "envs", "world_models"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            if "\\n" not in source or path.is_symlink():
                continue
            for call in ast.walk(ast.parse(source)):
                if isinstance(call, ast.Call) and PRINTS.search(ast.unparse(call.func) + "("):
                    texts = [a for a in call.args if isinstance(a, (ast.Constant, ast.JoinedStr, ast.BinOp))]
                    parts = [c.value for t in texts for c in ast.walk(t) if isinstance(c, ast.Constant)]
                    calls += 1
                    found += [f"{path.relative_to(ROOT)}:{call.lineno}"] * any(
                        isinstance(p, str) and "\n" in p for p in parts
                    )
    assert calls > 30 and not found


def test_a_note_that_was_a_warning_is_not_said_again(capsys: pytest.CaptureFixture[str]) -> None:
    warn("day.csv: time has a gap of its own kind")
    assert "warning: day.csv: time has a gap" in capsys.readouterr().err
    assert unsaid(["time has a gap of its own kind", "weighting by return"]) == ["weighting by return"]


def test_the_time_of_training_says_what_else_it_holds() -> None:
    assert time_text(117.0, 110.4, 0.2) == "trained in 1 min 57 s, of which compiling 1 min 50 s"
    assert (
        time_text(117.0, 80.0, 24.0)
        == "trained in 1 min 57 s, of which compiling 1 min 20 s and waiting for evaluation 24 s"
    )
    assert time_text(6.5, 0.0, 0.0) == "trained in 6 s"
