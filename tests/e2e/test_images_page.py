"""The commands of docs/images.md on robot learning, in their order, on drawn pictures."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest

from offrl.cli.main import main
from offrl.envs.drawn import WORLDS, generate
from tests.support.documents import ROOT, blocks
from tests.support.scripted_endpoint import serving

TEXT = (ROOT / "docs" / "images.md").read_text()
SMALL = ["steps=2", "seeds=1", "eval.env=none", "algo.batch_size=8", "compile=eager"]


@pytest.mark.nightly
def test_the_commands_on_robot_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    columns = dict(generate("pendulum", 0, 400).columns)
    states = columns.pop("observations")
    del columns["next_observations"]
    columns |= {"observations": WORLDS["pendulum"].pictures(states), "success": states[:, 0] > 0.5}
    for name, more in (
        ("video", {"rewards": np.zeros(400), "actions": np.zeros((400, 1), np.float32)}),
        ("my", {}),
        ("frames", {}),
        ("robot", {"intervention": np.arange(400) % 7 < 2}),
    ):
        np.savez(tmp_path / f"{name}.npz", **columns | more)
    section = TEXT[TEXT.index("## Robot learning") : TEXT.index("## What is not there yet")]
    commands = [
        shlex.split(line)
        for language, block in blocks(ROOT / "docs" / "images.md")
        if language == "bash" and block in section
        for line in block.splitlines()
    ]
    assert len(commands) == 8 and all(words[0] == "offrl" for words in commands)
    with serving(lambda prompt: "7") as endpoint:
        monkeypatch.setenv("OFFRL_LLM_URL", endpoint.url)
        for _, *words in commands:
            more = (
                SMALL
                if words[0] == "train"
                else ["fit.updates=20", "fit.reward=probability"] * ("kind=success" in words)
            )
            assert main([*words, *more]) == 0, words
        assert len(endpoint.bodies) == 40
