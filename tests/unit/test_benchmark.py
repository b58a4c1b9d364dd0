"""A benchmark's suites, cells, files and launchers, without training."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.benchmark import cell, launch, plan, suites
from offrl.benchmark import run as grid
from offrl.data.formats import minari, ogbench
from offrl.errors import UserError
from offrl.runs import record as runs
from offrl.settings.dataset import DatasetConfig
from offrl.settings.presets import config_names


def command(**values: Any) -> plan.Command:
    return plan.read({k.replace("__", "."): v for k, v in values.items()})


def cells(tmp_path: Path, **values: Any) -> tuple[plan.Command, suites.Suite, list[plan.Cell]]:
    asked = command(**{"suite": "own", "datasets": ["builtin"], "runs_dir": str(tmp_path), **values})
    suite = suites.load(asked.config.suite, asked.config.datasets)
    return asked, suite, plan.cells_of(asked, suite, plan.folder_of(asked, suite))


def test_a_cell_of_several_tasks_has_a_row_of_its_own(tmp_path: Path) -> None:
    own = {"brc__dataset__multitask": True, "brc__dataset__concatenate": ["point-robot"]}
    listed = cells(tmp_path, algos=["brc", "bc"], **own)[2]
    assert [(c.dataset, c.run) for c in listed] == [
        ("builtin (several tasks)", "brc-builtin"),
        ("builtin", "bc-builtin"),
    ]


# ------------------------------------------------------------------------------------------------------------------
# suites


@pytest.mark.parametrize("name", [n for n in config_names("suite") if n != "own"])
def test_each_suite_has_a_protocol_and_data_sets_that_can_be_named(name: str) -> None:
    suite = suites.load(name)
    assert suite.name == name and suite.steps is None and suite.settings["eval.episodes"] >= 10
    registry.names("task")
    for entry in suite.entries:
        family = name.partition("-")[0]
        known = {
            "d4rl": lambda n: registry.get("task", "d4rl")(n) is not None,
            "minari": lambda n: minari.ID.fullmatch(n) is not None,
            "ogbench": lambda n: ogbench.NAME.fullmatch(n) is not None,
            "neorl2": lambda n: n in registry.names("dataset"),
        }[family]
        assert known(entry.name), entry
        assert entry.label == entry.name
    assert len({e.name for e in suite.entries}) == len(suite.entries)


def test_sizes_of_the_suites() -> None:
    sizes = {n: len(suites.load(n).entries) for n in config_names("suite") if n != "own"}
    # OGBench's table has 8 + 8 + 3 maze, 6 humanoid, 4 soccer, 8 cube, 2 scene and 8 puzzle datasets with states
    assert sizes == {
        "d4rl-gym": 9,
        "d4rl-antmaze": 6,
        "d4rl-maze2d": 3,
        "d4rl-adroit": 8,
        "d4rl-kitchen": 3,
        "minari-mujoco": 9,
        "neorl2": 7,
        "ogbench": 47,
        "ogbench-singletask": 50,
        "ogbench-singletask-default": 10,
        "ogbench-chunking": 25,
    }


def test_episodes_follow_the_protocol() -> None:
    episodes = {n: suites.load(n).settings["eval.episodes"] for n in ("d4rl-gym", "d4rl-antmaze", "ogbench")}
    assert episodes == {"d4rl-gym": 10, "d4rl-antmaze": 100, "ogbench": 250}  # 5 goals x 50


def test_a_part_of_a_suite_and_a_wrong_name() -> None:
    assert [e.name for e in suites.load("d4rl-gym", ["hopper-medium-v2"]).entries] == ["hopper-medium-v2"]
    with pytest.raises(UserError, match=r"no dataset 'hopper-medum-v2'\. Did you mean 'hopper-medium-v2'"):
        suites.load("d4rl-gym", ["hopper-medum-v2"])
    with pytest.raises(UserError, match=r"unknown suite 'd4rlgym'. Did you mean 'd4rl-gym'"):
        suites.load("d4rlgym")
    with pytest.raises(UserError, match=r"no datasets of its own"):
        suites.load("own")


def test_a_suite_file(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.hdf5").touch()
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nsteps: 2e4\neval: {episodes: 7}\nsettings: {algo: {batch_size: 64}}\ndatasets:\n- data/a.hdf5\n- "
        "{name: hopper-medium-v2, env: Hopper-v5, settings: {dataset.reward_scale: 0.1}}\nreferences: {a: {bc: "
        "50.5}}\nreference_source: a paper\n"
    )
    suite = suites.load(str(tmp_path / "mine.yaml"))
    assert (suite.name, suite.steps, suite.settings) == ("mine", 20_000, {"eval.episodes": 7, "algo.batch_size": 64})
    assert suite.entries[0] == suites.Entry(str(tmp_path / "data" / "a.hdf5"), "a", {})
    assert suite.entries[1].settings == {"dataset.reward_scale": 0.1, "eval.env": "Hopper-v5"}
    assert suite.references == {"a": {"bc": 50.5}} and suite.reference_source == "a paper"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dataset: [a]", "unknown entry 'dataset'. Did you mean 'datasets'"),
        ("datasets: a.hdf5", "must be a list"),
        ("datasets: [{path: a}]", "a name, or a map with a name"),
        ("datasets: [{name: a, environment: b}]", "unknown entry 'environment'"),
        ("datasets: [a, a]", "named twice"),
        ("datasets: [a]\nsteps: lots", "steps='lots' must be a whole number"),
        ("datasets: [a]\nreferences: {a: {bc: good}}", "references.a.bc is 'good', where a number is due"),
        ("datasets: [hopper]\nreferences: {hoper: {bc: 1}}", "no dataset of it. Did you mean 'hopper'"),
        ("datasets: [a", "is not valid YAML"),
        ("- a", "must hold settings"),
    ],
)
def test_a_wrong_suite_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=message) as error:
        suites.load(str(tmp_path / "mine.yaml"))
    assert "mine.yaml" in str(error.value) and "\n" not in str(error.value)


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "data.hdf5").touch()
        names.append(str(tmp_path / folder / "data.hdf5"))
    assert [e.label for e in suites.load("own", [*names, "hopper-medium-v2"]).entries] == [
        "one-data",
        "two-data",
        "hopper-medium-v2",
    ]


# -------------------------------------------------------------------------------------------------------------------
# cells


def test_settings_go_where_they_belong(tmp_path: Path) -> None:
    asked, _, found = cells(
        tmp_path,
        algos=["bc", "percent-bc", "iql"],
        seeds=2,
        iql__temperature=5.0,
        iql__dataset__reward_scale=2.0,
        algo__batch_size=32,
        launcher__partition="gpu",
    )
    assert asked.launcher == {"partition": "gpu"}
    assert [c.run for c in found] == ["bc-builtin", "percent_bc-builtin", "iql-builtin"]
    bc, percent, iql = (c.config for c in found)
    assert iql.algo.temperature == 5.0 and iql.dataset.reward_scale == 2.0 and bc.dataset.reward_scale == 1.0
    assert percent.dataset.top_fraction == 0.1 and percent.label == "percent_bc"
    assert {c.algo.batch_size for c in (bc, percent, iql)} == {32}
    assert all(c.compare == [] and c.seeds == 2 and c.steps == 6_000 for c in (bc, percent, iql))


def test_experiments_and_protocol(tmp_path: Path) -> None:
    def iql(**values: Any) -> Any:
        return cells(tmp_path, suite="d4rl-antmaze", datasets=["antmaze-umaze-v2"], algos=["iql"], **values)[2][
            0
        ].config

    config = iql()
    assert (config.experiment, config.algo.expectile, config.eval.episodes, config.dataset.reward_shift) == (
        "iql/d4rl-antmaze",
        0.9,
        100,
        -1.0,
    )
    assert iql(eval__episodes=3).eval.episodes == 3  # the user's word counts most
    assert iql(experiment="none").algo.expectile == 0.7
    assert iql(steps=5).steps == 5


def test_an_algorithm_s_own_length_counts_unless_a_suite_file_or_the_command_says_another(tmp_path: Path) -> None:
    def steps(suite: str, **values: Any) -> dict[str, int]:
        found = cells(tmp_path, suite=suite, datasets=["hopper-medium-v2"], algos=["iql", "dt", "tt"], **values)[2]
        return {c.algorithm: c.config.steps for c in found}

    assert steps("d4rl-gym") == steps("own") == {"iql": 1_000_000, "dt": 100_000, "tt": 195_313}
    (tmp_path / "mine.yaml").write_text("steps: 700\ndatasets: [hopper-medium-v2]\n")
    assert set(steps(str(tmp_path / "mine.yaml")).values()) == {700}
    assert set(steps(str(tmp_path / "mine.yaml"), steps=5).values()) == {5}
    assert steps("d4rl-gym", dt__steps=9) == {"iql": 1_000_000, "dt": 9, "tt": 195_313}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algos": ["bc", "iqll"]}, "unknown algorithm 'iqll'. Did you mean 'iql'"),
        ({"algos": ["bc", "bc"]}, "names bc twice"),
        ({"algos": []}, "names no algorithm"),
        ({"algo": "bc"}, "algo= is not for offrl benchmark: algos=a,b says"),
        ({"dataset": "a"}, "datasets=a,b says"),
        ({"compare": ["bc"]}, "compare= is not for"),
        ({"sedes": 3}, "unknown setting 'sedes'. Did you mean 'seeds'"),
        ({"td3_bc__alpha": 3.0, "algos": ["bc"]}, r"td3_bc is none of algos=\[bc\]"),
        ({"seeds": 0}, "seeds=0"),
        ({"steps": 0}, "steps=0 is out of range"),
        ({"jobs": 0}, "jobs=0 is out of range"),
    ],
)
def test_a_wrong_command_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command(**values)


def test_settings_of_offrl_train_are_checked_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"iql: unknown setting 'algo.temprature'. Did you mean 'algo.temperature'"):
        cells(tmp_path, iql__temprature=3.0)
    with pytest.raises(UserError, match=r"bc: unknown setting 'algo.temperature'.*ALGO.NAME=VALUE"):
        cells(tmp_path, algo__temperature=3.0)
    with pytest.raises(UserError, match=r"compile=fast is not allowed"):
        cells(tmp_path, compile="fast")


# -------------------------------------------------------------------------------------------------------------- the
# folder


def begin(tmp_path: Path, **values: Any) -> dict[str, Any]:
    asked, suite, found = cells(tmp_path, **values)
    return plan.begin(plan.folder_of(asked, suite), asked, suite, found)


def test_a_benchmark_grows_and_keeps_what_it_is(tmp_path: Path) -> None:
    first = begin(tmp_path, algos=["bc"], seeds=2, steps=100)
    settings = first["cells"][0]["settings"]
    assert settings["seeds"] == [0, 1] and settings["algo"]["name"] == "bc"
    assert {**first, "cells": [{k: v for k, v in cell.items() if k != "settings"} for cell in first["cells"]]} == {
        "version": 1, "suite": "own", "seeds": [0, 1], "steps": 100,
        "cells": [{"dataset": "builtin", "algorithm": "bc", "run": "bc-builtin", "steps": 100}],
    }  # fmt: skip
    assert json.loads((tmp_path / "own" / "benchmark.json").read_text()) == first
    assert begin(tmp_path, algos=["bc"], seeds=2, steps=100) == first
    more = begin(tmp_path, algos=["iql"], seeds=2, steps=100)
    assert [c["run"] for c in more["cells"]] == ["bc-builtin", "iql-builtin"]
    with pytest.raises(UserError, match=r"holds a benchmark with seeds \[0, 1\], this one has \[0, 1, 2\]"):
        begin(tmp_path, algos=["bc"], seeds=3, steps=100)
    with pytest.raises(UserError, match=r"holds bc-builtin with 100 updates, here it has 50"):
        begin(tmp_path, algos=["bc"], seeds=2, steps=50)
    shorter = begin(tmp_path, algos=["td3_bc"], seeds=2, steps=50)  # algorithms have lengths of their own
    assert shorter["steps"] == 100 and [c["steps"] for c in shorter["cells"]] == [100, 100, 50]
    assert begin(tmp_path, algos=["bc"], seeds=2, steps=200)["steps"] == 200


def test_a_cell_with_other_settings_is_refused(tmp_path: Path) -> None:
    _, _, found = cells(tmp_path, algos=["bc"], seeds=2)
    folder = tmp_path / "own"
    begin(tmp_path, algos=["bc"], seeds=2)
    (folder / "bc-builtin").mkdir()
    record = {"identity": runs.identity(found[0].config), "data": {"name": "builtin"}}
    (folder / "bc-builtin" / "run.json").write_text(json.dumps(record, default=str))
    begin(tmp_path, algos=["bc"], seeds=2)
    with pytest.raises(UserError, match=r"other settings \(algo.batch_size: 256 there, 32 here\)"):
        begin(tmp_path, algos=["bc"], seeds=2, algo__batch_size=32)


def test_a_strange_folder_and_a_damaged_record(tmp_path: Path) -> None:
    asked, suite, found = cells(tmp_path, algos=["bc"])
    folder = plan.folder_of(asked, suite)
    folder.mkdir()
    (folder / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"no benchmark's folder and not empty"):
        plan.begin(folder, asked, suite, found)
    (folder / "thesis.tex").unlink()
    for text in ('{"version": 1, "sui', "[]", '{"suite": "own", "seeds": [0], "steps": 1, "cells": [{}]}'):
        (folder / "benchmark.json").write_text(text)
        with pytest.raises(UserError, match=r"benchmark.json cannot be read \(.*the same command writes it again"):
            plan.begin(folder, asked, suite, found)


def test_published_scores_are_written_down(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "name: own\ndatasets: [builtin]\nreferences: {builtin: {bc: 12}}\nreference_source: me\n"
    )
    record = begin(tmp_path, suite=str(tmp_path / "mine.yaml"), datasets=[])
    assert record["references"] == {"builtin": {"bc": 12.0}} and record["reference_source"] == "me"


@pytest.mark.parametrize("text", ["", '{"status": "do', "[1]", '{"status": "fine"}', "\x00\x01"])
def test_a_damaged_status_means_not_begun(tmp_path: Path, text: str) -> None:
    (tmp_path / "cells").mkdir()
    plan.status_path(tmp_path, "x").write_text(text)
    assert plan.read_status(tmp_path, "x") == {}
    assert not plan.finished(tmp_path, "x", 1)


def test_done_means_that_the_run_is_there_and_long_enough(tmp_path: Path) -> None:
    (tmp_path / "x" / "policies").mkdir(parents=True)
    (tmp_path / "x" / "run.json").touch()
    (tmp_path / "cells").mkdir()
    plan.write_status(tmp_path, "x", status="done", error="", seconds=1.0, steps=100)
    assert plan.finished(tmp_path, "x", 100) and not plan.finished(tmp_path, "x", 101)
    (tmp_path / "x" / "run.json").unlink()
    assert not plan.finished(tmp_path, "x", 100)


def _hold(path: str, ready: Any, leave: Any) -> None:
    with plan.hold(Path(path)):
        ready.set()
        leave.wait(30)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(str(plan.cell_lock(tmp_path, "x")), ready, leave))
    assert not plan.at_work(tmp_path, "x")
    process.start()
    assert ready.wait(30)
    assert plan.at_work(tmp_path, "x")
    process.kill()
    process.join()
    assert not plan.at_work(tmp_path, "x")


# --------------------------------------------------------------------------------------------------------------------
# cell


def orders(steps: int = 10) -> dict[str, Any]:
    return {"dataset": "builtin", "steps": steps, "values": {}}


def test_a_cell_writes_how_it_went(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cells").mkdir()

    def fails(error: BaseException) -> dict[str, Any]:
        def train(*_: Any) -> Any:
            raise error

        monkeypatch.setattr(cell, "_train", train)
        cell.train(tmp_path, "x", orders(), "token", in_parallel=False)
        return plan.read_status(tmp_path, "x")

    assert fails(UserError("there is\nno file"))["error"] == "there is no file"
    status = fails(ValueError("first line\nsecond"))
    assert (
        status["status"] == "failed"
        and status["error"] == "ValueError: first line (traceback in cells/x.log)"
        and status["token"] == "token"
    )
    assert "Traceback" in (tmp_path / "cells" / "x.log").read_text()
    assert "out of memory" in fails(MemoryError())["error"]
    assert "out of memory" in fails(RuntimeError("CUDA out of memory. Tried"))["error"]
    with pytest.raises(KeyboardInterrupt):
        fails(KeyboardInterrupt())
    assert plan.read_status(tmp_path, "x")["status"] == "running"
    for lost, status in (([], "done"), (["seed 0"], "done"), (["seed 0", "seed 1"], "failed")):
        monkeypatch.setattr(cell, "_train", lambda *_, lost=lost: (lost, 2))
        cell.train(tmp_path, "x", orders(), "token", in_parallel=False)
        assert plan.read_status(tmp_path, "x")["status"] == status
        assert ("diverged" in str(plan.read_status(tmp_path, "x"))) == bool(lost)


def test_a_cell_that_another_process_trains_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "_train", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(plan, "hold", lambda path, patience=0.0: _Nobody())
    cell.train(tmp_path, "x", orders(), "token", in_parallel=False)
    assert plan.read_status(tmp_path, "x") == {}


class _Nobody:
    def __enter__(self) -> bool:
        return False

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.usefixtures("heeds_signals")
def test_a_job_stops_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell, "STOP_SECONDS", 0.01)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), cell._stoppable(tmp_path / "stop"):
        (tmp_path / "stop").touch()
        time.sleep(10)
    assert time.monotonic() - began < 5
    with pytest.raises(KeyboardInterrupt), cell._stoppable(tmp_path / "stop"):
        pytest.fail("began although it was asked to stop")


def test_a_job_ends_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What that means is in test_children.py."""
    (tmp_path / plan.CELLS).mkdir()
    where = {"token": "t", "command": ["host", "", 1], "cwd": str(tmp_path), "environment": {}, "cells": {"x": {}}}
    (tmp_path / plan.CELLS / plan.PLAN).write_text(json.dumps(where))
    watched: list[Any] = []
    monkeypatch.setattr("offrl.system.children.live_with_parent", lambda other: watched.append(other))
    monkeypatch.setattr(cell, "train", lambda *_, **__: None)
    cell.work(tmp_path, "x")
    assert watched == [["host", "", 1]]


