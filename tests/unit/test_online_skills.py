"""Runs of skill_iql that go on online as skill_critic: what of them goes on, the same after a stop within a skill, and
what is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.api import Run
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.system import files as checkpoint
from tests.support.walk import Walk

SMALL: dict[str, Any] = {"eval.episodes": 2, "algo.hidden": [8], "algo.batch_size": 16}
SKILLS: dict[str, Any] = {"algo.skill_length": 4, "algo.skill_dim": 3, "algo.skill_hidden": [8], "algo.skill_steps": 3}


def data(discrete: bool = False) -> Dataset:
    """Noise in episodes of 9 steps."""
    g, n = np.random.default_rng(0), 90
    actions = g.integers(0, 3, n) if discrete else g.uniform(-2, 2, (n, 1))
    bounds: dict[str, Any] = {"num_actions": 3} if discrete else {"action_low": -2.0, "action_high": 2.0}
    observations, ends = g.normal(size=(n, 2)), np.arange(n) % 9 == 8
    return from_arrays(observations, actions, g.normal(size=n), np.zeros(n, bool), ends, **bounds)  # type: ignore[arg-type]


def trained(folder: Path, algo: str = "skill_iql", discrete: bool = False, **more: Any) -> Run:
    settings = {**SMALL, **(SKILLS if algo == "skill_iql" else {}), "eval.env": "none", **more}
    where: dict[str, Any] = {"runs_dir": str(folder), "device": "cpu", "compile": "eager", "quiet": True}
    return offrl.train(algo, data(discrete), seeds=2, steps=3, name="offline", settings=settings, **where)


def tune(run: Run | None, folder: Path, name: str = "online", steps: int = 40, **more: Any) -> Run:
    """Batches come from skills of 4 steps, and from those of one that time cuts."""
    call: dict[str, Any] = {"warmup": 12, "utd": 0.5, "device": "cpu", "compile": "eager", "quiet": True, **more}
    settings = {"eval.episodes": 2, "eval.every": 20, "checkpoint.every": 20, "log_every": 20}
    settings |= {k: call.pop(k) for k in list(call) if "." in k}
    return offrl.finetune(run, env=Walk, steps=steps, name=name, runs_dir=str(folder), settings=settings, **call)


def last(run: Run) -> dict[str, torch.Tensor]:
    loaded = checkpoint.load_latest(run.dir)
    assert loaded is not None
    return loaded[0]


def test_both_levels_learn_on(tmp_path: Path) -> None:
    offline = trained(tmp_path)
    run = tune(offline, tmp_path, **{"algo.low_divergence": 2.0})
    before, after = last(offline), last(run)
    for name in ("actor", "critic"):
        same = [torch.equal(x, after[k]) for k, x in before.items() if k.startswith(f"state/params/{name}/")]
        assert same and not any(same)
    low = {k.removeprefix("state/params/low/"): x for k, x in after.items() if k.startswith("state/params/low/")}
    decoder = "state/extra/skills/decoder."
    for name, x in low.items():
        begun = torch.full_like(x, -3.0) if name == "log_std" else before[decoder + name]
        assert 0 < float((x - begun).abs().max()) < 14 * 4e-4  # 14 steps of Adam with a rate of 3e-4
    assert all(torch.equal(x, after[k]) for k, x in before.items() if k.startswith("state/extra/skills/"))
    algo = run.record["identity"]["algo"]
    assert (algo["name"], algo["low_divergence"], algo["hidden"]) == ("skill_critic", 2.0, [8])
    assert run.record["label"] == "skill_iql+online" and run.record["identity"]["finetune"]["mixing"] == 0.0
    line = json.loads((run.dir / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"high/weight", "low/kl", "low_critic/q", "high/q"} <= set(line)
    assert int(after["state/step"][0]) == 3 + 14
    policy = run.policy(1)
    assert np.asarray(policy.act(np.zeros(2, np.float32))).shape == (1,)


def test_the_low_level_may_stay(tmp_path: Path) -> None:
    offline = trained(tmp_path)
    before, after = last(offline), last(tune(offline, tmp_path, steps=16, **{"algo.train_low": False}))
    for name, x in before.items():
        if name.startswith("state/extra/skills/decoder."):
            assert torch.equal(x, after[name.replace("extra/skills/decoder.", "params/low/")])
    assert not torch.equal(before["state/params/critic/head.bias"], after["state/params/critic/head.bias"])


@pytest.mark.nightly
@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("at", [70, 74, 78, 82])
def test_a_stop_within_a_skill_leaves_no_trace(at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step of skills of 4 in episodes of 9; `at` counts the steps of two environments for each of two seeds."""
    monkeypatch.setattr(Walk, "at", -1)
    offline = trained(tmp_path)
    settings: dict[str, Any] = {"envs": 2, "eval.every": 40}
    whole = tune(offline, tmp_path, "whole", **settings)
    monkeypatch.setattr(Walk, "steps", 0)
    monkeypatch.setattr(Walk, "at", at)
    with pytest.raises(offrl.Interrupted):
        tune(offline, tmp_path, "stopped", **settings)
    monkeypatch.setattr(Walk, "at", -1)
    tensors, expected = last(tune(offline, tmp_path, "stopped", **settings)), last(whole)
    assert tensors.keys() == expected.keys()
    assert [k for k, x in expected.items() if not torch.equal(x, tensors[k])] == []


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (
        ("skill_iql", {"discrete": True}),
        {},
        "skills of continuous actions alone, and .* has discrete ones",
    ),
    (("skill_iql", {"algo.value_head": "c51"}), {}, "critics of one number, and the run has algo.value_head=c51"),
    (("skill_iql", {"grid.temperature": [1.0, 3.0]}), {}, "grid.temperature is none of them"),
    (("skill_iql", {}), {"mixing": 0.5}, "mixing=0.5: both levels of skill_critic learn from what is played"),
    (("skill_iql", {}), {"algo.low_divergence": -1.0}, "algo.low_divergence=-1"),
    (("skill_iql", {}), {"algo.expectile": 0.7}, "algo.expectile= is a setting of skill_iql, and skill_critic"),
    (("skills", {}), {}, "skills has no actor and critic of single steps, .*, skill_iql,"),
    (("iql", {}), {"algo.train_low": False}, "train_low"),
    (None, {"algo": "skill_critic", "mixing": 0}, "skill_critic learns from the policies of a run of skill_iql"),
    (None, {"algo": "skill_iql", "mixing": 0}, "skill_iql learns from a run of it alone"),
]


@pytest.mark.parametrize(("run", "settings", "message"), REFUSED)
def test_what_is_refused(run: Any, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    offline = None if run is None else trained(tmp_path, run[0], **run[1])
    settings = {**settings, "dataset": data()} if settings.get("mixing") else settings
    with pytest.raises(UserError, match=message) as error:
        tune(offline, tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_it_is_not_trained_on_data_alone(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="offrl finetune RUN env=ID"):
        trained(tmp_path, "skill_critic")
