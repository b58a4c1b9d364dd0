"""FastTD3 swings a pendulum up in sixteen environments, from fresh parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offrl

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("normalize", ["running", "data"])
def test_it_swings_a_pendulum_up(normalize: str, tmp_path: Path) -> None:
    """As measured in docs/benchmarks/finetune.md: -135 to -177 at the end."""
    settings: dict[str, Any] = {
        "algo.batch_size": 512,
        "algo.value_bins": 51,
        "algo.value_range": [-800.0, 0.0],
        "algo.critic_hidden": [128, 64],
        "algo.hidden": [64, 64],
        "eval.every": 30_000,
        "eval.episodes": 10,
        "eval.workers": 0,
        "compile": "eager",
        "device": "cpu",
        "runs_dir": str(tmp_path),
    }
    done = offrl.finetune(
        algo="fast_td3", env="Pendulum-v1", seeds=3, steps=30_000, envs=16, utd=0.125, warmup=320, mixing="auto",
        normalize=normalize, quiet=True, settings=settings,
    )  # fmt: skip
    first, last = ([r["return_mean"] for r in done.score_rows if r["step"] == t] for t in (0, 30_000))
    print(first, last)
    assert max(first) < -900.0 and min(last) > -300.0
    assert np.isfinite(done.policy(0).act(np.zeros(3, np.float32))).all()
