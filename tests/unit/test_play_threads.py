"""Play in threads: the numbers of Gymnasium's own steps, bit by bit, whatever happens, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.envs.mujoco.hopper_v5 import HopperEnv

import offrl
from offrl.errors import UserError
from offrl.finetuning.play import threads
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.robots import ROBOTS, VERSIONS
from offrl.finetuning.play.snapshots import Snapshots
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.start import spec_of
from offrl.system import files as checkpoint
from offrl.tasks.task import Task
from tests.support.stops import play_stops
from tests.support.tiers import nightly_but
from tests.support.turns import assert_same

ENVS, ROWS = 5, 5_000
SETTINGS: dict[str, dict[str, Any]] = {
    "Hopper-v5": {"exclude_current_positions_from_observation": False, "healthy_reward": 0.3, "frame_skip": 5},
    "Hopper-v4": {"terminate_when_unhealthy": False, "healthy_state_range": (-3, 3), "ctrl_cost_weight": 0.7},
    "Walker2d-v5": {"terminate_when_unhealthy": False, "healthy_z_range": (1.1, 1.3), "forward_reward_weight": 2},
    "HalfCheetah-v5": {"forward_reward_weight": 0.1, "ctrl_cost_weight": 3},
    "Ant-v5": {"main_body": "front_left_leg", "contact_force_range": (-0.1, 0.2), "contact_cost_weight": 3e-3},
    "Ant-v4": {"use_contact_forces": True, "contact_force_range": (-0.1, 0.2)},
}
CASES = [(f"{robot}-v{version}", False) for robot in ROBOTS for version in VERSIONS] + [
    (name, True) for name in SETTINGS
]
FAST = [("Ant-v5", True), ("Hopper-v4", True)]  # of few rows; of all the others 5,000


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cores", lambda: 2)


def task_of(env_id: str, **settings: Any) -> Task:
    return Task(env_id, env_id=env_id, env_kwargs=settings)


def actions_of(task: Task, steps: int) -> tuple[Any, np.ndarray]:
    spec = spec_of(task)[0]
    return spec, np.random.default_rng(0).uniform(-1.1, 1.1, (steps, ENVS, spec.action_dim)).astype(np.float32)


def played(
    task: Task,
    backend: str,
    steps: int,
    max_steps: int | None = None,
    snapshots: Snapshots | None = None,
    before: Callable[[Play, int], None] = lambda play, t: None,
) -> list[Turn]:
    """Turns of random actions."""
    spec, actions = actions_of(task, steps)
    with Play(task, spec, range(ENVS), 1, 0, max_steps, backend=backend) as play:
        play.snapshots = snapshots
        play.begin()
        turns = []
        for t, row in enumerate(actions):
            before(play, t)
            turns.append(play.step(row))
    return turns


def assert_all_same(turns: list[Turn], others: list[Turn]) -> None:
    for one, other in zip(turns, others, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("case", nightly_but(FAST, CASES), ids=str)
def test_rows_are_those_of_gymnasiums_own_steps(case: tuple[str, bool]) -> None:
    env_id, changed = case
    steps = 60 if case in FAST else ROWS // ENVS
    task = task_of(env_id, **SETTINGS[env_id] if changed else {})
    turns = played(task, "sequential", steps)
    assert_all_same(turns, played(task, "threads", steps))
    assert case in FAST or any(turn.over.any() for turn in turns)


def test_states_of_the_data_and_time_limits() -> None:
    """Episodes begin where others were, and end by three limits."""
    g = np.random.default_rng(1)
    qpos, qvel = 0.05 * g.standard_normal((9, 6)) + [0, 1.25, 0, 0, 0, 0], g.standard_normal((9, 6))
    snapshots = Snapshots("data", np.zeros((9, 11)), [qpos, qvel], 0, 60, 0.7, 6)
    task = task_of("Hopper-v5", max_episode_steps=25)
    turns = played(task, "sequential", 80, 20, snapshots)
    assert_all_same(turns, played(task, "threads", 80, 20, snapshots))
    lengths = {(end.length, end.start < 0) for turn in turns for end in turn.ended}
    assert {(6, False), (20, True)} <= lengths and len(lengths) > 4


def test_physics_that_blow_up_are_named_and_cut(capfd: pytest.CaptureFixture[str]) -> None:
    def explode(play: Play, t: int) -> None:
        for k in {3: (1, 4), 7: (0,)}.get(t, ()):
            play.backend.envs[k].unwrapped.data.qvel[:] = 1e12  # type: ignore[union-attr]

    texts, turns = [], []
    for backend in ("sequential", "threads"):
        turns.append(played(task_of("HalfCheetah-v5"), backend, 10, before=explode))
        texts.append(capfd.readouterr().err)
    assert_all_same(*turns)
    assert texts[0] == texts[1] and texts[0].count("became unstable") == 3
    assert [int((~turn.valid).sum()) for turn in turns[0]] == [0, 0, 0, 2, 0, 0, 0, 1, 0, 0]


def test_the_middle_of_an_episode_comes_back_with_either() -> None:
    task = task_of("Hopper-v5")
    spec, actions = actions_of(task, 60)
    stops = np.random.default_rng(2).choice(59, 4, replace=False).tolist()
    states, expected = {}, []
    with Play(task, spec, range(ENVS), 1, 0, None) as play:
        play.begin()
        for t, row in enumerate(actions):
            states[t] = play.state()
            expected.append(play.step(row))
    for stop in stops:
        with Play(task, spec, range(ENVS), 1, 0, None, backend="threads") as play:
            play.t = stop
            assert play.resume(states[stop])[1] == []
            assert all(torch.equal(x, states[stop][name]) for name, x in play.state().items())
            assert_all_same(expected[stop:], [play.step(row) for row in actions[stop:]])


def test_an_environment_that_fails_is_named_and_the_step_taken_back() -> None:
    task = task_of("Swimmer-v5")
    spec, actions = actions_of(task, 2)
    with Play(task, spec, range(ENVS), 1, 0, None, backend="threads") as play:
        play.begin()
        play.step(actions[0])
        backend: Any = play.backend
        move, broken = backend.move, [backend.bodies[k].data for k in (1, 3)]

        def fail(model: Any, data: Any, frames: int) -> None:
            if any(data is other for other in broken):
                raise RuntimeError("it broke")
            move(model, data, frames)

        backend.move, before = fail, play.state()
        with pytest.raises(
            UserError, match=r"Swimmer-v5 failed \(seed 1, environment 0, episode 0, step 1\): RuntimeE"
        ):
            play.step(actions[1])
        assert all(torch.equal(x, before[name]) for name, x in play.state().items())


def test_what_is_not_known_to_be_equal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cure = "backend=sequential and backend=processes step it"

    def refused(task: Task, words: str) -> None:
        spec = spec_of(task)[0]
        with pytest.raises(UserError, match=f"^backend=threads {words}.*: {cure}$"):
            Play(task, spec, (0,), 1, 0, None, backend="threads")

    for env_id in ("Humanoid-v5", "Reacher-v5", "Pendulum-v1"):
        refused(task_of(env_id), f"steps HalfCheetah, .* and {env_id} is not the id of one")
    refused(Task("mine", env_factory=lambda: gym.make("Hopper-v5")), "steps .* and mine is not the id of one")

    original = gym.registry["Hopper-v5"]

    def registered(**changes: Any) -> None:
        spec = copy.deepcopy(original)
        for name, value in changes.items():
            setattr(spec, name, value)
        monkeypatch.setitem(gym.registry, "Hopper-v5", spec)

    registered(entry_point=lambda **settings: gym.wrappers.RescaleAction(HopperEnv(**settings), -1.0, 1.0))
    refused(task_of("Hopper-v5"), "knows no wrapper RescaleAction, which Hopper-v5 has")
    registered(entry_point=type("Mine", (HopperEnv,), {"__module__": "mine"}))
    refused(task_of("Hopper-v5"), "knows Hopper-v5 as Gymnasium makes it, and this is another")
    registered()
    for changes in ({"control_cost": lambda self, action: 0.0}, {"__setattr__": _without_range}):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(HopperEnv, name, value, raising=False)
            refused(task_of("Hopper-v5"), "does not know this version of Hopper-v5")


def _without_range(self: Any, name: str, value: Any) -> None:
    object.__setattr__(self, "_z_range" if name == "_healthy_z_range" else name, value)


@pytest.mark.nightly
@pytest.mark.usefixtures("heeds_signals")
def test_a_stop_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped at random steps, and continued with threads or without."""
    monkeypatch.setattr("offrl.finetuning.summary.picture", lambda *a, **k: False)
    settings = {"algo.hidden": [8], "algo.batch_size": 16, "eval.episodes": 1, "eval.every": 0, "eval.workers": 0}
    moments = play_stops(monkeypatch)

    def tune(name: str, backend: str) -> offrl.Run:
        call: dict[str, Any] = {"algo": "iql", "mixing": 0, "warmup": 20, "seeds": 2, "envs": 3, "compile": "eager"}
        call |= {"name": name, "backend": backend, "runs_dir": str(tmp_path), "quiet": True, "device": "cpu"}
        return offrl.finetune(env="Hopper-v5", steps=300, log_every=50, settings=settings, **call)

    expected = tune("expected", "sequential")
    for n, backends in enumerate((("threads", "threads"), ("threads", "sequential"), ("processes", "threads"))):
        name = f"stopped-{n}"
        moments[:] = (3 * np.random.default_rng(n).integers(10, 90, 1)).tolist()
        with pytest.raises(offrl.Interrupted):
            tune(name, backends[0])
        assert not moments
        run = tune(name, backends[1])
        (tensors, _), (due, _) = (checkpoint.load_latest(r.dir) or ({}, {}) for r in (run, expected))
        assert tensors.keys() == due.keys() and all(torch.equal(tensors[k], x) for k, x in due.items())
        for file in ("metrics.jsonl", "scores.csv", "episodes.csv", "finetune.json", "policies/seed_1.safetensors"):
            assert (run.dir / file).read_bytes() == (expected.dir / file).read_bytes(), file
