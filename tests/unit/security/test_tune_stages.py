"""Stages of a stranger's finished tune that somebody changed: to continue it is one line, whatever stands in them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from offrl.errors import UserError
from offrl.tuning.tune import tune
from tests.unit.test_tune import command, data, landscape

__all__ = ["data", "landscape"]  # fixtures

ODD = ({"a": 1}, [[]], 1.5, None)


def variants(value: Any, depth: int = 0) -> list[Any]:
    """`value` with one of its entries changed, or its first of a list."""
    result: list[Any] = list(ODD) if depth else [{"a": 1}, []]
    if depth < 4 and isinstance(value, dict):
        result += [{**value, k: v} for k in list(value)[:6] for v in variants(value[k], depth + 1)[:: depth + 1]]
    elif depth < 4 and isinstance(value, list) and value:
        result += [[v, *value[1:]] for v in variants(value[0], depth + 1)[:: depth + 1]]
    return result


@pytest.mark.parametrize("stage", ["judged", "chosen", "judged-0-0", "kept-0-0", "bracket-0"])
def test_a_changed_stage_is_one_line(stage: str, data: Path, landscape: None, tmp_path: Path) -> None:
    """state/chosen.json with an unknown setting was a KeyError."""
    tune(command(data, tmp_path / "t", budget="4x64"))
    path = tmp_path / "t" / "state" / f"{stage}.json"
    whole = json.loads(path.read_text())
    for changed in variants(whole)[:12]:
        path.write_text(json.dumps(changed))
        with contextlib.suppress(UserError):
            tune({"resume": str(tmp_path / "t"), "quiet": True})
    path.write_text(json.dumps(whole))
    assert tune({"resume": str(tmp_path / "t"), "quiet": True})["chosen"]