def test_group_sizes_depend_on_no_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**values: Any) -> Any:
        return cells(tmp_path, algos=["bc"], **values)[2][0].config

    monkeypatch.setattr("os.sched_getaffinity", lambda _: pytest.fail("asked how many cores there are"))
    assert [cell.group_size(config(seeds=n), "cpu") for n in (1, 3, 4, 5, 9)] == [1, 2, 2, 3, 4]
    assert cell.group_size(config(seeds=9), "cuda") == 9
    assert cell.group_size(config(seeds=9, group=2), "cpu") == 2
    assert cell.group_size(config(seeds=2, grid={"learning_rate": [1e-3, 1e-4]}), "cpu") == 2


# ---------------------------------------------------------------------------------------------------------------
# launchers


def test_unknown_launchers_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"unknown launcher 'slrum'. Did you mean 'slurm'"):
        launch.load("slrum", {})
    with pytest.raises(UserError, match=r"launcher=serial has no settings, so launcher.partition does nothing"):
        launch.load("serial", {"partition": "gpu"})
    (tmp_path / "mine.yaml").write_text("plugin: ray\nsetings: {num_cpus: 3}\n")
    with pytest.raises(UserError, match=r"unknown entry 'setings'. Did you mean 'settings'"):
        launch.load(str(tmp_path / "mine.yaml"), {})
    monkeypatch.setattr(launch, "_there", lambda package: False)
    for name in ("ray", "slurm"):
        with pytest.raises(UserError, match=rf"launcher={name} needs pip install 'offrl\[{name}\]'"):
            launch.load(name, {})


