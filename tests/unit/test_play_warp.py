"""Play by MuJoCo Warp, on its CPU device: numbers near MuJoCo's, worlds that leave one another alone, and going on in
the middle of an episode. What is refused is tested without the package.

The first run compiles kernels for minutes, later ones take them from warp's cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.errors import UserError
from offrl.finetuning import record
from offrl.finetuning.play import warp
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.setup import begin
from offrl.finetuning.start import spec_of
from offrl.tasks.task import Task
from tests.support.stops import play_stops
from tests.support.turns import assert_same

ENVS = 3
# env steps over which float32 stays within 1e-3; Ant's friction differs as soon as a steep leg touches the floor
STEPS = {"Hopper-v5": 8, "HalfCheetah-v5": 5, "InvertedPendulum-v5": 8, "Ant-v5": 2}


@pytest.fixture
def package() -> Any:
    return pytest.importorskip("mujoco_warp", reason="needs the extra `warp`")


def play_of(env_id: str, backend: str = "warp", max_steps: int | None = None, **settings: Any) -> Play:
    task = Task(env_id, env_id=env_id, env_kwargs=settings)
    spec, task = spec_of(task)
    return Play(task, spec, range(ENVS), 1, 0, max_steps, backend=backend, device="cpu")


def actions_of(play: Play, steps: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1, 1, (steps, ENVS, play.spec.action_dim)).astype(np.float32)


def played(
    play: Play, steps: int, first: int = 0, before: Callable[[Play, int], None] = lambda play, t: None
) -> tuple[list[Turn], dict[int, dict[str, torch.Tensor]]]:
    """The turns from step `first` on, and the states before them."""
    turns, states = [], {}
    for t, row in enumerate(actions_of(play, steps)[first:], first):
        states[t] = play.state()
        before(play, t)
        turns.append(play.step(row))
    return turns, states


def back(play: Play, t: int, state: dict[str, torch.Tensor]) -> list[Turn]:
    play.t = t
    turns, restarted = play.resume(state)
    assert restarted == [] and all(torch.equal(x, state[name]) for name, x in play.state().items())
    return turns


@pytest.mark.slow
@pytest.mark.parametrize("env_id", STEPS)
def test_numbers_are_near_mujocos(env_id: str, package: Any) -> None:
    turns = []
    for backend in ("sequential", "warp"):
        with play_of(env_id, backend) as play:
            play.begin()
            turns.append(played(play, STEPS[env_id])[0])
    for expected, got in zip(*turns, strict=True):
        for name in ("observations", "rewards", "next_observations"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), 0, 1e-3, err_msg=name)
        assert np.array_equal(got.terminated, expected.terminated) and got.valid.all()


@pytest.mark.slow
def test_worlds_limits_and_the_middle_of_an_episode(package: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """A world that begins again, even after its physics blew up, changes no other, and keeps nothing."""

    def explode(play: Play, t: int) -> None:
        data = play.backend.data  # type: ignore[union-attr]
        for name, k, value in {4: [("qvel", 1, 1e12)], 14: [("qpos", 0, np.nan)]}.get(t, ()):
            numbers = getattr(data, name).numpy().copy()
            numbers[k] = value
            getattr(data, name).assign(numbers)

    with play_of("Hopper-v5", max_steps=10) as play:
        play.begin()
        turns, states = played(play, 24)
    assert [[e.length for e in turn.ended] for turn in turns] == [[10] * 3 if t in (9, 19) else [] for t in range(24)]
    assert all(turn.over.all() and not turn.terminated.any() for turn in (turns[9], turns[19]))
    with play_of("Hopper-v5", max_steps=10) as play:
        play.begin()
        broken, after = played(play, 24, before=explode)
    assert capfd.readouterr().err.count("became unstable") == 2
    assert {(t, k) for t, turn in enumerate(broken) for k in np.flatnonzero(~turn.valid)} == {(4, 1), (14, 0)}
    assert all(np.isfinite(turn.next_observations).all() and np.isfinite(turn.rewards).all() for turn in broken)
    for t, (one, other) in enumerate(zip(turns, broken, strict=True)):
        same = [2, *[0] * (t < 14), *[1] * (t < 4)]
        assert one.next_observations[same].tobytes() == other.next_observations[same].tobytes()
    for all_turns, saved, stops in ((turns, states, (0, 7, 10)), (broken, after, (16,))):
        for stop in stops:
            with play_of("Hopper-v5", max_steps=10) as play:
                earlier = back(play, stop, saved[stop])
                assert len(earlier) == max(saved[stop]["length"])
                for expected, got in zip(all_turns[stop:], played(play, 24, stop)[0], strict=True):
                    assert_same(expected, got)


@pytest.mark.slow
def test_contacts_that_find_no_room_and_starts_that_fail(package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the step counts then."""
    with play_of("Hopper-v5", max_steps=3) as play:
        play.begin()
        played(play, 2)
        before = play.state()
        with monkeypatch.context() as patch:
            patch.setattr(type(play.env.unwrapped), "reset_model", lambda self: 1 / 0)
            with pytest.raises(UserError, match=r"failed on reset \(seed 0, environment 0, episode 1\): ZeroDivision"):
                play.step(actions_of(play, 1)[0])
        assert all(torch.equal(x, before[name]) for name, x in play.state().items())
    assert warp.room(play.backend.base.model, play.backend.model) == (14, 74)  # type: ignore[union-attr]
    monkeypatch.setattr(warp, "room", lambda *_: (14, 1))
    with play_of("Hopper-v5") as play:
        play.begin()
        with pytest.raises(UserError, match=r"more than 42 contacts, or 1 constraints in a world, .* backend=threads$"):
            for row in actions_of(play, 20):
                before = play.state()
                play.step(row)
        assert all(torch.equal(x, before[name]) for name, x in play.state().items())


