"""Grids, as a user runs them: one command, every combination of values with every seed, each policy as if trained by
itself.
"""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import offrl as package
from offrl.settings.replicas import expand
from offrl.system import files as checkpoint

from .conftest import Offrl

GRID = "grid.temperature=[1,3] grid.expectile=[0.7,0.9] seeds=2"
COMMAND = f"train algo=iql {GRID} name=mine"
REPLICAS = expand({"temperature": [1.0, 3.0], "expectile": [0.7, 0.9]}, [0, 1])
NAMES = [r.name for r in REPLICAS]


def refused(result: Any, *words: str) -> None:
    """One line on standard error, status 2, and each of `words` in it."""
    assert result.status == 2, result
    (line,) = result.err.splitlines()
    assert line.startswith("offrl: error: ")
    for word in words:
        assert word in line


def scores(run: str) -> list[dict[str, str]]:
    with open(Path(run) / "scores.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_grid_writes_what_the_docs_say(offrl: Offrl) -> None:
    result = offrl(f"{COMMAND} eval.every=10")
    assert result.status == 0 and not result.err
    run = Path("runs/mine")
    documented = "".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in ("grids.md", "runs.md"))
    for name in ("learning_curve.png", "grid.png", "run.json", "scores.csv", "metrics.jsonl"):
        assert (run / name).exists() and name in documented, name
    assert {p.name for p in (run / "policies").iterdir()} == {f"{name}.safetensors" for name in NAMES}
    assert len(NAMES) == 8 and "temperature=3,expectile=0.7,seed=0" in NAMES
    rows = scores("runs/mine")
    assert list(rows[0])[:5] == ["step", "seed", "temperature", "expectile", "episodes"]
    assert [(float(r["temperature"]), float(r["expectile"]), int(r["seed"])) for r in rows] == [
        (dict(r.values)["temperature"], dict(r.values)["expectile"], r.seed) for r in REPLICAS * 2
    ]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = metrics[-1]["value/loss"]
    assert len(losses) == 8 and len(set(losses)) > 1
    record = json.loads((run / "run.json").read_text())
    assert record["replicas"] == [{"seed": r.seed, **dict(r.values)} for r in REPLICAS]
    assert "8 replicas" in result.out and re.search(r"score -?[\d.]+ \.\. -?[\d.]+ over 4 cells", result.out)


def test_the_table_has_a_row_for_each_cell(offrl: Offrl) -> None:
    result = offrl(COMMAND)
    lines = result.out.splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.startswith("algorithm ")]
    assert lines[at].split()[:4] == ["algorithm", "temperature", "expectile", "score"]
    table = lines[at + 2 : at + 6]
    assert [line.split()[:3] for line in table] == [["iql", t, e] for t in ("1", "3") for e in ("0.7", "0.9")]
    assert lines[at + 6].startswith("note: to pick a cell by its score is to use the environment")
    run = package.load("runs/mine")
    for line, cell in zip(table, run.results(), strict=True):
        mean = np.mean([r["score"] for r in run.final_scores if all(r[k] == v for k, v in cell.values)])
        assert line.split()[3] == f"{mean:.1f}" and line.split()[-1] == "2"


def test_each_replica_is_the_one_that_is_trained_by_itself(offrl: Offrl) -> None:
    """The same data, random numbers and settings: equal but for the rounding of products of another shape."""
    assert offrl(COMMAND).status == 0
    assert offrl("train algo=iql algo.temperature=3 algo.expectile=0.9 seeds=[1] name=alone").status == 0
    assert offrl("train algo=iql algo.temperature=1 algo.expectile=0.9 seeds=[1] name=other").status == 0
    grid, alone, other = (
        checkpoint.read(Path("runs") / path)[0]
        for path in (
            "mine/policies/temperature=3,expectile=0.9,seed=1.safetensors",
            "alone/policies/seed_1.safetensors",
            "other/policies/seed_1.safetensors",
        )
    )
    assert grid.keys() == alone.keys()
    weights = [k for k in alone if alone[k].is_floating_point()]
    near = max((grid[k] - alone[k]).abs().max().item() for k in weights)
    far = max((other[k] - alone[k]).abs().max().item() for k in weights)
    assert near < 1e-5 and far > 10 * near, (near, far)
    ours = next(r for r in scores("runs/mine") if (r["temperature"], r["expectile"], r["seed"]) == ("3.0", "0.9", "1"))
    assert float(ours["return_mean"]) == pytest.approx(float(scores("runs/alone")[0]["return_mean"]), rel=1e-3)


