"""Students that learn in an environment from teachers who see more: what is stored, what is learnt, what they see when
they are scored, that a stop leaves no trace, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.numpy import load_file

import offrl
from offrl import registry, rng
from offrl.algorithm import stack
from offrl.api import Run
from offrl.data.dataset import ColumnSpec, DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.export.graph import PolicyGraph
from offrl.finetuning import summary
from offrl.finetuning.distillation.teacher import teach
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task, task_from_json
from tests.unit.test_online_run import SMALL, Walk, assert_same, interrupt, last, trained

WALK = DataSpec((2,), 1, action_low=(-2.0,), action_high=(2.0,), name="walk", task=Task("walk", env_factory=Walk))


class Sensors(gym.Env):
    """Three entries of a Dict: the state, something far that it does not hold, and an image."""

    image = spaces.Box(0, 255, (4, 4, 3), np.uint8)
    observation_space = spaces.Dict({"state": spaces.Box(-9, 9, (2,)), "far": spaces.Box(-9, 9, (1,)), "front": image})
    action_space = spaces.Box(-2.0, 2.0, (1,))


def choices() -> Walk:
    return Walk(True)


ENVIRONMENTS = (Walk, choices)


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)
    monkeypatch.setattr(Walk, "at", -1)


def student(run: Run | None, folder: Path, name: str = "student", discrete: bool = False, **more: Any) -> Run:
    call: dict[str, Any] = {"mode": "distill", "steps": 20, "eval.every": 0, "algo.hidden": [8], "algo.batch_size": 16}
    call = {**SMALL, **call, "name": name, "runs_dir": str(folder), **more}
    dotted = {k: call.pop(k) for k in list(call) if "." in k}
    return offrl.finetune(run, env=ENVIRONMENTS[discrete], settings=dotted, **call)


def rows_of(run: Run, replica: int) -> dict[str, np.ndarray]:
    """A replica's rows, as its replay buffer has them."""
    files = [load_file(path) for path in sorted((run.dir / "replay").iterdir())]
    names = files[0].keys()
    return {name: np.concatenate([f[name][f["replica"] == replica] for f in files]) for name in names}


def policy(spec: DataSpec, algo: str = "bc", seed: int = 0, **settings: Any) -> TrainedPolicy:
    kind = registry.get("algo", algo)
    algorithm = kind(kind.Config(**settings), spec)
    return TrainedPolicy(algorithm, algorithm.init(seed), seed)