@pytest.mark.slow
def test_a_model_that_it_does_not_step_is_refused(package: Any, tmp_path: Path) -> None:
    import gymnasium.envs.mujoco as robots

    text = (Path(robots.__file__).parent / "assets" / "hopper.xml").read_text()
    assert "<option " in text
    (tmp_path / "hopper.xml").write_text(text.replace("<option ", '<option solver="PGS" '))
    with pytest.raises(UserError, match=r"^backend=warp: MuJoCo Warp does not step this Hopper-v5 .*PGS.*: backend="):
        play_of("Hopper-v5", xml_file=str(tmp_path / "hopper.xml"))


def test_what_it_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(env_id: str, device: str, words: str) -> None:
        spec, task = spec_of(Task(env_id, env_id=env_id))
        with pytest.raises(UserError, match=f"^backend=warp {words}"):
            Play(task, spec, (0,), 1, 0, None, backend="warp", device=device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused("Hopper-v5", "auto", "steps on a CUDA GPU, and torch finds none: backend=threads steps Hopper-v5 on the")
    refused("Humanoid-v5", "cpu", "steps HalfCheetah, .* and Humanoid-v5 is not the id of one: backend=sequential and")
    monkeypatch.setitem(sys.modules, "warp", None)
    refused("Hopper-v5", "cpu", r"needs pip install 'offrl\[warp\]'")


def test_what_only_one_of_two_runs_has_is_told_apart(tmp_path: Path) -> None:
    def claim(**more: Any) -> None:
        start = begin(None, {"algo": "sac_n", "mixing": 0, "env": "Hopper-v5", "steps": 2000, "seeds": 1, **more})
        record.claim(tmp_path, start, "eager", "cpu")

    claim()
    claim(backend="threads")
    for name, value, here in (
        ("backend", "warp", "physics: MuJoCo"),
        ("interventions", "x.py:f", "interventions: None"),
    ):
        with pytest.raises(UserError, match=rf"holds another run \(finetune.{here} there, .* here\)"):
            claim(**{name: value})


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_signals")
def test_a_run_goes_on_after_a_stop(package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bytes on this device; with another back end it is another run."""
    monkeypatch.setattr("offrl.finetuning.summary.picture", lambda *a, **k: False)
    settings = {"algo.hidden": [8], "algo.batch_size": 16, "eval.episodes": 1, "eval.every": 0, "eval.workers": 0}
    moments = play_stops(monkeypatch)

    def tune(name: str, **changes: Any) -> offrl.Run:
        call: dict[str, Any] = {"algo": "sac_n", "mixing": 0, "warmup": 20, "seeds": 1, "envs": 4, "compile": "eager"}
        call |= {"name": name, "backend": "warp", "runs_dir": str(tmp_path), "quiet": True, "device": "cpu"} | changes
        return offrl.finetune(env="Hopper-v5", steps=60, log_every=20, settings=settings, **call)

    expected = tune("expected")
    moments[:] = [32]
    with pytest.raises(offrl.Interrupted):
        tune("stopped")
    with pytest.raises(UserError, match=r"holds another run \(finetune.physics: MuJoCo Warp there, MuJoCo here\)"):
        tune("stopped", backend="threads")
    assert not moments
    run = tune("stopped")
    for file in ("metrics.jsonl", "scores.csv", "episodes.csv", "finetune.json", "policies/seed_0.safetensors"):
        assert (run.dir / file).read_bytes() == (expected.dir / file).read_bytes(), file
