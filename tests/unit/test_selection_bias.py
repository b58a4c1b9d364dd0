"""The simulation behind docs/benchmarks/tuning-statistics.md: the bias is the one of theory, and new policies have
none.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.statistics.maxima import expected_maximum


def test_selecting_episodes_promise_what_theory_says_and_new_policies_nothing() -> None:
    from bench.selection_bias import EPISODES, SEEDS, SPREAD, equal, simulate

    bias = simulate(equal(8), adaptive=False, trials=2000)
    error = math.sqrt(SPREAD**2 / SEEDS + 1 / EPISODES)
    assert bias.exact == pytest.approx(error * expected_maximum(8))
    half = bias.selecting[2] - bias.selecting[0]
    assert bias.selecting[0] == pytest.approx(bias.exact, abs=2.5 * half)  # five standard errors
    # of the selecting mean's variance the policies have this share, and as much of its optimism stays in fresh episodes
    assert bias.same[0] == pytest.approx(
        bias.exact * SPREAD**2 / SEEDS / error**2, abs=2.5 * (bias.same[2] - bias.same[0])
    )
    assert abs(bias.retrained[0]) < 2.5 * (bias.retrained[2] - bias.retrained[0])
    assert bias.retrained[2] - bias.retrained[0] < 0.03 < bias.same[1]


def test_unequal_settings_and_halving() -> None:
    from bench.selection_bias import equal, simulate, unequal

    assert unequal(4) == pytest.approx([-1.150349, -0.318639, 0.318639, 1.150349], abs=1e-6)
    few, many = (simulate(world(8), adaptive=False, trials=1000) for world in (unequal, equal))
    assert few.exact < many.exact and few.selecting[2] < many.selecting[1]
    halved = simulate(equal(8), adaptive=True, trials=1000)
    assert math.isnan(halved.exact) and halved.same[1] > 0.2 and abs(halved.retrained[0]) < 0.1
    assert halved.selecting[2] < many.selecting[1]  # the finalists have more episodes


def test_the_script_prints_and_draws(
    tmp_path: Path, pictures: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from bench import selection_bias

    monkeypatch.setattr("sys.argv", ["selection_bias.py", "--trials", "60", "--out", str(tmp_path / "bias.png")])
    selection_bias.main()
    text = capsys.readouterr().out
    assert "retrained" in text and sum(line.startswith(("equal", "unequal")) for line in text.splitlines()) == 20
    lines = pictures["bias.png"].axes[0].lines
    assert len(lines) == 7 and np.isfinite(lines[1].get_ydata()).all()


def test_coverage_of_regret_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import selection_bias

    class Flat:
        value, low, high = np.array([0.5]), np.array([0.4]), np.array([0.6])

    monkeypatch.setattr(selection_bias, "regret_curve", lambda *a, **k: Flat())
    assert selection_bias.coverage(16, 3, [0]) == [["16", "0", "0.50", "100.0%", "0.40 to 0.60"]]
