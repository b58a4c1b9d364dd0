"""Goal-conditioned algorithms that learn online: goals of the rows' own episodes, policies towards the environment's
goals, the same after a stop, and what is refused.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import offrl
from offrl import registry, rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.samplers.goals import (
    ACTOR_GOALS,
    HIGH_TARGETS,
    LOW_GOALS,
    SUCCESSES,
    VALUE_GOALS,
    WINDOW_STATES,
    GoalSampler,
    Mix,
)
from offrl.errors import UserError
from offrl.finetuning import summary
from offrl.finetuning.play.environments import Play
from offrl.finetuning.replay.batches import MixedBatches
from offrl.finetuning.replay.ring import Ring
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.system import files as checkpoint
from offrl.tasks.task import Task

SPEC = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,), name="line")


class Line(gym.Env[Any, Any]):
    """Observations (a number of the episode's own, x): x moves by half of the action, from 0 to a goal in front or
    behind; time ends after 4 to 6 steps. Counts all steps of all, and sends a signal at one.
    """

    observation_space = spaces.Box(-99.0, 99.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, (1,))
    steps, stop_at = 0, -1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t, self.limit = 0.0, 0, int(self.np_random.integers(4, 7))
        self.episode = float(self.np_random.uniform())
        self.goal = float(options["goal"]) if options else float(self.np_random.choice([-1.0, 1.0]))
        return self._get_obs(), {"goal": np.array([0.0, self.goal], np.float32)}

    def _get_obs(self) -> np.ndarray:
        return np.array([self.episode, self.x], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        Line.steps += 1
        if Line.steps == Line.stop_at:
            os.kill(os.getpid(), signal.SIGINT)
        self.x, self.t = self.x + 0.5 * float(action[0]), self.t + 1
        success = abs(self.x - self.goal) < 0.1
        return self._get_obs(), 0.0, success, self.t >= self.limit, {"success": success}


def played(sampler: GoalSampler, actions: int = 40, **task: Any) -> tuple[Ring, Play]:
    """The ring after that many steps of two environments, each of a replica of its own, which go to the right."""
    columns = columns_for(SPEC, sampler, "it")
    rows = Rows(SPEC, columns, 2, 1, returns_of(sampler, 0.9), sampler)
    ring = Ring(rows.columns, 2, actions, torch.device("cpu"))
    with Play(Task("line", env_factory=Line, **task), SPEC, (0, 1), 1, 0, None) as made:
        made.goal_dim = 2
        made.begin()
        for _ in range(actions):
            ring.add(*rows.take(made.step(np.full((2, 1), 0.2, np.float32))))
    return ring, made


def last_rows(ring: Ring, episode: torch.Tensor) -> torch.Tensor:
    """The step of the last row of each episode [...]: the state after it is no row."""
    every = ring.take(torch.arange(int(ring.counts.max())).expand(2, -1))["observations"].flatten(0, 1)
    names = every[:, 0].unique()
    steps = {float(name): float((10 * every[every[:, 0] == name][:, 1]).round().max()) for name in names if name}
    assert set(steps.values()) == {3.0, 4.0, 5.0}
    return torch.tensor([steps[float(name)] for name in episode.flatten()]).reshape(episode.shape)


def batch_of(ring: Ring, sampler: GoalSampler, size: int = 500) -> Any:
    keys = torch.stack([rng.make_key(seed) for seed in (0, 1)])
    return MixedBatches(ring, sampler, None, keys, size, 0.0).get(3)


@pytest.mark.parametrize("geometric", [True, False])
def test_goals_are_later_rows_of_the_same_episode(geometric: bool) -> None:
    """Observations tell the episode and the step: the n-th one stands at 0.1 n."""
    sampler = GoalSampler(Mix(0.2, 0.8, 0.0, geometric), Mix(0.0, 1.0, 0.0, geometric))
    ring, _ = played(sampler)
    assert all(34 < count <= 40 for count in ring.counts.tolist())  # episodes come when they have ended
    batch = batch_of(ring, sampler)
    for replica in range(2):
        episode, x = batch["observations"][replica].unbind(-1)
        step, last = (10 * x).round(), last_rows(ring, episode)
        for name in (VALUE_GOALS, ACTOR_GOALS):
            goals = batch[name][replica]
            ahead = (10 * goals[:, 1]).round()
            assert (goals[:, 0] == episode).all() and (ahead <= last).all() and (ahead >= step).all()
        same = batch[VALUE_GOALS][replica] == batch["observations"][replica]
        assert (batch[SUCCESSES][replica].bool() == same.all(-1)).all() and 0 < int(same.all(-1).sum()) < 500
        following = (10 * batch[ACTOR_GOALS][replica][:, 1]).round() > step
        assert (following == (step < last)).all()
        assert len({int(v) for v in ahead[step == 0]}) > 2
        torch.testing.assert_close(batch["next_observations"][replica][:, 1], x + 0.1)


def test_subgoals_and_windows_stay_in_the_episode() -> None:
    mix = Mix(0.0, 0.5, 0.5)
    ring, _ = played(GoalSampler(mix, mix, subgoal_steps=2))
    batch = batch_of(ring, GoalSampler(mix, mix, subgoal_steps=2))
    episode, x = batch["observations"].unbind(-1)
    ahead = torch.minimum((10 * x).round() + 2, last_rows(ring, episode))
    torch.testing.assert_close(batch[LOW_GOALS], torch.stack([episode, 0.1 * ahead], -1))
    assert (batch[HIGH_TARGETS][..., 0] == episode).all()
    assert (batch[VALUE_GOALS][..., 0] != episode).any()  # goals of any row
    batch = batch_of(ring, GoalSampler(mix, mix, n_step=3))
    assert (batch[WINDOW_STATES][..., 0] == batch["observations"][..., 0]).all()


def test_episodes_are_played_towards_the_tasks_of_the_data_in_turn() -> None:
    starts = ({"goal": 0.3}, {"goal": -1.0})
    _, made = played(GoalSampler(None, Mix(0.0, 1.0, 0.0)), 5, starts=starts)
    assert [seat.episode for seat in made.seats] == [1, 1]  # 0.3 is there after 3 of 4 steps
    assert made.goals.tolist() == [[0.0, -1.0]] * 2


def test_policies_act_towards_the_goals_of_their_episodes() -> None:
    """The memory holds no goal of an episode before."""
    from offrl.finetuning.learner import Learner
    from offrl.settings.replicas import Replica
    from offrl.training.engine import Plan, first_state

    kind = registry.get("algo", "gciql")
    algorithm = kind(kind.Config(hidden=[8], batch_size=4), SPEC)
    replicas = [Replica(0, ()), Replica(1, ())]
    state = first_state(algorithm, replicas)
    ring, _ = played(algorithm.sampler())
    batches = MixedBatches(ring, algorithm.sampler(), None, state.key, 4, 0.0)
    learner = Learner(Plan(algorithm, 4, "eager", "float32", 2), batches, replicas, torch.device("cpu"), {}, {})
    learner.load(state, state, {})
    learner.begin(3, {})
    draw = np.random.default_rng(0)
    for t in range(2):
        observations, goals = draw.normal(size=(2, 2, 3, 2)).astype(np.float32)
        actions = learner.act(observations, t, 0.0, np.zeros((2, 3), bool), goals)
        for n, replica in enumerate(replicas):
            (policy,) = (p for p in offrl.training.engine.policies_of(algorithm, learner.acting(), replicas)
                         if p.seed == replica.seed)  # fmt: skip
            np.testing.assert_allclose(actions[n], policy.act(observations[n], goal=goals[n]), atol=1e-6)


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    "algo",
    [
        "gciql",
        "hiql",
        *(pytest.param(n, marks=pytest.mark.nightly) for n in ("gcbc", "gcivl", "crl", "qrl", "ota", "sharsa")),
    ],
)
def test_a_stop_leaves_no_trace(algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)
    settings: dict[str, Any] = {"algo.hidden": [4], "algo.batch_size": 8, "eval.episodes": 1, "eval.workers": 0}
    settings |= {"eval.every": 0, "log_every": 7, "compile": "eager"}
    rows = np.zeros((8, 2))
    data = from_arrays(rows, rows[:, :1], rows[:, 0], episode_ends=[3, 7], action_low=[-1.0], action_high=[1.0])

    def tune(name: str) -> offrl.Run:
        monkeypatch.setattr(Line, "steps", 0)
        run: dict[str, Any] = {"algo": algo, "env": Line, "seeds": 2, "device": "cpu", "quiet": True, "steps": 24}
        return offrl.finetune(
            dataset=data, mixing=0.5, warmup=8, name=name, runs_dir=str(tmp_path), settings=settings, **run
        )

    whole = tune("whole")
    assert whole.score_rows[0]["success"] is not None
    monkeypatch.setattr(Line, "stop_at", 12 + 2 * 17)
    with pytest.raises(offrl.Interrupted):
        tune("stopped")
    monkeypatch.setattr(Line, "stop_at", -1)
    again = tune("stopped")
    (tensors, _), (expected, _) = (checkpoint.load_latest(run.dir) or ({}, {}) for run in (again, whole))
    assert expected and all(torch.equal(tensors[k], v) for k, v in expected.items())
    for name in ("metrics.jsonl", "scores.csv", "policies/seed_1.safetensors"):
        assert (again.dir / name).read_bytes() == (whole.dir / name).read_bytes(), name


def test_what_cannot_be_played_is_refused(tmp_path: Path) -> None:
    call: dict[str, Any] = {"mixing": 0, "steps": 20, "warmup": 5, "runs_dir": str(tmp_path), "quiet": True}
    with pytest.raises(UserError, match=r"Pendulum-v1: reset gave no goal \(seed 0, environment 0, episode 0\)"):
        offrl.finetune(algo="gciql", env="Pendulum-v1", **call)
    with pytest.raises(UserError, match="capacity=10 would overwrite episodes from which hiql draws goals"):
        offrl.finetune(algo="hiql", env=Line, capacity=10, **call)
    data = from_arrays(
        np.zeros((4, 3)), np.zeros((4, 1)), np.zeros(4), episode_ends=[3], achieved_goals=np.zeros((4, 2))
    )
    with pytest.raises(UserError, match="those of arrays are parts of a state"):
        offrl.finetune(algo="gciql", env=Line, dataset=data, **call)
