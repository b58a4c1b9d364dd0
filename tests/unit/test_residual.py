"""Residuals on frozen policies: the memory of the policies below, that a stop leaves no trace, and what is refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.algorithm import stack
from offrl.api import Run
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.finetuning import summary as outcome
from offrl.finetuning.on_policy.learner import Passes
from offrl.finetuning.on_policy.rollout import Observers
from offrl.system import files as checkpoint
from tests.support.walk import Walk

SMALL: dict[str, Any] = {"quiet": True, "device": "cpu", "compile": "eager", "eval.episodes": 2, "eval.workers": 0}


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens at any step, and none was made."""
    monkeypatch.setattr(outcome, "picture", lambda *a, **k: False)
    monkeypatch.setattr(Walk, "steps", 0)
    monkeypatch.setattr(Walk, "at", -1)


@functools.cache
def rows() -> Any:
    g, n = np.random.default_rng(0), 90
    columns = (
        g.normal(size=(n, 2)),
        g.uniform(-2, 2, (n, 1)),
        g.normal(size=n),
        np.zeros(n, bool),
        np.arange(n) % 9 == 8,
    )
    return from_arrays(*columns, action_low=-2, action_high=2)


def trained(folder: Path, algo: str = "flow_bc", name: str = "base", seeds: int = 2, **more: Any) -> Run:
    settings = {"algo.hidden": [8], "eval.env": "none", "algo.batch_size": 16, **SMALL, **more}
    settings = {k: v for k, v in settings.items() if v is not None}
    return offrl.train(algo, rows(), seeds=seeds, steps=3, name=name, settings=settings, runs_dir=str(folder))


def chunked(folder: Path, seeds: int = 2) -> Run:
    """Flows that play chunks of 4, of which an episode of 9 steps cuts the third one short."""
    return trained(folder, seeds=seeds, **{"algo.length": 4, "algo.flow_steps": 2})


def refine(run: Any, folder: Path, name: str = "residual", env: Any = Walk, **more: Any) -> Run:
    settings = {"algo.hidden": [8], "algo.horizon": 7, "algo.passes": 3, "envs": 2, "steps": 42, **SMALL, **more}
    return offrl.finetune(
        run, env=env, settings={"mode": "residual", "name": name, "runs_dir": str(folder), **settings}
    )


def tensors(run: Run) -> dict[str, torch.Tensor]:
    latest = checkpoint.load_latest(run.dir)
    assert latest is not None
    return latest[0]


# ---- the policies below


def test_a_scale_of_zero_is_the_base_draws_included(tmp_path: Path) -> None:
    base = chunked(tmp_path)
    done = refine(base, tmp_path, **{"algo.scale": 0.5})
    expected, bare, changed = (
        r.evaluate(episodes=3, env=Walk, acting=a) for r, a in ((base, None), (done, {"scale": 0.0}), (done, None))
    )
    np.testing.assert_array_equal(bare.returns, expected.returns)
    assert not np.array_equal(changed.returns, expected.returns)
    start = done.score_rows[:2]  # before anything was learnt the mean is 0
    assert [r["return_mean"] for r in start] == base.evaluate(episodes=2, env=Walk).returns.mean(1).tolist()


def test_an_episode_that_begins_anew_plays_nothing_of_the_old_ones_chunk(tmp_path: Path) -> None:
    policy = refine(chunked(tmp_path, 1), tmp_path).policy(0)
    state = policy.state
    bases = Observers(policy.algorithm, stack([state]), 3, torch.device("cpu"))  # type: ignore[arg-type]
    g = torch.Generator().manual_seed(0)
    keys = state.key.unsqueeze(0)
    _, carries = bases.look(bases.carries, torch.randn(1, 3, 2, generator=g), keys)
    assert carries[0].remaining.tolist() == [3, 3, 3]
    bases.go_on(carries, torch.tensor([[False, True, False]]))
    assert bases.carries[0].remaining.tolist() == [3, 0, 3]
    seen = torch.randn(1, 3, 2, generator=g)
    planned = carries[0].actions[:, 0]
    sights, after = bases.look(bases.carries, seen, keys + 1)
    second = sights["base_actions"]
    assert after[0].remaining.tolist() == [2, 3, 2]  # each its own queue
    assert torch.equal(second[0, [0, 2]], planned[[0, 2]]) and not torch.equal(second[0, 1], planned[1])
    # looking ahead, for the value of a last state, consumes nothing
    assert bases.carries[0].remaining.tolist() == [3, 0, 3]
    assert torch.equal(bases.look(bases.carries, seen, keys + 1)[0]["base_actions"], second)


