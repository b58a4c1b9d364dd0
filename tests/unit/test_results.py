"""The results store: what is read from runs and benchmarks, however they ended, and what may be averaged."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.errors import UserError
from offrl.runs.comparable import group, groups, reference, settings_matrix
from offrl.runs.results import collect, write
from offrl.runs.score import COLUMNS, Results, Score
from offrl.tasks.provenance import Provenance

HEADER = (
    "step,seed,{}episodes,return_mean,return_std,length_mean,success,score,dataset,env_id,packages,reference,scored_by"
)

END = "d,e,,,return\n"  # the last columns of a line


def place(env: str = "Hopper-v4", mujoco: str = "3.11.0", whose: str = "D4RL") -> Provenance:
    return Provenance(env, f"gymnasium 1.4.0, mujoco {mujoco}", whose)


def columns(where: Provenance) -> str:
    """The columns of scores.csv that hold it."""
    return f'{where.env_id},"{where.packages}",{where.reference},{where.scored_by}'


def make(
    folder: Path,
    *,
    algorithm: str = "iql",
    dataset: str = "hopper-medium-v2",
    seeds: tuple[int, ...] = (0, 1, 2),
    steps: int = 200,
    at: tuple[int, ...] = (100, 200),
    algo: dict[str, Any] | None = None,
    given: dict[str, Any] | None = None,
    grid: dict[str, list[float]] | None = None,
    dead: tuple[int, ...] = (),
    score: float | None = 50.0,
    where: Provenance | None = None,
    fingerprint: str = "f" * 64,
    evaluation: dict[str, Any] | None = None,
) -> Path:
    """A run directory as offrl writes it. Seed s scores `score` + s + step / 100; replicas of `dead` have null metrics
    from step 200.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"name": algorithm, "learning_rate": 3e-4, "temperature": 3.0, "hidden": [256, 256], **(algo or {})}
    cells: list[dict[str, float]] = [{}]
    for field, values in (grid or {}).items():
        cells = [{**cell, field: value} for cell in cells for value in values]
        settings.pop(field, None)
    identity: dict[str, Any] = {
        "algo": settings,
        "dataset": {"name": str(folder), "normalize_observations": False},
        "seeds": list(seeds),
    }
    if grid:
        identity["grid"] = [[field, values] for field, values in grid.items()]
    record = {
        "label": algorithm,
        "identity": identity,
        "data": {"name": dataset, "fingerprint": fingerprint, "return_mean": 1.0},
        "spec": {"task": {"env_id": "Hopper-v4"} if score is not None else None},
        "env": "auto",
    }
    (folder / "run.json").write_text(json.dumps(record, indent=1))
    config = {"algo": settings, "steps": steps, "eval": evaluation or {}, "given": {"algo": algorithm, **(given or {})}}
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    replicas = [(seed, cell) for cell in cells for seed in seeds]
    lines = [HEADER.format("".join(f"{field}," for field in (grid or {})))]
    for step in at if score is not None else ():
        for seed, cell in replicas:
            value = score + seed + step / 100  # type: ignore[operator]
            words = [
                step,
                seed,
                *cell.values(),
                10,
                30.0 * value,
                1.0,
                500.0,
                "",
                value,
                dataset,
                columns(where or place()),
            ]
            lines.append(",".join(map(str, words)))
    (folder / "scores.csv").write_text("\n".join(lines) + "\n")
    metrics = []
    for step in (100, *(s for s in (200,) if s <= max((*at, steps if score is None else 0)))):
        values = [None if i in dead and step >= 200 else 1.0 for i in range(len(replicas))]
        metrics.append(json.dumps({"step": step, "critic/loss": values, "actor/loss": values}))
    (folder / "metrics.jsonl").write_text("\n".join(metrics) + "\n")
    return folder


def only_cell(results: Results) -> Any:
    (cell,) = results.cells()
    return cell