@pytest.mark.slow
def test_policies_have_their_own_settings(offrl: Offrl) -> None:
    assert offrl(COMMAND).status == 0
    for replica in REPLICAS:
        _, meta = checkpoint.read(Path("runs/mine/policies") / f"{replica.name}.safetensors")
        assert {k: meta["config"][k] for k in ("temperature", "expectile")} == dict(replica.values) and meta[
            "seed"
        ] == replica.seed
        assert meta["config"]["hidden"] == [8]
    run = package.load("runs/mine")
    action = run.policy(seed=1, temperature=3, expectile=0.9).act(np.zeros(11))
    assert action.shape == (3,) and not np.array_equal(
        action, run.policy(seed=0, temperature=3, expectile=0.9).act(np.zeros(11))
    )
    with pytest.raises(package.UserError, match=r"temperature=1 or 3; expectile=0.7 or 0.9"):
        run.policy()


@pytest.mark.slow
def test_resume_keeps_the_grid(offrl: Offrl) -> None:
    assert offrl(f"{COMMAND} steps=40 log_every=10 eval.every=20 checkpoint.every=10").status == 0
    for steps, command in ((20, COMMAND.replace("mine", "pieces")), (40, "train resume=runs/pieces")):
        result = offrl(f"{command} steps={steps} log_every=10 eval.every=20 checkpoint.every=10")
        assert result.status == 0, result.err
    assert "continuing from step 20" in result.out
    for name in ("metrics.jsonl", "scores.csv", *(f"policies/{n}.safetensors" for n in NAMES)):
        assert (Path("runs/pieces") / name).read_bytes() == (Path("runs/mine") / name).read_bytes(), name
    assert "has its 40 updates already" in offrl("train resume=runs/pieces").out
    assert "has its 40 updates already" in offrl("train config=runs/mine/config.yaml").out
    refused(
        offrl("train resume=runs/mine grid.temperature=[1,3,10]"),
        "grid.temperature=[1,3] ",
        " there, grid.temperature=[1,3,10] ",
    )
    refused(
        offrl("train resume=runs/mine algo.temperature=2"), "algo.temperature and grid.temperature=[1,3] are both given"
    )
    refused(offrl("train algo=iql seeds=2 name=mine"), "grid.expectile=[0.7,0.9] there, no grid here")


