"""The results store over runs that offrl itself made."""

from __future__ import annotations

import pytest

from offrl.api import Run
from offrl.runs.results import collect, write

from .conftest import Offrl


@pytest.mark.slow
def test_runs_of_all_kinds(offrl: Offrl) -> None:
    """Two runs of one name, the same run twice, a grid, a run that diverged, and what `Run` says of each."""
    for command in (
        "train algo=iql seeds=2 name=plain",
        "train algo=iql seeds=2 name=again",
        "train algo=iql seeds=2 name=hot algo.temperature=5",
        "train algo=iql seeds=[2] grid.temperature=[3,10] name=grid",
    ):
        assert offrl(command).status == 0
    assert offrl("train algo=iql seeds=2 name=lost algo.learning_rate=1e30 steps=30").status == 1  # every seed diverged
    results = collect(["runs"])
    plain = Run("runs/plain")
    ours = {
        (s.seed, s.step): (s.raw, s.normalised, s.env_id, s.packages)
        for s in results.scores
        if s.run.endswith(("plain", "again"))
    }
    assert ours == {
        (r["seed"], r["step"]): (r["return_mean"], r["score"], r["env_id"], r["packages"]) for r in plain.score_rows
    }
    labels = {cell.label: [s.seed for s in cell.scores] for cell in results.cells()}
    # 3 is the default: the grid's seed 2 with it continues the plain run's seeds
    assert labels == {
        "iql": [0, 1, 2],
        "iql (temperature=5)": [0, 1],
        "iql (temperature=10)": [2],
        "iql (learning_rate=1e+30)": [],
    }
    twins = [p for p in results.problems if "are the same" in p]
    assert len(twins) == 1 and "seeds 0, 1;" in twins[0] and "differ" not in twins[0], (
        "the same settings and seed give the same scores"
    )
    lost = [m for m in results.missing if m.run.endswith("lost")]
    assert [m.seed for m in lost] == [0, 1] and all(m.reason.startswith("diverged") for m in lost)
    assert collect(write(results, "out")[:1]).scores == results.scores