def test_the_open_ablation_sees_one_observation_in_several(tmp_path: Path) -> None:
    done = refine(chunked(tmp_path, 1), tmp_path, **{"algo.look_every": 4})
    actor = done.policy(0).actor
    carry, glances = actor.start(1), []
    for t in range(6):
        sights, carry = actor.look(carry, torch.full((1, 2), float(t)), actor.state.key)  # type: ignore[attr-defined]
        glances.append(float(sights["observations"][0, 0]))
    assert glances == [0, 0, 0, 0, 4, 4]


def test_what_it_learns_on_does_not_move_and_the_rest_does(tmp_path: Path) -> None:
    base, done = (r(tmp_path) for r in (chunked, lambda p: refine(p / "base", p)))
    parent, own = base.policy(1).state, done.policy(1).state
    assert all(torch.equal(own.extra["base"]["params"]["actor"][k], v) for k, v in parent.params["actor"].items())
    assert any(bool(v.any()) for k, v in own.params["actor"].items() if k.endswith("2.weight"))
    played = own.extra["mean"]
    # the time within episodes of 9 steps, from the first iteration
    assert torch.isfinite(played).all() and 2.0 < float(played[1]) < 6.0
    lines = Path(done.dir, "metrics.jsonl").read_text()
    assert "online/success" in lines and "online/passes" in lines
    assert done.algorithm == "flow_bc+residual"


def test_a_pass_goes_over_every_row_once() -> None:
    passes = Passes(torch.arange(2), 3)
    passes.rows = {"weight": torch.arange(12.0).expand(2, 12)}
    parts = [passes.get(step)["weight"] for step in range(6)]
    first, second = torch.cat(parts[:3], 1), torch.cat(parts[3:], 1)
    assert torch.equal(first.sort(1).values, passes.rows["weight"]) and torch.equal(
        second.sort(1).values, passes.rows["weight"]
    )
    assert not torch.equal(first, second) and not torch.equal(first[0], first[1])
    assert passes.get(4)["weight"].tolist() == parts[4].tolist()


def test_the_environments_own_rewards_and_batches(tmp_path: Path) -> None:
    base = trained(tmp_path, "bc", seeds=1)
    done = refine(
        base,
        tmp_path,
        env=lambda: Walk(reports=False),
        **{"algo.batch_size": 7, "algo.scale_rewards": True, "algo.schedule": "cosine"},
    )
    assert done.record["identity"]["algo"]["rewards"] == "env" and done.record["identity"]["steps"] == 42
    assert float(tensors(done)["moments/num_values"]) == pytest.approx(42.0, abs=1e-3)
    assert refine(base, tmp_path, name="other").record["identity"]["algo"]["rewards"] == "success"


