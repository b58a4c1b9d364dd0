"""PPO in an environment: that a stop leaves no trace, what its policies keep, the actor of a clone, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import offrl
from offrl.api import Run
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.finetuning import summary as outcome
from offrl.system import files as checkpoint
from tests.support.walk import Walk

SMALL: dict[str, Any] = {"quiet": True, "device": "cpu", "compile": "eager", "eval.episodes": 2, "eval.workers": 0}


class Choices(Walk):
    action_space = spaces.Discrete(3)


class Pixels(Walk):
    observation_space = spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros((8, 8, 3), np.uint8), super().reset(seed=seed)[1]


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens at any step, and none was made."""
    monkeypatch.setattr(outcome, "picture", lambda *a, **k: False)
    monkeypatch.setattr(Walk, "steps", 0)
    monkeypatch.setattr(Walk, "at", -1)


def learn(folder: Path, name: str = "ppo", run: Any = None, env: Any = Walk, **more: Any) -> Run:
    settings: dict[str, Any] = {"algo.horizon": 8, "algo.passes": 3, "algo.batch_size": 8, "envs": 2, "steps": 48}
    if run is None:
        settings |= {"algo": "ppo", "seeds": 2, "algo.hidden": [8]}
    else:
        settings |= {"mode": "on_policy"}
    settings = {k: v for k, v in {**settings, **SMALL, **more}.items() if v != "absent"}
    return offrl.finetune(run, env=env, settings={"name": name, "runs_dir": str(folder), **settings})


def clone(folder: Path, name: str = "clone", **more: Any) -> Run:
    g, n = np.random.default_rng(0), 90
    columns = g.normal(size=(n, 2)), g.uniform(-2, 2, (n, 1)), g.normal(size=n), np.zeros(n, bool)
    data = from_arrays(*columns, np.arange(n) % 9 == 8, action_low=-2, action_high=2)
    settings = {"algo.hidden": [8], "eval.env": "none", "algo.batch_size": 16, "algo.policy": "gaussian"}
    algo, seeds = more.pop("algo", "bc"), more.pop("seeds", 2)
    settings = {k: v for k, v in {**settings, **SMALL, **more}.items() if v is not None}
    return offrl.train(algo, data, seeds=seeds, steps=3, name=name, settings=settings, runs_dir=str(folder))


def tensors(run: Run) -> dict[str, torch.Tensor]:
    latest = checkpoint.load_latest(run.dir)
    assert latest is not None
    return latest[0]


# ---- what a run leaves


def test_its_policies_act_are_scored_and_exported(tmp_path: Path) -> None:
    run = learn(tmp_path, **{"eval.every": 16})
    assert run.algorithm == "ppo+online"
    assert [row["step"] for row in run.score_rows] == [0, 0, 16, 16, 32, 32, 48, 48]
    again = run.evaluate(episodes=2, env=Walk).returns.mean(1)
    assert again.tolist() == [row["return_mean"] for row in run.score_rows[-2:]]
    lines = Path(run.dir, "metrics.jsonl").read_text()
    assert all(name in lines for name in ("actor/kl", "actor/std", "critic/loss", "online/passes"))
    policy = run.policy(0)
    # the statistics of all that was played, within the policy's file
    assert 2.0 < float(policy.state.extra["mean"][1]) < 6.0 and float(policy.state.extra["std"][1]) > 1.0
    assert float(tensors(run)["statistics/num_values"][0]) == 48.0
    observation = np.array([0.3, 4.0], np.float32)
    program = torch.export.load(run.export("pt2")).module()
    action = program(torch.from_numpy(observation[None]))
    np.testing.assert_allclose(np.ravel(action.detach()), np.ravel(policy.act(observation)), atol=1e-5)


def test_a_replica_learns_the_same_alone_and_among_others(tmp_path: Path) -> None:
    """But for rounding: products of several replicas are summed in another order."""
    both, one = learn(tmp_path, "both"), learn(tmp_path, "one", seeds=1)
    together = tensors(both)
    for name, value in tensors(one).items():
        if name.startswith("state/params/"):
            torch.testing.assert_close(value[0], together[name][0], rtol=0, atol=1e-5)


