"""Policies that are asked for returns: what they hear in evaluation, other wishes, the table and the picture."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import offrl
from offrl import registry
from offrl.api import Run
from offrl.cli.main import main
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.sweeps import data_range, spread_targets
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.task import lookup

SMALL = {
    "algo.width": 8,
    "algo.layers": 1,
    "algo.context": 3,
    "compile": "eager",
    "quiet": True,
    "eval.every": 0,
    "compare": [],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return offrl.train(
        "dt", "chain-stitch", seeds=2, steps=3, runs_dir=str(tmp_path_factory.mktemp("runs")), settings=SMALL
    )


@pytest.fixture(scope="module")
def bc(tmp_path_factory: pytest.TempPathFactory) -> Run:
    small = {k: v for k, v in SMALL.items() if not k.startswith("algo.")}
    return offrl.train(
        "bc", "chain-stitch", seeds=1, steps=3, runs_dir=str(tmp_path_factory.mktemp("runs")), settings=small
    )


class Spy:
    """Always moves along +x, and writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[list[float]] = []

    def start(self, episodes: int) -> int:
        return 0

    def step(self, carry: int, observations: np.ndarray, t: int) -> tuple[np.ndarray, int]:
        return np.zeros(len(observations), np.int64), carry + 1

    def observe_reward(self, carry: int, rewards: np.ndarray) -> int:
        assert carry == len(self.heard) + 1
        self.heard.append(rewards.tolist())
        return carry


def test_a_policy_hears_its_rewards() -> None:
    task, spy = lookup("chain-stitch"), Spy()
    assert task is not None
    with Evaluator(task, EvalConfig(episodes=2)) as evaluator:
        result = evaluator([spy], [0])
    assert spy.heard == [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [0.0, 0.0]] and result.returns.tolist() == [[1.0, 1.0]]


def test_what_was_earned_is_taken_off(run: Run) -> None:
    policy = run.policy(seed=0)
    env = gym.make("offrl.envs.point:offrl/ChainStitch-v0")
    observation, _ = env.reset(seed=0)
    action, left, over = policy.act(observation), policy.algorithm.config.target_return, False
    assert left == 2.0
    while not over:
        observation, reward, terminated, truncated, _ = env.step(int(action))
        over, left = terminated or truncated, left - float(reward)
        action = policy.act(observation, reward=reward)
        assert float(policy._carry.window["returns_to_go"][0, -1]) == pytest.approx(left)


def test_with_another_target_return(run: Run, bc: Run) -> None:
    policy = run.policy(seed=0)
    other = policy.with_target_return(-7.5)
    assert float(other.start(1).remaining) == -7.5 and float(policy.start(1).remaining) == 2.0
    with pytest.raises(UserError, match="target_return=nan is not finite"):
        policy.with_target_return(float("nan"))
    with pytest.raises(UserError, match="a policy of bc cannot be asked"):
        bc.policy().with_target_return(1.0)


def test_several_returns_at_once(run: Run) -> None:
    achieved = run.evaluate_target_returns([1.0, 3.0], episodes=2)
    assert achieved.targets == (1.0, 3.0) and len(achieved.evaluations) == 2
    alone = run.evaluate_target_returns([3.0], episodes=2).evaluations[0]
    assert np.array_equal(alone.returns, achieved.evaluations[1].returns) and alone.returns.shape == (2, 2)
    assert spread_targets(0.0, 100.0) == [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]
    assert spread_targets(5.0, 5.0) == [5.0]
    assert run.evaluate_target_returns(episodes=1).targets[-1] == pytest.approx(2.2)


@pytest.mark.rendered
def test_command(run: Run, bc: Run, capsys: pytest.CaptureFixture[str], pictures: dict[str, Any]) -> None:
    assert main(["evaluate", str(run.dir), "target_returns=[0.5,2]", "episodes=1"]) == 0
    out = capsys.readouterr().out
    assert "target return" in out and "score [95% interval]" in out and out.count(".png") == 1
    with open(Path(run.dir) / "target_returns.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(float(r["target_return"]), r["seed"]) for r in rows] == [(0.5, "0"), (0.5, "1"), (2.0, "0"), (2.0, "1")]
    assert (Path(run.dir) / "target_returns.png").stat().st_size > 10_000
    mean, first, second, equal, _ = pictures["target_returns.png"].axes[0].lines
    achieved = {seed: [float(r["return_mean"]) for r in rows if r["seed"] == seed] for seed in ("0", "1")}
    np.testing.assert_allclose([first.get_ydata(), second.get_ydata()], [achieved["0"], achieved["1"]], rtol=1e-5)
    np.testing.assert_allclose(mean.get_ydata(), np.mean([achieved["0"], achieved["1"]], 0), rtol=1e-5)
    assert list(mean.get_xdata()) == list(equal.get_ydata()) == [0.5, 2.0]
    assert main(["evaluate", str(bc.dir), "target_returns=auto"]) == 2
    assert "cannot be asked for a return" in capsys.readouterr().err
    assert main(["evaluate", str(run.dir), "target_returns=[often]"]) == 2
    assert "target_returns is auto, or a list of numbers" in capsys.readouterr().err


def test_pairs_of_a_return_and_a_limit(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: dict[str, Any]
) -> None:
    """CDT's two prompts: each pair is told to the policies, and its limit is what their costs are held against."""
    small = {**SMALL, "algo.heads": 2, "algo.batch_size": 8}
    cdt = offrl.train("cdt", "forbidden-disc", seeds=2, steps=3, runs_dir=str(tmp_path), settings=small)
    pairs = [(-20.0, 4.0), (-20.0, 16.0)]
    achieved = cdt.evaluate_target_returns(pairs, episodes=2, max_steps=5)
    assert list(zip(achieved.targets, achieved.limits, strict=True)) == pairs
    assert [e.limits.tolist() for e in achieved.evaluations] == [[[4.0] * 2] * 2, [[16.0] * 2] * 2]
    assert achieved.safe([0, 1])[0][0] == 1.0 and achieved.costs([0])[1][0] == 0.0
    assert main(["evaluate", str(cdt.dir), "target_returns=[[-20,4],[-20,16]]", "episodes=1", "max_steps=5"]) == 0
    assert "safe seeds [95% interval]" in capsys.readouterr().out
    with open(Path(cdt.dir) / "target_returns.csv", newline="") as file:
        assert [(r["cost_limit"], r["cost"], r["safe"]) for r in csv.DictReader(file)][2] == ("16.0", "0.0", "1.0")
    assert [h.get_text() for h in pictures["target_returns.png"].axes[0].get_legend().get_texts()] == [
        "-20, limit 4",
        "-20, limit 16",
    ]
    with pytest.raises(UserError, match="of pairs of a return and a limit"):
        cdt.evaluate_target_returns([1.0, (1.0, 2.0)])
    with pytest.raises(UserError, match="a policy of dt cannot act with another cost_limit, only target_return"):
        run.evaluate_target_returns(pairs)


def test_targets_of_the_rest_of_an_episode_are_spread_over_the_scale() -> None:
    """Decision Diffuser's are discounted: an episode's return, here 3000, is none that it could be asked for."""
    data = {"return_min": -5.0, "return_max": 3000.0}
    kind = registry.get("algo", "decision_diffuser").Config
    assert data_range(registry.get("algo", "dt").Config(), data) == (-5.0, 3000.0)
    assert data_range(kind(target_return=360.0, return_scale=400.0), data) == (0.0, 400.0)
    assert data_range(kind(target_return=-11.0, return_scale=400.0), data) == (-400.0, 0.0)
