"""World models as artefacts: trained, found again, refused where they do not fit, and used by algorithms that resume
exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.system import files as checkpoint
from offrl.world_models.dynamics import Dynamics, DynamicsSettings, split
from offrl.world_models.model import load, required

MODEL = {
    "algo.hidden": [16],
    "algo.members": 3,
    "algo.elites": 2,
    "algo.batch_size": 32,
    "algo.epoch": 10,
    "compile": "eager",
}
AGENT = {
    "algo.hidden": [8],
    "algo.rollouts": 16,
    "algo.horizon": 2,
    "algo.rollout_every": 4,
    "algo.batch_size": 8,
    "compile": "eager",
}
QUIET: dict[str, Any] = {"quiet": True, "experiment": "none", "env": "none", "compare": [], "workers": 1}


def arrays(seed: int = 0, observations: int = 3, actions: int = 1, ends: bool = True) -> Dataset:
    """A linear system with noise, in 30 episodes of 20 steps; an episode `ends` where its first number leaves (-1,
    1).
    """
    g = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {"o": [], "a": [], "r": [], "n": [], "t": [], "u": []}
    for _ in range(30):
        s = g.uniform(-0.5, 0.5, observations)
        for t in range(20):
            a = g.uniform(-1, 1, actions)
            following = 0.95 * s + 0.5 * a.sum() + 0.01 * g.normal(size=observations)
            over = ends and abs(following[0]) > 1.0
            for name, value in zip("oarntu", (s, a, -(s[0] ** 2), following, over, t == 19 and not over), strict=True):
                rows[name].append(value)
            s = following
            if over:
                break
    o, a, r, n, t, u = (np.array(rows[k]) for k in "oarntu")
    return from_arrays(o, a, r, t, u, next_observations=n, action_low=-1.0, action_high=1.0)


def trained(tmp_path: Path, dataset: Dataset, name: str = "model", steps: int = 40, **more: Any) -> offrl.Run:
    return offrl.train(
        "dynamics",
        dataset,
        seeds=1,
        steps=steps,
        runs_dir=str(tmp_path),
        name=name,
        settings={**MODEL, **more},
        **QUIET,
    )


def test_a_model_is_trained_once_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = arrays()
    run = trained(tmp_path, data, log_every=10)
    model = load(run.dir)
    assert (
        model.meta["updates"] == 40
        and model.meta["data"]["fingerprint"] == data.fingerprint
        and len(model.meta["held_out"]) == 3
    )
    assert model.model.config.termination == "learned"  # nothing is known of where arrays come from
    assert not (run.dir / "policies").exists() and not run.score_rows
    lines = [json.loads(x) for x in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["dynamics/loss"][0] < lines[0]["dynamics/loss"][0]
    agent = offrl.train(
        "mopo", data, seeds=2, steps=8, runs_dir=str(tmp_path), settings={**AGENT, "world_model": str(run.dir)}, **QUIET
    )
    assert agent.record["identity"]["algo"]["world_model_id"] == model.identity
    assert "world_model" not in agent.record["identity"]["algo"]  # where it lies is no part of what the run is
    assert len(list((agent.dir / "policies").iterdir())) == 2
    assert not capsys.readouterr().out


@pytest.mark.nightly
def test_without_a_model_one_is_trained_first_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl.world_models import model_rollouts

    dynamics = {k.removeprefix("algo."): v for k, v in MODEL.items() if k != "compile"} | {"max_epochs": 2}
    monkeypatch.setattr(model_rollouts, "required", lambda settings: required({**dynamics, **settings}))
    data = arrays()
    first = offrl.train("mopo", data, seeds=1, steps=8, runs_dir=str(tmp_path), settings=AGENT, **QUIET)
    (model,) = tmp_path.glob("dynamics-*")
    before = (model / "models" / "seed_0.safetensors").stat().st_mtime_ns
    second = offrl.train(
        "mopo", data, seeds=1, steps=8, runs_dir=str(tmp_path), settings={**AGENT, "algo.penalty": 2.0}, **QUIET
    )
    assert (model / "models" / "seed_0.safetensors").stat().st_mtime_ns == before and second.dir != first.dir
    assert load(model).meta["epochs"] == 2  # it ended early, at its most epochs


@pytest.mark.slow
def test_an_interrupted_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    data = arrays()
    run = trained(tmp_path, data)
    settings = {**AGENT, "world_model": str(run.dir), "log_every": 2, "checkpoint.every": 2, "eval.every": 2}
    whole = offrl.train(
        "mopo", data, seeds=2, steps=14, runs_dir=str(tmp_path), name="whole", settings=settings, **QUIET
    )
    offrl.train("mopo", data, seeds=2, steps=6, runs_dir=str(tmp_path), name="parts", settings=settings, **QUIET)
    parts = offrl.train(
        "mopo", data, seeds=2, steps=14, runs_dir=str(tmp_path), name="parts", settings=settings, **QUIET
    )
    states = [checkpoint.load_latest(r.dir)[0] for r in (whole, parts)]  # type: ignore[index]
    assert "state/buffers/ring/rows" in states[0]
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert (whole.dir / "metrics.jsonl").read_text() == (parts.dir / "metrics.jsonl").read_text()


def test_an_interrupted_model_ends_with_the_same_bits(tmp_path: Path) -> None:
    data = arrays()
    settings = {"log_every": 5, "checkpoint.every": 5}
    whole = trained(tmp_path, data, "whole", **settings)
    trained(tmp_path, data, "parts", steps=25, **settings)
    parts = trained(tmp_path, data, "parts", **settings)
    assert load(whole.dir).identity == load(parts.dir).identity


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"observations": 4}, r"observations \(3,\).*has \(4,\).*algo=dynamics"),
        ({"actions": 2}, r"1 action dimensions.*2 action dimensions"),
    ],
)
def test_a_model_of_other_shapes_is_refused(tmp_path: Path, change: dict[str, int], words: str) -> None:
    run = trained(tmp_path, arrays())
    with pytest.raises(UserError, match=words):
        offrl.train(
            "mopo",
            arrays(**change),
            steps=4,
            runs_dir=str(tmp_path),
            settings={**AGENT, "world_model": str(run.dir)},
            **QUIET,
        )


def test_a_model_of_other_transforms_is_refused_and_of_other_data_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, arrays())
    use = {**AGENT, "world_model": str(run.dir)}
    with pytest.raises(UserError, match=r"another dataset\.normalize_observations"):
        settings = {**use, "dataset.normalize_observations": True}
        offrl.train("mopo", arrays(), steps=4, runs_dir=str(tmp_path), settings=settings, **QUIET)
    with pytest.raises(UserError, match=r"another dataset\.reward_scale \(reward_scale: 1 there, 2 here\)"):
        offrl.train(
            "mopo", arrays(), steps=4, runs_dir=str(tmp_path), settings={**use, "dataset.reward_scale": 2.0}, **QUIET
        )
    offrl.train("mopo", arrays(seed=1), seeds=1, steps=4, runs_dir=str(tmp_path), settings=use, **QUIET)
    assert "it may know little about these data" in capsys.readouterr().err


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    run = trained(tmp_path, arrays())
    bc = offrl.train(
        "bc", arrays(), seeds=1, steps=4, runs_dir=str(tmp_path), name="bc", settings={"algo.hidden": [8]}, **QUIET
    )
    with pytest.raises(UserError, match=r"it is a run of bc.*algo=dynamics"):
        load(bc.dir)
    with pytest.raises(UserError, match="is no world model"):
        load(next((bc.dir / "policies").iterdir()))
    with pytest.raises(UserError, match=r"modle does not exist\. Did you mean 'model'"):
        load(tmp_path / "modle")
    file = run.dir / "models" / "seed_0.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(UserError, match="damaged: its checksum"):
        load(run.dir)


def test_a_model_that_diverges_says_which_member_and_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path, arrays(), log_every=10, **{"algo.learning_rate": 1e30})
    assert "dynamics/member 0: loss" in capsys.readouterr().err
    assert run.diverged and not (run.dir / "models").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algo.termination": "hoper"}, r"algo\.termination=hoper is not known\. Did you mean 'hopper'"),
        ({"algo.reward": "pendulm"}, r"algo\.reward=pendulm is not known\. Did you mean 'pendulum'"),
    ],
)
def test_unknown_rules_are_named(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trained(tmp_path, arrays(), **settings)


def test_no_row_of_an_episode_kept_apart_is_trained_on() -> None:
    data = arrays()
    parts = split(data, DynamicsSettings(test_share=0.2))
    episode = torch.searchsorted(data.episode_start, torch.cat([parts.train, parts.held_out]), right=True) - 1
    assert len(parts.test) == 6 and not torch.isin(episode, parts.test).any()
    assert not torch.isin(parts.train, parts.held_out).any()
    flags = np.ones(1, bool), np.zeros(1, bool)
    one = from_arrays(np.zeros((1, 2)), np.zeros((1, 1)), np.zeros(1), *flags, action_low=-1.0, action_high=1.0)
    with pytest.raises(UserError, match="too few"):
        split(one, DynamicsSettings())


def test_a_model_that_looks_back_trains_agents_too(tmp_path: Path) -> None:
    data = arrays()
    run = trained(tmp_path, data, **{"algo.history": 3})
    assert load(run.dir).model.in_dim == 3 * 4
    agent = offrl.train(
        "mopo", data, seeds=1, steps=6, runs_dir=str(tmp_path), settings={**AGENT, "world_model": str(run.dir)}, **QUIET
    )
    assert not agent.diverged


def test_an_epoch_is_once_through_the_data_but_no_shorter_than_250_updates() -> None:
    data = arrays()
    assert Dynamics.fit_config(DynamicsSettings(batch_size=32), data).epoch == 250
    config = Dynamics.fit_config(DynamicsSettings(batch_size=1), data)
    assert config.epoch == len(split(data, config).train) > 250


@pytest.mark.slow
def test_a_learned_termination_sees_the_ends_of_data_without_next_observations(tmp_path: Path) -> None:
    data = arrays()
    o, a, r, t, u = (
        data.columns[k].numpy() for k in ("observations", "actions", "rewards", "terminations", "truncations")
    )
    bare = from_arrays(o, a, r, t, u, action_low=-1.0, action_high=1.0)
    parts = split(bare, DynamicsSettings())
    assert (
        len(parts.ends) > 5
        and bare.columns["terminations"][parts.ends].all()
        and not bare.columns["terminations"][parts.train].any()
    )
    run = trained(tmp_path, bare, steps=300, **{"algo.epoch": 300, "algo.learning_rate": 1e-2, "algo.hidden": [32, 32]})
    model = load(run.dir)
    prediction = model.model.predict(
        model.tree, bare.columns["observations"], bare.columns["actions"], torch.zeros(len(o), 0, 4)
    )
    assert prediction.ending is not None
    likely = prediction.ending.mean(0).sigmoid()
    assert likely[parts.ends].mean() > likely[parts.train].mean() + 0.3
    assert prediction.mean.isfinite().all()


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_a_roll_out_of_few_rows_asks_elites_alone(tmp_path: Path, rows: int) -> None:
    from offrl import rng

    model = load(trained(tmp_path, arrays()).dir)
    o, a = torch.zeros(rows, 3), torch.zeros(rows, 1)
    found = model.model.sample(model.tree, o, a, model.model.first_past(o), rng.make_key(0))
    assert found.next_observations.shape == (rows, 3) and found.rewards.shape == (rows,)