@pytest.mark.slow
def test_the_same_command_finds_its_run(offrl: Offrl, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("algo: {name: iql, temperature: 5.0}\ngrid: {temperature: [1, 3]}\n")
    refused(offrl("train config=my.yaml"), "are both given")
    (tmp_path / "my.yaml").write_text("algo: {name: iql, temperature: 5.0}\n")
    assert offrl("train config=my.yaml grid.temperature=[1,3] seeds=1").status == 0
    assert "already" in offrl("train algo=iql grid.temperature=[1.0,3.0] seeds=1").out
    assert len(list(Path("runs").iterdir())) == 1
    assert offrl("train algo=iql grid.temperature=[3,1] seeds=1").status == 0
    assert offrl("train algo=iql seeds=1").status == 0
    assert len(list(Path("runs").iterdir())) == 3


def test_a_setting_that_nothing_looks_at_is_said(offrl: Offrl) -> None:
    result = offrl("train algo=iql grid.lipschitz_radius=[0.1,0.2] seeds=1")  # of a penalty whose weight is 0
    assert result.status == 0
    assert "grid.lipschitz_radius: no update of iql with these settings looks at algo.lipschitz_radius" in result.err
    assert "looks at" not in offrl("train algo=iql algo.lipschitz=0.1 grid.lipschitz_radius=[0.1,0.2] seeds=1").err


@pytest.mark.slow
def test_compare_does_not_inherit_the_grid(offrl: Offrl) -> None:
    result = offrl("train algo=iql grid.temperature=[1,3] compare=[bc] seeds=2")
    assert result.status == 0, result.err
    (bc,) = Path("runs").glob("bc-*")
    assert yaml.safe_load((bc / "config.yaml").read_text())["grid"] == {}
    assert [p.name for p in sorted((bc / "policies").iterdir())] == ["seed_0.safetensors", "seed_1.safetensors"]
    table = result.out.split("algorithm ", 1)[1]
    assert re.search(r"\niql +1 .*\niql +3 .*\nbc ", table)


@pytest.mark.slow
def test_evaluate_prints_every_replica(offrl: Offrl) -> None:
    assert offrl(COMMAND).status == 0
    result = offrl("evaluate runs/mine episodes=1 max_steps=10 seed=5")
    assert result.status == 0
    lines = result.out.splitlines()
    assert lines[1].split()[:4] == ["temperature", "expectile", "seed", "score"]
    assert [line.split()[:3] for line in lines[3:11]] == [[t, e, s] for t in "13" for e in ("0.7", "0.9") for s in "01"]
    assert [line.split(":")[0] for line in lines[11:]] == [
        f"score over seeds, temperature={t},expectile={e}" for t in "13" for e in ("0.7", "0.9")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["bc", "td3_bc"])
def test_other_algorithms_and_one_replica(offrl: Offrl, algo: str) -> None:
    result = offrl(f"train algo={algo} grid.learning_rate=[1e-3] seeds=1 name=mine")
    assert result.status == 0, result.err
    assert offrl(f"train algo={algo} algo.learning_rate=1e-3 seeds=1 name=alone").status == 0
    assert [p.name for p in Path("runs/mine/policies").iterdir()] == ["learning_rate=0.001,seed=0.safetensors"]
    policies = [package.load(f"runs/{name}").policy() for name in ("mine", "alone")]
    assert policies[0].algorithm.config == policies[1].algorithm.config
    observations = np.random.default_rng(0).normal(size=(5, 11))
    np.testing.assert_allclose(policies[0].act(observations), policies[1].act(observations), atol=1e-5)


@pytest.mark.slow
def test_one_replica_diverges(offrl: Offrl) -> None:
    result = offrl("train algo=iql grid.learning_rate=[1e30,3e-4] seeds=1 steps=30 name=mine")
    assert result.status == 0
    assert "learning_rate=1e+30,seed=0 diverged between" in result.err
    assert result.err.splitlines()[-1] == "offrl: warning: diverged and frozen: learning_rate=1e+30,seed=0"
    assert [r.name for r in package.load("runs/mine").diverged] == ["learning_rate=1e+30,seed=0"]
    assert re.search(r"\niql +1e\+30 .*\niql +0.0003 ", result.out)  # the table does not hide it


@pytest.mark.slow
def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"algo.hidden": [8], "eval.env": "none", "compile": "eager", "quiet": True}
    run = package.train("iql", seeds=1, steps=10, grid={"temperature": np.array([1, 3])}, settings=small)
    assert package.train("iql", seeds=1, steps=10, settings={**small, "grid.temperature": [1.0, 3.0]}).dir == run.dir
    assert run.grid == {"temperature": [1.0, 3.0]} and [r.name for r in run.replicas] == [
        "temperature=1,seed=0",
        "temperature=3,seed=0",
    ]
    assert run.results() == [] and run.policy(temperature=3).algorithm.config.temperature == 3.0


def test_mistakes(offrl: Offrl) -> None:
    refused(offrl("train grid.temprature=[1,3]"), "unknown setting 'grid.temprature'", "Did you mean 'temperature'")
    refused(
        offrl("train algo=iql grid.dropout=[0,0.1]"), "algo.dropout decides how the networks are built", "separate runs"
    )
    refused(offrl("train grid.expectile=[0.7,2]"), "grid.expectile=2.0 is out of range")
    refused(offrl("train grid.temperature=[1,1]"), "twice")
    refused(offrl("train grid.batch_size=[1,2]"), "does not hold one real number")
    assert not Path("runs").exists()


def test_help(offrl: Offrl) -> None:
    text = offrl("train --help").out
    assert "grid.temperature=1,3,10 grid.expectile=0.7,0.9" in text and "precision=float32" in text
    assert "a grid (grid.NAME=a,b) varies expectile, temperature, max_weight" in offrl("train --help algo=iql").out
    assert "grid.temperature=1,3,10" in offrl("--help").out
