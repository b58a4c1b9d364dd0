"""The maze in words (arXiv 2311.18232): values stitch what cloning cannot; without CQL's term they write nonsense. A
quarter of an hour.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offrl

pytestmark = pytest.mark.nightly
if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

COMMON: dict[str, Any] = {"dataset": "text-maze-compact", "seeds": 1, "quiet": True, "device": "cpu"}


def mean_return(folder: Path, algo: str, **settings: Any) -> float:
    run = offrl.train(algo=algo, runs_dir=str(folder), **COMMON, **{"eval.every": 0, "eval.episodes": 100, **settings})
    return float(np.mean(run.evaluate(episodes=100).returns))


def test_values_stitch_what_cloning_cannot(tmp_path: Path) -> None:
    """Tabular limits: cloning -78 to -81, implicit Q-learning -6.84."""
    cloned = mean_return(tmp_path, "lm_bc", steps=6000)
    assert -92.0 < cloned < -62.0
    steps: dict[str, Any] = {"steps": 12_000, "algo.policy_steps": 6000}
    steered = mean_return(tmp_path, "ilql", **steps)
    assert steered > -9.0
    unheld = mean_return(tmp_path, "ilql", **steps, **{"algo.conservative_weight": 0.0})
    assert unheld < steered - 30.0
