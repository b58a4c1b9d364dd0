"""Fine-tuning as a whole, from Python: what it learns from, that a stop leaves no trace, and what is refused."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import offrl
from offrl import registry
from offrl.api import Run
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.finetuning import setup
from offrl.finetuning import summary as outcome
from offrl.finetuning.learner import Learner
from offrl.finetuning.replay.batches import MixedBatches
from offrl.system import files as checkpoint
from offrl.training import execution

SMALL: dict[str, Any] = {
    "quiet": True,
    "device": "cpu",
    "compile": "eager",
    "log_every": 10,
    "eval.episodes": 2,
    "eval.every": 20,
}


class Walk(gym.Env):
    """x moves by half the action and pays -|x|; a terminal beyond 1, a time-out after 9 steps. Counts all steps of all
    of them.
    """

    observation_space = spaces.Box(-9, 9, (2,))
    steps, at, then = 0, -1, staticmethod(lambda: None)

    def __init__(self, discrete: bool = False) -> None:
        self.discrete = discrete
        self.action_space: Any = spaces.Discrete(3) if discrete else spaces.Box(-2.0, 2.0, (1,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = float(self.np_random.uniform(-0.9, 0.9)), 0
        return np.array([self.x, self.t], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Walk.steps += 1
        self.x += (int(action) - 1) * 0.2 if self.discrete else float(action[0]) / 2
        self.t += 1
        reward = -abs(self.x)
        if Walk.steps == Walk.at:
            reward = Walk.then() or reward
        return np.array([self.x, self.t], np.float32), reward, abs(self.x) > 1.0, self.t >= 9, {}


@pytest.fixture(autouse=True)
def still(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens at any step, and none was made."""
    recorded(False), recorded(True)
    drawn = request.node.name == "test_it_learns_from_play_and_data"
    draw = outcome.picture
    # it takes as long as all the rest
    monkeypatch.setattr(outcome, "picture", lambda *a, **k: draw(*a, **k) if drawn else False)
    monkeypatch.setattr(Walk, "steps", 0)
    monkeypatch.setattr(Walk, "at", -1)


@functools.cache
def recorded(discrete: bool) -> list[Any]:
    """Columns of 90 rows and a few more, of whole episodes with random actions."""
    g, env, rows = np.random.default_rng(0), Walk(discrete), []
    while len(rows) < 90:
        seen, over = env.reset(seed=len(rows))[0], False
        while not over:
            action = g.integers(0, 3) if discrete else g.uniform(-1, 1, 1)
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((seen, action, reward, terminated, truncated and not terminated, after))
            seen, over = after, terminated or truncated
    return [np.array(column) for column in zip(*rows, strict=True)]


def data(discrete: bool = False) -> Dataset:
    bounds: dict[str, Any] = {"num_actions": 3} if discrete else {"action_low": -2, "action_high": 2}
    return from_arrays(*recorded(discrete), **bounds)


def trained(folder: Path, algo: str = "iql", discrete: bool = False, **more: Any) -> Run:
    settings = {"algo.hidden": [8], "eval.env": "none", "algo.batch_size": 16, **SMALL, **more}
    settings = {name: value for name, value in settings.items() if name != "eval.every" and value is not None}
    return offrl.train(algo, data(discrete), seeds=2, steps=7, name="offline", settings=settings, runs_dir=str(folder))


def tune(run: Run | None, folder: Path, name: str = "online", discrete: bool = False, **more: Any) -> Run:
    given = {"dataset": data(discrete)} if more.get("mixing") != 0 else {}
    call: dict[str, Any] = {"steps": 60, "name": name, "runs_dir": str(folder), **given, **SMALL, **more}
    return offrl.finetune(
        run, env=lambda: Walk(discrete), settings={k: call.pop(k) for k in list(call) if "." in k}, **call
    )