@pytest.fixture
def sbatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a cluster."""
    monkeypatch.setattr("shutil.which", lambda program: f"/usr/bin/{program}")


def test_slurm_without_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setattr("shutil.which", lambda program: None)
    with pytest.raises(UserError, match=r"launcher=slurm needs the command sbatch, .*slurm_local"):
        launch.load("slurm", {})


@pytest.mark.usefixtures("sbatch")
@pytest.mark.parametrize(
    ("name", "settings", "path", "expected"),
    [
        ("slurm", {"partition": "gpu"}, "params.partition", "gpu"),
        ("slurm", {}, "params.array_parallelism", 3),
        ("slurm", {"additional_parameters.mail-user": "a@b.c"}, "params.additional_parameters.mail-user", "a@b.c"),
        ("ray", {}, "ray_cfg.init.num_cpus", 3),
        ("ray", {"ray.init.address": "auto"}, "ray_cfg.init.num_cpus", None),
        ("ray", {"ray.remote.num_gpus": 1}, "ray_cfg.remote.num_gpus", 1),
        ("ray", {}, "ray_cfg.remote.max_retries", 0),
    ],
)
def test_settings_reach_the_plugins(
    tmp_path: Path, name: str, settings: dict[str, Any], path: str, expected: Any
) -> None:
    pytest.importorskip({"ray": "ray", "slurm": "submitit"}[name])
    at: Any = launch.HydraJobs(launch.load(name, settings), tmp_path / "it's here", 3).hydra
    for part in path.split("."):
        at = at.get(part) if hasattr(at, "get") else getattr(at, part)
    assert at == expected


@pytest.mark.usefixtures("sbatch")
def test_a_setting_that_a_plugin_does_not_have(tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    with pytest.raises(UserError, match=r"launcher.partion: slurm has no such setting. Did you mean 'partition'"):
        launch.HydraJobs(launch.load("slurm", {"partion": "gpu"}), tmp_path, None)
    with pytest.raises(UserError, match=r"launcher.timeout_min=soon"):
        launch.HydraJobs(launch.load("slurm", {"timeout_min": "soon"}), tmp_path, None)


class _Jobs(launch.Jobs):
    """Plays a launcher: each round runs the next of `rounds`, {cell: status it leaves}, and then gives up, or not."""

    def __init__(self, folder: Path, rounds: list[tuple[dict[str, str], str]], batch: int | None) -> None:
        super().__init__("toy", folder, 2)
        self.rounds, self.batch, self.asked = rounds, batch, []

    def _train(self, runs: Sequence[str]) -> str:
        self.asked.append(list(runs))
        states, error = self.rounds[len(self.asked) - 1]
        for run, status in states.items():
            plan.write_status(self.folder, run, status=status, error="", seconds=1.0, token="t")
        return error


def play(
    tmp_path: Path, rounds: list[tuple[dict[str, str], str]], batch: int | None = None
) -> tuple[list[list[str]], dict[str, str]]:
    (tmp_path / "cells").mkdir()
    jobs = _Jobs(tmp_path, rounds, batch)
    jobs.run(["a", "b", "c"], "t")
    return jobs.asked, {r: f"{(s := plan.read_status(tmp_path, r))['status']}: {s['error']}" for r in "abc"}


def test_a_launcher_that_gave_up_is_asked_again_for_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "QUIET_SECONDS", 0.0)
    asked, states = play(tmp_path, [({"a": "done", "b": "running"}, "a worker crashed"), ({"c": "done"}, "")])
    assert asked == [["a", "b", "c"], ["c"]]
    assert states["a"] == states["c"] == "done: "
    assert states["b"].startswith("failed: its worker died (a worker crashed); the next command goes on")


def test_a_launcher_that_begins_nothing_is_not_asked_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "QUIET_SECONDS", 0.0)
    asked, states = play(tmp_path, [({}, "no sbatch here")])
    assert asked == [["a", "b", "c"]]
    assert set(states.values()) == {"failed: the launcher toy did not begin it (no sbatch here)"}


def test_a_launcher_without_a_limit_gets_batches(tmp_path: Path) -> None:
    asked, _ = play(tmp_path, [({"a": "done", "b": "failed"}, ""), ({"c": "done"}, "")], batch=2)
    assert asked == [["a", "b"], ["c"]]


def test_local_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two at once; a process that is killed is one failed cell, one that ends early one that did not begin."""
    (tmp_path / "cells").mkdir()
    monkeypatch.setattr(launch, "QUIET_SECONDS", 0.0)
    scripts = {"a": "sleep 0.3", "b": "kill -9 $$", "c": "exit 3", "d": "sleep 0.1"}
    begun, at_once = [], []

    def start(self: launch.LocalJobs, run: str) -> subprocess.Popen[bytes]:
        begun.append((run, subprocess.Popen(["sh", "-c", scripts[run]])))
        at_once.append(sum(process.poll() is None for _, process in begun))
        if run != "c":
            plan.write_status(
                tmp_path, run, status="running" if run == "b" else "done", error="", seconds=1.0, token="t"
            )
        return begun[-1][1]

    monkeypatch.setattr(launch.LocalJobs, "_start", start)
    launch.LocalJobs("local", tmp_path, 2).run(list(scripts), "t")
    # c, which had not begun, was sent again
    assert [run for run, _ in begun] == ["a", "b", "c", "d", "c"] and max(at_once) == 2
    found = {run: plan.read_status(tmp_path, run) for run in scripts}
    assert [found[run]["status"] for run in scripts] == ["done", "failed", "failed", "done"]
    assert found["b"]["error"].startswith("its worker died (it was killed by SIGKILL")
    assert found["c"]["error"] == "the launcher local did not begin it (it ended with status 3)"