# ---- stop and go on


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    "settings",
    [
        {"algo.schedule": "adaptive"},
        pytest.param(
            {"algo.scale_rewards": True, "algo.normalise_over": "iteration", "checkpoint.every": 32},
            marks=pytest.mark.nightly,
        ),
        pytest.param({"algo.target_kl": 1e-3, "algo.value_warmup": 1}, marks=pytest.mark.nightly),
    ],
)
def test_a_stop_leaves_no_trace(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = learn(tmp_path, "straight", **settings)
    total, expected = Walk.steps, tensors(straight)
    for moment in (total // 4, total // 2):
        monkeypatch.setattr(Walk, "steps", 0)
        monkeypatch.setattr(Walk, "at", moment)
        with pytest.raises(offrl.Interrupted, match="the same command continues"):
            learn(tmp_path, f"stopped-{moment}", **settings)
        monkeypatch.setattr(Walk, "at", -1)
        again = learn(tmp_path, f"stopped-{moment}", **settings)
        assert tensors(again).keys() == expected.keys()
        for name, tensor in tensors(again).items():
            assert torch.equal(tensor.nan_to_num(-1.0), expected[name].nan_to_num(-1.0)), name
        for name in ("metrics.jsonl", "scores.csv", "episodes.csv", "policies/seed_1.safetensors"):
            assert (again.dir / name).read_bytes() == (straight.dir / name).read_bytes(), name


def test_steps_can_be_added(tmp_path: Path) -> None:
    constant = {"algo.schedule": "constant"}
    straight = learn(tmp_path, "straight", **constant)
    learn(tmp_path, "short", steps=32, **constant)
    longer = offrl.finetune(resume=tmp_path / "short", env=Walk, steps=48, quiet=True)
    assert all(torch.equal(v, tensors(straight)[k]) for k, v in tensors(longer).items() if k.startswith("state/"))


# ---- from a clone


def test_the_actor_of_a_clone_goes_on_once_its_critic_has_learnt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = clone(tmp_path)
    done = learn(tmp_path, run=base, **{"algo.value_warmup": 2, "eval.every": 16})
    assert done.algorithm == "bc+ppo"
    before = base.evaluate(episodes=2, env=Walk).returns.mean(1).tolist()
    scores = [[row["return_mean"] for row in done.score_rows if row["step"] == t] for t in (0, 16, 32, 48)]
    # two iterations in which the critic alone learns
    assert scores[0] == scores[1] == scores[2] == before != scores[3]
    assert tensors(done)["state/opt/actor/count"].tolist() == [6.0, 6.0]  # of one iteration
    assert tensors(done)["state/opt/critic/count"].tolist() == [18.0, 18.0]
    assert "will not learn" not in capsys.readouterr().err
    std = base.policy(0).state.params["actor"]["log_std"]
    assert torch.allclose(done.policy(0).state.params["actor"]["log_std"], std, atol=0.01)
    squared = clone(tmp_path, "squared", **{"algo.policy": "deterministic"})
    narrow = learn(tmp_path, "narrow", run=squared, **{"algo.std_start": 0.1, "algo.value_warmup": 9, "eval.every": 0})
    assert "the policies will not learn: steps=48 are 3 iterations" in capsys.readouterr().err
    assert torch.allclose(narrow.policy(0).state.params["actor"]["log_std"].exp(), torch.tensor(0.1))
    assert narrow.score_rows[-1]["return_mean"] == pytest.approx(
        squared.evaluate(episodes=2, env=Walk).returns.mean(1)[-1]
    )


# ---- what is refused


FRESH: list[tuple[dict[str, Any], str]] = [
    ({"algo.batch_size": 5}, "algo.batch_size=5 does not divide the 16 steps"),
    ({"algo.desired_kl": 0.0}, "desired_kl"),
    ({"algo.std_start": 1e-7}, "std_start"),
    ({"algo.clip": -1}, "clip=-1"),
    ({"algo.clipp": 1}, "clipp"),
    ({"env": Choices}, "ppo needs continuous actions, and environment has discrete ones"),
    ({"env": Pixels}, "rows of numbers"),
    ({"mode": "transitions"}, "mode=transitions is not of ppo"),
    ({"mode": "residual"}, "mode=residual"),
    ({"mixing": 0.5}, "mixing= belongs to mode=transitions: ppo learns without data"),
    ({"dataset": "x"}, "dataset= has no place with ppo, which needs no data"),
    ({"grid.clip": [0.1, 0.2]}, "grid.clip= has no place with ppo"),
    ({"env": None}, "the environment must be named"),
    ({"algo": "sac_n", "mode": "on_policy"}, "algo=sac_n: mode=on_policy is of ppo alone"),
]


@pytest.mark.parametrize(("settings", "message"), FRESH, ids=[message[:20] for _, message in FRESH])
def test_bad_input_is_refused_in_one_line(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    settings = dict(settings)
    env = settings.pop("env", Walk)
    if settings.get("algo") == "sac_n":
        settings |= dict.fromkeys(("algo.horizon", "algo.passes"), "absent")
    with pytest.raises(UserError, match=message) as error:
        learn(tmp_path, env=env, **settings)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_clones_that_ppo_cannot_go_on_with(tmp_path: Path) -> None:
    base = clone(tmp_path, seeds=1)
    chunks = clone(tmp_path, "chunks", algo="chunk_bc", seeds=1, **{"algo.length": 3})
    squashed = clone(tmp_path, "squashed", seeds=1, **{"algo.policy": "tanh_gaussian"})
    squared = clone(tmp_path, "squared", seeds=1, **{"algo.policy": "deterministic"})
    online = learn(tmp_path, seeds=1, steps=16)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (chunks, {}, "goes on with the actor of a run of bc, and this is one of chunk_bc"),
        (squashed, {}, "its actor is algo.policy=tanh_gaussian"),
        (squared, {}, "give one, algo.std_start=0.1"),
        (online, {}, "learnt online"),
        (base, {"algo.hidden": [9]}, "algo.hidden= is decided by the actor"),
        (base, {"seeds": 3}, "seeds= has no place with ppo"),
        (base, {"env": None}, "no environment to learn in; name one"),
        (base, {"env": "Pendulum-v1"}, "observations of shape"),
    ]
    for run, settings, message in cases:
        settings = dict(settings)
        with pytest.raises(UserError, match=message) as error:
            learn(tmp_path, "case", run, settings.pop("env", Walk), **settings)
        assert "\n" not in str(error.value)


def test_it_learns_from_no_data(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="offrl finetune algo=ppo env=ID"):
        clone(tmp_path, algo="ppo", **{"algo.policy": None})