def last(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    found = checkpoint.load_latest(run.dir)
    assert found is not None
    return found


def assert_same(one: Run, two: Run) -> None:
    (tensors, meta), (expected, expected_meta) = last(one), last(two)
    assert {k: v for k, v in meta.items() if k != "files"} == {k: v for k, v in expected_meta.items() if k != "files"}
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    for name in (
        "metrics.jsonl",
        "scores.csv",
        "finetune.json",
        "episodes.csv",
        "policies/seed_0.safetensors",
        "policies/seed_1.safetensors",
    ):
        assert (one.dir / name).read_bytes() == (two.dir / name).read_bytes(), name


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "plain": ("iql", False, {"mixing": 0.5}),
    "union, two environments": ("iql", False, {"mixing": None, "envs": 2, "utd": 0.5}),
    "actor at every second update": ("td3_bc", False, {"mixing": 0.5, "utd": 1.5, "warmup": 5, "checkpoint.every": 7}),
    "a policy beside the run's": ("iql", False, {"mode": "expansion", "warmup": 5}),
    "by episodes": ("td3_bc", False, {"update_every": "episode", "envs": 2, "noise": 0.3}),
    "discrete, alone, small ring": ("iql", True, {"mixing": 0.0, "capacity": 20, "noise": 0.2}),
}


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if i == len(CASES) - 1 else pytest.mark.nightly) for i, c in enumerate(CASES)]
)
def test_a_stop_leaves_no_trace(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    algo, discrete, settings = CASES[case]
    offline = trained(tmp_path, algo, discrete)
    before = (offline.dir / "run.json").read_bytes()
    settings = {"steps": 30, **settings}
    whole = tune(offline, tmp_path, "whole", discrete, **settings)
    total = Walk.steps
    moments = 1 + np.random.default_rng(len(case)).choice(total * 3 // 4, 2, replace=False)
    for moment in moments.tolist():  # while playing or scoring, not at the very end
        name = f"stopped-{moment}"
        monkeypatch.setattr(Walk, "steps", 0)
        monkeypatch.setattr(Walk, "at", moment)
        monkeypatch.setattr(Walk, "then", staticmethod(interrupt))
        with pytest.raises(offrl.Interrupted, match="the same command continues"):
            tune(offline, tmp_path, name, discrete, **settings)
        monkeypatch.setattr(Walk, "at", -1)
        assert_same(tune(offline, tmp_path, name, discrete, **settings), whole)
    assert (offline.dir / "run.json").read_bytes() == before


@pytest.mark.slow
def test_what_came_after_a_checkpoint_is_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after kill -9: files are ahead of the checkpoint."""
    offline = trained(tmp_path)
    whole = tune(offline, tmp_path, "whole", steps=40)

    def die() -> None:
        raise SystemExit

    for moment in (70, 100):
        monkeypatch.setattr(Walk, "steps", 0)
        monkeypatch.setattr(Walk, "at", moment)
        monkeypatch.setattr(Walk, "then", staticmethod(die))
        with pytest.raises(SystemExit):
            tune(offline, tmp_path, f"killed-{moment}", steps=40)
        monkeypatch.setattr(Walk, "at", -1)
        assert_same(tune(offline, tmp_path, f"killed-{moment}", steps=40), whole)


@pytest.mark.slow
@pytest.mark.rendered
def test_it_learns_from_play_and_data(tmp_path: Path, pictures: dict[str, Any]) -> None:
    offline = trained(tmp_path)
    run = tune(offline, tmp_path)
    tensors, meta = last(run)
    assert meta["step"] == 60 and meta["rows"] == [[60, 60]] and meta["updates"] == 7 + 60
    assert tensors["state/step"].tolist() == [67, 67]
    first = checkpoint.load_latest(offline.dir)
    assert first is not None and not torch.equal(
        tensors["state/params/actor/log_std"], first[0]["state/params/actor/log_std"]
    )
    assert [r["step"] for r in run.score_rows] == [0, 0, 20, 20, 40, 40, 60, 60]
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60]
    assert all(line["critic/loss"][0] is not None for line in lines)
    assert sum(line["online/episodes"][0] for line in lines) >= 6
    score = offline.evaluate(2, env=lambda: Walk()).rows()[1]["return_mean"]
    assert run.score_rows[1]["return_mean"] == score  # row 0 is the offline policy's
    outcome = json.loads((run.dir / "finetune.json").read_text())[0]
    assert outcome["unit"] == "return" and outcome["offline"][1] == score and outcome["regret_mean"] is None
    assert outcome["online"][0] == pytest.approx(
        np.mean([r["return_mean"] for r in run.score_rows if r["seed"] == 0 and r["step"]])
    )
    assert (run.dir / "finetune.png").stat().st_size > 10_000
    # the record of an environment that a function makes, or of several tasks, says "auto"
    assert run.record["env"] == "auto" and pictures["finetune.png"].get_suptitle() == "iql in tune.<locals>.<lambda>"
    *seeds, mean, before = pictures["finetune.png"].axes[0].lines
    curves = [[r["return_mean"] for r in run.score_rows if r["seed"] == seed] for seed in (0, 1)]
    np.testing.assert_allclose([line.get_ydata() for line in seeds], curves)
    np.testing.assert_allclose(mean.get_ydata(), np.mean(curves, 0))
    np.testing.assert_allclose(before.get_ydata(), np.mean(curves, 0)[0])
    assert np.isfinite(run.policy(1).act(np.zeros(2, np.float32))).all()
    steps = Walk.steps
    again = tune(offline, tmp_path)
    assert again.dir == run.dir and Walk.steps == steps  # nothing is played


@pytest.mark.slow
def test_steps_can_be_added(tmp_path: Path) -> None:
    offline = trained(tmp_path)
    tune(offline, tmp_path, "two", steps=40)
    assert_same(tune(offline, tmp_path, "two"), tune(offline, tmp_path, "one"))


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_signals")
def test_resume_needs_neither_parent_nor_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = trained(tmp_path)
    whole = tune(offline, tmp_path, "whole", mixing=0)
    monkeypatch.setattr(Walk, "steps", 0)
    monkeypatch.setattr(Walk, "at", 80)
    monkeypatch.setattr(Walk, "then", staticmethod(interrupt))
    with pytest.raises(offrl.Interrupted):
        tune(offline, tmp_path, mixing=0)
    for path in sorted(offline.dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run = tune(None, tmp_path, mixing=0, resume=str(tmp_path / "online"))
    assert_same(run, whole)


@pytest.mark.parametrize("discrete", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_policy_learns_beside_the_runs(discrete: bool, tmp_path: Path) -> None:
    """Of the run come its policy, which stays, values and targets; policies' files hold both policies."""
    offline = trained(tmp_path, discrete=discrete)
    settings = {"mode": "expansion", "warmup": 6, "steps": 10, "algo.inverse_temperature": 3.0}
    run = tune(offline, tmp_path, discrete=discrete, **settings)
    before, after = last(offline)[0], last(run)[0]
    for name, tensor in before.items():
        if name.startswith("state/params/actor/"):
            assert torch.equal(after[name.replace("params/actor", "extra/old")], tensor)
            assert torch.equal(after[name], tensor) == name.endswith("std_min")
    # one step of Adam with a rate of 3e-4 moves a parameter by at most that
    for name in (k for k in before if k.startswith(("state/params/critic/", "state/params/value/"))):
        assert 0 < float((after[name] - before[name]).abs().max()) < 4 * 4e-4
    assert after["state/step"].tolist() == [11, 11] and int(after["state/opt/critic/count"][0]) == 4
    config = run.record["identity"]
    assert (config["algo"]["name"], config["algo"]["inverse_temperature"]) == ("pex", 3.0)
    assert (config["finetune"]["mode"], config["finetune"]["mixing"]) == ("expansion", 0.5)
    assert run.record["label"] == "iql+expansion"
    assert np.asarray(run.policy(1).act(np.zeros(2, np.float32))).shape == (() if discrete else (1,))
    assert [r["step"] for r in run.score_rows] == [0, 0, 10, 10]
    assert (
        offrl.finetune(
            None,
            resume=str(run.dir),
            steps=14,
            dataset=data(discrete),
            env=lambda: Walk(discrete),
            quiet=True,
            runs_dir=str(tmp_path),
        ).dir
        == run.dir
    )


@pytest.mark.parametrize(
    ("run", "settings", "message"),
    [
        (None, {}, "mode=expansion learns beside the policies of a run: offrl finetune RUN mode=expansion env=ID"),
        (("td3_bc", {}), {}, "offline: mode=expansion takes runs of iql, .*; not td3_bc"),
        (("iql", {"algo.policy": "deterministic"}), {}, "takes a stochastic policy, and algo.policy=deterministic"),
        (("iql", {"algo.representation": "mrq"}), {}, "takes runs without algo.representation"),
        (("iql", {}), {"algo.inverse_temperature": -1.0}, "algo.inverse_temperature=-1"),
        (("iql", {}), {"algo.scale": 1.0}, "no setting 'algo.scale'|unknown setting"),
    ],
)
def test_what_cannot_be_expanded(run: Any, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    offline = None if run is None else trained(tmp_path, run[0], **run[1])
    with pytest.raises(UserError, match=message):
        tune(offline, tmp_path, mode="expansion", warmup=0, **settings)


def assert_a_stop_leaves_no_trace(
    whole: Run, parent: Run | None, folder: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupt the same run after three fifths of the steps that `Walk` counted of `whole`, and let it go on."""
    monkeypatch.setattr(Walk, "at", Walk.steps * 3 // 5)
    monkeypatch.setattr(Walk, "steps", 0)
    monkeypatch.setattr(Walk, "then", staticmethod(interrupt))
    with pytest.raises(offrl.Interrupted):
        tune(parent, folder, "stopped", **settings)
    monkeypatch.setattr(Walk, "at", -1)
    assert_same(tune(parent, folder, "stopped", **settings), whole)


MODEL: dict[str, Any] = {
    "algo.hidden": [4],
    "algo.batch_size": 8,
    "algo.members": 2,
    "algo.elites": 1,
    "algo.model_hidden": [4],
    "algo.model_steps": 2,
    "algo.rollouts": 10,
    "algo.rollout_every": 5,
    "algo.candidates": 2,
    "algo.lookahead": 2,
}


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("parent", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_model_learns_from_what_is_played(
    parent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From fresh parameters or a run, with its data; and a stop between two updates of the model leaves no trace."""
    kind = registry.get("algo", "mbpo")
    refresh, sources = kind.refresh, []

    def watched(self: Any, state: Any, source: Any, key: Any, *, step: int) -> Any:
        sources.append((step, int(source.filled), len(source.data.get("rewards", ()))))
        return refresh(self, state, source, key, step=step)

    run = trained(tmp_path, "mbpo", **MODEL) if parent else None
    monkeypatch.setattr(kind, "refresh", watched)
    settings: dict[str, Any] = {"steps": 16, "warmup": 8, "utd": 2, "mixing": None if parent else 0, "eval.every": 16}
    settings |= {"quiet": False, "eval.episodes": 1}
    settings |= {} if parent else {"algo": "mbpo", "seeds": 2, **MODEL}
    monkeypatch.setattr(Walk, "steps", 0)
    whole = tune(run, tmp_path, "whole", **settings)
    # 2 updates at step 9, 4 at 10, ...; of both replicas
    first, rows = (7, len(data().transition_rows())) if parent else (0, 0)
    expected = [(first + n, 9 + n // 2, rows) for n in range(16) if (first + n) % 5 == 0]
    assert sources == [source for source in expected for _ in range(2)]
    tensors, meta = last(whole)
    assert meta["updates"] == first + 16
    assert {k.split("/")[2] for k in tensors if k.startswith("state/opt/")} >= {"dynamics", "actor"}
    lines = (whole.dir / "metrics.jsonl").read_text()
    assert "model/held-out error" in lines and "rollout/steps" in lines
    text = capsys.readouterr().out
    assert "imagined by a model that learns from all real ones every 2.5 steps" in text
    assert ("real rows from the union of data and play" if parent else "no data, 2 updates a step") in text
    assert_a_stop_leaves_no_trace(whole, run, tmp_path, settings, monkeypatch)
    act = whole.policy(1).act(np.zeros(2, np.float32))
    assert np.isfinite(act).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup": 3}, "warmup=3: mbpo learns a model of the environment before its first update.*warmup=8 or more"),
        ({"discrete": True}, "mbpo needs continuous actions, and .* has discrete ones"),
        ({"steps": 100, "warmup": None}, "warmup=5000 leaves no update in steps=100"),
    ],
)
def test_what_mbpo_cannot_learn_from(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    refused(words, lambda: tune(None, tmp_path, algo="mbpo", mixing=0, seeds=1, **{"warmup": 8, **MODEL, **settings}))


RECURRENT: dict[str, Any] = {
    "algo.length": 6,
    "algo.burn_in": 1,
    "algo.recurrent_width": 8,
    "algo.width": 8,
    "algo.groups": 2,
    "algo.classes": 2,
    "algo.members": 2,
    "algo.warmup_steps": 2,
    "algo.horizon": 2,
}


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"mixing": 0, "envs": 2}, id="fresh"),
        pytest.param({"mixing": 0.5}, id="half", marks=pytest.mark.nightly),
        pytest.param({"mixing": None, "algo.core": "scan"}, id="union", marks=pytest.mark.nightly),
        pytest.param({"mixing": 0, "algo": "director", "algo.goal_steps": 1}, id="goals", marks=pytest.mark.nightly),
        pytest.param(None, id="run", marks=pytest.mark.nightly),
    ],
)
def test_a_recurrent_model_learns_from_what_is_played(
    case: dict[str, Any] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows across episodes, with or without data, from fresh parameters or a run; and a stop leaves no trace."""
    run = trained(tmp_path, "rssm", **{"algo.hidden": None, **RECURRENT}) if case is None else None
    settings: dict[str, Any] = {"steps": 32, "warmup": 16, "eval.every": 32}
    settings |= {} if case is None else {"algo": "rssm", "seeds": 2, "algo.batch_size": 4, **RECURRENT, **case}
    monkeypatch.setattr(Walk, "steps", 0)
    whole = tune(run, tmp_path, "whole", **settings)
    assert "model/kl" in (whole.dir / "metrics.jsonl").read_text()
    assert_a_stop_leaves_no_trace(whole, run, tmp_path, settings, monkeypatch)


def test_the_first_lines_say_that_a_program_would_be_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(execution, "PAYS_FROM", 1)
    monkeypatch.setattr(execution, "LONGEST", 3)
    given = {**RECURRENT, "algo.batch_size": 4, "compile": "auto", "quiet": False}
    tune(None, tmp_path, algo="rssm", mixing=0, seeds=1, steps=17, warmup=16, **given)
    printed = capsys.readouterr()
    assert "the step is not compiled: its recurrences are unrolled over" in printed.out + printed.err


@pytest.mark.nightly
def test_states_of_all_episodes_are_kept(tmp_path: Path) -> None:
    """One more for each than it has steps, so that steps can be added, too."""
    given = {"algo": "rssm", "mixing": 0, "seeds": 2, "warmup": 16, "algo.batch_size": 4, **RECURRENT}
    tune(None, tmp_path, "two", steps=40, **given)
    assert_same(tune(None, tmp_path, "two", steps=60, **given), tune(None, tmp_path, "one", steps=60, **given))


def test_a_run_that_learns_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"algo": "sac_n", "algo.hidden": [4], "algo.batch_size": 8, "seeds": 1}
    tune(None, tmp_path, mixing=0, steps=16, warmup=8, utd=0.1, **settings)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "learnt nothing" in line]
    assert "no update was due in 16 steps" in line


def test_data_of_which_no_row_is_drawn_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"algo": "sac_n", "algo.hidden": [4], "algo.batch_size": 8, "seeds": 1, "quiet": False}
    tune(None, tmp_path, mixing=0, dataset=data(), steps=12, warmup=8, **settings)
    assert "12 steps each, no row of arrays (mixing=0), 1 updates a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"envs": 16}, "rssm learns from 6 states in a row, and each of 16 environments keeps 3: more steps="),
        ({"capacity": 5}, "rssm learns from 6 states in a row, and each of 1 environments keeps 5"),
        ({"noise": 0.1}, "noise=0.1: a policy of rssm remembers the actions that it chose"),
        ({"interventions": "person.py:Person"}, "interventions=person.py:Person: a policy of rssm remembers"),
    ],
)
def test_what_a_recurrent_model_cannot_learn_from(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    given = {"algo": "rssm", "mixing": 0, "seeds": 1, "warmup": 16, **RECURRENT, **settings}
    refused(words, lambda: tune(None, tmp_path, **given))


LATENT: dict[str, Any] = {"algo.latent": 4, "algo.action_latent": 4, "algo.target_every": 5, "algo.horizon": 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"algo": "tdmpc2", "algo.horizon": 9, "algo.discount": 0.9, "algo.episodic": False},
            "tdmpc2 learns from 10 states in a row .* for 8 steps .*: a smaller algo.horizon, or a larger max_steps=",
        ),
        (
            {"algo": "mrq", "algo.horizon": 2, "algo.n_step": 9},
            "mrq learns from 10 .* a terminal: a smaller algo.n_step",
        ),
        (
            {"algo": "td3_bc", "mixing": 0.5, "algo.representation": "mrq", "algo.representation_horizon": 9},
            "td3_bc learns from 10 states .*: a smaller algo.representation_horizon, or",
        ),
        (
            {"algo": "mrq", "algo.horizon": 5, "envs": 8},
            "mrq learns from 6 .* for 4 steps .*: a smaller algo.horizon, or more steps=",
        ),
    ],
)
def test_windows_of_more_states_than_episodes_have(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Of which no run would ever learn; and nothing of it stays."""
    given = {"mixing": 0, "seeds": 1, "steps": 32, "warmup": 16, "max_steps": 8, "algo.batch_size": 8, **settings}
    refused(words, lambda: tune(None, tmp_path / "runs", **given))
    assert not (tmp_path / "runs").exists()


def test_refused_for_its_data_a_run_leaves_nothing(tmp_path: Path) -> None:
    """Data are cut to windows when the run's settings have been written."""
    given = {"algo": "tdmpc2", "algo.horizon": 30, "algo.plan_horizon": 2, "seeds": 1, "warmup": 16}
    refused("no window of 31 states", lambda: tune(None, tmp_path / "runs", steps=60, **given))
    assert not (tmp_path / "runs").exists()


@pytest.mark.nightly
@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("parent", [False, True])
def test_encoders_learn_from_what_is_played(parent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From fresh parameters or a run; and a stop leaves no trace."""
    run = trained(tmp_path, "mrq", **LATENT) if parent else None
    settings: dict[str, Any] = {"steps": 32, "warmup": 16, "mixing": 0, "eval.every": 32}
    settings |= {} if parent else {"algo": "mrq", "seeds": 2, "algo.hidden": [4], "algo.batch_size": 8, **LATENT}
    monkeypatch.setattr(Walk, "steps", 0)
    whole = tune(run, tmp_path, "whole", **settings)
    assert "model/dynamics" in (whole.dir / "metrics.jsonl").read_text()
    assert_a_stop_leaves_no_trace(whole, run, tmp_path, settings, monkeypatch)


@pytest.mark.nightly
@pytest.mark.usefixtures("heeds_signals")
def test_plans_go_on_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop within episodes leaves no trace, for the plan of the step before is kept; without it the run is
    another.
    """
    settings: dict[str, Any] = {"algo": "tdmpc2", "seeds": 2, "steps": 32, "warmup": 16, "mixing": 0, "eval.every": 32}
    settings |= {"algo.hidden": [8], "algo.encoder_hidden": [8], "algo.latent": 8, "algo.batch_size": 4, "envs": 2}
    settings |= {"algo.horizon": 2, "algo.discount": 0.9, "algo.episodic": True, "algo.plan_start": "previous"}
    settings |= {
        "eval.episodes": 1,
        "algo.plan_population": 8,
        "algo.plan_elites": 4,
        "algo.plan_proposals": 2,
        "algo.plan_horizon": 3,
    }
    whole = tune(None, tmp_path, "whole", **settings)
    monkeypatch.setattr(Walk, "at", Walk.steps - 26)  # of which scores take 18 at most
    monkeypatch.setattr(Walk, "steps", 0)
    monkeypatch.setattr(Walk, "then", staticmethod(interrupt))
    with pytest.raises(offrl.Interrupted):
        tune(None, tmp_path, "stopped", **settings)
    monkeypatch.setattr(Walk, "at", -1)
    saved = checkpoint.load_latest(tmp_path / "stopped")
    assert saved is not None and 16 < saved[1]["step"] < 32
    assert saved[0]["memory/0"].shape == (2, 2, 3, 1) and saved[0]["memory/0"].any(-1).any(-1).all()
    shutil.copytree(tmp_path / "stopped", tmp_path / "without")
    assert_same(tune(None, tmp_path, "stopped", **settings), whole)
    begin = Learner.begin
    monkeypatch.setattr(Learner, "begin", lambda self, envs, memory: begin(self, envs, {}))
    other = tune(None, tmp_path, "without", **settings)
    played = [(run.dir / "episodes.csv").read_text() for run in (whole, other)]
    assert played[0] != played[1]


def test_a_grid_decides_what_data_would() -> None:
    """The discount of TD-MPC2, which without data has to be named."""
    given = {"algo": "tdmpc2", "algo.episodic": True, "algo.hidden": [8], "algo.latent": 8, "steps": 32, "warmup": 16}
    start = setup.begin(None, {**given, "mixing": 0, "seeds": 1, "grid.discount": [0.8, 0.9]}, env=Walk)
    assert [dict(replica.values) for replica in start.replicas] == [{"discount": 0.8}, {"discount": 0.9}]


def test_encoders_learn_from_nothing_but_play(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"algo": "mrq", "seeds": 1, "warmup": 256, "steps": 300}
    refused("mixing=0.5: the encoders of mrq learn from what is played alone: mixing=0", lambda: tune(
        None, tmp_path, mixing=0.5, **settings))  # fmt: skip


def test_pex_is_not_trained_on_data_alone(tmp_path: Path) -> None:
    how = "offrl finetune RUN mode=expansion"
    with pytest.raises(UserError, match=how):
        trained(tmp_path, "pex")
    with pytest.raises(UserError, match=how):
        tune(None, tmp_path, algo="pex")


@pytest.mark.slow
def test_a_share_of_each_batch_is_the_datas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches that the step gets, told apart by whether the data have that row."""
    known = {round(float(x), 5) for x in data().columns["observations"][:, 0]}
    get, shares = MixedBatches.get, []

    def watched(self: MixedBatches, step: int) -> dict[str, torch.Tensor]:
        batch = get(self, step)
        shares.append(np.mean([round(float(x), 5) in known for x in batch["observations"][0, :, 0]]))
        return batch

    monkeypatch.setattr(MixedBatches, "get", watched)
    offline = trained(tmp_path)
    for mixing, share in ((0.25, 0.25), (0, 0.0), (1, 1.0)):
        shares.clear()
        tune(offline, tmp_path, f"mix-{share}", mixing=mixing, steps=20)
        assert len(shares) == 20 and set(shares) == {share}
    shares.clear()
    tune(offline, tmp_path, "union", mixing=None, steps=60)
    assert np.mean(shares[:10]) > 0.85 > 0.75 > np.mean(shares[-10:]) > 0.4  # some 90 of 150 rows at the end


@pytest.mark.slow
def test_settings_of_the_algorithm_change_online(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = {"noise_clip": 0.25, "mixing": None, "update_every": "episode", "anneal": {"alpha": [1.0, 0.5, 0.5]}}
    monkeypatch.setattr(setup, "finetune_settings", lambda name, label="": block)
    run, seen = Learner.run, []

    def watched(self: Learner, step: int, count: int) -> None:
        seen.append((self.hyper[0].get("alpha"), self.algorithm.config.noise_clip))
        run(self, step, count)

    monkeypatch.setattr(Learner, "run", watched)
    offline = trained(tmp_path, "td3_bc")
    tuned = tune(offline, tmp_path)
    alphas = [float(alpha[0]) for alpha, _ in seen if alpha is not None]
    assert len(alphas) == len(seen) and alphas == sorted(alphas, reverse=True)
    assert 2.5 > alphas[0] > 1.9 and alphas[len(alphas) // 2 + 1 :] == [1.25] * (len(alphas) - len(alphas) // 2 - 1)
    assert {clip for _, clip in seen} == {0.25}
    assert tuned.record["identity"]["finetune"]["mixing"] is None
    assert tuned.record["identity"]["finetune"]["update_every"] == "episode"
    with pytest.raises(UserError, match=r"was begun with steps=60, over which algo\.alpha changes"):
        tune(offline, tmp_path, steps=80)
    seen.clear()
    # the command's word holds
    tune(offline, tmp_path, "given", mixing=0.5, **{"algo.alpha": 4.0, "algo.noise_clip": 0.1})
    assert {clip for _, clip in seen} == {0.1} and {alpha for alpha, _ in seen} == {None}


def test_a_grid_goes_on_with_its_own_values(tmp_path: Path) -> None:
    offline = trained(tmp_path, "iql", **{"grid.temperature": [1.0, 3.0]})
    run = tune(offline, tmp_path)
    assert [r.name for r in run.replicas] == [r.name for r in offline.replicas] and len(run.final_scores) == 4
    tensors, _ = last(run)
    actor = next(v for k, v in tensors.items() if k.startswith("state/params/actor/") and v.ndim == 3)
    assert not torch.equal(actor[0], actor[2])
    assert run.policy(1, temperature=3.0).algorithm.config.temperature == 3.0


@pytest.mark.slow
def test_from_fresh_parameters(tmp_path: Path) -> None:
    run = tune(None, tmp_path, algo="iql", seeds=2, warmup=20, mixing=0, **{"algo.hidden": [8], "algo.batch_size": 16})
    _, meta = last(run)
    assert (
        meta["updates"] == 40
        and run.record["identity"]["parent"] is None
        and run.record["data"]["source"] == "environment"
    )
    shard, _ = checkpoint.read(run.dir / "replay" / "000000.safetensors")
    early = shard["actions"][:, 0]
    assert early.abs().max() > 0.8 and abs(float(early.mean())) < 0.4  # uniform before the first update
    mixed = tune(
        None, tmp_path, "mixed", algo="td3_bc", seeds=1, warmup=20, **{"algo.hidden": [8], "algo.batch_size": 16}
    )
    assert mixed.record["identity"]["finetune"]["mixing"] == 0.5 and mixed.record["data"]["rows"] == len(data())


def test_what_the_environment_gets_wrong_is_named_and_what_was_learnt_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline = trained(tmp_path)
    for at, then, words in (
        (85, lambda: float("nan"), r"gave a reward .* not finite \(seed \d, environment 0, episode \d+, step \d\)"),
        (30, lambda: 1 / 0, r"failed \(seed \d, environment 0, episode \d+, step \d\): ZeroDivisionError"),
    ):
        monkeypatch.setattr(Walk, "steps", 0)
        monkeypatch.setattr(Walk, "at", at)
        monkeypatch.setattr(Walk, "then", staticmethod(then))
        with pytest.raises(UserError, match=words + r".*what was learnt up to step \d+ is saved"):
            tune(offline, tmp_path, "failed", **{"eval.every": 0})
        _, meta = last(Run(tmp_path / "failed"))
        assert meta["step"] > 10
        monkeypatch.setattr(Walk, "at", -1)
    assert_same(
        tune(offline, tmp_path, "failed", **{"eval.every": 0}), tune(offline, tmp_path, "well", **{"eval.every": 0})
    )


def test_a_step_whose_next_episode_cannot_begin_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other environments are in the middle of their episodes then."""
    settings = {"envs": 2, "steps": 40, "eval.every": 0}
    offline = trained(tmp_path)
    well = tune(offline, tmp_path, "well", **settings)
    resets, reset = 0, Walk.reset

    def fails_once(self: Walk, **more: Any) -> tuple[Any, dict[str, Any]]:
        nonlocal resets
        resets += 1
        if resets == 15:
            raise OSError("no start")
        return reset(self, **more)

    monkeypatch.setattr(Walk, "reset", fails_once)
    with pytest.raises(UserError, match=r"failed on reset \(seed \d, environment \d, episode [1-9].*OSError: no start"):
        tune(offline, tmp_path, "failed", **settings)
    assert_same(tune(offline, tmp_path, "failed", **settings), well)


def test_a_replica_that_diverges_is_frozen_and_the_other_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    offline = trained(tmp_path)
    found = checkpoint.load_latest(offline.dir)
    assert found is not None
    tensors, meta = found
    tensors = {k: v.clone() for k, v in tensors.items()}
    tensors["state/params/value/" + next(k.split("/")[-1] for k in tensors if k.startswith("state/params/value/"))][
        0
    ] = 1e30
    checkpoint.save(
        offline.dir, 7, tensors, {k: v for k, v in meta.items() if k not in ("version", "sha256", "step")}, 2
    )
    run = tune(offline, tmp_path)
    assert [r.seed for r in run.diverged] == [0] and "seed 0 diverged" in capsys.readouterr().err
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["critic/loss"][0] is None and lines[-1]["critic/loss"][1] is not None


def test_a_line_is_the_mean_over_the_updates_since_the_last_one(tmp_path: Path) -> None:
    offline = trained(tmp_path)  # of 7 updates, which are no part of any line

    def losses(name: str, every: int) -> list[list[float]]:
        settings = {"steps": 4, "warmup": 1, "eval.every": 0, "eval.episodes": 1, "log_every": every}
        lines = (tune(offline, tmp_path, name, **settings).dir / "metrics.jsonl").read_text().splitlines()
        # none where nothing was learnt yet
        return [line["critic/loss"] for line in map(json.loads, lines) if "critic/loss" in line]

    together, single = losses("together", 4), losses("single", 1)
    assert (len(together), len(single)) == (1, 3)
    np.testing.assert_allclose(together[0], np.mean(single, axis=0), rtol=1e-5)


def refused(words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(UserError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_what_cannot_go_on_is_refused(tmp_path: Path) -> None:
    offline = trained(tmp_path)
    refused("there is no environment to learn in", lambda: offrl.finetune(offline, dataset=data(), quiet=True))
    refused("trained on arrays from Python", lambda: offrl.finetune(offline, env="Pendulum-v1", quiet=True))
    refused(
        r"observations of shape \(2,\), Pendulum-v1 of \(3,\).* \(env=ID\)\.$",
        lambda: offrl.finetune(offline, env="Pendulum-v1", mixing=0, quiet=True, runs_dir=str(tmp_path)),
    )
    refused("steps=0 is out of range", lambda: tune(offline, tmp_path, steps=0))
    refused("mixing=2 must be", lambda: tune(offline, tmp_path, mixing=2))
    refused("update_every=0 must be", lambda: tune(offline, tmp_path, update_every=0))
    refused("Did you mean 'mixing'", lambda: tune(offline, tmp_path, mixin=0.5))
    refused("seeds= cannot be changed", lambda: tune(offline, tmp_path, seeds=3))
    refused(
        "algo.alpha= is no setting of algo=iql; its paper calls so algo.polyak",
        lambda: tune(offline, tmp_path, **{"algo.alpha": 1.0}),
    )
    refused(
        r"algo.critics= cannot be changed: .*offline was trained with algo.critics=2; leave it out",
        lambda: tune(offline, tmp_path, **{"algo.batch_size": 8, "algo.critics": 3}),
    )
    refused("algo.activation= cannot be changed", lambda: tune(offline, tmp_path, **{"algo.activation": "tanh"}))
    columns = recorded(False)
    other = from_arrays(*columns[:2], columns[2] + 1, *columns[3:], action_low=-2, action_high=2)
    refused("and this is", lambda: offrl.finetune(offline, env=Walk, dataset=other, quiet=True))
    silent = {"algo.hidden": [8], **SMALL, "eval.env": "none"}
    imitation = offrl.train("bc", data(), seeds=1, steps=5, name="bc", runs_dir=str(tmp_path), settings=silent)
    refused("bc has no form that learns from an environment's rewards", lambda: tune(imitation, tmp_path))
    tuned = tune(offline, tmp_path)
    refused("is a fine-tuning run: offrl finetune resume=", lambda: tune(tuned, tmp_path, "third"))
    refused("holds another run \\(finetune.utd: 1.0 there, 2.0 here\\)", lambda: tune(offline, tmp_path, utd=2.0))
    refused("is no fine-tuning run", lambda: offrl.finetune(env=Walk, resume=str(offline.dir)))
    tensors, meta = last(offline)
    tensors["state/params/value/" + next(k.split("/")[-1] for k in tensors if k.startswith("state/params/value/"))][
        0
    ] += 1
    checkpoint.save(
        offline.dir, 7, tensors, {k: v for k, v in meta.items() if k not in ("version", "sha256", "step")}, 2
    )
    refused("began from another state", lambda: tune(offline, tmp_path))
    for path in (offline.dir / "checkpoints").iterdir():
        path.unlink()
    refused("has no checkpoint, so its critics are gone", lambda: tune(offline, tmp_path, "fourth"))


def test_a_run_in_another_normalisation_is_not_continued(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {"rewards": rng.normal(size=40), "terminations": np.zeros(40, bool), "truncations": np.arange(40) % 20 == 19}
    data = offrl.from_arrays(rng.normal(size=(40, 2)), rng.uniform(-1, 1, (40, 1)), **rows)
    settings = {"algo.hidden": [4], "algo.batch_size": 8, "eval.env": "none", "compare": [], "compile": "eager"}
    settings |= {"runs_dir": str(tmp_path), "name": "run", "quiet": True, "dataset.normalize_observations": True}
    train = functools.partial(offrl.train, "td3_bc", data, seeds=1, settings=settings)
    train(steps=2)
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    record["spec"]["observation_std"][0] *= 1.1
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match="normalised in another way"):
        train(steps=4)
    with pytest.raises(UserError, match="normalised in another way"):
        setup.begin(tmp_path / "run", {"mixing": 0.5, "steps": 10}, data, Walk)