@pytest.mark.parametrize("discrete", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_row_has_what_the_teacher_would_have_done(discrete: bool, tmp_path: Path) -> None:
    """Its greedy action of all that it sees, each replica's teacher, also where the student did something else."""
    offline = trained(tmp_path, discrete=discrete, **{"dataset.normalize_observations": True})
    run = student(offline, tmp_path, discrete=discrete, envs=2, **{"student.observation_keys": ["1", "0"]})
    for n in range(2):
        rows, teacher = rows_of(run, n), offline.policy(n)
        assert len(rows["observations"]) == 20
        mean, std = np.array(teacher.spec.observation_mean), np.array(teacher.spec.observation_std)
        raw = rows["observations"][:, ::-1] * std + mean
        assert {*np.round(raw[:, 1]).astype(int)} <= {*range(9)}  # steps of an episode
        due = teacher.act(raw.astype(np.float32))
        np.testing.assert_allclose(rows["teacher_actions"] * (1 if discrete else 2.0), due, atol=1e-5)
        assert discrete or not np.allclose(rows["teacher_actions"], rows["actions"], atol=1e-3)


def test_it_is_behaviour_cloning_of_these_rows(tmp_path: Path) -> None:
    """Of one row, which is all of a batch after the first step."""
    offline = trained(tmp_path)
    run = student(offline, tmp_path, steps=1, **{"student.observation_keys": ["0"], "student.history": 2})
    spec = replace(run.spec, observation_mean=None, observation_std=None)
    kind = registry.get("algo", "bc")
    algorithm = kind(kind.Config(hidden=[8], batch_size=16), spec)
    states = [algorithm.init(seed) for seed in (0, 1)]
    for n, state in enumerate(states):
        rows = {name: torch.from_numpy(x).expand(16, *x.shape[1:]) for name, x in rows_of(run, n).items()}
        x = rows["observations"]
        assert x.shape == (16, 2) and torch.equal(x[:, 0], x[:, 1])  # an episode's first observation is repeated
        batch = {"observations": x, "actions": rows["teacher_actions"]}
        states[n], _ = algorithm.update(state, batch, rng.make_key(0), phase=0)
    tensors, expected = last(run)[0], stack(states)
    for name, tensor in expected.params["actor"].items():
        torch.testing.assert_close(tensors[f"state/params/actor/{name}"], tensor, rtol=0, atol=1e-6)


def test_it_acts_without_its_teacher(tmp_path: Path) -> None:
    """It is scored, loaded and exported with what it sees: the first number of the last three observations."""
    offline = trained(tmp_path)
    settings = {"student.observation_keys": [0], "student.history": 3}
    run = student(offline, tmp_path, seed=3, **settings)
    observations = rows_of(run, 1)["observations"]
    assert observations.shape == (20, 3)
    assert np.array_equal(observations[1:3, 1:], np.stack([observations[1:3, 1], observations[1:3, 2]], 1))
    assert np.array_equal(observations[1, :2], observations[0, 1:])  # the window moves on
    returns = [row["return_mean"] for row in run.score_rows if row["step"] == 20]
    for path in sorted(offline.dir.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert [row["return_mean"] for row in run.evaluate(2, env=Walk).rows()] == returns
    acts = run.policy(1)
    assert acts.spec.task is not None and acts.spec.task.observation_numbers == (0,)
    action = acts.act(np.array([0.3], np.float32))
    window = torch.full((1, 3), 0.3)
    np.testing.assert_allclose(PolicyGraph(acts, False)(window)[0].numpy(), action, atol=1e-6)
    acts.reset()
    with pytest.raises(UserError, match=r"shape \(2,\); this policy takes \(1,\), the numbers 0 of what .* observes"):
        acts.act(np.zeros(2, np.float32))
    assert run.record["label"] == "bc+distill" and run.record["identity"]["finetune"]["mode"] == "distill"


@pytest.mark.nightly
@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("discrete", [False, True])
def test_a_stop_leaves_no_trace(discrete: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it goes on without the run of its teachers."""
    offline = trained(tmp_path, discrete=discrete)
    settings: dict[str, Any] = {"student.observation_keys": [0], "student.history": 3, "student.history_actions": 2}
    settings |= {"steps": 40, "envs": 2, "noise": 0.2, "checkpoint.every": 10}
    monkeypatch.setattr(Walk, "steps", 0)
    whole = student(offline, tmp_path, "whole", discrete, **settings)
    total = Walk.steps
    for share in (0.3, 0.7):
        name = f"stopped-{share}"
        monkeypatch.setattr(Walk, "steps", 0)
        monkeypatch.setattr(Walk, "at", int(total * share))
        monkeypatch.setattr(Walk, "then", staticmethod(interrupt))
        with pytest.raises(offrl.Interrupted):
            student(offline, tmp_path, name, discrete, **settings)
        monkeypatch.setattr(Walk, "at", -1)
        if share == 0.3:
            assert_same(student(offline, tmp_path, name, discrete, **settings), whole)
            continue
        for path in sorted(offline.dir.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        resumed = offrl.finetune(None, env=ENVIRONMENTS[discrete], resume=str(tmp_path / name), quiet=True)
        assert_same(resumed, whole)


def test_entries_that_the_teacher_does_not_see() -> None:
    """Play observes both: the teacher's first, in its order."""
    task = Task("sensors", env_factory=Sensors, observation_keys=("state",))
    teachers = [policy(replace(WALK, task=task), seed=seed) for seed in (0, 1)]
    teacher, shown = teach(teachers, task, ["far"], "run")
    assert teacher.task.observation_keys == ("state", "far") and shown.observation_keys == ("far",)
    assert (teacher.known.tolist(), teacher.shown.tolist(), teacher.spec.observation_shape) == ([0, 1], [2], (3,))
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for n, one in enumerate(teachers):
        np.testing.assert_allclose(2.0 * teacher.actions(rows, 0)[n], one.act(rows[n, :2]), atol=1e-6)
    assert teach(teachers, task, [], "run")[1].observation_keys == ("state",)  # hides nothing


def test_positions_ranges_and_names() -> None:
    columns = ColumnSpec("x"), ColumnSpec("steps")
    named = [policy(replace(WALK, observation_columns=columns))]
    task = WALK.task
    assert task is not None
    for keys, due in ((["1"], (1,)), (["steps"], (1,)), (["0:1"], (0,)), ([":1"], (0,)), ([], ()), (["0:"], ())):
        assert teach(named, task, keys, "run")[1].observation_numbers == due, keys
    # a teacher that sees a part itself, and a student that sees another
    half = replace(task, observation_numbers=(1,))
    teacher, shown = teach([policy(replace(WALK, observation_shape=(1,), task=half))], half, ["0"], "run")
    assert (teacher.known.tolist(), teacher.shown.tolist(), shown.observation_numbers) == ([1], [0], (0,))
    assert teacher.task.observation_numbers == () and teacher.spec.observation_shape == (2,)


def test_an_environment_shows_some_numbers_once() -> None:
    """Within another wrapper, as a perturbed environment is, it is not cut again; files say it."""
    task = Task("walk", env_factory=Walk, observation_numbers=(1,))
    env = make_env(task)
    assert env.reset(seed=0)[0].tolist() == [0.0] and env.observation_space.shape == (1,)
    again = make_env(replace(task, env_factory=lambda: gym.Wrapper(make_env(task))))
    assert again.reset(seed=0)[0].shape == (1,)
    assert task_from_json(task.to_json()).observation_numbers == (1,)
    assert "observation_numbers" not in Task("walk").to_json()  # as older files
    with pytest.raises(UserError, match="sees the numbers 5 of a row of them, and walk observes Box"):
        make_env(replace(task, observation_numbers=(5,)))


@pytest.mark.parametrize(
    ("spec", "algo", "keys", "words"),
    [
        (WALK, "bc", ["2"], "there is no number '2' among the 2 of an observation; write positions from 0 to 1"),
        (WALK, "bc", ["1:0"], "there is no number '1:0'"),
        (replace(WALK, observation_columns=(ColumnSpec("place"), ColumnSpec("speed"))), "bc", ["sped"], "'speed'"),
        (WALK, "chunk_bc", [], "a policy of chunk_bc remembers its episode"),
        (WALK, "gcbc", [], "a run of gcbc is a policy that takes goals"),
        (replace(WALK, history=2), "bc", [], "bc sees windows of 2 observations"),
        (replace(WALK, observation_shape=(3,)), "bc", [], r"observations of shape \(3,\), the environment of \(2,\)"),
        (replace(WALK, action_dim=2, action_low=(-1.0,) * 2, action_high=(1.0,) * 2), "bc", [], "2 action dimensions"),
    ],
)
def test_who_cannot_teach_and_what_cannot_be_seen(spec: DataSpec, algo: str, keys: list[str], words: str) -> None:
    assert spec.task is not None
    with pytest.raises(UserError, match=words) as error:
        teach([policy(spec, algo)], spec.task, keys, "runs/x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("farr", "have no entry 'farr'; .* Did you mean 'far'"),
        ("front", "'front' is an image, and students see numbers"),
    ],
)
def test_entries_that_cannot_be_seen(key: str, words: str) -> None:
    task = Task("sensors", env_factory=Sensors, observation_keys=("state",))
    with pytest.raises(UserError, match=words):
        teach([policy(replace(WALK, task=task))], task, [key], "run")


def test_settings_that_have_no_place(tmp_path: Path) -> None:
    offline = trained(tmp_path)
    for run, settings, words in (
        (None, {}, "mode=distill learns from the policies of a run: offrl finetune RUN mode=distill"),
        (offline, {"mixing": 0.5}, "mixing= has no place with mode=distill"),
        (offline, {"seeds": 3}, "seeds= has no place with mode=distill"),
        (offline, {"starts": "data"}, "starts= has no place"),
        (offline, {"algo": "iql"}, "students of mode=distill are policies of bc"),
        (offline, {"mode": "transitions", "student.history": 2}, "student.* are settings of mode=distill"),
        (offline, {"student.history_stride": 2}, "student.history_stride is the distance of several observations"),
        (offline, {"encoder": "drq"}, "encoder=drq"),
        (offline, {"algo.expectile": 0.9}, "algo.expectile"),
    ):
        with pytest.raises(UserError, match=words) as error:
            student(run, tmp_path, **settings)
        assert "\n" not in str(error.value)
