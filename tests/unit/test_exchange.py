"""Exchangeable results: a run as a document and back, documents of others beside it, and files that are none."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offrl.errors import UserError
from offrl.report.rows import entries, table
from offrl.runs.comparable import groups
from offrl.runs.exchange import document, documents, read, write
from offrl.runs.exchange.describe import public
from offrl.runs.exchange.merge import documents_of
from offrl.runs.results import collect
from offrl.runs.score import Results

from .test_results import make, place

ROOT = Path(__file__).resolve().parents[2]
TUNED = {"by": "offrl tune", "candidates": 32, "judge": "fqe", "episodes_used": 0, "split": "seeds 0-2 chose"}
KEYS = [
    "schema",
    "library",
    "version",
    "commit",
    "created",
    "license",
    "dataset",
    "task",
    "algorithm",
    "protocol",
    "runs",
    "curve",
    "hardware",
    "notes",
]


def run_of(folder: Path, **options: Any) -> Path:
    """A run directory with the episodes of its last evaluation, ten each, whose mean is that of scores.csv."""
    run = make(folder, **options)
    rows = [line.split(",") for line in (run / "scores.csv").read_text().splitlines()]
    column = rows[0].index("return_mean")
    last = [row for row in rows[1:] if row[0] == rows[-1][0]]
    returns = [
        [float(row[column]) + d for d in (-4.5, -3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 4.5)] for row in last
    ]
    line = {"step": int(last[0][0]), "returns": returns, "lengths": [[500] * 10 for _ in last]}
    (run / "episodes.jsonl").write_text(json.dumps(line) + "\n")
    return run


def other(**changes: Any) -> dict[str, Any]:
    """A document of another library: two seeds of a td3_bc on hopper-medium-v2."""
    value: dict[str, Any] = {
        "schema": 1,
        "library": "CORL",
        "version": "2.0",
        "commit": None,
        "created": "2026-01-31",
        "license": "CC-BY-4.0",
        "dataset": {
            "name": "hopper-medium-v2",
            "checksum": "c" * 64,
            "rows": 999_906,
            "episodes": 2186,
            "source": "d4rl",
            "transforms": [],
        },
        "task": {
            "name": "hopper-medium-v2",
            "environment": "Hopper-v4",
            "packages": {"gymnasium": "1.4.0", "mujoco": "3.11.0"},
            "reference_scores": {"source": "D4RL", "min": -20.272305, "max": 3234.3},
            "max_steps": 1000,
        },
        "algorithm": {
            "name": "td3_bc",
            "settings": {"alpha": 2.5, "hidden": [256, 256]},
            "settings_hash": "abc",
            "tuned": dict(TUNED),
        },
        "protocol": {"steps": 1000, "evaluation": "last", "episodes": 2, "deterministic": True, "reset_seeds": [0, 1]},
        "runs": [
            {
                "seed": s,
                "step": 1000,
                "returns": [1600.0 + s, 1700.0],
                "lengths": [900, 1000],
                "costs": None,
                "score": None,
                "diverged": False,
            }
            for s in (0, 1)
        ],
        "curve": [{"seed": s, "step": 500, "score": 30.0} for s in (0, 1)],
        "hardware": {"kind": "cuda", "wall_s": 60.0},
        "notes": "",
    }
    return {**value, **changes}


def put(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


def cells(results: Results) -> str:
    return table(entries(results))


# ------------------------------------------------------------------------------------------------------------ round
# trip


def test_a_document_has_the_keys_of_the_schema_and_every_episode(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", dead=(2,))
    one = document(run, tuned=TUNED, created="2026-02-03", license="CC-BY-4.0")
    assert list(one) == KEYS and one["created"] == "2026-02-03" and one["algorithm"]["tuned"] == TUNED
    assert one["dataset"]["checksum"] == "f" * 64 and one["task"]["packages"] == {
        "gymnasium": "1.4.0",
        "mujoco": "3.11.0",
    }
    assert one["algorithm"]["settings"]["algo.temperature"] == 3.0 and one["protocol"]["steps"] == 200
    assert [(r["seed"], r["step"], len(r["returns"]), r["lengths"][0], r["diverged"]) for r in one["runs"]] == [
        (0, 200, 10, 500, False), (1, 200, 10, 500, False), (2, 200, 10, 500, True),
    ]  # fmt: skip
    assert [(p["seed"], p["step"], p["score"]) for p in one["curve"]] == [
        (0, 100, 51.0),
        (1, 100, 52.0),
        (2, 100, 53.0),
    ]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", document(run)["created"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"score": None, "where": "", "dead": ()},
        {"dead": (1,)},
        {"dataset": "own", "where": place("own", whose="given")},
        {"algo": {"temperature": 5.0}, "given": {"algo.temperature": 5.0}},
        {"grid": {"temperature": [1.0, 3.0], "expectile": [0.7, 0.9]}, "seeds": (3, 4)},
        {"at": (100,), "steps": 200},
    ],
)
def test_a_report_shows_the_same_cells_of_a_run_and_of_its_documents(tmp_path: Path, options: dict[str, Any]) -> None:
    run = (
        run_of(tmp_path / "run", **options)
        if options.get("score", 1) is not None
        else make(tmp_path / "run", **options)
    )
    if options.get("score", 1) is None:
        with pytest.raises(UserError, match="was never scored"):
            document(run)
        return
    plain = make(tmp_path / "plain", algorithm="bc", seeds=(0, 1))
    mine = collect([plain, run])
    file = write(tmp_path / "results.jsonl", [*documents(plain), *documents(run)])
    theirs = collect([file])
    hide = re.compile("diverged: a loss was not finite before step [0-9]*")
    assert (
        hide.sub("diverged", cells(theirs)) == hide.sub("diverged", cells(mine)) and len(cells(mine).splitlines()) > 2
    )
    lines = [[replace(s, run="", cell="") for s in r.scores] for r in (mine, theirs)]
    assert sorted(lines[0], key=repr) == sorted(lines[1], key=repr), "learning curves too"
    assert read(file) == documents_of(theirs), "what was read is written as it was"
    both = collect([plain, run, file])
    assert hide.sub("diverged", cells(both)).replace("diverged; ", "") == hide.sub("diverged", cells(mine)).replace(
        "diverged; ", ""
    )
    assert any("are the same" in p for p in both.problems), "counted once, with a warning"


def test_a_run_without_single_episodes_is_a_document_too(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    (run / "episodes.jsonl").unlink(missing_ok=True)
    means = document(run)
    assert all(
        r["returns"] is None and r["lengths"] is None and isinstance(r["return_mean"], float) for r in means["runs"]
    )
    file = write(tmp_path / "means.json", [means])
    assert cells(collect([file])) == cells(collect([run]))
    (run / "episodes.jsonl").write_text('{"step": 200, "returns": 5}\n{"step": 200, "returns": [[nan]]}\nx')
    assert document(run)["runs"][0]["returns"] is None


def test_a_grid_has_a_document_for_each_point(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", grid={"temperature": [1.0, 3.0]}, seeds=(0,))
    with pytest.raises(UserError, match=r"2 grid points .*temperature=1; temperature=3"):
        document(run)
    one = document(run, values={"temperature": 3.0})
    assert one["algorithm"]["settings"]["algo.temperature"] == 3.0 and one["runs"][0]["score"] == 52.0
    with pytest.raises(UserError, match="0 grid points"):
        document(run, values={"temperature": 2.0})
    with pytest.raises(UserError, match=r"holds one: give .*a\.jsonl"):
        write(tmp_path / "a.json", documents(run))


def test_a_document_says_nothing_of_its_machine(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "home" / "alice" / "run",
        algo={"world_model": "/home/alice/models/a.pt", "note": "https://bob:secret@host/a/b"},
    )
    config = json.loads((run / "config.yaml").read_text())
    config["given"] = {"algo.world_model": "/home/alice/models/a.pt"}
    (run / "config.yaml").write_text(json.dumps(config))
    text = json.dumps(document(run))
    assert "alice" not in text and "secret" not in text and str(tmp_path) not in text and "a.pt" in text
    for path, shown in {
        "/home/John Smith/x.hdf5": "x.hdf5",
        "~/a/b.py": "b.py",
        "../al/x": "x",
        "C:\\Users\\al\\x.h5": "x.h5",
        "file:///home/al/x": "x",
        "mine.py:f": "mine.py:f",
        "labels by /home/alice/r.py:f (x)": "labels by r.py:f (x)",
        "D4RL/hopper/medium-v2": "D4RL/hopper/medium-v2",
    }.items():
        assert public({path: [path]}) == {shown: [shown]}


def test_no_clock_where_none_is_wanted(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    first = write(tmp_path / "a.json", [document(run, created="2026-01-01", hardware=False)]).read_bytes()
    (run / "timing.jsonl").write_text('{"step": 100, "updates_per_second": 10}\n')
    assert document(run)["hardware"]["wall_s"] == 10.0
    assert write(tmp_path / "b.json", [document(run, created="2026-01-01", hardware=False)]).read_bytes() == first


# ---------------------------------------------------------------------------------------------------- documents of
# others


def test_others_stand_beside_own_runs(tmp_path: Path) -> None:
    run = run_of(tmp_path / "runs" / "a")
    (tmp_path / "other").mkdir()
    put(tmp_path / "other" / "b.json", other(more={"kept": [1, None]}))
    results = collect([run, tmp_path / "other"])
    assert [(c.label, len(c.scores)) for c in results.cells()] == [("iql", 3), ("td3_bc", 2)]
    (first,) = [s for s in results.final if s.algorithm == "td3_bc" and s.seed == 0]
    assert (
        first.raw == 1650.0
        and first.normalised == pytest.approx(100 * 1670.272305 / 3254.572305)
        and first.episodes == 2
    )
    assert [s.raw for s in results.scores if s.step == 500] == pytest.approx([-20.272305 + 0.3 * 3254.572305] * 2)
    assert [g.name for g in groups(results)[0]] == ["D4RL gym"]
    assert documents_of(results)[1]["more"] == {"kept": [1, None]}, "unknown keys are kept"
    put(
        tmp_path / "other" / "c.json", other(library="mine", algorithm={**other()["algorithm"], "settings_hash": "abd"})
    )
    assert [c.label for c in collect([tmp_path / "other"]).cells()] == [
        "td3_bc (library=CORL)",
        "td3_bc (library=mine)",
    ]


def test_duplicates_are_counted_once(tmp_path: Path) -> None:
    a = put(tmp_path / "a.json", other())
    later = other()
    later["runs"] = [{**r, "step": 2000} for r in later["runs"]] + [{**later["runs"][0], "seed": 2}]
    renamed = other(
        dataset={**other()["dataset"], "name": "hopper-mine"}, algorithm={**other()["algorithm"], "name": "td3bc"}
    )
    results = collect([a, put(tmp_path / "b.json", later)])
    assert sorted((s.seed, s.step) for s in results.final) == [(0, 2000), (1, 2000), (2, 1000)]
    assert [p for p in results.problems if "counted once, from " in p and "b.json" in p]
    results = collect([a, put(tmp_path / "c.json", renamed)])
    assert {(s.dataset, s.algorithm) for s in results.final} == {("hopper-medium-v2", "td3_bc")} and len(
        results.final
    ) == 2
    assert "calls td3bc on hopper-mine" in results.problems[0] and any("counted once" in p for p in results.problems)
    twice = other()
    twice["runs"] = [twice["runs"][0], {**twice["runs"][0], "step": 1500}]
    results = collect([put(tmp_path / "d.json", twice)])
    assert [s.step for s in results.final] == [1500] and "seed 0 twice" in results.problems[0]
    results = collect([a, tmp_path])  # the same file again, and the others
    assert len({(s.dataset, s.algorithm, s.seed) for s in results.final}) == len(results.final)


@pytest.mark.parametrize(
    ("change", "label"),
    [
        (("task", "environment", "Hopper-v5"), "environment=Hopper-v5"),
        (("protocol", "deterministic", False), "deterministic=false"),
        (("protocol", "steps", 900), "steps=900"),
        (("task", "max_steps", 500), "max_steps=500"),
        (("task", "reference_scores", {"source": "own", "min": 0.0, "max": 100.0}), "reference=own"),
    ],
)
def test_seeds_that_were_scored_otherwise_are_not_averaged(
    tmp_path: Path, change: tuple[str, str, Any], label: str
) -> None:
    unlike = other()
    unlike[change[0]][change[1]] = change[2]
    unlike["runs"] = [{**r, "seed": r["seed"] + 2} for r in unlike["runs"]]
    unlike["curve"] = []
    results = collect([put(tmp_path / "a.json", other()), put(tmp_path / "b.json", unlike)])
    assert sorted((c.label.partition(" ")[2], [s.seed for s in c.scores]) for c in results.cells()) == [
        ("", [0, 1]), (f"({label})", [2, 3]),
    ] or sorted([s.seed for s in c.scores] for c in results.cells()) == [[0, 1], [2, 3]]  # fmt: skip
    assert any(label in c.label for c in results.cells())
    same = other()
    same["runs"], same["protocol"]["deterministic"] = unlike["runs"], None  # not known: no contradiction
    assert [len(c.scores) for c in collect([tmp_path / "a.json", put(tmp_path / "c.json", same)]).cells()] == [4]


def test_own_run_and_a_document_of_another_environment(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run")
    unlike = document(run)
    unlike["task"]["environment"] = "Hopper-v5"
    unlike["runs"] = [{**r, "seed": r["seed"] + (5 if r["seed"] else 0)} for r in unlike["runs"]]
    results = collect([put(tmp_path / "a.json", unlike), run])
    assert [(c.label, [s.seed for s in c.scores]) for c in results.cells()] == [
        ("iql", [0, 1, 2]),
        ("iql (environment=Hopper-v5)", [6, 7]),
    ]
    assert any("seed 0 of iql" in p and "scored otherwise" in p for p in results.problems)


# ---------------------------------------------------------------------------------------------------- what is no
# document


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of each key of the schema in a document, settings aside."""
    for key, entry in value.items():
        yield (*path, key)
        if isinstance(entry, dict) and key not in ("settings", "packages"):
            yield from paths_of(entry, (*path, key))
        if isinstance(entry, list) and entry and isinstance(entry[0], dict):
            yield from paths_of(entry[0], (*path, key, 0))


