"""A person, or a script, who acts in a policy's place: what is executed, which rows count as the data's, the same after
a stop, and what is refused.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl import registry, rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.samplers.transitions import TransitionSampler
from offrl.errors import UserError
from offrl.finetuning import summary
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.interventions import Interventions
from offrl.finetuning.replay.batches import MixedBatches
from offrl.finetuning.replay.ring import Ring
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.finetuning.windows import INTERVENTION
from offrl.system import files as checkpoint
from offrl.tasks.task import Task
from tests.support.documents import ROOT, blocks
from tests.unit.test_online_play import Walk

SPEC = DataSpec((2,), 1, action_low=(-2.0,), action_high=(4.0,), name="walk")
# observations of Walk are (x, steps so far); every other step the person takes the action back to 0
PERSON = """
import numpy as np

def correct(observation, action):
    assert action.shape == (1,) and -2.0 <= action[0] <= 4.0
    return [-observation[0]] if observation[1] % 2 else None

def far(observation, action):
    return [9.0]

def wide(observation, action):
    return [0.0, 0.0]

def word(observation, action):
    return "left"

def wrong(observation, action):
    return observation["front"]

def first(observation, action):
    return 1 if observation[0] else None

def seventh(observation, action):
    return 7

def leave(observation, action):
    raise SystemExit(3)

def half(observation, action):
    return 0.5

def erase(observation, action):
    for part in observation.values() if isinstance(observation, dict) else [observation]:
        part[...] = 0
