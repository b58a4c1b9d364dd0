"""The code of docs/python.md, in its order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import offrl as package

from .conftest import Offrl
from .test_plugins import forgotten

__all__ = ["forgotten"]
PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
PYTHON, SHELL = (re.findall(rf"^```{kind}\n(.*?)^```", PAGE, flags=re.M | re.S) for kind in ("python", "bash"))


@pytest.mark.slow
def test_the_code_of_the_page(offrl: Offrl) -> None:
    scope: dict[str, Any] = {}
    small = (
        "steps=20, quiet=True, settings={'eval.episodes': 1, 'eval.max_steps': 5, 'compare': [], 'algo.hidden': [8]}"
    )
    for block in PYTHON[:-1]:
        exec(block.replace("steps=1000", small), scope)
    assert isinstance(scope["policy"], package.TrainedPolicy) and scope["action"].shape == (3,)
    Path("nets.py").write_text(PYTHON[-1])
    commands = [line for block in SHELL for line in block.splitlines() if "network" in line]
    assert len(commands) == 2
    for command in commands:
        result = offrl(command.removeprefix("offrl ") + " seeds=2 eval.env=none")
        assert result.status == 0, result.err
