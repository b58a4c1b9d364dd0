"""Learning in context: the classical learners, playing several episodes with one memory, and the command."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from offrl.cli.adapt import chosen
from offrl.cli.main import main
from offrl.envs import bandits
from offrl.errors import UserError
from offrl.evaluation.in_context import Arena, Played, table, unseen
from offrl.figures.evaluations import draw_in_context
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task

BANDITS = bandits.TASK


class Counting(gym.Env):
    """Observation: task and step. It ends after as many steps as the task's number; the reward is the action."""

    def __init__(self, task: int = 1) -> None:
        self.task, self.t = task, 0
        self.observation_space = spaces.Box(-100, 100, (2,), np.float32)
        self.action_space = spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        return np.array([self.task, 0], np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.task, self.t], np.float32), float(action), self.t == self.task, False, {}


gym.register("offrl-test/Counting-v0", entry_point=Counting)


class Recorder:
    """Acts by the parity of the step and writes down all that it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def begin(self, tasks: Any, seed: int) -> Any:
        return 0

    def step(self, memory: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        self.told.append(("step", t, observations.copy()))
        return np.full(len(observations), 1 + t % 2), memory

    def observe_reward(self, memory: Any, rewards: np.ndarray) -> Any:
        self.told.append(("observe_reward", rewards.copy()))
        return memory

    def new_episode(self, memory: Any, observations: np.ndarray, lengths: np.ndarray) -> Any:
        self.told.append(("new_episode", observations.copy(), lengths.copy()))
        return memory


def test_episodes_of_different_lengths() -> None:
    recorder = Recorder()
    with Arena(Task("counting", "offrl-test/Counting-v0"), [2, 3]) as arena:
        played = arena.play(recorder, 2)
    assert played.ends == (3, 6) and played.regrets is None
    np.testing.assert_array_equal(played.rewards, [[1, 2, 0, 2, 1, 0], [1, 2, 1, 2, 1, 2]])
    np.testing.assert_array_equal(played.returns(), [[3, 3], [4, 5]])
    assert [t[1] for t in recorder.told if t[0] == "step"] == list(range(6))
    renewals = [t for t in recorder.told if t[0] == "new_episode"]
    assert len(renewals) == 1, "after the last episode nothing is to come"
    np.testing.assert_array_equal(renewals[0][1], [[2, 2], [3, 3]])
    np.testing.assert_array_equal(renewals[0][2], [2, 3])
    np.testing.assert_array_equal(recorder.told[4][2], [[0, 0], [3, 2]])  # the first task's episode is over
    x, values, what = played.curve()
    assert x.tolist() == [1, 2] and what == "return" and values.tolist() == [[3, 3], [4, 5]]


class Fixed(Recorder):
    """Pulls arm 1."""

    def step(self, memory: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return np.ones(len(observations), np.int64), memory


def test_regret_is_the_sum_of_the_gaps() -> None:
    tasks = [3, 1_000_000]
    with Arena(BANDITS, tasks, seed=1, max_steps=7) as arena:
        played = arena.play(Fixed(), 1)
        again = arena.play(Fixed(), 1)
    np.testing.assert_array_equal(played.rewards, again.rewards)
    for row, number in enumerate(tasks):
        means = bandits.Bandit().means_of(number)
        x, values, what = played.curve()
        assert what == "cumulative regret" and x.tolist() == [1, 2, 3, 4, 5, 6, 7]
        np.testing.assert_allclose(values[row], (means.max() - means[1]) * np.arange(1, 8))
    with Arena(BANDITS, tasks[1:], seed=1, max_steps=7) as arena:  # whatever is played beside it
        np.testing.assert_array_equal(arena.play(Fixed(), 1).rewards[0], played.rewards[1])


# ---- classical learners


@pytest.mark.parametrize("features", [None, 2])
def test_thompson_samplings_posterior(features: int | None) -> None:
    """Mean and covariance by summing over all that was seen, one observation after another (Bayesian linear
    regression).
    """
    env = bandits.Bandit(features=features)
    learner = env.learners()["Thompson sampling"]
    g = np.random.default_rng(0)
    pulls, rewards = g.integers(0, 5, 9), g.normal(size=9)
    memory = learner.begin([0], 0)
    d = env.phi.shape[1]
    prior = (0.5, 1 / 12) if features is None else (0.0, 0.5)
    mean, covariance = np.full(d, prior[0]), np.eye(d) * prior[1]
    for arm, reward in zip(pulls, rewards, strict=True):
        memory = learner.observe_reward({**memory, "actions": np.array([arm])}, np.array([reward]))
        phi = env.phi[arm]
        gain = covariance @ phi / (phi @ covariance @ phi + 0.3**2)  # Kalman
        mean, covariance = mean + gain * (reward - phi @ mean), covariance - np.outer(gain, phi @ covariance)
    found = learner.posterior(memory)
    np.testing.assert_allclose(found[0][0], mean, atol=1e-10)
    np.testing.assert_allclose(found[1][0], covariance, atol=1e-10)
    drawn = [learner.step({**memory, "rng": np.random.default_rng(s)}, np.zeros((1, 1)), 0)[0][0] for s in range(2000)]
    samples = np.random.default_rng(5).multivariate_normal(mean, covariance, 20_000) @ env.phi.T
    expected = np.bincount(samples.argmax(1), minlength=5) / 20_000
    np.testing.assert_allclose(np.bincount(drawn, minlength=5) / 2000, expected, atol=0.04)


def test_ucb() -> None:
    learner = bandits.Bandit().learners()["UCB"]
    memory, order = learner.begin([0], 0), []
    for reward in (0.1, 0.9, 0.2, 0.3, 0.4):
        action, memory = learner.step(memory, np.zeros((1, 1)), 0)
        order.append(int(action[0]))
        memory = learner.observe_reward(memory, np.array([reward]))
    assert order == [0, 1, 2, 3, 4], "each arm once"
    for _ in range(2):  # 0.9 + 1 is the largest bound, then 0.9 + 1 / sqrt(2) still is
        action, memory = learner.step(memory, np.zeros((1, 1)), 0)
        assert int(action[0]) == 1
        memory = learner.observe_reward(memory, np.array([0.9]))
    assert int(learner.step(memory, np.zeros((1, 1)), 0)[0][0]) == 1  # 0.9 + 0.577 > 0.4 + 1
    greedy = bandits.Bandit().learners()["empirical mean"]
    assert int(greedy.step({**memory, "rng": None}, np.zeros((1, 1)), 0)[0][0]) == 1


@pytest.mark.parametrize("settings", [{}, {"arms": 10, "features": 2}])
def test_they_learn(settings: dict[str, Any]) -> None:
    """Less regret than random arms have, and the later the less."""
    task = Task("b", BANDITS.env_id, settings, max_episode_steps=100)
    with Arena(task, unseen(make_env(task), 40, "b")) as arena:
        for name, learner in bandits.Bandit(**settings).learners().items():
            regret = arena.play(learner, 1).regrets
            assert regret is not None
            assert regret[:, 50:].mean() < 0.5 * regret[:, :3].mean(), name


# ---- what is written, and mistakes


def test_table_and_picture(tmp_path: Path) -> None:
    one = Played((4, 5), np.ones((2, 3)), np.array([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]]), (3,))
    rows = list(csv.DictReader(table({"a": [one, one]}).splitlines()))
    assert [(r["policy"], r["x"], float(r["mean"]), float(r["std_over_tasks"])) for r in rows[:3]] == [
        ("0", "1", 0.5, 0.5),
        ("0", "2", 0.5, 0.5),
        ("0", "3", 2.0, 1.0),
    ]
    assert len(rows) == 6 and rows[0]["what"] == "cumulative regret"
    draw_in_context({"a": [one], "b": [one, one]}, tmp_path / "x.png", "t")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"


def test_mistakes() -> None:
    env = make_env(Task("cart", "CartPole-v1"))
    with pytest.raises(UserError, match=r"no attribute held_out\); name some: tasks=\[7,8,9\]"):
        unseen(env, 3, "CartPole-v1")
    with (
        pytest.raises(UserError, match="takes its task as an argument, task=NUMBER"),
        Arena(Task("cart", "CartPole-v1"), [1]),
    ):
        pass
    room = Task("darkroom", "offrl.envs.darkroom:offrl/Darkroom-v0")
    with pytest.raises(UserError, match="has 20 tasks that are in no data; tasks=21 asks for more"):
        unseen(make_env(room), 21, "it")
    assert unseen(make_env(room), 20, "it") == list(range(80, 100))
    for wrong in (0, -1, True, [], [1, 1], [1.5], "3", [-1], None):
        with pytest.raises(UserError, match="must be how many tasks"):
            chosen(wrong, lambda count: [])
    assert chosen([7, 9], lambda count: []) == [7, 9]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = (
        "algo.context=6 algo.width=8 algo.layers=1 algo.batch_size=4 steps=3 seeds=2 eval.every=0 eval.episodes=1 "
        "eval.max_steps=5"
    )
    where = f"runs_dir={tmp_path} name=x quiet=true compile=eager workers=1"
    assert main(["train", "algo=dpt", "dataset=bandits", *small.split(), *where.split()]) == 0
    capsys.readouterr()
    assert main(["adapt", str(tmp_path / "x"), "tasks=3", "max_steps=9"]) == 0
    out = capsys.readouterr().out
    assert "Thompson sampling" in out and "dpt" in out and "cumulative regret: mean over 3 tasks" in out
    rows = list(csv.DictReader((tmp_path / "x" / "in_context.csv").read_text().splitlines()))
    assert sum(r["learner"] == "dpt" for r in rows) == 18 and (tmp_path / "x" / "in_context.png").exists()
    assert main(["adapt", str(tmp_path / "x"), "tasks=3", "max_steps=4", "episodes=2", f"out={tmp_path / 'y'}"]) == 0
    assert len(list(csv.DictReader((tmp_path / "y" / "in_context.csv").read_text().splitlines()))) == 10
    capsys.readouterr()
    for wrong, message in (
        (["adapt"], "usage: offrl adapt"),
        (["adapt", str(tmp_path / "x"), "task=3"], "has no setting 'task'"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
