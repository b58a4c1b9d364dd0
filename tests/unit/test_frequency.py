"""Policies that decide once in several steps: what they see and play, the frequency score, the table and the
picture.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offrl
from offrl.api import Run
from offrl.cli.main import main
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool.protocol import from_bytes, to_bytes
from offrl.evaluation.sweeps import HeldPolicy, trapezoid
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.task import lookup
from tests.support.cases import Case

SMALL = {"compile": "eager", "quiet": True, "eval.every": 0, "compare": []}
TWICE = {"algo.hidden": [8], "grid.learning_rate": [1e-3, 1e-2]}


@pytest.fixture(scope="module")
def bc(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return offrl.train(
        "bc",
        "chain-stitch",
        seeds=2,
        steps=3,
        runs_dir=str(tmp_path_factory.mktemp("runs")),
        settings={**SMALL, **TWICE},
    )


def policy(name: str, **settings: Any) -> TrainedPolicy:
    algorithm = Case(name).make(**settings)
    return TrainedPolicy(algorithm, algorithm.init(0), 0)


def played(held: HeldPolicy, steps: int, rows: int = 2, reward: float = 0.0) -> tuple[np.ndarray, np.ndarray, Any]:
    """Actions [T, E, A] and observations [T, E, O] of `steps` steps, other observations at each; and the last carry."""
    observations = np.random.default_rng(1).normal(size=(steps, rows, 4)).astype(np.float32)
    carry, actions = held.start(rows), []
    for t in range(steps):
        a, carry = held.step(carry, observations[t], t)
        carry = held.observe_reward(carry, np.full(rows, reward * (t + 1)))
        actions.append(a)
    return np.stack(actions), observations, carry


def test_frequency_score_of_known_curves() -> None:
    """Worked out by hand: J.8 no. 1; the code of Sequence RL divides the same areas by 30 where this divides by 29."""
    steps = [1, *range(2, 31, 2)]
    assert trapezoid(steps, np.array([1000.0 - 20.0 * d for d in steps])) / 29_000.0 == pytest.approx(0.69)
    assert trapezoid(steps, np.array([float(d <= 4) for d in steps])) / 29.0 == pytest.approx(4.0 / 29.0)
    assert trapezoid(steps, np.exp(-np.array(steps) / 10.0)) / 29.0 == pytest.approx(0.295752942)
    curves = np.array([[100.0, 90.0, 70.0, 40.0, 10.0], np.full(5, 7.0)]).T  # a constant is its own mean
    np.testing.assert_allclose(trapezoid([1, 2, 4, 8, 16], curves) / 15.0, [45.0, 7.0])


def test_a_policy_without_a_queue_holds_its_action() -> None:
    own = policy("td3_bc")
    actions, observations, _ = played(HeldPolicy(own, 3), 7)
    for t in range(7):
        np.testing.assert_array_equal(actions[t], own.step(None, observations[t - t % 3], 0)[0])
    every, observations, _ = played(HeldPolicy(own, 1), 4)
    np.testing.assert_array_equal(every, [own.step(None, o, t)[0] for t, o in enumerate(observations)])


@pytest.mark.parametrize("every", [1, 2, 6])
def test_a_policy_with_a_queue_plays_it_and_then_holds_the_last(every: int) -> None:
    own = policy("flow_bc", length=4, greedy="sample")
    actions, observations, _ = played(HeldPolicy(own, every), 9)
    for t in range(9):
        decision, place = t - t % every, t % every
        carry = own.start(2)
        # the whole chunk, from what was seen at the decision, with its random numbers
        for k in range(min(place, 3) + 1):
            expected, carry = own.step(carry, observations[decision], decision + k)
        np.testing.assert_array_equal(actions[t], expected)
    assert len(np.unique(actions[:every, 0], axis=0)) == min(every, 4)


def test_a_memory_counts_decisions_and_hears_what_they_earned() -> None:
    own = policy("dt", target_return=100.0)
    held = HeldPolicy(own, 3)
    _, observations, carry = played(held, 6, reward=1.0)
    scale, shift = own.algorithm.spec.reward_scale, own.algorithm.spec.reward_shift
    assert (scale, shift) == (1.0, 0.0)
    # 1 + 2 + 3, then 4 + 5 + 6
    assert carry.inner.remaining.tolist() == [94.0, 94.0] and carry.earned.tolist() == [15.0, 15.0]
    _, carry = held.step(carry, observations[0], 6)
    assert carry.inner.remaining.tolist() == [79.0, 79.0]
    assert carry.inner.window["timesteps"][0].tolist() == [0, 1, 2]


def test_goals_reach_the_policy() -> None:
    own, goals = policy("gcbc"), np.random.default_rng(2).normal(size=(2, 4)).astype(np.float32)
    held = HeldPolicy(own, 2)
    observations = np.ones((2, 4), np.float32)
    first, carry = held.step(held.set_goal(held.start(2), goals), observations, 0)
    np.testing.assert_array_equal(first, own.step(own.set_goal(own.start(2), goals), observations, 0)[0])
    np.testing.assert_array_equal(held.step(carry, 0 * observations, 1)[0], first)


def test_the_same_start_states_and_bits_as_every_evaluation(bc: Run) -> None:
    scores = bc.evaluate_frequency([1, 2, 4], episodes=3)
    alone = bc.evaluate(episodes=3)
    np.testing.assert_array_equal(scores.evaluations[0].returns, alone.returns)
    assert scores.values.shape == (3, 4) and scores.decisions[0].tolist() == alone.lengths.mean(1).tolist()
    expected = np.ceil(scores.evaluations[2].lengths / 4).mean(1)
    assert scores.decisions[2].tolist() == expected.tolist()
    np.testing.assert_allclose(
        scores.frequency_score, (scores.values[0] / 2 + 1.5 * scores.values[1] + scores.values[2]) / 3
    )
    assert bc.evaluate_frequency([5], episodes=1).frequency_score is None


def test_handed_to_another_process(bc: Run) -> None:
    """As the evaluation pool does it."""
    task, algorithms = lookup("chain-stitch"), []
    assert task is not None
    held = HeldPolicy(bc.policy(learning_rate=1e-2), 3)
    copy = from_bytes(to_bytes(held, algorithms), algorithms)  # type: ignore[arg-type]
    with Evaluator(task, EvalConfig(episodes=4)) as evaluator:
        np.testing.assert_array_equal(evaluator([held], [0]).returns, evaluator([copy], [0]).returns)


@pytest.mark.rendered
def test_command(bc: Run, capsys: pytest.CaptureFixture[str], pictures: dict[str, Any]) -> None:
    assert main(["evaluate", str(bc.dir), "frequency=1,2,4", "episodes=2"]) == 0
    out = capsys.readouterr().out
    assert (
        out.count("decisions per episode") == 2
        and "frequency score, the mean score from 1 to 4 steps per decision" in out
    )
    with open(Path(bc.dir) / "frequency.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert (
        len(rows) == 12
        and {r["steps_per_decision"] for r in rows} == {"1", "2", "4"}
        and {r["learning_rate"] for r in rows} == {"0.001", "0.01"}
    )
    lines = pictures["frequency.png"].axes[0].lines
    first = [
        np.mean([float(r["score"]) for r in rows if r["steps_per_decision"] == d and r["learning_rate"] == "0.001"])
        for d in "124"
    ]
    np.testing.assert_allclose(lines[0].get_ydata(), first, rtol=1e-5)
    assert list(lines[0].get_xdata()) == [1, 2, 4]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["frequency=[0,2]"], "whole numbers from 1 to 10,000"),
        (["frequency=[often]"], "frequency"),
        (["frequency=[4,2]"], "ascend, each once: [2, 4]"),
        (["frequency=[2,2]"], "ascend"),
        (["frequency=[1,2]", "target_returns=auto"], "target_returns and frequency are different evaluations"),
        (["frequency=[1,2]", "video=true"], "leave frequency= out"),
    ],
)
def test_bad_input_is_one_line(bc: Run, capsys: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    assert main(["evaluate", str(bc.dir), *given]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_how_much_of_a_queue_is_played_is_decided_once() -> None:
    with pytest.raises(UserError, match="only action_steps"):
        policy("flow_bc", length=4).with_settings({"length": 2})
    assert HeldPolicy(policy("flow_bc", length=1), 4).planned == 1
    assert HeldPolicy(policy("flow_bc", length=4), 9).planned == 4