def at(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> Any:
    value = copy.deepcopy(value)
    node = value
    for key in path[:-1]:
        node = node[key]
    change(node, path[-1])
    return value


def refused(path: Path) -> str:
    with pytest.raises(UserError) as error:
        collect([path])
    text = str(error.value)
    assert "\n" not in text and str(path) in text and len(text) < 500, text
    return text


def test_each_missing_key_is_named(tmp_path: Path) -> None:
    for path in paths_of(other()):
        text = refused(put(tmp_path / "a.json", at(other(), path, lambda node, key: node.pop(key))))
        assert f"'{path[-1]}' is missing" in text or f".{path[-1]}' is missing" in text, (path, text)
    renamed = {("checksums" if k == "checksum" else k): v for k, v in other()["dataset"].items()}
    assert "Did you mean 'checksums'?" in refused(put(tmp_path / "a.json", other(dataset=renamed)))


@pytest.mark.parametrize(
    "wrong", [{"a": 1}, [[1]], "text", -1, True, float("nan"), float("inf"), 1e308, 10**400, None, "x" * 20_000]
)
def test_each_value_of_a_wrong_type_is_one_line_or_understood(tmp_path: Path, wrong: Any) -> None:
    """Whatever stands anywhere: a line that names the file and the field, or a value that the schema allows."""
    bad = 0
    for path in paths_of(other()):
        file = put(tmp_path / "a.json", at(other(), path, lambda node, key: node.__setitem__(key, wrong)))
        try:
            entries(collect([file]))
        except UserError as error:
            bad += 1
            text = str(error)
            assert (
                "\n" not in text and str(file) in text and len(text) < 500 and str(path[-1]) in text.replace("\\", "")
            ), (path, text)
        else:
            assert wrong is None or isinstance(wrong, (str, dict, bool)) or wrong == -1, (path, wrong)
    assert bad >= (18 if wrong is None else 25), bad


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("schema",), 2, "reads 1; update offrl"),
        (("created",), "2026-13-01", "a date in UTC is due"),
        (("created",), "2026-01-31T10:00:00", "a date in UTC is due"),
        (("runs",), [], "runs is empty"),
        (("runs", 0, "returns"), [], "runs[0].returns is empty: write null"),
        (("runs", 0, "returns"), [1.0], "runs[0].lengths has 2 entries and returns 1"),
        (("runs", 0, "lengths"), [5, -1], "runs[0].lengths holds -1"),
        (("runs", 0, "costs"), [5, -1], "runs[0].costs holds -1"),
        (("runs", 0, "returns"), None, "there is no return_mean"),
        (("runs", 0, "score"), 99.0, "runs[0].score is 99, and its returns between"),
        (("runs", 0, "return_mean"), 99.0, "runs[0].return_mean is 99, and the mean of its returns 1650"),
        (("runs", 0, "success"), 1.5, "runs[0].success is 1.5"),
        (("runs", 0, "step"), -1, "runs[0].step is -1"),
        (("runs", 0, "seed"), 2**70, "runs[0].seed is"),
        (("protocol", "reset_seeds"), [3, 1], "protocol.reset_seeds is [3, 1]"),
        (("task", "reference_scores", "max"), -30.0, "the second the larger"),
        (("task", "reference_scores", "max"), 5000.0, "as D4RL's for hopper-medium-v2, which are"),
        (("dataset", "checksum"), " ", "dataset.checksum is empty"),
        (("algorithm", "settings", "x"), float("inf"), "algorithm.settings.x is inf"),
    ],
)
def test_what_contradicts_itself_is_refused(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    assert message in refused(
        put(tmp_path / "a.json", at(other(), path, lambda node, key: node.__setitem__(key, value)))
    )


def nested(depth: int) -> str:
    return json.dumps(other()).replace('"alpha": 2.5', '"alpha": ' + "[" * depth + "]" * depth)


def test_files_that_are_no_documents(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for text, message in (
        ("", "is empty"), ("{", "is no JSON"), ("[]", "it is a list"), ("null", "it is null"), ("5", "the value 5"),
        ("{}", "'schema' is missing"),
        (json.dumps(other()) * 2, "one a line in a .jsonl file"), (nested(50), "deeper than 32 layers"),
        (nested(100_000), "nested too deeply"),
        ('{"schema": ' + "9" * 10_000 + "}", "digits"), ("[" * 2_500_000, "objects and lists"),
        (json.dumps(other(runs=other()["runs"][:1] * 10_001)), "runs has 10,001 entries, and a document 10,000"),
    ):  # fmt: skip
        file.write_text(text)
        assert message in refused(file), text[:60]
    file.write_bytes(b"\xff\xfe{}")
    assert "UTF-8" in refused(file)
    with open(file, "wb") as sparse:
        sparse.truncate(64_000_001)
    assert "64,000,001 bytes" in refused(file)
    lines = put(tmp_path / "b.jsonl", other(), other(library=5))
    assert "b.jsonl, line 2: library is 5" in refused(lines)
    for name in ("gone.json", "pipe.json"):
        if name == "pipe.json":
            os.mkfifo(tmp_path / name)
        with pytest.raises(UserError):
            collect([tmp_path / name])


def test_a_million_runs_are_refused(tmp_path: Path) -> None:
    one = (
        json.dumps(other()["runs"][0], separators=(",", ":"))
        .replace("[1600.0,1700.0]", "null")
        .replace("[900,1000]", "null")
    )
    (tmp_path / "a.json").write_text(
        json.dumps(other(runs=[])).replace('"runs": []', f'"runs": [{",".join([one] * 400_000)}]')
    )
    assert "runs has 400,000 entries" in refused(tmp_path / "a.json")
    (tmp_path / "a.json").write_text(
        json.dumps(other(runs=[])).replace('"runs": []', f'"runs": [{",".join(["{}"] * 1_000_000)}]')
    )
    assert "runs has 1,000,000 entries" in refused(tmp_path / "a.json")


def test_damage_in_a_folder_is_a_problem_and_other_json_is_not_looked_at(tmp_path: Path) -> None:
    put(tmp_path / "a.json", other())
    put(tmp_path / "b.json", other(schema=7))
    put(tmp_path / "c.json", {"unrelated": True})
    results = collect([tmp_path])
    assert len(results.final) == 2 and len(results.problems) == 1 and "b.json: schema is 7" in results.problems[0]


def test_names_of_strangers_are_texts(tmp_path: Path) -> None:
    name = "\x1b[2J\n\ud800 =cmd <script>" + "x" * 500
    value = other(
        algorithm={**other()["algorithm"], "name": name, "given": {name: name}},
        dataset={**other()["dataset"], "name": name},
    )
    results = collect([put(tmp_path / "a.json", value)])
    (only,) = results.cells()
    assert only.label.isprintable() and len(only.label) < 200 and len(only.dataset) <= 100
    cells(results).encode()
    write(tmp_path / "again.jsonl", documents_of(results))
    assert read(tmp_path / "again.jsonl") == read(tmp_path / "a.json")


def test_only_documents_are_written(tmp_path: Path) -> None:
    for values, name, message in (
        ([other()], "a.txt", "NAME.json"),
        ([], "a.json", "no results"),
        ([other(notes=float("nan"))], "a.json", "notes is nan"),
        (
            [other(algorithm={**other()["algorithm"], "tuned": {"by": "x"}})],
            "a.json",
            "'algorithm.tuned.candidates' is missing",
        ),
    ):
        with pytest.raises(UserError, match=message):
            write(tmp_path / name, values)
    assert not list(tmp_path.iterdir())


# ----------------------------------------------------------------------------------------------------------------
# tables

HEADER = "algorithm,dataset,seed,step,return"


def test_tables_of_other_libraries(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        f"{HEADER}\ncql,hopper-medium-v2,0,100,1000\ncql,hopper-medium-v2,0,200,1500\ncql,hopper-medium-v2,0,200,1700\n"
        "cql,hopper-medium-v2,1,200,1800\ncql,hopper-medium-v2,2,100,900\ncql,Own-v0,0,200,5\n"
    )
    results = collect([tmp_path / "a.csv", run_of(tmp_path / "run")])
    cell = next(c for c in results.cells() if c.dataset == "hopper-medium-v2" and c.algorithm == "cql")
    assert cell.label == "cql" or cell.label == "cql (file=a.csv)"
    assert [(s.seed, s.raw, s.episodes) for s in cell.scores] == [(0, 1600.0, 2), (1, 1800.0, 1)]
    assert (
        cell.scores[0].normalised == pytest.approx(100 * 1620.272305 / 3254.572305)
        and cell.scores[0].reference == "D4RL"
    )
    assert [(m.seed, m.reason) for m in cell.missing] == [(2, "unfinished: step 100 of 200")]
    assert next(c for c in results.cells() if c.dataset == "Own-v0").scores[0].normalised is None
    (tmp_path / "b.csv").write_text(
        f"\ufeff{HEADER},score,environment\niql,x,0.0,1e2,5,50,E-v1\niql,x,1,100,6,60,E-v1\niql,x,2,100,6,60,E-v2\n"
    )
    found = collect([tmp_path / "b.csv"]).cells()
    assert [[(s.seed, s.step, s.normalised) for s in c.scores] for c in found] == [
        [(0, 100, 50.0), (1, 100, 60.0)],
        [(2, 100, 60.0)],
    ]
    (tmp_path / "c.csv").write_text((tmp_path / "b.csv").read_text().replace("E-v2", "E-v1").replace(",0.0,", ",7,"))
    assert all(len(c.scores) <= 3 for c in collect([tmp_path / "b.csv", tmp_path / "c.csv"]).cells()), (
        "never averaged over two tables"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cql,d,0,100,nan", "line 2: return is 'nan'"),
        ("cql,d,0,100,", "line 2: return is ''"),
        ("cql,d,x,100,1", "line 2: seed is 'x'"),
        ("cql,d,0.5,100,1", "line 2: seed is '0.5'"),
        ("cql,d,0,inf,1", "line 2: step is 'inf'"),
        ("cql,d,0,-5,1", "line 2: step is -5"),
        (",d,0,100,1", "line 2: algorithm is empty"),
        ("cql", "line 2: dataset is empty"),
        ("", "no line"),
        ("cql,d,0,100,1e308", "1e308"),
        ("c" * 300 + ",d,0,100,1", "300 characters"),
        ('"' + "c" * 200_000, "no CSV table"),
    ],
)
def test_damaged_tables_of_others(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.csv").write_text(f"{HEADER}\n{line}\n")
    assert message in refused(tmp_path / "a.csv")