# -----------------------------------------------------------------------------------------------------------------
# NeoRL-2


def neorl2_file(path: Path, trajectories: int = 3, truncated: bool = True) -> None:
    """RocketRecovery's shapes: trajectories of 5 rows, of which every second one ends and the others are cut."""
    rows, rng = 5 * trajectories, np.random.default_rng(0)
    last, early = np.arange(rows) % 5 == 4, (np.arange(rows) // 5) % 2 == 0
    columns = {"obs": (7,), "action": (2,), "reward": ()}
    flags = {"done": last & early, **({"truncated": last & ~early} if truncated else {})}
    values = {k: rng.uniform(-1, 1, (rows, *s)).astype(np.float32) for k, s in columns.items()}
    np.savez(path, next_obs=np.roll(values["obs"], -1, 0), **values, **flags)


def test_neorl2_data_are_found_and_scored_as_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl.data import load_dataset
    from offrl.envs import neorl2

    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no RocketRecovery-train.npz in .*set \$OFFRL_NEORL2 to its folder"):
        neorl2.locate("RocketRecovery")
    monkeypatch.setenv("OFFRL_NEORL2", str(tmp_path))
    with pytest.raises(UserError, match=r"and put it there"):
        neorl2.locate("RocketRecovery")
    neorl2_file(tmp_path / "RocketRecovery-train.npz", trajectories=120)
    data = load_dataset(DatasetConfig("RocketRecovery"))
    assert data.spec.name == "RocketRecovery" and data.num_episodes == 100 and len(data) == 500
    assert int(data.columns["terminations"].sum()) == 50
    assert any("the first 100 of 120 trajectories" in n for n in data.notes)
    task = data.spec.task
    assert (
        task is not None
        and task.ref_label == "NeoRL-2"
        and torch.isclose(torch.tensor(task.normalise(16.0)), torch.tensor(50.0))
    )
    assert (task.env_id is None) == (not neorl2.importlib.util.find_spec("neorl2"))
    assert task.env_id is not None or "neorl2 package, which is not installed" in task.note


def test_neorl2_scores() -> None:
    lookup = registry.get("task", "neorl2")
    assert lookup("Pipeline").normalise(751.0) == 100.0 and lookup("DMSD").normalise(30.6) == 0.0
    assert lookup("Fusion").normalise(0.0) == pytest.approx(100 * 107.601 / 205.651)
    assert lookup("hopper-medium-v2") is None


def test_a_wrong_neorl2_file(tmp_path: Path) -> None:
    from offrl.envs import neorl2

    neorl2_file(tmp_path / "x.npz")
    with pytest.raises(UserError, match=r"is not NeoRL-2's Pipeline: its observations have shape \(7,\), not \(52,\)"):
        neorl2.read("Pipeline", tmp_path / "x.npz", DatasetConfig())
    np.savez(tmp_path / "y.npz", obs=np.zeros((3, 7)))
    with pytest.raises(UserError, match=r"has no column 'next_obs'"):
        neorl2.read("RocketRecovery", tmp_path / "y.npz", DatasetConfig())


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert grid.benchmark({"suite": "d4rl-gym", "algos": ["iql"], "runs_dir": str(tmp_path), "dry_run": True}) == 0
    assert "9 cells" in capsys.readouterr().out and not list(tmp_path.iterdir())