"""


class Stopping(Walk):
    """Counts all steps of all of them, and sends a signal at one."""

    steps, stop_at = 0, -1

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Stopping.steps += 1
        if Stopping.steps == Stopping.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "person.py"
    path.write_text(PERSON)
    return path


def play(file: Path, function: str = "correct", spec: DataSpec = SPEC, **task: Any) -> Play:
    person = Interventions(f"{file}:{function}", spec)
    made = Play(Task("walk", **(task or {"env_factory": Walk})), spec, (0,), 1, 0, None, interventions=person)
    made.begin()
    return made


def test_the_executed_action_is_what_is_stored(file: Path) -> None:
    """Actions of -2 to 4: 0.4 is 0.4 x 3 + 1 = 2.2 for the environment, and 0 is -1/3 in [-1, 1]."""
    with play(file) as made:
        start = float(made.current[0, 0])
        turns = [made.step(np.full((1, 1), -0.3, np.float32)) for _ in range(4)]
        assert [bool(t.interventions[0]) for t in turns] == [False, True, False, True]
        x = start + 0.1
        np.testing.assert_allclose(turns[1].actions, [[(-x - 1.0) / 3.0]], rtol=1e-6)
        np.testing.assert_allclose(turns[1].next_observations[0, 0], 0.0, atol=1e-6)
        assert turns[0].actions.tolist() == [[np.float32(-0.3)]]
    with play(file, "far") as made:  # beyond the range: its end
        assert made.step(np.zeros((1, 1), np.float32)).actions.tolist() == [[1.0]]
    spec = DataSpec((4,), 1, discrete=True, num_actions=2, name="cartpole")
    with play(file, "first", spec, env_id="CartPole-v1") as made:
        assert made.step(np.zeros(1, np.int64)).actions.tolist() == [1]


@pytest.mark.parametrize("kind", ["(3,)f4", [("front", "u1", (2, 2, 3)), ("vector", "f4", (2,))]])
def test_a_function_may_change_what_it_is_given(kind: Any, file: Path) -> None:
    """Rows hold what the environment showed, also where the function writes into its argument."""
    shown = np.frombuffer(bytes(range(40)), kind, 1)[0].copy()
    before = shown.tobytes()
    assert Interventions(f"{file}:erase", SPEC)(shown, np.zeros(1, np.float32), "here") is None
    assert shown.tobytes() == before


@pytest.mark.parametrize(
    "function, message",
    [
        ("wide", r"gave \[0.0, 0.0\] \(seed 0, environment 0, episode 0, step 0\): an action of shape \[1\]"),
        ("word", "gave 'left' .*: an action of .* is due, or None"),
        ("wrong", "person.py:wrong .* failed at .*person.py"),
        ("leave", r"person.py:leave \(seed 0, .* failed at .*person.py:\d+: SystemExit: 3"),
        ("rong", "has no 'rong'. Did you mean 'wrong'"),
    ],
)
def test_a_wrong_answer_is_one_line(file: Path, function: str, message: str) -> None:
    with pytest.raises(UserError, match=message), play(file, function) as made:
        made.step(np.zeros((1, 1), np.float32))


@pytest.mark.parametrize(
    "function, answer", [("seventh", "7"), ("half", "0.5"), ("far", r"\[9.0\]"), ("word", "'left'")]
)
def test_a_wrong_choice_is_one_line(function: str, answer: str, file: Path) -> None:
    spec = DataSpec((4,), 1, discrete=True, num_actions=2, name="cartpole")
    with (
        pytest.raises(UserError, match=f"gave {answer} .*: a choice from 0 to 1 is due, or None"),
        play(file, function, spec, env_id="CartPole-v1") as made,
    ):
        made.step(np.zeros(1, np.int64))


def test_the_middle_of_an_episode_comes_back_with_its_interventions(file: Path) -> None:
    actions = np.full((1, 1), -0.3, np.float32)
    with play(file) as made:
        for _ in range(3):
            made.step(actions)
        state = made.state()
        expected = made.step(actions)
    with play(file) as made:
        made.t = 3
        turns, restarted = made.resume(state)
        assert restarted == [] and [bool(t.interventions[0]) for t in turns] == [False, True, False]
        turn = made.step(actions)
        assert (turn.actions == expected.actions).all() and turn.interventions.tolist() == [True]


@pytest.mark.parametrize("name, first", [("td3_bc", [0, 1, 0, 1]), ("qc", [0, 1, 0, 1]), ("tdmpc2", [0, 1, 0])])
def test_a_row_belongs_to_who_took_its_first_action(file: Path, name: str, first: list[int]) -> None:
    """Windows of two steps; those of the states of an episode with 4 steps begin at 3 of its 5."""
    settings = {"qc": {"length": 2}, "tdmpc2": {"horizon": 2, "discount": 0.9, "episodic": True}}.get(name, {})
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(hidden=[2], **settings), SPEC)
    sampler = algorithm.sampler()
    rows = Rows(SPEC, columns_for(SPEC, sampler, name), 1, 1, returns_of(sampler, 0.9), sampler)
    with play(file) as made:
        taken = [rows.take(made.step(np.full((1, 1), -0.3, np.float32)))[1] for _ in range(4)]
    assert np.concatenate([t[INTERVENTION] for t in taken]).astype(int).tolist() == first


@pytest.mark.parametrize("name, column, flags", [("arsq", "demonstration", [0, 1, 0]), ("mbpo", "unknown", [0, 0, 0])])
def test_interventions_are_demonstrations_and_no_other_flag(
    file: Path, name: str, column: str, flags: list[int]
) -> None:
    sampler = registry.get("algo", name)(registry.get("algo", name).Config(hidden=[2]), SPEC).sampler()
    rows = Rows(SPEC, columns_for(SPEC, sampler, name), 1, 1, returns_of(sampler, 0.9), sampler)
    with play(file) as made:
        taken = [rows.take(made.step(np.full((1, 1), -0.3, np.float32)))[1] for _ in range(4)]
    assert np.concatenate([t[column] for t in taken]).astype(int).tolist()[:3] == flags


def test_interventions_are_drawn_as_rows_of_the_data() -> None:
    """30 rows of the data and 10 of a person share the data's half of a batch; the other half is all of play."""
    columns = {"observations": ((1,), torch.float32), "actions": ((), torch.int64)}
    columns |= dict.fromkeys(("rewards", "masks"), ((), torch.float32))
    columns["next_observations"] = columns["observations"]

    def ring(first: int, count: int) -> Ring:
        made = Ring(columns, 1, 64, torch.device("cpu"))
        x = first + np.arange(count)
        row = {name: np.zeros((count, *shape)) for name, (shape, _) in columns.items()}
        made.add(np.zeros(count, np.int64), {**row, "rewards": x})
        return made

    data = from_arrays(np.zeros((30, 1)), np.zeros(30, int), 1000 + np.arange(30), np.ones(30, bool), num_actions=2)
    sampler = TransitionSampler()
    keys = rng.make_key(0).unsqueeze(0)
    empty, some = ring(0, 0), ring(500, 10)
    for corrected, share in ((some, 0.25), (empty, 0.0)):
        batches = MixedBatches(ring(0, 40), sampler, sampler.prepare(data), keys, 200, 0.5, corrected)
        rewards = torch.cat([batches.get(step)["rewards"] for step in range(30)])
        assert (rewards[:, 100:] < 40).all() and (rewards[:, :100] >= 500).all()
        found = float((rewards[:, :100] < 1000).double().mean())
        assert abs(found - share) <= 5 * np.sqrt(share * (1 - share) / 3_000)
    assert set(rewards[:, :100].flatten().int().tolist()) == set(range(1000, 1030))