# ---- stop and go on


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"algo.look_every": 4, "algo.batch_size": 7, "checkpoint.every": 28}, marks=pytest.mark.nightly)],
)
def test_a_stop_leaves_no_trace(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = chunked(tmp_path)
    straight = refine(base, tmp_path, "straight", **settings)
    total = Walk.steps
    for moment in (total // 4, total // 2):
        monkeypatch.setattr(Walk, "steps", 0)
        monkeypatch.setattr(Walk, "at", moment)
        with pytest.raises(offrl.Interrupted, match="the same command continues"):
            refine(base, tmp_path, f"stopped-{moment}", **settings)
        monkeypatch.setattr(Walk, "at", -1)
        again = refine(base, tmp_path, f"stopped-{moment}", **settings)
        expected = tensors(straight)
        assert tensors(again).keys() == expected.keys()
        for name, tensor in tensors(again).items():
            assert torch.equal(tensor.nan_to_num(-1.0), expected[name].nan_to_num(-1.0)), name
        for name in ("metrics.jsonl", "scores.csv", "policies/seed_1.safetensors"):
            assert (again.dir / name).read_bytes() == (straight.dir / name).read_bytes(), name


def test_steps_can_be_added_without_the_parent(tmp_path: Path) -> None:
    base = chunked(tmp_path)
    straight = refine(base, tmp_path, "straight")
    refine(base, tmp_path, "short", steps=28)
    (tmp_path / "base").rename(tmp_path / "gone")
    longer = offrl.finetune(resume=tmp_path / "short", env=Walk, steps=42, quiet=True)
    assert all(torch.equal(v, tensors(straight)[k]) for k, v in tensors(longer).items() if k.startswith("state/"))


def test_a_replica_learns_the_same_alone_and_among_others(tmp_path: Path) -> None:
    """But for rounding: products of several replicas are summed in another order."""
    both = refine(chunked(tmp_path), tmp_path, "both", steps=28)
    (tmp_path / "base").rename(tmp_path / "two")
    one = refine(chunked(tmp_path, 1), tmp_path, "one", steps=28)
    together = tensors(both)
    for name, value in tensors(one).items():
        if name.startswith("state/params/actor"):
            torch.testing.assert_close(value[0], together[name][0], rtol=0, atol=1e-5)


# ---- what is refused


def test_what_cannot_be_built_on_is_refused_in_one_line(tmp_path: Path) -> None:
    base = trained(tmp_path, "bc", seeds=1)
    refined = refine(base, tmp_path, steps=14)
    discrete = offrl.train(
        "bc",
        from_arrays(np.zeros((20, 2)), np.zeros(20, np.int64), np.zeros(20), num_actions=3),
        steps=1,
        seeds=1,
        name="discrete",
        runs_dir=str(tmp_path),
        settings={"eval.env": "none", "algo.hidden": [8], **SMALL},
    )
    sequence = trained(
        tmp_path,
        "dt",
        "dt",
        1,
        **{"algo.width": 8, "algo.heads": 1, "algo.layers": 1, "algo.context": 2, "algo.hidden": None},
    )
    grid = trained(tmp_path, "iql", "grid", 1, **{"grid.temperature": [1.0, 2.0], "algo.hidden": [8]})
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (refined, {}, "learnt online"),
        (discrete, {}, "discrete actions"),
        (sequence, {}, "rewards of its episode"),
        (grid, {}, "grid over temperature"),
        (None, {}, "offrl finetune RUN mode=residual"),
        (base, {"env": None}, "no environment to learn in; name one"),
        (base, {"algo.scale": 0}, "algo.scale=0 must be above 0"),
        (base, {"algo.scale": -1}, "algo.scale=-1"),
        (base, {"algo.scal": 1}, "Did you mean 'scale'"),
        (base, {"envs": 0}, "envs=0"),
        (base, {"algo.batch_size": 5}, "algo.batch_size=5 does not divide the 14 steps"),
        (base, {"mixing": 0.5}, "mixing= belongs to mode=transitions"),
        (base, {"dataset": "x"}, "dataset= has no place"),
        (base, {"env": lambda: Walk(False), "algo.rewards": "success"}, "algo.rewards=env learns from its rewards"),
        (base, {"env": "Pendulum-v1"}, "observations of shape"),
    ]
    for run, settings, message in cases:
        settings = dict(settings)
        with pytest.raises(UserError, match=message.replace("(", r"\(")) as error:
            refine(run, tmp_path, f"case-{message[:9]}", settings.pop("env", Walk), **settings)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="offrl finetune RUN mode=residual"):
        offrl.train("residual", rows(), steps=1, seeds=1, settings={**SMALL}, runs_dir=str(tmp_path))


def test_goals_are_refused(tmp_path: Path) -> None:
    goals = trained(tmp_path, "gcbc", "goals", 1)
    with pytest.raises(UserError, match="acts towards goals"):
        refine(goals, tmp_path)


def test_nothing_earned_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refine(trained(tmp_path, "bc", seeds=1), tmp_path, **{"algo.end_on_success": True, "max_steps": 1})
    assert "nothing was earned in the first 14 steps" in capsys.readouterr().err