def test_a_run(tmp_path: Path) -> None:
    results = collect([make(tmp_path / "run")])
    assert not results.problems and not results.missing
    assert [(s.seed, s.step, s.normalised, s.raw, s.final) for s in results.final] == [
        (0, 200, 52.0, 1560.0, True), (1, 200, 53.0, 1590.0, True), (2, 200, 54.0, 1620.0, True),
    ]  # fmt: skip
    assert len(results.scores) == 6 and results.scores[0].success is None and results.scores[0].suite == ""
    cell = only_cell(results)
    assert (cell.label, cell.normalised, cell.best()) == ("iql", True, (200, 53.0))
    assert cell.interval()[0] == 53.0 and cell.interval("raw")[0] == 1590.0 and math.isnan(cell.interval("success")[0])
    # Student's t for 2 degrees of freedom
    assert cell.interval()[2] - 53.0 == pytest.approx(4.30265 / math.sqrt(3), abs=1e-4)


def test_csv_and_parquet_hold_the_same(tmp_path: Path) -> None:
    results = collect([make(tmp_path / "runs" / "a"), make(tmp_path / "runs" / "b", dataset="own, data", score=None)])
    tricky = replace(results.scores[0], success=1 / 3, normalised=None, raw=0.1 + 0.2, dataset='a "quoted", name')
    results.scores.append(tricky)
    files = write(results, tmp_path / "out")
    assert [f.name for f in files][:1] == ["results.csv"]
    assert (tmp_path / "out" / "results.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert collect([tmp_path / "out" / "results.csv"]).scores == results.scores
    assert collect([tmp_path / "out"]).scores == results.scores, "a folder without runs: its table"
    parquet = pytest.importorskip("pyarrow.parquet")
    assert files[1] == tmp_path / "out" / "results.parquet"
    rows = parquet.read_table(files[1]).to_pylist()
    assert [Score(**row) for row in rows] == results.scores
    assert not [p for p in (tmp_path / "out").iterdir() if p.name.startswith(".")]


def test_without_pyarrow_no_older_table_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = collect([make(tmp_path / "run")])
    write(results, tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert write(results, tmp_path) == [tmp_path / "results.csv"]
    assert not (tmp_path / "results.parquet").exists()


def test_a_table_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"could not write .*results\.csv"):
        write(collect([make(tmp_path / "run")]), tmp_path / "file")


def test_the_best_evaluation_is_not_the_headline(tmp_path: Path) -> None:
    run = make(tmp_path / "run", at=(100,), steps=300)
    text = (run / "scores.csv").read_text()
    rows = text.splitlines()[1:]
    # 51 -> 151
    later = "\n".join(row.replace("100,", "300,", 1).replace(",1.0,500.0,,", ",1.0,500.0,,1", 1) for row in rows)
    (run / "scores.csv").write_text(text + later.replace(",,1", ",,-", 1) + "\n")
    (run / "metrics.jsonl").write_text('{"step": 300, "a/b": [1.0, 1.0, 1.0]}\n')
    cell = only_cell(collect([run]))
    assert [s.step for s in cell.scores] == [300, 300, 300]
    assert cell.scores[0].value == -51.0 and cell.best() == (300, (-51.0 + 152.0 + 153.0) / 3)


# ------------------------------------------------------------------------------------------------------------ bad input


def test_a_half_written_last_line(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    text = (run / "scores.csv").read_text()
    (run / "scores.csv").write_text(text[: text.rindex("mujoco")])
    results = collect([run])
    assert len(results.scores) == 5 and [s.seed for s in results.final] == [0, 1]
    assert "half-written" in results.problems[0] and str(run) in results.problems[0]
    assert [(m.seed, m.reason) for m in results.missing] == [(2, "no score at the last step, 200")]
    assert [s.step for s in only_cell(results).latest()] == [100, 100, 100], "the last step that all seeds have"


def test_a_last_line_cut_between_numbers_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    # the last character is missing: what else may be?
    (run / "scores.csv").write_text((run / "scores.csv").read_text().rstrip("\n"))
    assert len(collect([run]).scores) == 5


@pytest.mark.parametrize(
    ("content", "scores", "problem"),
    [
        ("", 0, "is empty"),
        (None, 0, ""),
        ("step,seed\n100,0\n", 0, "cannot be read"),
        (
            HEADER.format("") + f"\nnan,0,10,1,1,1,,1,{END}100,0,10,1.5,1,1,,x,{END}100,0,10,2.5,1,1,,7,{END}",
            1,
            "2 lines cannot be read",
        ),
        (
            HEADER.format("") + "\n100,9,10,1,1,1,,1,d,e,,,return\n",
            0,
            "1 line cannot be read",
        ),  # a seed that the run does not have
        (HEADER.format("") + f"\n100,0,10,,1,1,,1,{END}", 0, "1 line cannot be read"),  # a return that was not finite
        ("\0" * 4096, 0, ""),  # what a file system may leave after a power cut
    ],
)
def test_damaged_scores(tmp_path: Path, content: str | None, scores: int, problem: str) -> None:
    run = make(tmp_path / "run")
    if content is None:
        (run / "scores.csv").unlink()
    else:
        (run / "scores.csv").write_text(content)
    results = collect([run, make(tmp_path / "whole", dataset="walker2d-medium-v2")])
    assert len(results.scores) == scores + 6
    assert problem in " ".join(results.problems)
    assert {m.seed for m in results.missing} == {0, 1, 2}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"label": "iql"}',
        "[]",
        '{"identity": {"seeds": 3}, "data": {}}',
        "\0\0",
        '{"identity": null, "data": {"name": 1}}',
    ],
)
def test_a_damaged_record(tmp_path: Path, content: str) -> None:
    make(tmp_path / "runs" / "whole")
    bad = make(tmp_path / "runs" / "bad", dataset="walker2d-medium-v2")
    (bad / "run.json").write_text(content)
    results = collect([tmp_path / "runs"])
    assert results.datasets == ["hopper-medium-v2"] and len(results.runs) == 1
    assert len(results.problems) == 1 and "left out" in results.problems[0] and str(bad) in results.problems[0]
    assert "\n" not in results.problems[0]


