"""Grids from a command to replicas: what is read, what is refused, and what a run remembers of it."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from offrl import registry
from offrl.algorithm import with_settings
from offrl.algorithms.bc import BCConfig
from offrl.algorithms.iql import IQL
from offrl.api import Run
from offrl.data import Dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.runs import record as runs
from offrl.runs.settings import run_settings
from offrl.settings.compose import compose, parse
from offrl.settings.field import marked, setting
from offrl.settings.replicas import Replica, by_cell, expand, hyper, number, replicas, scalars, varied
from offrl.settings.train import TrainConfig
from offrl.system import files as checkpoint

GRID = {"temperature": [1.0, 3.0], "expectile": [0.7, 0.9]}
SPEC = DataSpec((3,), 2, action_low=(-1.0, -1.0), action_high=(1.0, 1.0))
SMALL: dict[str, Any] = {"algo": "iql", "algo.hidden": [4], "seeds": 2, "quiet": True}


def read(command: str) -> TrainConfig:
    return compose(parse(command.split()))


def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    return from_arrays(
        rng.normal(size=(20, 3)), rng.uniform(-1, 1, (20, 2)), np.zeros(20), episode_ends=[19], name="mine"
    )


def test_order_and_names() -> None:
    made = expand(GRID, [4, 0])
    assert [r.name for r in made] == [
        f"temperature={t},expectile={e},seed={s}" for t in ("1", "3") for e in ("0.7", "0.9") for s in (4, 0)
    ]  # fmt: skip
    assert hyper(made) == {"temperature": [1.0] * 4 + [3.0] * 4, "expectile": [0.7, 0.7, 0.9, 0.9] * 2}
    assert list(by_cell(made).values()) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert str(made[1]) == made[1].name and made[1].cell == "temperature=1,expectile=0.7"


def test_without_a_grid() -> None:
    made = replicas(TrainConfig(seeds=[3, 7]))
    assert made == [Replica(3), Replica(7)] and hyper(made) == {}
    assert made[0].name == "seed_3" and str(made[0]) == "seed 3" and made[0].cell == ""
    assert by_cell(made) == {(): [0, 1]}


@pytest.mark.parametrize(
    ("value", "text"), [(3.0, "3"), (0.7, "0.7"), (1e-5, "1e-05"), (0.1 + 0.2, "0.30000000000000004"), (-2, "-2")]
)
def test_numbers_read_back(value: float, text: str) -> None:
    assert number(value) == text and float(text) == value


def test_read_from_a_command_a_file_and_python(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(
        "algo: {name: iql, expectile: 0.8}\ngrid:\n  temperature: [1, 3]\n  learning_rate: [1e-4, 3e-4]\n"
    )
    expected = {"temperature": [1.0, 3.0, 10.0]}
    for config in (
        read("grid.temperature=[1,3,10]"),
        read("grid.algo.temperature=[1,3,10]"),
        read("grid={temperature:[1,3,10]}"),
        compose({"grid": {"temperature": (1, 3, 10)}}),
        compose({"grid.temperature": np.array([1, 3, 10])}),
    ):
        assert config.grid == expected and all(isinstance(v, float) for v in config.grid["temperature"])
    assert read("grid.temperature=5").grid == {"temperature": [5.0]}
    assert compose({"grid": {}}).grid == compose({"grid": None}).grid == {}
    config = read(f"config={tmp_path / 'my.yaml'} grid.expectile=[0.9,0.7] grid.temperature=10")
    assert list(config.grid.items()) == [
        ("temperature", [10.0]),
        ("learning_rate", [1e-4, 3e-4]),
        ("expectile", [0.9, 0.7]),
    ]
    assert config.algo.temperature == 3.0


@pytest.mark.parametrize(
    ("command", "words"),
    {
        "grid.temprature=[1,3]": "unknown setting 'grid.temprature'. Did you mean 'temperature'?",
        "grid.xyz=[1]": "A grid of iql varies optimizer.learning_rate, actor.learning_rate, discount, polyak",
        "grid.batch_size=[32,64]": "algo.batch_size does not hold one real number; a grid of iql varies",
        "grid.policy=[gaussian]": "algo.policy does not hold",
        "grid.hidden=[4]": "algo.hidden does not hold",
        "grid.temperature.x=[1]": "unknown setting 'grid.temperature.x'",
        "grid.temperature=[]": "grid.temperature has no values",
        "grid.temperature=[1,3,1.0]": "grid.temperature has the value 1 twice",
        "grid.temperature=[1,-3]": "grid.temperature=-3.0 is out of range: the smallest allowed value is 0.0",
        "grid.expectile=[0.7,2]": "grid.expectile=2.0 is out of range: the largest allowed value is 1.0",
        "grid.temperature=[1,nan]": "grid.temperature is NaN",
        "grid.temperature=[1,hot]": "grid.temperature: hot must be a number",
        "grid.temperature=[true]": "grid.temperature: true must be a number",
        "grid.temperature=null": "grid.temperature: null must be a number",
        "grid.temperature=[[1,3]]": "must be a number",
        "grid=5": "grid=5: a grid names its fields",
        "grid.temperature=[1] algo.temperature=3": "algo.temperature and grid.temperature=[1] are both given",
        "grid.temperature=[1] grid.algo.temperature=[3]": "grid.temperature is given twice",
        "grid.temperature=[1,2,3] seeds=5000": "with 5000 seeds is 15,000 replicas, at most 10,000",
        "algo=td3_bc grid.temperature=[1,3]": "A grid of td3_bc varies",
        "algo.temperature=[1,3]": "must be a number, not several values; grid.temperature=a,b trains with each value",
        "algo.temperature=1,3": "grid.temperature=a,b trains with each value",
        "grids.temperature=[1]": "Did you mean 'grid.temperature'",
        "precision=fp16": "choose one of float32, tf32, bf16",
        "algo.batch_size=99999999999999999999": "no whole number is that large here",
        "workers=0": "workers=0 is out of range",
        "group=0": "group=0 is out of range",
    }.items(),
)
def test_refused(command: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        read(command)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_texts_are_told_from_numbers_of_the_same_name() -> None:
    with pytest.raises(UserError, match=r"representation=none,mrq must be one value, not several values$"):
        read("algo.representation=none,mrq")
    with pytest.raises(UserError, match=r"It is a setting of iql, rebrac, td3_bc: choose one"):
        read("algo=sac_n algo.representation=mrq")
    with pytest.raises(UserError, match=r"It is a setting of gadt, hiql, iql, .*: choose one"):
        read("algo=sac_n algo.representation=8")


def test_an_algorithm_that_is_not_vectorised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IQL, "traits", dataclasses.replace(IQL.traits, vectorized=False))
    with pytest.raises(UserError, match="algo=iql trains one replica at a time and takes no grid"):
        read("grid.temperature=[1,3]")
    assert read("algo=iql").grid == {}


@dataclasses.dataclass
class OddConfig(BCConfig):
    name: str = "odd"
    scale: float = setting(1.0, "of the networks' first layer", low=0.0, structural=True)
    horizon: float = setting(0.9, "of the sampler", low=0.0, shared=True)
    weight: float | None = setting(None, "of the loss", low=0.0)
    rates: list[float] = setting([0.1], "several numbers")


def test_marked_fields_are_not_varied() -> None:
    assert scalars(OddConfig) == ["learning_rate", "dropout", "scale", "horizon", "weight"]
    assert varied(OddConfig) == ["learning_rate", "weight"]
    with pytest.raises(
        UserError, match=r"algo.dropout decides how the networks are built .*separate runs, such as algo.dropout=0.1"
    ):
        read("grid.dropout=[0.1,0.2] grid.temperature=[1,3]")
    with pytest.raises(UserError, match=r"grid.discount: algo.discount decides what its replicas share"):
        read("algo=gcbc grid.discount=[0.9,0.99]")
    assert compose({"algo": "iql", "grid.learning_rate": [1e-4, 1e-3]}).grid == {"learning_rate": [1e-4, 1e-3]}
    for name, algorithm in registry.names("algo").items():
        assert set(marked(algorithm.Config, "structural", "shared")) <= set(scalars(algorithm.Config)), (
            "other types need no mark"
        )
        if algorithm.traits.vectorized and "learning_rate" in algorithm.Config.__dataclass_fields__:
            assert "learning_rate" in varied(algorithm.Config), name


def test_other_settings_change_the_config_alone() -> None:
    algorithm = IQL(IQL.Config(hidden=[4]), SPEC)
    own = with_settings(algorithm, {"temperature": 10.0})
    assert (own.config.temperature, own.config.hidden, algorithm.config.temperature) == (10.0, [4], 3.0)
    assert own.networks is algorithm.networks and with_settings(algorithm, {}) is algorithm


# ------------------------------------------------------------------------------------------------------------------
# runs


def test_identity_and_the_directory_of_a_run() -> None:
    data = dataset()
    plain = compose(SMALL)
    assert not {"grid", "workers", "group"} & set(runs.identity(plain))
    commands: list[dict[str, Any]] = [
        {},
        {"precision": "bf16"},
        {"grid.temperature": [1, 3]},
        {"grid.temperature": [3, 1]},
        {"grid.temperature": [1, 3], "grid.expectile": [0.7]},
        {"grid.expectile": [0.7], "grid.temperature": [1, 3]},
    ]
    names = [runs.directory(compose({**SMALL, **more}), data).name for more in commands]
    assert len(set(names)) == len(names)
    for more in ({"workers": 2}, {"group": 3}, {"grid": {}}):
        assert runs.directory(compose({**SMALL, **more}), data).name == names[0]


def prepare(run_dir: Path, **more: Any) -> TrainConfig:
    run_dir.mkdir(exist_ok=True)
    config = compose({**SMALL, **{k.replace("__", "."): v for k, v in more.items()}})
    runs.prepare(run_dir, config, dataset(), lambda: ("eager", 1), torch.device("cpu"))
    return config


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    prepare(tmp_path / "run", grid=GRID)
    return tmp_path / "run"


def test_the_record_lists_the_replicas_and_resume_keeps_them(run_dir: Path) -> None:
    record = json.loads((run_dir / "run.json").read_text())
    assert record["replicas"][2] == {"seed": 0, "temperature": 1.0, "expectile": 0.9} and len(record["replicas"]) == 8
    saved = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert saved["grid"] == GRID and "temperature" not in saved["algo"] and saved["algo"]["discount"] == 0.99
    again = run_settings(run_dir, {"steps": 5})
    assert list(again.grid.items()) == list(GRID.items()) and replicas(again) == Run(run_dir).replicas
    runs.prepare(run_dir, again, dataset(), lambda: ("eager", 1), torch.device("cpu"))
    with pytest.raises(UserError, match=r"algo.temperature and grid.temperature=\[1,3\] are both given"):
        run_settings(run_dir, {"algo.temperature": 5})
    assert compose({"config": str(run_dir / "config.yaml")}).grid == GRID


@pytest.mark.parametrize(
    "grid", [{}, {"temperature": [1.0, 3.0]}, dict(reversed(GRID.items())), {**GRID, "discount": [0.9]}]
)
def test_another_grid_is_another_run(run_dir: Path, grid: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"holds another run \(grid.temperature=\[1,3\] grid.expectile=\[0.7,0.9\] there, "
    ):
        prepare(run_dir, grid=grid)


def test_a_run_without_a_grid_or_precision_is_not_one_with_it(tmp_path: Path) -> None:
    prepare(tmp_path / "run")
    with pytest.raises(UserError, match=r"\(no grid there, grid.temperature=\[1,3\] here\)"):
        prepare(tmp_path / "run", grid__temperature=[1, 3])
    with pytest.raises(UserError, match=r"\(precision: float32 there, bf16 here\)"):
        prepare(tmp_path / "run", precision="bf16")
    assert prepare(tmp_path / "run", workers=2, group=1).workers == 2


def test_policies_by_value(run_dir: Path) -> None:
    run = Run(run_dir)
    algorithm = IQL(IQL.Config(hidden=[4]), SPEC)
    with pytest.raises(
        UserError, match=r"temperature=1,expectile=0.7,seed=1.safetensors does not exist: training has not finished"
    ):
        run.policy(1, temperature=1, expectile=0.7)
    run.record["kind"] = "finetune"
    with pytest.raises(UserError, match=re.escape(f"`offrl finetune resume={run_dir}` continues it")):
        run.policy(1, temperature=1, expectile=0.7)
    for replica in run.replicas:
        own = with_settings(algorithm, dict(replica.values))
        TrainedPolicy(own, own.init(replica.seed), replica.seed).save(
            run_dir / "policies" / f"{replica.name}.safetensors"
        )
    policy = run.policy(seed=1, temperature=3.0, expectile=0.7)
    assert (policy.seed, policy.algorithm.config.temperature, policy.algorithm.config.expectile) == (1, 3.0, 0.7)
    assert run.policy(temperature=1, expectile=0.9).seed == 0
    _, meta = checkpoint.read(run_dir / "policies" / "temperature=3,expectile=0.9,seed=0.safetensors")
    assert (meta["config"]["temperature"], meta["config"]["expectile"]) == (3.0, 0.9)
    for values, words in (
        ({}, r"several policies of seed 0; say which: .* temperature=1 or 3; expectile=0.7 or 0.9"),
        ({"temperature": 1}, r"say which: policy\(seed=0, ...\) with expectile=0.7 or 0.9"),
        ({"temperature": 2, "expectile": 0.7}, r"has no temperature=2; it has 1, 3"),
        (
            {"temprature": 1},
            r"no grid over 'temprature'; its grid is over temperature, expectile. Did you mean 'temperature'",
        ),
        ({"seed": 5, "temperature": 1, "expectile": 0.7}, "has no seed 5; it has 0, 1"),
    ):
        with pytest.raises(UserError, match=words):
            run.policy(**values)


def test_one_cell_needs_no_value(tmp_path: Path) -> None:
    prepare(tmp_path / "run", grid__temperature=5)
    run = Run(tmp_path / "run")
    with pytest.raises(UserError, match=r"temperature=5,seed=1.safetensors does not exist"):
        run.policy(1)
    prepare(tmp_path / "plain")
    with pytest.raises(UserError, match="no grid over 'temperature'; it has no grid"):
        Run(tmp_path / "plain").policy(temperature=5)


def test_diverged_names_replicas(run_dir: Path) -> None:
    alive = torch.tensor([True, False, *[True] * 6])
    checkpoint.save(run_dir, 10, {"alive": alive}, {}, 1)
    (lost,) = Run(run_dir).diverged
    assert str(lost) == "temperature=1,expectile=0.7,seed=1"


def test_results_have_a_row_for_each_cell(run_dir: Path) -> None:
    run = Run(run_dir)
    assert run.results() == []
    lines = [
        "step,seed,temperature,expectile,episodes,return_mean,return_std,length_mean,success,score,dataset,env_id,packages,reference,scored_by"
    ]
    for step in (10, 20):
        for i, r in enumerate(run.replicas):
            lines.append(
                ",".join(
                    [
                        str(step),
                        str(r.seed),
                        *(repr(v) for _, v in r.values),
                        "1",
                        f"{step + i}.0",
                        "0.0",
                        "5.0",
                        "",
                        "",
                        "d",
                        "e",
                        *["", "", "return"],
                    ]
                )
            )
    (run_dir / "scores.csv").write_text("\n".join(lines) + "\n")
    results = run.results()
    assert [dict(r.values) for r in results] == [
        {"temperature": t, "expectile": e} for t in (1.0, 3.0) for e in (0.7, 0.9)
    ]
    assert [(r.returns[0], r.seeds, r.score) for r in results] == [
        (20.5, 2, None),
        (22.5, 2, None),
        (24.5, 2, None),
        (26.5, 2, None),
    ]
    assert run.plot() and (run_dir / "grid.png").exists() and (run_dir / "learning_curve.png").exists()
