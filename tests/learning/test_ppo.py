"""PPO swings a pendulum up from fresh parameters, and lifts a clone that a push throws off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offrl
from tests.learning.test_residual import Pushed, demonstrations

pytestmark = pytest.mark.nightly
COMMON: dict[str, Any] = {"quiet": True, "device": "cpu", "eval.workers": 0}


def test_it_swings_a_pendulum_up(tmp_path: Path) -> None:
    settings = {
        "algo": "ppo",
        "seeds": 3,
        "algo.discount": 0.9,
        "algo.learning_rate": 1e-3,
        "algo.schedule": "constant",
        "algo.normalise_observations": False,
        "eval.every": 24_576,
        "eval.episodes": 20,
    }
    done = offrl.finetune(env="Pendulum-v1", steps=98_304, settings={**COMMON, **settings, "runs_dir": str(tmp_path)})
    returns = np.array(
        [[r["return_mean"] for r in done.score_rows if r["step"] == t] for t in range(0, 98_305, 24_576)]
    )
    print(returns)
    assert (returns[0] < -900.0).all()
    # one evaluation in several dips: a policy of single iterations is not a mean over them
    assert (returns[1:].max(0) > -300.0).all() and np.median(returns[1:]) > -300.0


def test_it_lifts_a_clone(tmp_path: Path) -> None:
    common = {**COMMON, "eval.episodes": 100, "compile": "eager", "runs_dir": str(tmp_path)}
    shape = {"algo.policy": "gaussian", "algo.hidden": [32, 32], "dataset.normalize_observations": True}
    clone = offrl.train(
        "bc", demonstrations(), seeds=2, steps=1500, env=Pushed, name="clone",
        settings={**common, **shape, "algo.learning_rate": 1e-3},
    )  # fmt: skip
    more = {"mode": "on_policy", "algo.horizon": 48, "algo.learning_rate": 1e-3, "eval.every": 3_840, "steps": 23_040}
    done = offrl.finetune(clone, env=Pushed, settings={**common, **more})
    rates = np.array([[r["success"] for r in done.score_rows if r["step"] == t] for t in range(0, 23_041, 3_840)])
    print(rates)
    assert (rates[1] == rates[0]).all()  # five iterations in which its critic alone learns
    assert (rates[-1] > rates[0] + 0.3).all()