def test_a_run_that_lost_its_record(tmp_path: Path) -> None:
    (make(tmp_path / "runs" / "bad") / "run.json").unlink()
    results = collect([tmp_path / "runs"])
    assert not results.scores and "no run.json" in results.problems[0]


@pytest.mark.parametrize("content", ["", "a: [", "steps: x", None])
def test_a_damaged_config(tmp_path: Path, content: str | None) -> None:
    run = make(tmp_path / "run")
    if content is None:
        (run / "config.yaml").unlink()
    else:
        (run / "config.yaml").write_text(content)
    results = collect([run])
    assert len(results.scores) == 6 and not results.final
    assert "whether the run finished is not known" in results.problems[0] and len(results.missing) == 3


def test_an_unfinished_run_has_no_headline(tmp_path: Path) -> None:
    results = collect([make(tmp_path / "run", steps=1000)])
    assert not results.final and {m.reason for m in results.missing} == {"unfinished: step 200 of 1,000"}
    cell = only_cell(results)
    assert cell.scores == () and math.isnan(cell.interval()[0]) and [s.step for s in cell.latest()] == [200, 200, 200]


def test_a_run_that_went_further_than_it_was_asked_to(tmp_path: Path) -> None:
    """The same command again with fewer steps changes nothing but `steps`."""
    results = collect([make(tmp_path / "run", steps=100)])
    assert {s.step for s in results.final} == {200} and not results.missing


def test_a_seed_that_diverged_is_named_and_not_counted(tmp_path: Path) -> None:
    results = collect([make(tmp_path / "run", dead=(1,))])
    assert [s.seed for s in results.final] == [0, 2]
    assert [(m.seed, m.reason) for m in results.missing] == [(1, "diverged: a loss was not finite before step 200")]


def test_a_run_without_an_environment(tmp_path: Path) -> None:
    results = collect([make(tmp_path / "run", score=None)])
    assert {m.reason for m in results.missing} == {"trained, but there is no environment to score it in"}
    assert only_cell(results).best() is None and not results.problems


def test_nothing_to_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.csv").write_text("a,b\n")
    make(tmp_path / "runs")
    for bad, message in [
        ([tmp_path / "empty"], "holds no run"),
        ([tmp_path / "notes.csv"], "holds no run"),
        ([tmp_path / "ruins"], "Did you mean"),
        ([], "nothing to read"),
    ]:
        with pytest.raises(UserError, match=message):
            collect(bad)


