"""The commands of docs/limits.md, run with few updates, and what its page says of numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offrl.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S)
COMMANDS = [shlex.split(line)[1:] for block in BLOCKS for line in block.splitlines()]
SMALL = ["steps=2", "seeds=1", "eval.episodes=1", "algo.batch_size=8", "compile=eager", "quiet=true"]


@pytest.mark.slow
def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them, and the last, which scores a run, on one that the first made."""
    monkeypatch.chdir(tmp_path)
    *training, (verb, _, *scoring) = COMMANDS
    assert len(training) == 3 and all(command[0] == "train" for command in training) and verb == "evaluate"
    for i, command in enumerate(training):
        assert main([*command, *SMALL, f"name=run{i}"]) == 0
        header = Path(f"runs/run{i}/scores.csv").read_text().splitlines()[0].split(",")
        assert {"cost", "cost_normalized", "safe"} <= set(header)
    capsys.readouterr()
    assert main([verb, "runs/run0", *scoring, "episodes=1"]) == 0
    assert "cost" in capsys.readouterr().out
