"""The outcome of fine-tuning, by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offrl.finetuning.outcome import outcomes, play_regrets, recovery, regret_area, regret_mean, steps_to
from offrl.finetuning.summary import budget_text, milestones
from offrl.settings.replicas import Replica
from offrl.statistics.aggregate import aggregates, probability_of_improvement
from offrl.tasks.task import Task

CURVE = {0: 40.0, 10: 50.0, 20: 70.0, 30: 90.0}
HALVES = {0: 0.0, 10: 100.0, 40: 100.0}  # gaps of 10 and 30 steps


def test_regrets_of_evaluations() -> None:
    assert regret_mean(CURVE) == pytest.approx(0.3, rel=1e-6)  # 1 - (.5 + .7 + .9) / 3
    assert regret_area(CURVE) == pytest.approx(0.3833333333, rel=1e-6)  # 1 - (.45 + .6 + .8) / 3
    assert regret_mean(HALVES) == pytest.approx(0.0)
    assert regret_area(HALVES) == pytest.approx(0.125, rel=1e-6)  # 1 - (10 x .5 + 30 x 1) / 40
    assert regret_area({0: 150.0, 10: 150.0}) == pytest.approx(-0.5, rel=1e-6)  # better than the reference


def test_recovery_and_steps_to_a_score() -> None:
    fell = {0: 60.0, 1: 40.0, 2: 61.0, 3: 58.0, 4: 70.0}
    assert recovery(fell, 1.0) == 4 and recovery(fell, 3.0) == 2 and recovery(fell, 30.0) == 0
    assert recovery({0: 60.0, 1: 40.0, 2: 59.0}, 3.0) is None  # near, never there
    assert [steps_to(CURVE, level) for level in (50, 75, 90)] == [20, 30, None]  # means 45, 60, 80


def test_regrets_of_play_leave_snapshot_episodes_out() -> None:
    rows = [
        {"return": 10.0, "length": 2.0, "success": 1.0, "start": "task"},
        {"return": 0.0, "length": 8.0, "success": 0.5, "start": "task"},
        {"return": 90.0, "length": 3.0, "success": 1.0, "start": "data"},
    ]
    by_return, by_success = Task("a", ref_min=0.0, ref_max=10.0), Task("a", scored_by="success")
    assert play_regrets(by_return, rows) == pytest.approx((0.5, 0.8), rel=1e-6)  # weights 2 and 8
    assert play_regrets(by_success, rows) == pytest.approx((0.25, 0.4), rel=1e-6)
    assert play_regrets(Task("a"), rows) is None and play_regrets(by_return, rows[2:]) is None


def test_the_outcome_of_a_run(tmp_path: Path) -> None:
    """Two seeds, evaluations at 0, 10, 50, 100 of 100 steps; references 0 and 200, episodes of deviation 20. 99 steps
    were asked for, which two environments cannot play."""
    returns = {0: [100.0, 60.0, 90.0, 120.0], 1: [80.0, 80.0, 100.0, 180.0]}
    steps = (0, 10, 50, 100)
    rows = [
        {"step": t, "seed": seed, "score": values[i] / 2, "return_mean": values[i], "return_std": 20.0, "episodes": 5,
         "success": None}
        for seed, values in returns.items() for i, t in enumerate(steps)
    ]  # fmt: skip
    (tmp_path / "config.yaml").write_text("steps: 99\nenvs: 2\nutd: 0.5\nmixing: null\n")
    (tmp_path / "timing.jsonl").write_text(
        '{"step": 50, "online": 30.0, "updates": 20}\n{"step": 100, "updates": 45}\n'
    )
    (tmp_path / "episodes.csv").write_text(
        "step,seed,return,length,success,start\n20,0,100.0,20,,task\n60,1,50.0,60,,task\n"
    )
    run: Any = SimpleNamespace(
        dir=tmp_path, score_rows=rows, replicas=[Replica(0), Replica(1)],
        spec=SimpleNamespace(task=Task("a", ref_min=0.0, ref_max=200.0)),
        record={"online": {"parent": {"step": 700}}, "data": {"rows": 99}},
    )  # fmt: skip
    (found,) = outcomes(run)
    assert found.offline == [50.0, 40.0] and found.final_last == [60.0, 90.0] and found.unit == "score"
    np.testing.assert_allclose(found.final, [45.0, 60.0])  # means of (30, 45, 60) and (40, 50, 90)
    np.testing.assert_allclose(found.gain, [-5.0, 20.0])
    assert found.dip == [20.0, 0.0]  # of the evaluation at step 10
    assert found.recovery == [100, 0]  # standard error 10 / sqrt(4) = 5, so that 45 >= 50 - 5 is no fall
    assert found.steps_to == {"50": [100, 100], "75": [None, None], "90": [None, None]}
    np.testing.assert_allclose(found.regret_mean or [], [0.55, 0.4])
    np.testing.assert_allclose(found.regret_area or [], [1 - (4 + 15 + 26.25) / 100, 1 - (4 + 18 + 35) / 100])
    np.testing.assert_allclose(found.regret_play or [], [0.5, 0.75])
    assert milestones(found) == [
        "back at the start score: 2 of 2 seeds, median step 50",
        "steps to a score of 50: 2 of 2 seeds, median step 100; 75: 0 of 2 seeds; 90: 0 of 2 seeds",
    ]
    assert budget_text(found.budget, 0.5) == (
        "budget: 100 environment steps of each seed, 45 updates, envs=2, utd=0.5, mixing=null, after 700 offline "
        "updates, 99 rows of data; 0.5 minutes"
    )


def test_statistics_over_runs() -> None:
    runs = aggregates(np.array([[0.0, 0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]]).T, reps=50)
    assert runs["iqm"].value == pytest.approx(0.65, rel=1e-6) and runs["mean"].value == pytest.approx(0.5875, rel=1e-6)
    chance = probability_of_improvement(np.array([[0.5], [0.7], [0.9]]), np.array([[0.6], [0.7], [0.2]]), reps=50)
    assert chance.value == pytest.approx(0.7222222222, rel=1e-6)
