"""Two ways round an obstacle: cloning their mean crashes, cloning both gets there, values take the better one; and
where the way cannot be seen from step to step, chunks keep to one. docs/benchmarks/generative.md has five seeds of
each, trained for longer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import offrl
from offrl.envs import fork

pytestmark = pytest.mark.nightly
COMMON: dict[str, Any] = {
    "compare": [],
    "quiet": True,
    "eval.every": 0,
    "eval.episodes": 100,
    "eval.workers": 0,
    "workers": 1,
}
COMMON |= {
    "algo.hidden": [128, 128],
    "algo.batch_size": 128,
    "algo.learning_rate": 1e-3,
    "dataset.normalize_observations": False,
}
FLOW = {"algo.average": 0.005}
FQL = {
    "algo.flow_steps": 5,
    "algo.normalize_q": True,
    "algo.pessimism": "min",
    "algo.polyak": 0.01,
    "algo.alpha": 0.6,
    "algo.discount": 0.8,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


def play(folder: str, algo: str, task: str, steps: int, **settings: Any) -> tuple[np.ndarray, np.ndarray]:
    """Of each of two seeds: the shares of episodes that reach the goal, and that do so by the better way."""
    run = offrl.train(algo, task, seeds=2, steps=steps, runs_dir=folder, settings={**COMMON, **settings})
    evaluation = run.evaluate(episodes=100)
    assert evaluation.successes is not None
    goal = evaluation.successes.mean(1)
    above = ((evaluation.successes == 1) & (evaluation.returns > fork.ABOVE)).mean(1)
    print(f"{algo} on {task}, {settings}: goal {goal.round(2)}, above {above.round(2)}")
    return goal, above


def test_what_clones_the_mean_crashes_and_what_clones_both_ways_does_not(folder: str) -> None:
    mean, _ = play(folder, "bc", "point-fork", 2000, **{"algo.policy": "gaussian"})
    flow, above = play(folder, "flow_bc", "point-fork", 4000, **FLOW)
    assert mean.max() < 0.1 and flow.min() > 0.7
    assert above.min() > 0.2 and (flow - above).min() > 0.2  # both ways


def test_fql_takes_the_better_way(folder: str) -> None:
    _, above = play(folder, "fql", "point-fork", 4000, **FQL)
    assert above.mean() > 0.8


def test_chunks_keep_to_one_way_where_it_cannot_be_seen(folder: str) -> None:
    single, _ = play(folder, "flow_bc", "stale-fork", 4000, **FLOW)
    chunks, _ = play(folder, "flow_bc", "stale-fork", 4000, **FLOW, **{"algo.length": 4})
    mean, _ = play(folder, "chunk_bc", "stale-fork", 2000, **{"algo.length": 4})
    assert chunks.min() > 0.7 and chunks.mean() - single.mean() > 0.15 and mean.max() < 0.1
