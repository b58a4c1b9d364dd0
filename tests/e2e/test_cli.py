"""What a user does: train, continue, compare, score again, list, inspect, from the command line and from Python."""

from __future__ import annotations

import csv
import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import offrl as package
from offrl import registry
from offrl.algorithms.bc import BC, BCConfig
from offrl.data import Dataset
from offrl.data.arrays import from_arrays
from offrl.settings.compose import compose
from offrl.settings.presets import find_experiment
from offrl.settings.train import TrainConfig

from .conftest import SMALL, Offrl

SHARED = Path(os.environ.get("OFFRL_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
FAST: dict[str, Any] = {
    "algo.hidden": [8],
    "eval.episodes": 1,
    "eval.max_steps": 10,
    "eval.every": 0,
    "compile": "eager",
    "quiet": True,
}


def shared(name: str) -> Path:
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the project")
    return path


def only_run() -> Path:
    (run,) = Path("runs").iterdir()
    return run


def test_help_is_quick() -> None:
    """Nothing heavy is imported, and the whole process takes less than a second."""
    heavy = (
        "torch",
        "numpy",
        "gymnasium",
        "mujoco",
        "h5py",
        "minari",
        "hydra",
        "omegaconf",
        "tensorboard",
        "matplotlib",
        "rich",
    )
    script = (
        f"import sys; from offrl.cli.main import main; main(['--help']); print([m for m in {heavy} if m in "
        "sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script], env=environment, text=True, capture_output=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"
    assert "offrl train td3_bc hopper-medium-v2" in done.stdout
    total = sum(
        int(line.split("|")[0].removeprefix("import time:"))
        for line in done.stderr.splitlines()
        if "self [us]" not in line
    )
    assert total < 1_000_000, f"{total} us of imports"


def test_a_run_writes_what_the_docs_say(offrl: Offrl) -> None:
    result = offrl("train algo=bc seeds=[3,7] eval.every=10 checkpoint.every=10")
    assert result.status == 0 and not result.err
    assert "algorithm" in result.out and "data's mean score" in result.out
    run = only_run()
    documented = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    for name in (
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "timing.jsonl",
        "scores.csv",
        "learning_curve.png",
        "tensorboard",
    ):
        assert (run / name).exists(), name
        assert f"`{name}" in documented, name
    assert [p.name for p in sorted((run / "policies").iterdir())] == ["seed_3.safetensors", "seed_7.safetensors"]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "latest", "step_000000010.safetensors", "step_000000020.safetensors",
    ]  # fmt: skip
    settings = yaml.safe_load((run / "config.yaml").read_text())
    assert settings["algo"]["hidden"] == [8] and settings["dataset"]["normalize_observations"] is True
    record = json.loads((run / "run.json").read_text())
    assert len(record["data"]["fingerprint"]) == 64 and record["packages"]["torch"]
    with open(run / "scores.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["step"], r["seed"]) for r in rows] == [("10", "3"), ("10", "7"), ("20", "3"), ("20", "7")]
    assert all(r["env_id"] == "Hopper-v5" for r in rows)
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [10, 20]


def test_the_same_command_continues_and_reports(offrl: Offrl) -> None:
    first = offrl("train algo=bc")
    run = only_run()
    before = {p: p.stat().st_mtime_ns for p in (run / "checkpoints").iterdir()}
    again = offrl("train algo=bc")
    assert again.status == 0 and "this run has its 20 updates already" in again.out
    assert first.out.split("algorithm", 1)[1] == again.out.split("algorithm", 1)[1]  # the table
    assert {p: p.stat().st_mtime_ns for p in (run / "checkpoints").iterdir()} == before
    longer = offrl("train algo=bc steps=30")
    assert longer.status == 0 and "continuing from step 20" in longer.out
    resumed = offrl(f"train resume={run} steps=40 --quiet")
    assert resumed.status == 0 and only_run() == run
    assert resumed.out.startswith("offrl/hopper-mixed-v0 in Hopper-v5")  # nothing but the table
    assert package.load(run).score_rows[-1]["step"] == 40


@pytest.mark.slow
def test_a_resumed_run_was_as_long_from_the_start(offrl: Offrl) -> None:
    for name, lengths in (("pieces", (7, 20)), ("whole", (20,))):
        for steps in lengths:
            assert (
                offrl(
                    f"train algo=td3_bc seeds=2 log_every=5 checkpoint.every=7 eval.every=20 steps={steps} name={name}"
                ).status
                == 0
            )
    policies = [(Path("runs") / name / "policies" / "seed_1.safetensors").read_bytes() for name in ("pieces", "whole")]
    assert policies[0] == policies[1]


def test_compare(offrl: Offrl) -> None:
    result = offrl("train algo=iql compare=[bc,percent_bc] seeds=1 algo.expectile=0.8 dataset.subsample=0.5")
    assert result.status == 0
    names = sorted(p.name.split("-")[0] for p in Path("runs").iterdir())
    assert names == ["bc", "iql", "percent_bc"]
    table = result.out.split("algorithm", 1)[1]
    assert all(f"\n{name} " in table for name in names)
    settings = {n: yaml.safe_load(next(Path("runs").glob(f"{n}-*/config.yaml")).read_text()) for n in names}
    assert all(s["dataset"]["subsample"] == 0.5 and s["steps"] == 20 for s in settings.values())
    assert (settings["percent_bc"]["dataset"]["top_fraction"], settings["bc"]["dataset"]["top_fraction"]) == (0.1, 1.0)
    assert settings["bc"]["dataset"]["reward_by_return_range"] == 0.0
    assert "algo.hidden, algo.expectile: of iql alone; bc, percent_bc have their own default settings" in result.out
    assert [line for line in table.split("\n") if line.startswith("differ")] == [
        "differing besides the algorithm: normalised observations: no (iql), yes (bc, percent_bc); reward scale by the "
        "range of returns: 1000 (iql), 0 (bc, percent_bc); share of the best episodes: 1 (iql, bc), 0.1 (percent_bc); "
        "hidden layers: [8] (iql), [64,64] (bc, percent_bc) and 3 more"
    ]
    run = next(Path("runs").glob("iql-*"))
    assert offrl(f"train resume={run}").out.split("algorithm", 1)[1] == table
    assert len(list(Path("runs").iterdir())) == 3


def test_what_a_reading_guessed_is_said_once(offrl: Offrl) -> None:
    rows = "".join(f"{t},{t % 7},0.5,{t % 3}\n" for t in (*range(40), *range(100, 140)))
    Path("log.csv").write_text("time,obs_0,action,reward\n" + rows)
    for command in ("train algo=bc dataset=log.csv seeds=1 steps=5 name=a", "train resume=runs/a steps=6"):
        result = offrl(command)
        assert result.status == 0 and (result.out + result.err).count("1 gap longer than") == 1, result


def test_config_file(offrl: Offrl, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("algo: {name: td3_bc, alpha: 4.0}\neval: {env: none}\nseeds: [5]\nname: mine\n")
    assert offrl("train config=my.yaml seeds=[6]").status == 0
    settings = yaml.safe_load(Path("runs/mine/config.yaml").read_text())
    assert (settings["algo"]["name"], settings["algo"]["alpha"], settings["seeds"]) == ("td3_bc", 4.0, [6])
    assert not package.load("runs/mine").score_rows
    assert "already" in offrl("train config=runs/mine/config.yaml").out
    assert compose({"config": "my.yaml"}).eval.env == "none"


def test_evaluate(offrl: Offrl) -> None:
    assert offrl("train algo=bc seeds=2 name=mine").status == 0
    scores = Path("runs/mine/scores.csv").read_text()
    one = offrl("evaluate runs/mine episodes=2 max_steps=20 seed=5")
    assert one.status == 0 and "score over seeds:" in one.out and "Hopper-v5" in one.out
    assert offrl("evaluate runs/mine episodes=2 max_steps=20 seed=5 parallel=1").out == one.out
    assert "Hopper-v4" in offrl("evaluate runs/mine episodes=2 max_steps=20 env=Hopper-v4").out
    assert Path("runs/mine/scores.csv").read_text() == scores


def test_lists_and_help(offrl: Offrl) -> None:
    result = offrl("list")
    assert result.status == 0 and all(name in result.out for name in ("iql", "td3_bc", "percent_bc", "iql/d4rl-gym"))
    assert "algo.expectile=0.7" in offrl("list algo=iql").out
    assert "dataset.top_fraction=0.1" in offrl("list algo=percent_bc").out
    assert "it sets dataset.normalize_observations=true steps=100000" in offrl("list algo=dt").out
    names = offrl("data list").out
    assert all(name in names for name in ("builtin", "hopper-medium-v2", "antmaze-umaze-v2", "kitchen-mixed-v0"))
    assert offrl("data inspect builtin").status == 0
    text = offrl("train --help all").out
    missing = [f.name for f in dataclasses.fields(TrainConfig().dataset) if f"dataset.{f.name}=" not in text]
    assert not missing
    assert "checkpoint.keep=2" in text and "algo.alpha" in offrl("train --help algo=td3_bc").out
    for command in ("evaluate --help", "data --help", "list --help"):
        assert offrl(command).out.startswith("usage: offrl")


@pytest.mark.parametrize(
    ("dataset", "experiment"),
    {
        "builtin": "builtin",
        "hopper-medium-v2": "d4rl-gym",
        "/data/hopper_mixed.hdf5": "d4rl-gym",
        "mujoco/ant/medium-v0": "d4rl-gym",
        "antmaze-umaze-v2": "d4rl-antmaze",
        "antmaze-large-diverse-v0": "d4rl-antmaze",
        "Ant_maze_big-maze_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5": "d4rl-antmaze",
        "D4RL/antmaze/medium-play-v1": "d4rl-antmaze",
        "maze2d-large-v1": "d4rl-maze2d",
        "D4RL/pointmaze/umaze-v2": "d4rl-maze2d",
        "D4RL/door/human-v2": "d4rl-adroit-kitchen",
        "minari:D4RL/door/human-v2": "d4rl-adroit-kitchen",
        "kitchen-mixed-v0": "d4rl-adroit-kitchen",
        "pointmaze-medium-navigate-v0": "none",  # OGBench's
        "antmaze-medium-navigate-v0.npz": "none",
        "pendulum_v1.1.0.h5": "none",
    }.items(),
)
def test_the_settings_that_belong_to_a_data_set(dataset: str, experiment: str) -> None:
    assert find_experiment("iql", dataset) == (experiment if experiment == "none" else f"iql/{experiment}")
    if experiment == "d4rl-antmaze":
        assert find_experiment("percent_bc", dataset) == "bc/d4rl-antmaze"


def arrays(name: str = "mine", **more: Any) -> Dataset:
    rng = np.random.default_rng(0)
    ends = np.arange(300) % 100 == 99
    return from_arrays(
        rng.normal(size=(300, 3)),
        rng.uniform(-2, 2, (300, 1)),
        rng.normal(size=300),
        truncations=ends,
        action_low=-2.0,
        action_high=2.0,
        name=name,
        **more,
    )


@pytest.mark.slow
def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gymnasium

    monkeypatch.chdir(tmp_path)
    run = package.train(algo="iql", dataset=arrays(env="Pendulum-v1"), seeds=2, steps=20, settings=FAST)
    assert run.seeds == [0, 1] and len(run.final_scores) == 2 and run.final_scores[0]["env_id"] == "Pendulum-v1"
    action = run.policy(seed=1).act(np.zeros(3))
    assert action.shape == (1,) and abs(action[0]) <= 2.0
    assert run.policy(seed=1).act(np.zeros((5, 3))).shape == (5, 1)
    again = package.load(run.dir)
    assert again.score_rows == run.score_rows
    assert again.policy(seed=1).act(np.zeros(3)) == action
    made = []

    def factory() -> Any:
        made.append(gymnasium.make("Pendulum-v1"))
        return made[-1]

    run = package.train("bc", arrays(), seeds=[np.int64(4)], steps=20, env=factory, settings=FAST)  # type: ignore[list-item]
    assert made and run.seeds == [4] and run.final_scores[0]["length_mean"] == 10
    longer = package.train(resume=run.dir, dataset=arrays(), steps=30, quiet=True)
    assert longer.dir == run.dir
    with pytest.raises(package.UserError, match="arrays from Python"):
        package.train(resume=run.dir)
    with pytest.raises(package.UserError, match="has no seed 0"):
        run.policy(seed=0)
    with pytest.raises(package.UserError, match="shape"):
        run.policy().act(np.zeros(4))


def test_functions_of_the_package_are_hidden_by_no_module() -> None:
    import offrl.finetuning.setup
    import offrl.training.loop

    assert offrl.train is package.train and callable(offrl.train) and callable(offrl.finetune)
    assert package.Interrupted is sys.modules["offrl.errors"].Interrupted


def test_a_registered_data_set(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._table.setdefault("dataset", {}), "plant-7", lambda config: arrays("plant-7"))
    assert offrl("train dataset=plant-7 seeds=1").status == 0
    run = only_run()
    assert run.name.startswith("iql-plant-7-")
    assert offrl(f"train resume={run} steps=30").status == 0
    assert "plant-7" in offrl("data list").out
    result = offrl("train dataset=plant-8")
    assert result.status == 2 and "Did you mean 'plant-7'" in result.err


@pytest.mark.slow
def test_the_examples_of_the_docs(offrl: Offrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/datasets.md runs as written, on arrays and a file of the shapes that it describes, but for what trains
    models (unit tests).
    """
    monkeypatch.setattr(registry, "_table", {kind: dict(members) for kind, members in registry._table.items()})
    text = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text()
    (command,) = re.findall(r"offrl (train dataset=log.npz .*?)\n```", text, re.DOTALL)
    ends = np.arange(300) % 100 == 99
    columns = {"obs": np.zeros((300, 3)), "act": np.zeros((300, 1)), "rew": np.zeros(300), "done": ends, "last": ends}
    np.savez(tmp_path / "log.npz", **columns)
    assert offrl(command.replace("\\\n", " ")).status == 0
    values: dict[str, Any] = {
        "observations": columns["obs"],
        "actions": columns["act"],
        "rewards": columns["rew"],
        "terminations": ~ends & False,
        "truncations": ends,
        "next_observations": columns["obs"],
    }
    blocks = re.findall(r"```python\n(.*?)```", text[text.index("\n## Python") :], re.DOTALL)
    for block in blocks:
        exec(block.replace("steps=50_000)", "steps=20, settings=FAST)"), {**globals(), **values}, values)
    assert values["run"].scored_in.startswith("pendulum-mine in Pendulum-v1")
    assert package.train(dataset="plant-7", steps=20, settings=FAST).dataset == "plant-7"


@pytest.mark.slow
def test_a_plugin_package(tmp_path: Path) -> None:
    """An installed package with an entry point: its algorithm (without a YAML file) and its dataset work by name."""
    (tmp_path / "mine.py").write_text(
        "from dataclasses import dataclass\nimport numpy as np\nfrom offrl import from_arrays, register\nfrom "
        "offrl.algorithms.bc import BC, BCConfig\nfrom offrl.settings.field import setting\n@dataclass\nclass "
        "MyConfig(BCConfig):\n    name: str = 'my_bc'\n    weight: float = setting(1.0, 'weight of the loss', "
        "low=0.0)\n@register('algo', 'my_bc')\nclass MyBC(BC):\n    '''My own cloning.'''\n    Config = "
        "MyConfig\n@register('dataset', 'my-data')\ndef load(config):\n    x = np.zeros((50, 2), np.float32)\n    "
        "return from_arrays(x, x, x[:, 0], episode_ends=[49], name='my-data')\n"
    )
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[offrl.plugins]\nmine = mine\nbroken = no_such_module\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "OMP_NUM_THREADS": "1"}
    script = (
        f"import sys; from offrl.cli.main import main\nsmall = {SMALL!r}\nprint(main(['train', *small, 'algo=my_bc', "
        "'algo.weight=2', 'dataset=my-data', 'seeds=1', 'name=mine']))\nprint(main(['train', 'resume=runs/mine', "
        "'steps=30']), main(['list', 'algo=my_bc']))\nprint(main(['train', 'algo=my_bc', 'algo.weight=-1']))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, text=True, capture_output=True)
    assert done.stdout.splitlines()[-1] == "2", done.stderr
    assert "0 0" in done.stdout and "algo.weight=1.0" in done.stdout and "my_bc: runs/mine/" in done.stdout
    warning, *doubts, error = done.stderr.splitlines()
    assert all("more than the 50 rows" in doubt for doubt in doubts), doubts
    assert "plugin 'broken'" in warning and "algo.weight=-1.0 is out of range" in error


def test_an_algorithm_whose_config_says_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [(f.name, f.type, f) for f in dataclasses.fields(BCConfig) if f.name != "batch_size"]
    monkeypatch.setitem(
        registry._table["algo"], "poor", type("Poor", (BC,), {"Config": dataclasses.make_dataclass("C", fields)})
    )
    with pytest.raises(package.UserError, match=r"'poor'.*batch_size"):
        compose({"algo": "poor"})


@pytest.mark.slow
def test_minari(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Human demonstrations of an Adroit hand: loads, trains, and is scored with Minari's reference returns."""
    pytest.importorskip("gymnasium_robotics")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(shared("minari")))
    result = offrl("train algo=bc dataset=D4RL/door/human-v2 seeds=1")
    assert result.status == 0, result.err
    assert (
        "6,729 rows, 25 episodes" in result.out
        and "AdroitHandDoor" in result.out
        and "Minari reference returns" in result.out
    )
    data = package.load_dataset("D4RL/door/human-v2")
    assert data.episode_returns().mean().item() == pytest.approx(802.8, abs=0.05)


@pytest.mark.slow
def test_ogbench(offrl: Offrl) -> None:
    path = shared("ogbench/pointmaze-medium-navigate-v0.npz")
    result = offrl(f"train dataset={path} seeds=1")
    assert result.status == 0, result.err
    scored = "share of episodes that succeed" if importlib.util.find_spec("ogbench") else "not scored"
    assert "1,001,000 rows, 1,000 episodes" in result.out and scored in result.out
    lengths = package.load_dataset(str(path)).episode_lengths()
    assert lengths.min() == lengths.max() == 1001


@pytest.mark.slow
def test_d3rlpy(offrl: Offrl) -> None:
    path = shared("d3rlpy/pendulum_v1.1.0.h5")
    result = offrl(f"train dataset={path} eval.env=Pendulum-v1 seeds=1 dataset.action_low=[-2] dataset.action_high=[2]")
    assert result.status == 0 and not result.err
    assert "99,500 rows, 500 episodes" in result.out and "Pendulum-v1, gymnasium" in result.out
    returns = package.load_dataset(str(shared("d3rlpy/pendulum_random_v1.1.0.h5"))).episode_returns()
    assert returns.mean().item() == pytest.approx(-1224, abs=1)


def test_the_first_slice_is_a_whole_pattern_and_no_measure_of_speed(offrl: Offrl) -> None:
    """Two updates of TD3+BC, whose actor moves at every second: tracing and compiling fall into them."""
    assert offrl("train algo=td3_bc name=t eval.env=none checkpoint.every=10").status == 0
    first, second = (json.loads(line) for line in Path("runs/t/timing.jsonl").read_text().splitlines()[:2])
    assert first["step"] == 2 and first["first_updates"] > 0
    assert second["step"] == 10 and second["updates_per_second"] > 0


@pytest.mark.slow
def test_a_schedule_that_is_longer_than_the_run(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says at what learning rate the actor's schedule is cut off, once, unless the run is a trial or quiet."""
    command = "train algo=iql seeds=1 algo.decay_steps=60"
    note = "the actor's learning rate falls over 60 updates (algo.decay_steps); this run ends at 75% of it\n"
    assert "falls over" not in offrl(f"{command} name=trial").out
    monkeypatch.setattr("offrl.training.run.header.PAYS_FROM", 20)
    long, quiet = offrl(command), offrl(f"{command} name=quiet quiet=true")
    assert long.out.count(note) == 1 and not long.err and "falls over" not in quiet.out


@pytest.mark.slow
def test_what_critics_expect_is_logged(offrl: Offrl) -> None:
    """Q(s0, pi(s0)) less the discounted return of the episode, in the units of the data; nothing without a critic."""
    for algo in ("td3_bc", "iql", "bc"):
        assert offrl(f"train algo={algo} seeds=2 name={algo}").status == 0
    found = {algo: package.load(f"runs/{algo}").final_scores for algo in ("td3_bc", "iql", "bc")}
    assert all(r["q_overestimation"] is None and 0 < r["discounted_mean"] < r["return_mean"] for r in found["bc"])
    for row in found["td3_bc"] + found["iql"]:  # after 20 updates critics still say about 0
        assert (
            0 < row["discounted_mean"] < row["return_mean"]
            and -1.5 < row["q_overestimation"] / row["discounted_mean"] < -0.5
        )


@pytest.mark.nightly
def test_a_run_ends_where_its_estimated_values_no_longer_rise(offrl: Offrl) -> None:
    command = "train algo=bc seeds=2 name=a eval.every=5 train.stop=fqe-plateau stop_patience=1 stop_updates=30 steps="
    first = offrl(f"{command}100")
    assert first.status == 0, first.err
    looks = [json.loads(line) for line in Path("runs/a/fqe.jsonl").read_text().splitlines()]
    end = looks[-1]["step"]
    assert [row["step"] for row in looks] == list(range(5, end + 1, 5)) and 10 <= end < 100
    assert f"stopping at step {end}" in first.out and {r["step"] for r in package.load("runs/a").final_scores} == {end}
    again = offrl(f"{command}100")
    assert f"this run ended at step {end}" in again.out and not again.err
    # stopped on the way and continued, it ends at the same place with the same estimates
    assert offrl(f"{command.replace('name=a', 'name=b')}5").status == 0
    assert offrl(f"{command.replace('name=a', 'name=b')}100").status == 0
    assert Path("runs/b/fqe.jsonl").read_text() == Path("runs/a/fqe.jsonl").read_text()
    assert offrl(f"train resume=runs/a stop=none steps={end + 5}").status == 0
    assert {r["step"] for r in package.load("runs/a").final_scores} == {end + 5}
    refused = offrl(f"{command.replace('eval.every=5', 'eval.every=0').replace('name=a', 'name=c')}10")
    assert refused.status == 2 and "eval.every=0" in refused.err
