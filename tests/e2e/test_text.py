"""Language-model policies from a file to scores, and what is refused, through the command line."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import offrl as package
from offrl.cli.main import main

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

OWN = "compare=[] log_every=3 eval.every=0 eval.episodes=3 eval.max_steps=3 steps=6 seeds=2"
SIZES = "algo.width=8 algo.layers=1 algo.heads=2 algo.batch_size=4 algo.length=40"


@pytest.mark.slow
def test_from_a_file_to_scores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path / "cache"))

    def call(command: str) -> tuple[int, str]:
        capfd.readouterr()
        status = main(command.split())
        return status, "".join(capfd.readouterr())

    turn = {"obs": "5 8\n", "action": "move down\n", "reward": -1.0}
    episode = {"turns": [turn, turn], "final_obs": "6 8\n", "terminated": False, "truncated": True}
    header = {"offrl": {"name": "walks", "task": "text-maze-compact"}}
    Path("walks.jsonl").write_text("\n".join(json.dumps(x) for x in (header, episode, episode)) + "\n")
    status, shown = call("data inspect walks.jsonl")
    assert status == 0 and "move down" in shown
    status, told = call(f"train algo=ilql name=t dataset=walks.jsonl algo.policy_steps=2 {OWN} {SIZES}")
    assert status == 0 and "ilql needs lm_bc" in told and "a GPT-2 from scratch on characters" in told
    run = package.Run("runs/t")
    assert [row["episodes"] for row in run.final_scores] == [3, 3]
    assert (
        run.scored_in.startswith("walks in offrl/TextMaze-v0")
        and run.record["spec"]["task"]["name"] == "text-maze-compact"
    )
    assert call("train resume=runs/t steps=8")[0] == 0
    status, again = call("evaluate runs/t episodes=2 max_steps=2 acting.decoding=greedy")
    assert status == 0 and "return" in again
    assert isinstance(run.policy(seed=1).act("5 8\n"), str)
    for command, words in (
        ("train algo=iql dataset=walks.jsonl", "walks.jsonl holds texts, and dataset.action_margin is for numbers"),
        (
            "train algo=bc dataset=walks.jsonl dataset.normalize_observations=false",
            "bc learns from numbers, and walks holds texts; use one of",
        ),
        ("train algo=lm_bc dataset=builtin", "lm_bc learns from texts"),
        ("export runs/t", "cannot be exported"),
        ("select runs/t", "texts"),
    ):
        status, refused = call(command)
        assert status == 2 and words in refused and refused.count("\n") == 1, refused