@pytest.mark.usefixtures("heeds_signals")
def test_a_stop_leaves_no_trace(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)
    data = from_arrays(np.zeros((6, 2)), np.linspace(-2, 4, 6)[:, None], np.ones(6), episode_ends=[2, 5])

    def tune(name: str, **more: Any) -> offrl.Run:
        monkeypatch.setattr(Stopping, "steps", 0)
        settings = {"algo.hidden": [4], "algo.batch_size": 8, "eval.episodes": 1, "eval.every": 0, "eval.workers": 0}
        settings |= {"log_every": 7, "max_steps": 4, "interventions": f"{file}:correct", "compile": "eager"}
        call = {"steps": 14, "warmup": 4, "name": name, **more}
        run: dict[str, Any] = {"algo": "td3_bc", "env": Stopping, "seeds": 2, "device": "cpu", "quiet": True}
        return offrl.finetune(dataset=data, runs_dir=str(tmp_path), settings=settings, **run, **call)

    whole = tune("whole")
    lines = [json.loads(line) for line in (whole.dir / "metrics.jsonl").read_text().splitlines()]
    shares = [line["online/interventions"] for line in lines if line["step"]]
    assert len(shares) == 2
    saved = checkpoint.load_latest(whole.dir)
    assert saved is not None and (7 * np.sum(shares, 0)).round(6).tolist() == saved[1]["rows"][1]
    assert 0 < sum(saved[1]["rows"][1]) < 28
    monkeypatch.setattr(Stopping, "stop_at", 2 * 4 + 2 * 9)
    with pytest.raises(offrl.Interrupted):
        tune("stopped")
    monkeypatch.setattr(Stopping, "stop_at", -1)
    again = tune("stopped")
    (tensors, _), (expected, _) = (checkpoint.load_latest(run.dir) or ({}, {}) for run in (again, whole))
    assert expected and all(torch.equal(tensors[k], v) for k, v in expected.items())
    for name in ("metrics.jsonl", "scores.csv", "policies/seed_1.safetensors"):
        assert (again.dir / name).read_bytes() == (whole.dir / name).read_bytes(), name
    with pytest.raises(UserError, match="is Python code that a file names"):
        offrl.finetune(resume=whole.dir, dataset=data, env=Stopping, steps=20)
    with pytest.raises(UserError, match="interventions= belongs to mode=transitions"):
        offrl.finetune(whole.dir, mode="residual", interventions=f"{file}:correct")


def test_the_keyboard_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys come from a pipe in place of a terminal."""
    (code,) = (text for _, text in blocks(ROOT / "docs" / "finetune.md") if text.startswith("# person.py"))
    (tmp_path / "keys.py").write_text(code)
    reader, writer = os.pipe()
    with os.fdopen(reader) as typed, os.fdopen(writer, "wb", buffering=0) as keys:
        monkeypatch.setattr("sys.stdin", typed)
        spec = DataSpec((3,), 1, action_low=(-2.0,), action_high=(2.0,), name="pendulum")
        with play(tmp_path / "keys.py", spec=spec, env_id="Pendulum-v1") as made:
            keys.write(b"dxa")
            turns = [made.step(np.zeros((1, 1), np.float32)) for _ in range(4)]
    assert [float(t.actions[0, 0]) for t in turns] == [1.0, 0.0, -1.0, 0.0]
    assert [bool(t.interventions[0]) for t in turns] == [True, False, True, False]
