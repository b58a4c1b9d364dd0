"""Play in worker processes: the same numbers as in one process, and what goes wrong is said as there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.finetuning.play import choice, workers
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.snapshots import Snapshots
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.play.workers import Workers
from offrl.system import files as checkpoint
from offrl.tasks.task import Task
from tests.support.stubborn import BREAK, DIE, EXPLODE, STICK, Stubborn, stubborn
from tests.support.turns import assert_same

SPEC = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,), name="stubborn")
TASK = Task("stubborn", env_factory=Stubborn)
DATA = Snapshots("data", np.zeros((3, 2)), [np.array([[0.1], [0.2], [0.3]]), np.zeros((3, 1))], 0, 20, 0.5, 3)


@pytest.fixture(scope="module")
def shared() -> Iterator[Workers]:
    """Two processes with two and three environments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "cores", lambda: 2)
        both = Workers(TASK, 5)
    yield both
    ended = [process for process, _ in both.workers]
    both.close()
    assert [process.returncode for process in ended] == [0, 0]  # ended by themselves, and waited for


@pytest.fixture
def processes(shared: Workers, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """The same, to be used by whatever play there is."""
    monkeypatch.setattr(choice, "Workers", lambda task, count: shared)
    monkeypatch.setattr(shared, "close", lambda: None)
    return shared


@pytest.fixture
def pair(processes: Workers) -> Iterator[list[Play]]:
    """Play of five replicas as it is by default, and in processes."""
    with played("sequential") as one, played("processes") as other:
        yield [one, other]


def played(backend: str) -> Play:
    made = Play(TASK, SPEC, range(5), 1, 0, None, backend=backend)
    made.snapshots, made.goal_dim = DATA, 2
    return made


def same(one: Turn, other: Turn) -> None:
    assert_same(one, other)
    assert len(one.observations) == 5


def test_the_numbers_are_those_of_one_process(pair: list[Play], capfd: pytest.CaptureFixture[str]) -> None:
    """Over ends of episodes, states of the data and physics that become unstable, and from either's checkpoint."""
    chosen = -np.random.default_rng(0).uniform(0.1, 0.9, (14, 5, 1)).astype(np.float32)
    chosen[2, 3] = chosen[9, 1] = EXPLODE
    states, turns = [], []
    for play in pair:
        play.begin()
    for actions in chosen:
        states.append((pair[0].t, [play.state() for play in pair]))
        turns.append([play.step(actions) for play in pair])
        same(*turns[-1])
        assert pair[0].goals.tobytes() == pair[1].goals.tobytes()
    assert [int((~turn.valid).sum()) for turn, _ in turns].count(1) == 2 and sum(len(t.ended) for t, _ in turns) > 10
    assert capfd.readouterr().err.count("became unstable (seed 3, environment 0") == 2
    for t, both in (states[4], states[7]):
        assert all(torch.equal(x, both[1][name]) for name, x in both[0].items())
        again = []
        for play, state in zip(pair, reversed(both), strict=True):
            play.t = t
            again.append(play.resume(state))
        assert again[0][1] == again[1][1] == [] and len(again[0][0]) == len(again[1][0]) > 0
        for one, other in zip(again[0][0], again[1][0], strict=True):
            same(one, other)
        for actions, (expected, _) in zip(chosen[t:], turns[t:], strict=True):
            for play in pair:
                same(expected, play.step(actions))


@pytest.mark.parametrize(("fault", "words"), [
    (BREAK, r"stubborn failed \(seed 1, environment 0, episode 0, step 1\): ValueError: it broke"),
    (STICK, r"stubborn failed on reset \(seed 1, environment 0, episode 1\): RuntimeError: it sticks"),
])  # fmt: skip
def test_an_environment_that_fails_is_named_and_the_step_taken_back(fault: float, words: str, pair: list[Play]) -> None:
    actions, states = np.full((5, 1), -0.1, np.float32), []
    for play in pair:
        play.snapshots = None
        play.begin()
        play.step(actions)
        before = play.state()
        actions[[1, 3]] = fault  # the first one is named, though both processes fail
        with pytest.raises(UserError, match=words):
            play.step(actions)
        actions[:] = -0.1
        states.append(play.state())
        assert play.t == 1 and all(torch.equal(x, before[name]) for name, x in states[-1].items())
    assert all(torch.equal(x, states[1][name]) for name, x in states[0].items())


def test_a_process_that_dies_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 1)
    with played("processes") as play:
        play.begin()
        before = play.state()
        with pytest.raises(UserError, match=r"^a process that steps environments of stubborn ended with status 3; b"):
            play.step(np.full((5, 1), DIE, np.float32))
        assert all(torch.equal(x, before[name]) for name, x in play.state().items())


def test_what_other_processes_cannot_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 1)
    cure = "env=FILE.py:NAME, or write backend=sequential"
    with pytest.raises(UserError, match=f"stubborn cannot be handed to other processes .*<lambda>.*{cure}"):
        Play(Task("stubborn", env_factory=lambda: Stubborn()), SPEC, (0,), 1, 0, None, backend="processes")
    monkeypatch.setattr(stubborn, "__module__", "__main__")  # as in a script
    monkeypatch.setattr(sys.modules["__main__"], "stubborn", stubborn, raising=False)
    with pytest.raises(UserError, match=f"another process cannot make .*AttributeError: .*'stubborn'.*{cure}"):
        Play(Task("stubborn", env_factory=stubborn), SPEC, (0,), 1, 0, None, backend="processes")


@pytest.mark.usefixtures("heeds_signals")
def test_a_run_goes_on_with_either(processes: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begun in processes, stopped by Ctrl-C, and ended in one: the same bytes as in one from the beginning."""
    monkeypatch.setattr("offrl.finetuning.summary.picture", lambda *a, **k: False)
    settings = {"algo.hidden": [4], "algo.batch_size": 8, "eval.episodes": 1, "eval.every": 0, "eval.workers": 0}

    def tune(name: str, backend: str) -> offrl.Run:
        call: dict[str, Any] = {"algo": "iql", "mixing": 0, "warmup": 4, "seeds": 5, "compile": "eager"}
        call |= {"name": name, "backend": backend, "runs_dir": str(tmp_path), "quiet": True, "device": "cpu"}
        return offrl.finetune(env=Stubborn, steps=24, log_every=4, settings=settings, **call)

    step = Play.step
    whole = tune("whole", "sequential")

    def stopping(self: Play, actions: np.ndarray) -> Turn:
        if self.t == 13:
            assert self.backend is processes
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, actions)

    monkeypatch.setattr(Play, "step", stopping)
    with pytest.raises(offrl.Interrupted):
        tune("stopped", "processes")
    monkeypatch.setattr(Play, "step", step)
    run = tune("stopped", "sequential")
    (tensors, _), (expected, _) = (checkpoint.load_latest(r.dir) or ({}, {}) for r in (run, whole))
    assert tensors.keys() == expected.keys() and all(torch.equal(tensors[k], x) for k, x in expected.items())
    for name in ("metrics.jsonl", "scores.csv", "episodes.csv", "policies/seed_1.safetensors"):
        assert (run.dir / name).read_bytes() == (whole.dir / name).read_bytes(), name
