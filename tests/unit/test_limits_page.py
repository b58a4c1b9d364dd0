"""The commands of docs/limits.md, run with few updates, and what its page says of numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offrl.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.M | re.S)
COMMANDS = [shlex.split(line, comments=True)[1:] for block in BLOCKS for line in block.splitlines()]
SMALL = ["steps=2", "seeds=1", "eval.episodes=1", "algo.batch_size=8", "compile=eager", "quiet=true"]


@pytest.mark.nightly
def test_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """All of them: what scores several limits of one policy on a run of cdt, what else scores on the first one."""
    monkeypatch.chdir(tmp_path)
    training = [command for command in COMMANDS if command[0] == "train"]
    scoring = [words for verb, _, *words in COMMANDS if verb == "evaluate"]
    assert len(training) == 3 and len(scoring) == 3 and len(training + scoring) == len(COMMANDS)
    for i, command in enumerate([*training, ["train", "dataset=forbidden-disc", "algo=cdt"]]):
        assert main([*command, *SMALL, f"name=run{i}"]) == 0
        header = Path(f"runs/run{i}/scores.csv").read_text().splitlines()[0].split(",")
        assert {"cost", "cost_normalized", "safe"} <= set(header)
    for words, run in zip(scoring, ("run0", "run3", "run3"), strict=True):
        capsys.readouterr()
        assert main(["evaluate", f"runs/{run}", *words, "episodes=1"]) == 0
        assert "cost" in capsys.readouterr().out
