"""The scripts behind docs/benchmarks: ablations, costs of updates, the page of all algorithms."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


# ---- ablations


def test_spikes_are_entries_far_above_the_running_median() -> None:
    from bench.ablations import spikes

    calm = [1.0 + 0.1 * (i % 3) for i in range(40)]
    assert spikes(calm) == 0
    assert spikes([*calm[:20], 10.5, *calm[20:]]) == 0  # not yet ten times the median of 1.1
    assert spikes([*calm[:20], 12.0, *calm[20:]]) == 1
    assert spikes([*calm[:20], -12.0, *calm[20:30], 50.0, *calm[30:]]) == 2
    assert spikes([*calm, math.inf, math.inf]) == 2  # what is not finite counts
    assert spikes([100.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == 0  # nothing before the first five
    assert spikes([1.0 * 1.5**i for i in range(40)]) > 0  # grows by 10 within half a window
    assert spikes([1.0 * 1.05**i for i in range(40)]) == 0
    # a median of nothing: the first ones at a new level, until they are the median
    assert spikes([0.0] * 20 + [1e-9] + [1.0] * 30) == 5 + 5


def test_every_part_composes_and_its_variants_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import ablations

    from offrl.settings.compose import compose

    for name, part in ablations.PARTS.items():
        options = argparse.Namespace(
            data=str(tmp_path),
            files=[],
            seeds=3,
            steps=None,
            runs="runs",
            set={},
            plain=False,
            verbose=False,
            part_name=name,
        )
        todo = ablations.plan(part, options)
        assert len(todo) == len(part.files) * len(part.variants)
        assert len({(file, settings["label"]) for _, file, settings in todo}) == len(todo)
        one = todo[: len(part.variants)]
        configs = [compose(settings) for _, _, settings in one]
        seen: list[Any] = [(c.algo, c.dataset) for c in configs]
        assert all(a != b for i, a in enumerate(seen) for b in seen[:i]), name
        assert all((c.steps, c.seeds) == (part.steps, 3) for c in configs)
        names = [c.label for c in configs]
        assert len(set(names)) == len(names)
        # published settings do not undo what a part fixes
        for (variant, _, settings), config in zip(one, configs, strict=True):
            for key in {**part.common, **part.variants[variant]}:
                if key.startswith("algo."):
                    assert getattr(config.algo, key.removeprefix("algo.")) == settings[key]


def test_a_part_is_put_in_its_own_place() -> None:
    from bench.ablations import insert

    first = insert("", "b", "## B\nold")
    both = insert(first, "c", "## C")
    again = insert(both, "b", "## B\nnew")
    assert again.index("## B") < again.index("## C") and "old" not in again and again.count("## B") == 1
    assert again.startswith("# Ablations") and again == insert(again, "c", "## C")


def test_columns_of_a_run() -> None:
    from bench.ablations import Trained, at_end, cell, counted, largest, over_time

    lines = [{"step": i, "x": [float(i), None if i == 9 else 1.0]} for i in range(10)]
    run = Trained("v", "f", [50.0, 60.0], [], [], lines)
    assert at_end("x")(run)[0] == pytest.approx(7.0)  # of 5, 6, 7, 8, 9
    assert math.isnan(at_end("x")(run)[1])
    assert largest("x")(run) == [9.0, math.inf] and counted("x")(run) == [0.0, 1.0]
    assert over_time("x", 2)(run).startswith("0.50, nan")
    assert at_end("y")(run) == counted("y")(run) == "-"
    assert cell([50.0, 60.0]) == "55.0 [-8.5, 118.5]"
    assert cell([50.0, math.nan]) == "50.0; 1 of 2 not finite" and cell([]) == "-"


def test_a_part_trains_reads_back_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bench import ablations

    page = tmp_path / "ablations.md"
    command = [
        "weighting",
        "--files",
        str(SCRIPTS.parent / "offrl" / "assets" / "hopper-mixed-v0.hdf5"),
        "--seeds",
        "2",
        "--steps",
        "4",
    ]
    command += ["--runs", str(tmp_path / "runs"), "--out", str(page)]
    command += [
        "--set",
        "eval.episodes=1",
        "eval.max_steps=5",
        "eval.env=none",
        "log_every=2",
        "algo.batch_size=4",
        "algo.hidden=[4]",
    ]
    part = ablations.PARTS["weighting"]
    few = {k: v for k, v in part.variants.items() if k in ("TD3+BC, uniform", "TD3+BC, top 10%")}
    changed = ablations.Part(part.title, part.claim, part.files, part.steps, few)
    old = dict(ablations.PARTS)
    try:
        ablations.PARTS["weighting"] = changed
        assert ablations.main(command) == 0
        made = sorted(p.name for p in (tmp_path / "runs" / "weighting").iterdir())
        assert len(made) == 2 and "| hopper-mixed-v0 | TD3+BC, top 10% |" in page.read_text()
        stamps = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("step_*.safetensors")}
        assert ablations.main(command) == 0  # finished runs are read, not trained
        assert {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("step_*.safetensors")} == stamps
        assert ablations.main([*command[:-1], "algo.hiden=[4]"]) == 1
    finally:
        ablations.PARTS.update(old)
    assert "unknown setting 'algo.hiden'" in capsys.readouterr().err


# ---- costs of updates


def test_rows_of_algorithms_and_their_table() -> None:
    from bench.compare_algorithms import Row, rows_of, table

    rows = rows_of(["iql", "cql", "td3_bc"])
    assert [(r.algorithm, r.label) for r in rows] == [
        ("td3_bc", "as published"),
        ("cql", "as published"),
        ("cql", "TD3+BC's sizes"),
        ("cql", "TD3+BC's sizes, penalty_share=0.25"),
        ("iql", "as published"),
    ]
    ours = Row("td3_bc", {}, "as published", 4e8, "2 x 256", {"eager": [400.0, 200.0]})
    other = Row("cql", {}, "as published", 8e8, "3 x 256", {"eager": [100.0, 100.0]})
    lines = table([ours, other], ["eager"], 4, 1e11)
    # 100 updates/s of 4 replicas: 2.5 ms each; ratios 4 and 2 within the rounds
    assert lines[-1] == "| cql | as published | 3 x 256 | 800 | 2.00 | 2.50 | 3.00 (2.00 to 4.00) | 3.20 |"


# ---- the page


def test_page_of_all_algorithms() -> None:
    from bench.scores_page import page

    from offrl.runs.score import Missing, Results, Score

    def score(algorithm: str, dataset: str, seed: int, value: float, step: int = 100) -> Score:
        return Score(
            "",
            dataset,
            "Hopper-v4",
            "",
            "D4RL",
            "return",
            algorithm,
            algorithm,
            seed,
            step,
            10,
            10 * value,
            value,
            None,
            "",
            f"runs/{algorithm}-{dataset}",
            True,
        )

    scores = [
        score(a, d, s, v + s)
        for a, d, v in (("iql", "x", 30.0), ("bc", "x", 10.0), ("bc", "y", 20.0))
        for s in range(3)
    ]
    text = page(
        Results(scores, missing=[Missing("y", "iql", "iql", None, "runs/iql-y", "unfinished: step 5 of 100")]),
        "COMMAND",
    )
    assert "| | updates: **1/10000** of the published | x | y | mean |" in text
    # Student's t with 2 degrees: 4.303 / sqrt(3)
    assert "| bc | 100 of 1,000,000 | 11.0 [8.5, 13.5] (3) | **21.0** [18.5, 23.5] (3) | 16.0 |" in text
    assert "| iql | 100 of 1,000,000 | **31.0** [28.5, 33.5] (3) | (unfinished: step 5 of 100) | - |" in text
    assert text.index("| bc |") < text.index("| iql |") and "    COMMAND" in text
    assert "- iql on y: unfinished: step 5 of 100" in text