def test_a_damaged_table(tmp_path: Path) -> None:
    (table,) = write(collect([make(tmp_path / "run")]), tmp_path / "out.csv")[:1]
    lines = table.read_text().splitlines()
    lines[2] = lines[2].replace("true", "perhaps").replace("false", "perhaps")
    table.write_text("\n".join(lines))  # no newline at the end either
    results = collect([table])
    assert len(results.scores) == 4 and len(results.problems) == 2


# ------------------------------------------------------------------------------------------------- runs that are alike


def test_two_runs_of_one_name_with_other_settings(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", algo={"temperature": 5.0}, given={"algo.temperature": 5.0}, score=60.0)
    results = collect([tmp_path])
    assert [c.label for c in results.cells()] == ["iql", "iql (temperature=5)"]
    assert [c.interval()[0] for c in results.cells()] == [53.0, 63.0] and not results.problems


def test_labels_are_the_same_on_all_data_sets(tmp_path: Path) -> None:
    """Defaults differ between datasets and do not show; what was asked for does, also where it stands alone."""
    make(tmp_path / "a")
    make(tmp_path / "b", dataset="antmaze-umaze-v2", algo={"temperature": 10.0})  # its own default, not asked for
    make(tmp_path / "c", dataset="walker2d-medium-v2", algo={"temperature": 5.0}, given={"algo.temperature": 5.0})
    labels = {(c.dataset, c.label) for c in collect([tmp_path]).cells()}
    assert labels == {
        ("hopper-medium-v2", "iql"),
        ("antmaze-umaze-v2", "iql"),
        ("walker2d-medium-v2", "iql (temperature=5)"),
    }


def test_runs_that_differ_in_what_nobody_asked_for(tmp_path: Path) -> None:
    make(tmp_path / "a", algo={"expectile": 0.7})
    make(tmp_path / "b", algo={"expectile": 0.8})  # another version's default
    make(tmp_path / "c", algo={"expectile": 0.8}, fingerprint="0" * 64)  # other data under the same name
    labels = sorted(c.label for c in collect([tmp_path]).cells())
    assert labels == [
        "iql (expectile=0.7, data.fingerprint=ffffffffffff)",
        "iql (expectile=0.8, data.fingerprint=000000000000)",
        "iql (expectile=0.8, data.fingerprint=ffffffffffff)",
    ]


def test_evaluation_that_changes_the_score_keeps_runs_apart(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", evaluation={"max_steps": 50, "episodes": 3}, given={"eval.max_steps": 50, "eval.episodes": 3})
    assert [c.label for c in collect([tmp_path]).cells()] == ["iql", "iql (eval.max_steps=50)"]


def test_other_seeds_of_the_same_settings_come_together(tmp_path: Path) -> None:
    make(tmp_path / "a", seeds=(0, 1))
    make(tmp_path / "b", seeds=(2, 3), given={"algo.temperature": 3.0})  # the default, written out
    cell = only_cell(collect([tmp_path]))
    assert [s.seed for s in cell.scores] == [0, 1, 2, 3] and cell.label == "iql"


def test_the_same_seed_twice_is_named_and_counted_once(tmp_path: Path) -> None:
    make(tmp_path / "a", seeds=(0, 1), steps=400)  # unfinished
    make(tmp_path / "b", seeds=(1, 2), score=70.0)
    results = collect([tmp_path])
    assert [(s.seed, s.value) for s in results.final] == [(1, 73.0), (2, 74.0)]
    (problem,) = [p for p in results.problems if "are the same" in p]
    assert "seed 1;" in problem and f"counted once, from {tmp_path / 'b'}" in problem and "differ" in problem
    assert [m.seed for m in results.missing] == [0]
    assert {s.run for s in results.scores if s.seed == 1} == {str(tmp_path / "b")}
    make(tmp_path / "a", seeds=(0, 1), score=70.0)  # now it has finished, with the same scores
    results = collect([tmp_path])
    assert [s.seed for s in only_cell(results).scores] == [0, 1, 2] and not results.missing
    (problem,) = results.problems
    assert f"counted once, from {tmp_path / 'a'}" in problem and "differ" not in problem


def test_a_path_given_twice_is_read_once(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / "a")
    (tmp_path / "link").symlink_to(run)
    results = collect([run, tmp_path / "runs", tmp_path / "link", str(run) + "/"])
    assert len(results.scores) == 6 and len(results.runs) == 1 and not results.problems


def test_a_grid_has_a_cell_for_each_value(tmp_path: Path) -> None:
    make(tmp_path / "grid", grid={"temperature": [1.0, 3.0]}, seeds=(0, 1), given={"grid.temperature": [1, 3]})
    make(tmp_path / "plain", seeds=(2,), algo={"temperature": 3})
    results = collect([tmp_path])
    assert {c.label: [s.seed for s in c.scores] for c in results.cells()} == {
        "iql (temperature=1)": [0, 1],
        "iql": [0, 1, 2],
    }
    assert {s.cell for s in results.scores} == {"temperature=1", "temperature=3", ""}
    labels, matrix = settings_matrix(results, "hopper-medium-v2", "iql")
    assert labels == ["iql (temperature=1)", "iql"]
    np.testing.assert_allclose(matrix, [[0.52, 0.52], [0.53, 0.53], [np.nan, 0.54]])


def test_other_versions_are_warned_of(tmp_path: Path) -> None:
    make(tmp_path / "a")
    make(tmp_path / "b", algorithm="bc", where=place(mujoco="3.3.7"))
    (problem,) = collect([tmp_path]).problems
    assert (
        "iql in Hopper-v4, gymnasium 1.4.0, mujoco 3.11.0" in problem
        and "bc in Hopper-v4, gymnasium 1.4.0, mujoco 3.3.7" in problem
    )
    make(
        tmp_path / "b",
        algorithm="bc",
        dataset="walker2d-medium-v2",
        where=place("Walker2d-v4", "3.3.7"),
    )
    (problem,) = collect([tmp_path]).problems
    assert problem.startswith("D4RL gym: scores of mujoco 3.11.0 and 3.3.7 together")


def test_other_lengths_of_training_are_warned_of(tmp_path: Path) -> None:
    make(tmp_path / "a", seeds=(0,))
    make(tmp_path / "b", seeds=(1,), steps=100, at=(100,))
    assert "trained for 100 and 200 updates" in collect([tmp_path]).problems[0]


# ---------------------------------------------------------------------------------------------------------- benchmarks


def plan(folder: Path, seeds: tuple[int, ...] = (0, 1, 2), **more: Any) -> Path:
    cells = [
        {"dataset": d, "algorithm": a, "run": f"{a}-{d}"}
        for d in ("hopper-medium-v2", "walker2d-medium-v2")
        for a in ("bc", "iql")
    ]
    folder.mkdir(exist_ok=True)
    (folder / "cells").mkdir(exist_ok=True)
    content = {"version": 1, "suite": "d4rl-gym", "seeds": list(seeds), "steps": 200, "cells": cells, **more}
    (folder / "benchmark.json").write_text(json.dumps(content))
    return folder


def test_a_benchmark(tmp_path: Path) -> None:
    bench = plan(
        tmp_path / "bench",
        seeds=(0, 1, 2, 3),
        references={"hopper-medium-v2": {"iql": 66.3}},
        reference_source="a paper",
    )
    make(bench / "iql-hopper-medium-v2")
    make(bench / "bc-hopper-medium-v2", algorithm="bc", steps=1000, seeds=(0, 1, 2, 3))
    (bench / "cells" / "bc-hopper-medium-v2.json").write_text('{"status": "failed", "error": "out of\\nmemory"}')
    (bench / "cells" / "bc-walker2d-medium-v2.json").write_text('{"status": "failed", "error": "no such file"}')
    (bench / "cells" / "iql-walker2d-medium-v2.json").write_text('{"sta')
    write(collect([bench]), bench)
    for given in ([bench], [tmp_path], [bench, bench / "results.csv"]):
        results = collect(given)
        assert {s.suite for s in results.scores} == {"d4rl-gym"} and len(
            {(s.dataset, s.algorithm, s.seed) for s in results.final}
        ) == 3
        assert results.references == {("hopper-medium-v2", "iql"): 66.3} and results.reference_source == "a paper"
        reasons = {(m.dataset, m.algorithm, m.seed): m.reason for m in results.missing}
        assert reasons == {
            **{("hopper-medium-v2", "bc", seed): "failed: out of memory" for seed in range(4)},
            ("hopper-medium-v2", "iql", 3): "not trained",
            ("walker2d-medium-v2", "bc", None): "failed: no such file",
            ("walker2d-medium-v2", "iql", None): "not started",
        }
        assert [(c.dataset, c.label) for c in results.cells()] == [
            ("hopper-medium-v2", "bc"),
            ("hopper-medium-v2", "iql"),
            ("walker2d-medium-v2", "bc"),
            ("walker2d-medium-v2", "iql"),
        ]
        assert any("cannot be read" in p and "iql-walker2d" in p for p in results.problems)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"suite": "x", "seeds": [0], "cells": [{"dataset": "d"}]}'])
def test_a_damaged_benchmark_is_read_as_a_folder_of_runs(tmp_path: Path, content: str) -> None:
    bench = plan(tmp_path / "bench")
    make(bench / "iql-hopper-medium-v2")
    (bench / "benchmark.json").write_text(content)
    results = collect([bench])
    assert len(results.final) == 3 and "its runs are read without it" in results.problems[0]


# ------------------------------------------------------------------------------------------------ what may be averaged


def scored(dataset: str, where: Provenance, normalised: float | None = 50.0, suite: str = "") -> Score:
    return Score(
        suite,
        dataset,
        *astuple(where),
        "iql",
        "00000000",
        0,
        100,
        10,
        1000.0,
        normalised,
        None,
        "",
        "runs/a",
        True,
    )


def test_what_may_be_averaged() -> None:
    gym = {
        group(scored(f"{r}-medium-v2", place(f"{r}-medium-v2"))) for r in ("hopper", "walker2d", "halfcheetah", "ant")
    }
    assert gym == {"D4RL gym"}
    maze = "offrl/D4RL-AntMaze-v0"
    assert group(scored("antmaze-umaze-v2", place(maze))) == "D4RL antmaze"
    assert group(scored("maze2d-umaze-v1", place())) == "D4RL maze2d"
    assert {group(scored(f"{h}-human-v1", place())) for h in ("pen", "door", "hammer", "relocate")} == {"D4RL adroit"}
    assert group(scored("kitchen-mixed-v0", place())) == "D4RL kitchen"
    assert group(scored("hopper-medium-v2", Provenance("Hopper-v4"), None)) == "", "a raw return"
    minari = [
        ("mujoco/hopper/medium-v0", "mujoco"),
        ("D4RL/door/human-v2", "adroit"),
        ("D4RL/antmaze/umaze-v1", "antmaze"),
    ]
    assert all(group(scored(d, place("X-v1", whose="Minari"))) == f"Minari {family}" for d, family in minari)
    assert group(scored("hopper-medium-v2", place(whose="Minari"))) == "Minari gym", "another scale"
    assert group(scored("hopper-medium-v2", place(whose="given"))) == "own files (given references, gym)"


def test_own_files_are_by_reference_and_family() -> None:
    """A file that is called like a D4RL dataset is not one."""
    own = group(scored("hopper-medium", place()))
    assert own == "own files (D4RL references, gym)" == group(scored("walk", place("Walker2d-v5")))
    assert group(scored("my-antmaze", place("offrl/D4RL-AntMaze-v0"))) == "own files (D4RL references, antmaze)"
    assert group(scored("a", place("MyEnv-v0", whose="given"))) != group(
        scored("b", place("OtherEnv-v0", whose="given"))
    )
    assert group(scored("a", place(), suite="robots")) == "robots (D4RL references, gym)"


def test_the_reference_of_a_score() -> None:
    score = scored("a in b", place())
    assert score.provenance == place() and reference(score) == "D4RL"
    assert reference(replace(score, reference="")) == "given" and reference(replace(score, normalised=None)) == ""


def test_matrices(tmp_path: Path) -> None:
    for dataset, score in (("hopper-medium-v2", 50.0), ("walker2d-medium-v2", 80.0)):
        for algorithm, seeds in (("bc", (0, 1)), ("iql", (0, 1, 2))):
            make(tmp_path / f"{algorithm}-{dataset}", algorithm=algorithm, dataset=dataset, seeds=seeds, score=score)
    make(tmp_path / "x", dataset="halfcheetah-medium-v2")  # iql only
    make(tmp_path / "y", algorithm="td3_bc")  # one dataset of three
    make(tmp_path / "z", dataset="antmaze-umaze-v2", score=10.0)
    make(tmp_path / "raw", dataset="mine", where=Provenance("Pendulum-v1", "gymnasium 1.4.0"))
    (tmp_path / "raw" / "scores.csv").write_text((tmp_path / "raw" / "scores.csv").read_text().replace(",52.0,", ",,"))
    for seed in range(3):
        text = (tmp_path / "raw" / "scores.csv").read_text()
        (tmp_path / "raw" / "scores.csv").write_text(
            text.replace(f",{51.0 + seed},", ",,").replace(f",{52.0 + seed},", ",,")
        )
    found, why = groups(collect([tmp_path]))
    by_name = {g.name: g for g in found}
    assert set(by_name) == {"D4RL gym", "D4RL antmaze"}, "never together"
    gym = by_name["D4RL gym"]
    assert (
        gym.datasets == ("hopper-medium-v2", "walker2d-medium-v2")
        and set(gym.scores) == {"bc", "iql"}
        and gym.seeds == 2
    )
    np.testing.assert_allclose(gym.scores["iql"], [[0.52, 0.82], [0.53, 0.83], [0.54, 0.84]])
    notes = " ".join(gym.notes)
    assert (
        "td3_bc left out" in notes
        and "halfcheetah-medium-v2 left out: no final scores of bc" in notes
        and "too narrow" in notes
    )
    assert len(why) == 1 and why[0].startswith("mine: no reference scores")


def test_missing_seeds_are_not_numbers(tmp_path: Path) -> None:
    make(tmp_path / "a", seeds=(0, 1))
    make(tmp_path / "b", dataset="walker2d-medium-v2", seeds=(1, 2))
    ((one,), _) = groups(collect([tmp_path]))
    np.testing.assert_allclose(one.scores["iql"], [[0.52, np.nan], [0.53, 0.53], [np.nan, 0.54]])
    make(tmp_path / "c", dataset="ant-medium-v2", seeds=(0, 1, 2))
    ((one,), _) = groups(collect([tmp_path]))
    assert any("numbers of seeds differ" in note for note in one.notes)


# Returns of BC's best setting for each task, seeds 7, 42 and 210: benchmark/results/TASK-bc/log.csv of
# github.com/polixir/NeoRL2
NEORL2_BC = {
    "Pipeline": (482.8752240294218, 261.7726762526035, 522.429623716116),
    "Simglucose": (355.46776733685437, 359.56242725319447, 361.9991905184348),
    "RocketRecovery": (114.55265963179805, 97.51930291441177, 97.96229854822066),
    "RandomFrictionHopper": (136.96168265291087, 139.05990605881257, 140.50766845010818),
    "DMSD": (574.5185721209077, 567.807075522353, 548.5790326721146),
    "Fusion": (6.092581487627143, 5.339085794277416, 6.558493622720572),
    "SafetyHalfCheetah": (1665.9704493644238, 1671.4118400039908, 1686.2128626306826),
}


def test_a_published_table_from_its_raw_returns(tmp_path: Path) -> None:
    """Seven runs, three seeds each: NeoRL-2's printed column of BC, mean and deviation, and rliable's aggregates of
    it.
    """
    from offrl.envs import neorl2, published
    from offrl.statistics.aggregate import aggregates

    for task, returns in NEORL2_BC.items():
        where = place(f"neorl2:{task}", whose="NeoRL-2")
        run = make(tmp_path / task, dataset=task, algorithm="bc", seeds=(7, 42, 210), where=where)
        normalise = neorl2.lookup(task).normalise  # type: ignore[union-attr]
        rows = [
            f"200,{s},100,{g},1,100,,{normalise(g)},{task},{columns(where)}"
            for s, g in zip((7, 42, 210), returns, strict=True)
        ]
        (run / "scores.csv").write_text("\n".join([HEADER.format(""), *rows]) + "\n")
    results = collect([tmp_path])
    for cell in results.cells():
        printed = published.published(cell.dataset, "bc")
        assert printed is not None and printed.std is not None
        assert cell.interval()[0] == pytest.approx(printed.mean, abs=0.0051)
        assert np.std([s.value for s in cell.scores], ddof=1) == pytest.approx(printed.std, abs=0.0051)
    ((one,), why) = groups(results)
    assert one.name == "NeoRL-2" and not why and one.scores["bc"].shape == (3, 7)
    ours = aggregates(one.scores["bc"], reps=500)
    assert 100 * ours["mean"].value == pytest.approx(62.14, abs=0.005)  # of the printed column
    assert 100 * ours["median"].value == pytest.approx(68.61, abs=0.005)
    assert ours["iqm"].value == pytest.approx(float(np.sort(one.scores["bc"].reshape(-1))[5:16].mean()), abs=1e-12)
    assert ours["optimality_gap"].value == pytest.approx(1 - ours["mean"].value)
    library, metrics = pytest.importorskip("rliable.library"), pytest.importorskip("rliable.metrics")
    np.random.seed(0)
    theirs = lambda x: np.array([getattr(metrics, f"aggregate_{name}")(x) for name in ours])  # noqa: E731
    points, ends = library.get_interval_estimates({"bc": one.scores["bc"]}, theirs, reps=500)
    expected = np.stack([points["bc"], *ends["bc"]], 1)
    assert [(x.value, x.low, x.high) for x in ours.values()] == pytest.approx(expected, abs=1e-12)


def test_a_line_without_its_end_is_damaged(tmp_path: Path) -> None:
    run = make(tmp_path / "run", seeds=(0,), at=(100, 200))
    lines = (run / "scores.csv").read_text().splitlines()
    (run / "scores.csv").write_text("\n".join([*lines, ",".join(lines[1].split(",")[:9])]) + "\n")
    results = collect([run])
    assert len(results.scores) == 2 and "1 line cannot be read" in results.problems[0]


def test_an_older_evaluation_without_a_score_is_never_the_best(tmp_path: Path) -> None:
    run = make(tmp_path / "run", seeds=(0,), at=(100, 200))
    lines = (run / "scores.csv").read_text().splitlines()
    cells = lines[1].split(",")
    cells[lines[0].split(",").index("score")] = ""
    (run / "scores.csv").write_text("\n".join([lines[0], ",".join(cells), lines[2]]) + "\n")
    assert only_cell(collect([run])).best() == (200, 52.0)


def test_a_cell_of_a_benchmark_with_a_damaged_record_is_missing(tmp_path: Path) -> None:
    bench = plan(tmp_path / "bench")
    (make(bench / "iql-hopper-medium-v2") / "run.json").write_text("{")
    reasons = {(m.dataset, m.algorithm): m.reason for m in collect([bench]).missing}
    assert reasons["hopper-medium-v2", "iql"] == "its run.json cannot be read"


def test_a_run_that_stopped_at_a_plateau_has_ended(tmp_path: Path) -> None:
    run = make(tmp_path / "run", steps=1000, seeds=(0,))
    config = json.loads((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(json.dumps({**config, "stop": "fqe-plateau", "stop_patience": 1}))
    for values, final in (([1.0, 2.0], 0), ([2.0, 1.0], 1)):
        (run / "fqe.jsonl").write_text(
            "".join(f'{{"step": {s}, "value": [{v}]}}\n' for s, v in zip((100, 200), values, strict=True))
        )
        results = collect([run])
        assert [s.step for s in results.final] == [200] * final and len(results.missing) == 1 - final
