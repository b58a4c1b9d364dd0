"""Episodes that begin in recorded states of the data: which ones, how they end and count, the same after a stop, and
what is refused.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import offrl
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.finetuning import episodes, summary
from offrl.finetuning.config import FinetuneConfig
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.snapshots import TASK, Snapshots, load
from offrl.settings.dataset import DatasetConfig
from offrl.system import files as checkpoint
from offrl.tasks.task import Task
from tests.support.corridor import Corridor, record

CELLS = (2, 5, 6)
SPEC = DataSpec((9,), 1, discrete=True, num_actions=2, name="corridor")
SMALL: dict[str, Any] = {
    "algo.hidden": [4],
    "algo.batch_size": 8,
    "eval.episodes": 1,
    "eval.every": 0,
    "eval.workers": 0,
}


class Short(Corridor):
    """Nine cells. Counts all steps of all of them."""

    steps, stop_at = 0, -1

    def __init__(self) -> None:
        super().__init__(9, 7)
        self.right[:] = 1

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Short.steps += 1
        if Short.steps == Short.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


def snapshots(path: Path, **settings: Any) -> Snapshots:
    file = record(path / "data.hdf5", CELLS, 9)
    config = FinetuneConfig(starts="data", **{"start_limit": 3, "start_steps": 10, **settings})
    return load(config, DatasetConfig(name=str(file)), "file")


def played(found: Snapshots, envs: int = 2) -> Play:
    made = Play(Task("corridor", env_factory=Short), SPEC, (0, 1), envs, 0, None)
    made.begin_in(found)
    return made


def tune(folder: Path, name: str = "online", env: Any = Short, **more: Any) -> offrl.Run:
    file = folder / "data.hdf5"
    if not file.exists():
        record(file, CELLS, 9)
    settings = {k: more.pop(k) for k in list(more) if "." in k}
    call = {
        "dataset": str(file),
        "mixing": 0,
        "steps": 16,
        "warmup": 4,
        "seeds": 2,
        "starts": "data",
        "start_limit": 3,
        "max_steps": 7,
        **more,
    }
    run = {"algo": "iql", "env": env, "name": name, "runs_dir": str(folder), "quiet": True}
    return offrl.finetune(
        **{**run, "device": "cpu", "compile": "eager", "log_every": 4, **call}, settings={**SMALL, **settings}
    )  # type: ignore[arg-type]


def test_draws_are_a_function_of_the_numbers_alone(tmp_path: Path) -> None:
    found = snapshots(tmp_path, start_share=0.5)
    rows = [[found.draw(seed, env, episode, 9) for episode in range(200)] for seed in (0, 1) for env in (0, 1)]
    assert rows == [[found.draw(seed, env, episode, 0) for episode in range(200)] for seed in (0, 1) for env in (0, 1)]
    assert len({tuple(row) for row in rows}) == 4
    counts = np.array([[row.count(value) for value in (TASK, 0, 1, 2)] for row in rows]).sum(0) / 800
    np.testing.assert_allclose(counts, [1 / 2, 1 / 6, 1 / 6, 1 / 6], atol=0.07)  # over four standard deviations
    assert {found.draw(0, 0, episode, 10) for episode in range(200)} == {TASK}


def test_episodes_begin_in_states_and_are_cut(tmp_path: Path) -> None:
    """Always to the left, so that only limits end an episode: 3 steps from a state, 7 from where the task begins."""
    with played(snapshots(tmp_path), envs=1) as made:
        made.begin()
        cells, lengths = [], []
        for _ in range(30):
            begun = [k for k, seat in enumerate(made.seats) if not seat.actions]
            cells += [(made.t, int(made.current[k].argmax()), made.seats[k].start) for k in begun]
            turn = made.step(np.zeros(2, np.int64))
            assert not turn.terminated.any()
            lengths += [(made.t, episode.length, episode.start != TASK) for episode in turn.ended]
    assert all(cell == (CELLS[row] if row != TASK else 0) for _, cell, row in cells)
    assert {row for t, _, row in cells if t < 10} <= {0, 1, 2} and {row for t, _, row in cells if t >= 10} == {TASK}
    assert [n for _, n, snapshot in lengths if snapshot] == [3] * 8 and lengths[0] == (3, 3, True)
    assert [n for _, n, snapshot in lengths if not snapshot] == [7] * 4


def test_the_middle_of_such_episodes_comes_back(tmp_path: Path) -> None:
    found = snapshots(tmp_path, start_share=0.7)
    chosen = np.random.default_rng(0).integers(0, 2, (12, 4))
    states, turns = [], []
    with played(found) as made:
        made.begin()
        for actions in chosen:
            states.append((made.t, {k: v.clone() for k, v in made.state().items()}))
            turns.append(made.step(actions))
    for stopped in (1, 4, 5, 8):
        with played(found) as made:
            made.t = states[stopped][0]
            assert made.resume(states[stopped][1])[1] == []
            for actions, expected in list(zip(chosen, turns, strict=True))[stopped:]:
                turn = made.step(actions)
                assert turn.ended == expected.ended and (turn.next_observations == expected.next_observations).all()
                assert (turn.observations == expected.observations).all()


@pytest.mark.usefixtures("heeds_signals")
def test_a_stop_inside_one_leaves_no_trace_and_none_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)
    monkeypatch.setattr(Short, "steps", 0)
    runs = [tune(tmp_path, "run")]
    lines = [json.loads(line) for line in (runs[0].dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["online/episodes"] for line in lines[:2]] == [[0.0, 0.0]] * 2  # the first half: none from the start
    assert max(sum(line["online/episodes"]) for line in lines) > 0
    played = episodes.read(runs[0].dir)
    assert {(row["start"], row["length"] <= 3) for row in played if row["step"] <= 8} == {("data", True)}
    assert {row["start"] for row in played if row["step"] > 11} == {"task"}
    assert {row["seed"] for row in played} == {0.0, 1.0} and {row["success"] for row in played} <= {0.0, 1.0}
    monkeypatch.setattr(Short, "steps", 0)
    monkeypatch.setattr(Short, "stop_at", 2 * 7 + 9)  # after the evaluation at step 0, within an episode
    with pytest.raises(offrl.Interrupted):
        tune(tmp_path, "stopped")
    monkeypatch.setattr(Short, "stop_at", -1)
    saved = checkpoint.load_latest(tmp_path / "stopped")
    assert saved is not None and 0 < saved[1]["step"] < 8
    assert (saved[0]["play/start"] >= 0).all() and saved[0]["play/length"].any()
    runs.append(tune(tmp_path, "stopped"))
    (tensors, _), (expected, _) = (checkpoint.load_latest(run.dir) or ({}, {}) for run in reversed(runs))
    assert all(torch.equal(tensors[k], v) for k, v in expected.items())
    for name in ("metrics.jsonl", "scores.csv", "episodes.csv", "finetune.json", "policies/seed_1.safetensors"):
        assert (runs[1].dir / name).read_bytes() == (runs[0].dir / name).read_bytes(), name


def test_states_that_are_not_there_or_others_are_refused(tmp_path: Path) -> None:
    files = {
        "bare": ({"infos/qpos": None}, "holds no states of MuJoCo"),
        "wide": (
            {"infos/qpos": np.zeros((3, 2))},
            "wide does not take the states of .*wide.hdf5, row 0 .AssertionError",
        ),
        "moved": (
            {"infos/qpos": np.array([[2.0], [5.0], [7.0]])},
            "not those of .*in that of row 2 than the data hold",
        ),
    }
    for name, (columns, message) in files.items():
        file = record(tmp_path / f"{name}.hdf5", CELLS, 9, **columns)
        with pytest.raises(UserError, match=message):
            tune(tmp_path, dataset=str(file))
    with pytest.raises(UserError, match="start_limit=1 is out of range"):
        tune(tmp_path, start_limit=1)
    with pytest.raises(UserError, match="start_limit=3 is a setting of starts=data"):
        tune(tmp_path, starts="task")
    with pytest.raises(UserError, match="name them, dataset=NAME"):
        tune(tmp_path, dataset=None)
    arrays = from_arrays(np.eye(9)[[1, 2]], np.array([0, 1]), np.zeros(2), episode_ends=[1], num_actions=2)
    with pytest.raises(UserError, match="these data are arrays from Python"):
        tune(tmp_path, dataset=arrays)
    with pytest.raises(UserError, match="starts= belongs to mode=transitions"):
        offrl.finetune(tmp_path, mode="residual", starts="data")


def test_an_environment_without_states_is_refused(tmp_path: Path) -> None:
    spec = DataSpec((4,), 1, discrete=True, num_actions=2, name="cartpole")
    with (
        Play(Task("CartPole-v1", env_id="CartPole-v1"), spec, (0,), 1, 0, None) as made,
        pytest.raises(UserError, match=r"CartPole-v1 has no set_state\(qpos, qvel\)"),
    ):
        made.begin_in(snapshots(tmp_path))


def test_states_of_mujoco_in_float32(tmp_path: Path) -> None:
    """As D4RL has them; another model's are refused."""
    env: Any = gym.make("Hopper-v4")
    rows = []
    for seed in range(3):
        observation = env.reset(seed=seed)[0]
        rows.append((observation, env.unwrapped.data.qpos.copy(), env.unwrapped.data.qvel.copy()))
    observations, qpos, qvel = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    found = Snapshots("data", observations, [qpos, qvel], 0, 9, 1.0, 5)
    spec = DataSpec((11,), 3, action_low=(-1.0,) * 3, action_high=(1.0,) * 3, name="hopper")
    with Play(Task("hopper", env_id="Hopper-v4"), spec, (0,), 1, 0, None) as made:
        made.begin_in(found)
        made.begin()
        np.testing.assert_allclose(made.current[0], observations[made.seats[0].start], rtol=1e-6, atol=1e-7)
        other = Snapshots("data", observations, [qpos + np.float32(1e-3), qvel], 0, 9, 1.0, 5)
        with pytest.raises(UserError, match="it observes other numbers in that of row 0"):
            made.begin_in(other)
