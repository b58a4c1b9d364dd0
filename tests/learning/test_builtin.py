"""Does it learn? On the dataset that ships with offrl, most of it bad: IQL must beat cloning, and must not without its
key ideas.
"""

from __future__ import annotations

import numpy as np
import pytest

import offrl

pytestmark = pytest.mark.nightly
COMMON = {"seeds": 4, "steps": 6000, "compare": [], "quiet": True, "eval.every": 0, "eval.episodes": 20}


def scores(tmp_path_factory: pytest.TempPathFactory, algo: str, **settings: object) -> np.ndarray:
    run = offrl.train(algo, "builtin", runs_dir=str(tmp_path_factory.mktemp("runs")), settings={**COMMON, **settings})
    return np.array([row["score"] for row in run.final_scores])


@pytest.fixture(scope="module")
def iql(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return scores(tmp_path_factory, "iql")


def test_iql_beats_cloning_on_every_seed(iql: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> None:
    bc = scores(tmp_path_factory, "bc")
    assert iql.min() > bc.max() and iql.mean() > bc.mean() + 8.0, (iql, bc)


def test_without_advantage_weights_iql_is_cloning(iql: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> None:
    ablated = scores(tmp_path_factory, "iql", **{"algo.temperature": 0.0})  # every weight is exp(0) = 1
    assert ablated.mean() < iql.mean() - 8.0, (iql, ablated)
