"""`offrl report`: its numbers are those of the runs, what is missing or damaged is said, and nothing damaged stops
it.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import yaml

from offrl.errors import UserError
from offrl.report import ReportConfig
from offrl.report.build import report
from tests.support.tiers import nightly_but

from .test_html import Reader, outside

Values = Callable[[int, int], float]  # (seed, step) -> score
STEPS = (100, 200, 300)
PLACE = 'Hopper-v4,"gymnasium 1.4.0, mujoco 3.11.0",D4RL,return'


def level(mean: float) -> Values:
    """Scores that grow to `mean`, one more and one less for the seeds beside seed 1."""
    return lambda seed, step: mean * step / 300 + (seed - 1)


def make(
    root: Path,
    algorithm: str,
    dataset: str,
    score: Values | None,
    *,
    name: str = "",
    seeds: int = 3,
    success: bool = False,
    place: str = PLACE,
    raw: bool = False,
    **settings: object,
) -> Path:
    """A run directory as `offrl train` leaves it. `score` None: nothing was scored. raw: without reference scores."""
    run = root / (name or f"{algorithm}-{dataset.replace('/', '-')}")
    run.mkdir(parents=True)
    task = {"name": dataset, "env_id": "Hopper-v4", "ref_min": 0.0, "ref_max": 1000.0, "ref_label": "D4RL"}
    record = {
        "label": algorithm,
        "identity": {
            "algo": {"name": algorithm, "learning_rate": 3e-4, **settings},
            "dataset": {},
            "seeds": list(range(seeds)),
        },
        "replicas": [{"seed": s} for s in range(seeds)],
        "data": {"name": dataset, "fingerprint": f"of {dataset}", "return_mean": 400.0},
        "spec": {"task": None if raw else task},
        "env": "auto",
        "mode": "eager",
        "device": "cpu",
        "packages": {"offrl": "0.1.0", "mujoco": "3.11.0"},
        "python": "3.11.7",
        "machine": "Linux x86_64",
    }
    (run / "run.json").write_text(json.dumps(record))
    given = {f"algo.{k}": v for k, v in settings.items()}
    (run / "config.yaml").write_text(yaml.safe_dump({"steps": STEPS[-1], "given": given}))
    header = "step,seed,episodes,return_mean,return_std,length_mean,success,score,dataset,env_id,packages,reference,scored_by,discounted_mean,q_overestimation"  # noqa: E501
    lines = [header]
    for step in STEPS if score else ():
        for seed in range(seeds):
            value = score(seed, step) if score else 0.0
            share = "0.5" if success else ""
            normalised = "" if raw else repr(value)
            words = "Pendulum-v1,gymnasium 1.4.0,,return" if raw else place
            lines.append(f"{step},{seed},10,{10 * value!r},1.0,100,{share},{normalised},{dataset},{words},1.5,0.25")
    (run / "scores.csv").write_text("\n".join(lines) + "\n")
    metrics = [{"step": s, "critic/q": [1.0 * s] * seeds, "critic/td_error": [0.5] * seeds} for s in STEPS]
    (run / "metrics.jsonl").write_text("".join(json.dumps(m) + "\n" for m in metrics))
    timing = [
        {"step": 10, "first_updates": 4.0},
        *({"step": s, "updates_per_second": 50.0} for s in STEPS),
        {"step": 300, "evaluation": 2.5},
    ]
    (run / "timing.jsonl").write_text("".join(json.dumps(t) + "\n" for t in timing))
    return run


def grid(root: Path) -> None:
    """Two algorithms on two datasets of one family; iql is better."""
    for dataset, base in (("hopper-medium-v2", 50.0), ("walker2d-medium-v2", 60.0)):
        make(root, "bc", dataset, level(base))
        make(root, "iql", dataset, level(base + 10))


def made(*paths: Path, out: Path, draw: bool = False, **settings: object) -> tuple[str, list[dict[str, str]]]:
    """(the page's text, the rows of table.csv), after a check of the page's form. draw: with its pictures, which take a
    second.
    """
    with contextlib.ExitStack() as patches:
        if not draw:
            patches.enter_context(mock.patch("offrl.figures.style.save"))
            patches.enter_context(mock.patch("offrl.report.page.svg", return_value="<svg></svg>"))
        page = report(list(paths), ReportConfig(out=str(out), bootstrap=200, **settings))  # type: ignore[arg-type]
    text = page.read_text(encoding="utf-8")
    reader = Reader(text)
    assert page == out / "index.html" and not reader.wrong and not reader.open and outside(text) == []
    with open(out / "table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    return re.sub(r"[\s\u00a0]+", " ", " ".join(reader.texts)), rows


def cell(rows: list[dict[str, str]], dataset: str, algorithm: str) -> dict[str, str]:
    (found,) = [r for r in rows if r["dataset"] == dataset and r["algorithm"] == algorithm]
    return found


def test_numbers_of_the_page_are_those_of_the_runs(tmp_path: Path) -> None:
    grid(tmp_path / "runs")
    text, rows = made(tmp_path / "runs", out=tmp_path / "out", draw=True)
    values = [69.0, 70.0, 71.0]  # iql on walker2d at step 300
    half = 4.302652729911275 * statistics.stdev(values) / math.sqrt(3)  # t of 2 degrees of freedom
    row = cell(rows, "walker2d-medium-v2", "iql")
    assert [float(row[k]) for k in ("mean", "low", "high")] == pytest.approx([70.0, 70.0 - half, 70.0 + half])
    assert [row[k] for k in ("unit", "seeds", "seeds_asked", "step", "group", "missing")] == [
        "score",
        "3",
        "3",
        "300",
        "D4RL gym",
        "",
    ]
    assert float(row["return_mean"]) == pytest.approx(700.0)
    assert len(rows) == 4 and all(f"{float(r['mean']):.1f}" in text for r in rows)
    assert f"{70.0 - half:.1f} to {70.0 + half:.1f}" in text
    with open(tmp_path / "out" / "scores.csv", newline="") as file:
        assert len(list(csv.DictReader(file))) == 4 * 3 * 3  # every evaluation of every seed
    pictures = {p.stem for p in (tmp_path / "out").glob("*.png")}
    assert pictures == {
        "curve-hopper-medium-v2",
        "curve-walker2d-medium-v2",
        "aggregates-d4rl-gym",
        "profile-d4rl-gym",
        "improvement-d4rl-gym",
    }


def test_large_folders_leave_out_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final scores and what is made of them stay; of the rest the page says what is missing."""
    grid(tmp_path / "runs")
    _, expected = made(tmp_path / "runs", out=tmp_path / "all")
    size = sum(p.stat().st_size for p in (tmp_path / "runs").glob("*/scores.csv"))
    monkeypatch.setattr("offrl.report.build.MOST_SCORES", -(-size // 2))
    for module in ("context", "appendix"):
        monkeypatch.setattr(f"offrl.report.{module}.MANY_RUNS", 3)
    monkeypatch.setattr("offrl.report.appendix.SOME", 0)
    monkeypatch.setattr("offrl.report.diagnostics.LONGEST", 0)
    text, rows = made(tmp_path / "runs", out=tmp_path / "less")
    final = [name for name in rows[0] if not name.startswith("best")]
    assert [[row[k] for k in final] for row in rows] == [[row[k] for k in final] for row in expected]
    assert (
        "of the evaluations of each seed only one in 2 is read" in text and "one evaluation in 2, and the last," in text
    )
    assert "The first 3 of 4 runs; timing.jsonl of each run has the rest." in text
    with open(tmp_path / "less" / "scores.csv", newline="") as file:
        assert {row["step"] for row in csv.DictReader(file)} == {"200", "300"}
    monkeypatch.setattr("offrl.report.appendix.SOME", 1)
    text, _ = made(tmp_path / "runs" / "bc-hopper-medium-v2", *(tmp_path / "runs").glob("*"), out=tmp_path / "some")
    assert "Left out, for they are longer than 0 MB: " in text
    monkeypatch.setattr("offrl.report.build.MOST_SCORES", size)
    monkeypatch.setattr("offrl.report.scores.MOST_POINTS", 1)
    text, _ = made(tmp_path / "runs", out=tmp_path / "points")
    assert "Of curves of more than 1 evaluations only about so many are drawn" in text


def test_costs_stand_beside_returns(tmp_path: Path) -> None:
    """Seeds 0 to 3 cost 10, 20, 30, 40 against a limit of 25: half of them keep it; Wilson's interval is 15% to 85%."""
    run, plain = (make(tmp_path, name, "hopper-medium-v2", level(50.0), seeds=4) for name in ("cpq", "bc"))
    header, *lines = (run / "scores.csv").read_text().splitlines()
    costs = [10.0 * (1 + int(line.split(",")[1])) for line in lines]
    lines = [f"{line},{c!r},{c / 25!r},{float(c <= 25)!r}" for line, c in zip(lines, costs, strict=True)]
    (run / "scores.csv").write_text("\n".join([f"{header},cost,cost_normalized,safe", *lines]) + "\n")
    text, _ = made(run, plain, out=tmp_path / "out", draw=True)
    assert "Costs and limits" in text and "1.00 2 of 4 15.0 to 85.0%" in text
    assert (tmp_path / "out" / "costs-hopper-medium-v2.png").is_file()
    assert "cost,cost_normalized,safe" in (tmp_path / "out" / "scores.csv").read_text()
    text, _ = made(tmp_path / "out" / "scores.csv", out=tmp_path / "again")
    assert "1.00 2 of 4" in text
    text, _ = made(plain, out=tmp_path / "plain")
    assert "Costs and limits" not in text and "cost_normalized" not in (tmp_path / "plain" / "scores.csv").read_text()


def test_what_fine_tuning_gained(tmp_path: Path) -> None:
    """Three seeds on two datasets with scores of 50, 50, 60, 70, plus the seed: the last three have a mean of 60."""
    for dataset in ("hopper-medium-v2", "walker2d-medium-v2"):
        run = make(tmp_path, "iql+online", dataset, lambda seed, step: 40.0 + seed + step / 10)
        text = (run / "scores.csv").read_text()
        first = [line for line in text.splitlines() if line.startswith(f"{STEPS[0]},")]
        old = "\n".join("0," + line.partition(",")[2] for line in first)
        (run / "scores.csv").write_text(text.replace("\n", f"\n{old}\n", 1))
        record = json.loads((run / "run.json").read_text())
        record["spec"] |= {"observation_shape": [11], "action_dim": 3}
        record |= {"kind": "finetune", "online": {"label": "iql", "parent": {"step": 500}}}
        (run / "run.json").write_text(json.dumps(record))
    page, _ = made(tmp_path, out=tmp_path / "out")
    own = "51.0 [48.5, 53.5] 50.0, 51.0, 52.0 61.0 [58.5, 63.5] 60.0, 61.0, 62.0 10.0 10.0, 10.0, 10.0"
    assert f"walker2d-medium-v2 iql+online {own} 0.39 [0.37, 0.41] 0.40, 0.39, 0.38 0.42 [0.40, 0.45]" in page
    assert "hopper-medium-v2: steps to a score of 50: 3 of 3 seeds, median step 100; 75: 0 of 3 seeds" in page
    assert "300 environment steps of each seed, after 500 offline updates" in page
    assert "dataset algorithm seeds steps last 95%" in page and "seeds updates" not in page
    # of all six seeds without the lowest and the highest: means of 0.39 and 0.4233
    assert "0.39 [0.38, 0.40] 0.40, 0.39, 0.38, 0.40, 0.39, 0.38 0.42 [0.41, 0.43]" in page


def test_the_headline(tmp_path: Path) -> None:
    grid(tmp_path / "runs")
    text, _ = made(tmp_path / "runs", out=tmp_path / "out", baseline="bc")
    # IQM of 59, 60, 61, 69, 70, 71 without one and a half: floor(6 / 4) = 1 from each side: (60 + 61 + 69 + 70) / 4
    assert re.search(
        r"iql is ahead of bc by 10\.0 \[\S+, \S+\] points; probability of improvement 1\.00 \[1\.00, 1\.00\]\.", text
    )
    assert "intervals of 3 seeds are too narrow" in text and "D4RL gym, 2 datasets, 3 seeds each" in text
    assert re.search(r"iql 65\.0 \[\S+, \S+\] bc 55\.0 \[", text)  # the rows of the picture
    assert "iql over bc" in text and "bc over iql" not in text
    assert "cells of 3 seeds" in text  # few seeds are said


def test_the_best_stands_beside_the_last_and_is_labelled(tmp_path: Path) -> None:
    make(
        tmp_path / "runs",
        "bc",
        "hopper-medium-v2",
        lambda seed, step: {100: 20.0, 200: 44.5, 300: 33.0}[step] + seed - 1,
    )
    text, (row,) = made(tmp_path / "runs", out=tmp_path / "out")
    assert float(row["mean"]) == 33.0 and float(row["best_uses_the_environment"]) == 44.5 and row["best_step"] == "200"
    assert "best (uses the environment)" in text and "44.5" in text
    assert "bc scores 33.0 [" in text  # the headline is the last


def test_published_scores_and_those_of_a_benchmark(tmp_path: Path) -> None:
    grid(tmp_path / "bench")
    cells = [
        {"dataset": d, "algorithm": a, "run": f"{a}-{d}"}
        for d in ("hopper-medium-v2", "walker2d-medium-v2")
        for a in ("bc", "iql")
    ]
    plan = {"version": 1, "suite": "d4rl-gym", "seeds": [0, 1, 2], "steps": 300, "cells": cells,
            "references": {"hopper-medium-v2": {"bc": 12.75}}, "reference_source": "table 7 of <somebody>"}  # fmt: skip
    (tmp_path / "bench" / "benchmark.json").write_text(json.dumps(plan))
    text, rows = made(tmp_path / "bench", out=tmp_path / "out")
    assert cell(rows, "hopper-medium-v2", "bc")["published"] == "12.75" and "table 7 of <somebody>" in text
    assert "published 12.8 [1]" in text
    from offrl.envs.published import published

    paper = published("walker2d-medium-v2", "iql")
    assert paper is not None and float(cell(rows, "walker2d-medium-v2", "iql")["published"]) == paper.mean
    assert f"published {paper.mean:.1f}" in text and paper.source in text
    assert text.startswith("offrl") is False and "d4rl-gym: bc, iql on 2 datasets" in text


def test_two_runs_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    make(tmp_path / "runs", "iql", "hopper-medium-v2", level(50), name="a")
    make(tmp_path / "runs", "iql", "hopper-medium-v2", level(60), name="b", temperature=5.0)
    text, rows = made(tmp_path / "runs", out=tmp_path / "out")
    assert {r["algorithm"]: float(r["mean"]) for r in rows} == {"iql": 50.0, "iql (temperature=5)": 60.0}
    assert "What differs between the two runs" in text and re.search(r"algo.temperature 3 5 ", text)


def test_the_same_run_twice_is_counted_once(tmp_path: Path) -> None:
    run = make(tmp_path / "runs", "iql", "hopper-medium-v2", level(50), name="a")
    shutil.copytree(run, tmp_path / "runs" / "b")
    text, (row,) = made(tmp_path / "runs", out=tmp_path / "out")
    assert row["seeds"] == "3" and float(row["mean"]) == 50.0
    assert "are the same" in text and "to know before reading the numbers" in text and "Nothing: their settings" in text


def test_raw_returns_are_apart_and_it_is_said_why(tmp_path: Path) -> None:
    grid(tmp_path / "runs")
    make(tmp_path / "runs", "bc", "pendulum", level(-20), raw=True)
    text, rows = made(tmp_path / "runs", out=tmp_path / "out")
    row = cell(rows, "pendulum", "bc")
    assert row["group"] == "raw returns" and row["unit"] == "return" and float(row["mean"]) == -200.0
    assert (
        "Raw returns" in text and "no reference to be normalised by" in text and "pendulum: no reference scores" in text
    )
    assert "2 datasets: hopper-medium-v2, walker2d-medium-v2" in text  # it is in no average


def test_unlike_suites_are_never_averaged(tmp_path: Path) -> None:
    grid(tmp_path / "runs")
    for dataset in ("antmaze-umaze-v2", "antmaze-large-play-v2"):
        make(tmp_path / "runs", "bc", dataset, level(70), success=True)
        make(tmp_path / "runs", "iql", dataset, level(90), success=True)
    text, rows = made(tmp_path / "runs", out=tmp_path / "out")
    assert {r["group"] for r in rows} == {"D4RL gym", "D4RL antmaze"}
    assert "D4RL gym: aggregates" in text and "D4RL antmaze: aggregates" in text and "4 datasets:" not in text
    assert (
        "Success rates" in text
        and "50.0%" in text
        and float(cell(rows, "antmaze-umaze-v2", "bc")["success_mean"]) == 0.5
    )


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "half a line of scores": (
        lambda r: (r / "scores.csv").write_text((r / "scores.csv").read_text()[:-40]),
        "half-written",
    ),
    "empty scores": (lambda r: (r / "scores.csv").write_text(""), "is empty"),
    "no scores": (lambda r: (r / "scores.csv").unlink(), "no score at the last step"),
    "scores are no table": (
        lambda r: (r / "scores.csv").write_bytes(b"\x00\xff\n\x01,,,\n"),
        "iql on hopper-medium-v2",
    ),
    "half a record": (lambda r: (r / "run.json").write_text((r / "run.json").read_text()[:100]), "left out"),
    "a record of something else": (lambda r: (r / "run.json").write_text("[1, 2]"), "left out"),
    "no settings": (lambda r: (r / "config.yaml").unlink(), "whether the run finished is not known"),
    "a score that is not there": (
        lambda r: (r / "scores.csv").write_text((r / "scores.csv").read_text().replace(",,20.0,", ",,,")),
        "",
    ),
    "half a line of metrics": (lambda r: (r / "metrics.jsonl").write_text('{"step": 300, "critic/q": [1.'), ""),
    "odd metrics": (
        lambda r: (r / "metrics.jsonl").write_text(
            '3\n{"step": "x"}\n{"step": 300, "critic/q": "no", "a": [1, "b", {}]}\n'
        ),
        "",
    ),
    "odd times": (
        lambda r: (r / "timing.jsonl").write_text(
            '{"step": 5, "updates_per_second": 0}\nnull\n{"step": 9, "evaluation": "x"}\n'
        ),
        "",
    ),
    "no logs": (lambda r: [(r / n).unlink() for n in ("metrics.jsonl", "timing.jsonl")], ""),
    "unfinished": (lambda r: (r / "config.yaml").write_text("steps: 1000\n"), "unfinished: step 300 of 1,000"),
    "one seed lost": (
        lambda r: (r / "scores.csv").write_text(
            "".join(x + "\n" for x in (r / "scores.csv").read_text().splitlines() if x[:5] != "300,2")
        ),
        "seed 2: no score at the last step",
    ),
}


@pytest.mark.parametrize(
    "name", nightly_but(("half a line of scores", "no scores", "one seed lost", "odd metrics", "no logs"), DAMAGE)
)
def test_damage_is_told_and_stops_nothing(tmp_path: Path, name: str) -> None:
    damage, words = DAMAGE[name]
    grid(tmp_path / "runs")
    damage(tmp_path / "runs" / "iql-hopper-medium-v2")
    text, rows = made(tmp_path / "runs", out=tmp_path / "out", draw="metrics" in name)
    assert words in text
    assert float(cell(rows, "walker2d-medium-v2", "iql")["mean"]) == 70.0
    if words:
        assert "to know before reading the numbers" in text
    else:
        assert float(cell(rows, "hopper-medium-v2", "iql")["mean"]) == 60.0
    if name == "one seed lost":
        assert "2 of 3 seeds" in text and cell(rows, "hopper-medium-v2", "iql")["seeds"] == "2"
    if name == "unfinished":
        assert (
            "not finished" in text
            and "60.0 at step 300, not counted" in text
            and cell(rows, "hopper-medium-v2", "iql")["mean"] == ""
        )


def test_failed_and_missing_cells_of_a_benchmark(tmp_path: Path) -> None:
    root = tmp_path / "bench"
    grid(root)
    shutil.rmtree(root / "iql-hopper-medium-v2")
    (root / "cells").mkdir()
    (root / "cells" / "iql-hopper-medium-v2.json").write_text('{"status": "failed", "error": "no file <x>"}')
    cells = [
        {"dataset": d, "algorithm": a, "run": f"{a}-{d}"}
        for d in ("hopper-medium-v2", "walker2d-medium-v2")
        for a in ("bc", "iql", "td3_bc")
    ]
    (root / "benchmark.json").write_text(
        json.dumps({"version": 1, "suite": "own", "seeds": [0, 1, 2, 3], "steps": 300, "cells": cells})
    )
    text, rows = made(root, out=tmp_path / "out")
    assert "iql on hopper-medium-v2: failed: no file <x>" in text and "not started" in text and "3 of 4 seeds" in text
    assert cell(rows, "hopper-medium-v2", "iql")["missing"] == "failed: no file <x>"
    assert cell(rows, "hopper-medium-v2", "td3_bc")["missing"] == "not started"
    assert cell(rows, "walker2d-medium-v2", "bc")["missing"] == "seed 3: not trained"


def test_a_search_over_settings(tmp_path: Path) -> None:
    for i, temperature in enumerate((1.0, 2.0, 3.0, 4.0)):
        make(tmp_path / "runs", "iql", "hopper-medium-v2", level(40 + 10 * i), name=f"t{i}", temperature=temperature)
    make(tmp_path / "runs", "bc", "hopper-medium-v2", level(50))
    text, _ = made(tmp_path / "runs", out=tmp_path / "out")
    assert "bc, iql on hopper-medium-v2" in text and "2 algorithms (5 with different settings)" in text
    assert "iql (temperature=4) is ahead of bc by 20.0 points: 70.0 [67.5, 72.5] against 50.0 [47.5, 52.5]" in text
    assert "No interval covers that its settings were chosen with the environment." in text
    assert "is the best of 4 settings of iql, chosen with the environment" in text
    # means 40, 50, 60, 70: of one 55; of two, over the six pairs, (50 + 3 * 70 + 2 * 60) / 6; of three (60 + 3 * 70) /
    # 4
    assert re.search(
        r"best of 1 best of 2 best of 3 hopper-medium-v2 iql 4 55\.0 \S+ to \S+ 63\.3 \S+ to \S+ 67\.5 ", text
    )


def test_other_physics_is_told(tmp_path: Path) -> None:
    make(tmp_path / "runs", "bc", "hopper-medium-v2", level(50))
    make(tmp_path / "runs", "iql", "hopper-medium-v2", level(60), place=PLACE.replace("3.11.0", "3.2.1"))
    text, _ = made(tmp_path / "runs", out=tmp_path / "out")
    assert "scores of different environments or versions" in text and "mujoco 3.2.1" in text


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    for dataset in ("hopper-medium-v2", "walker2d-medium-v2"):
        make(tmp_path / "runs", "bc", dataset, level(50), seeds=1)
        make(tmp_path / "runs", "iql", dataset, level(60), seeds=1)
    text, rows = made(tmp_path / "runs", out=tmp_path / "out")
    assert "one seed" in text and {r["low"] for r in rows} == {""}
    assert not re.search(r"\bnan\b", text)


def test_nothing_was_scored(tmp_path: Path) -> None:
    make(tmp_path / "runs", "bc", "mine", None)
    text, (row,) = made(tmp_path / "runs", out=tmp_path / "out")
    assert "bc on mine: not scored." in text and "Without scores" in text and row["group"] == "not scored"


def test_a_table_of_results_alone(tmp_path: Path) -> None:
    grid(tmp_path / "runs")
    _, first = made(tmp_path / "runs", out=tmp_path / "out")
    (tmp_path / "results.csv").write_bytes((tmp_path / "out" / "scores.csv").read_bytes())
    text, second = made(tmp_path / "results.csv", out=tmp_path / "again")
    assert [{**r, "settings": ""} for r in second] == [{**r, "settings": ""} for r in first]
    assert "Time" not in [w.strip() for w in text.split("  ")] and "iql is ahead of bc by 10.0" in text


def test_times(tmp_path: Path) -> None:
    from offrl.api import Run
    from offrl.report.diagnostics import times

    run = make(tmp_path, "bc", "hopper-medium-v2", level(50))
    speed, trained, evaluated = times(Run(run))
    assert speed == pytest.approx(50.0) and trained == pytest.approx(4.0 + 290 / 50) and evaluated == 2.5
    (run / "timing.jsonl").unlink()
    assert all(map(math.isnan, times(Run(run))))


def test_names_that_are_markup(tmp_path: Path) -> None:
    make(tmp_path / "runs", "<i>$a$</i>", "data & \u6570\u636e</table>", level(50))
    text, _ = made(tmp_path / "runs", out=tmp_path / "out", draw=True, title="<script>x</script>")
    assert "<i>$a$</i>" in text and "data & \u6570\u636e</table>" in text and "<script>x</script>" in text


def test_bad_commands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from offrl.cli.main import main

    grid(tmp_path / "runs")
    runs, out = str(tmp_path / "runs"), f"out={tmp_path / 'out'}"
    for arguments, words in (
        (["report"], "which runs?"),
        (["report", "quiet=true"], "which runs?"),
        (["report", runs, out, "baselin=bc"], "Did you mean 'baseline'?"),
        (["report", runs, out, "baseline=bd"], "Did you mean 'bc'?"),
        (["report", runs, out, "bootstrap=3"], "bootstrap=3"),
        (["report", str(tmp_path / "none"), out], "does not exist"),
        (["report", str(tmp_path), f"out={tmp_path / 'runs' / 'bc-hopper-medium-v2' / 'run.json'}"], "could not write"),
    ):
        capfd.readouterr()
        assert main(arguments) == 2, arguments
        message = capfd.readouterr().err.splitlines()[-1]
        assert message.startswith("offrl: error: ") and words in message
    assert not (tmp_path / "out").exists()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no run"):
        report([tmp_path / "empty"])


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from offrl.cli.main import main

    make(tmp_path / "a=b", "bc", "hopper-medium-v2", level(50))
    assert main(["report", str(tmp_path / "a=b"), f"out={tmp_path / 'o, p'}", "title=a, b: [c", "bootstrap=100"]) == 0
    said = capfd.readouterr()
    assert said.out.startswith(str(tmp_path / "o, p" / "index.html")) and "1 run" in said.err
    assert "<h1>a, b: [c</h1>" in (tmp_path / "o, p" / "index.html").read_text()
    assert main(["report", str(tmp_path / "a=b"), f"out={tmp_path / 'q'}", "quiet=true"]) == 0
    assert capfd.readouterr() == ("", "")
    assert main(["report", "--help"]) == 0
    assert "baseline=none" in capfd.readouterr().out
