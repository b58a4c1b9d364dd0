"""Environments that only a file names: no module of theirs is imported, and no argument of theirs opens or starts
anything.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest

import offrl
from offrl import registry
from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.formats.provenance import Record, describe
from offrl.data.loading.read import read_raw
from offrl.data.raw import RawData
from offrl.data.tools.convert import convert, merge
from offrl.data.tools.inspect import inspect_dataset
from offrl.errors import UserError
from offrl.report.dataset import doctor
from offrl.runs.run import SavedRun
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import EvalConfig
from offrl.system import trust
from offrl.tasks.environments import make_env, resolve_task
from offrl.tasks.task import lookup, task_from_json

N = 40
EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
import gymnasium
gymnasium.register("Evil-v0", entry_point="gymnasium.envs.classic_control.pendulum:PendulumEnv", max_episode_steps=20)
"""
names = itertools.count()


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Path]]:
    """The id of an environment whose module lies beside the data, and the file that shows that it ran."""
    module, marker = f"strangers_{next(names)}", tmp_path / "marker"
    (tmp_path / "runs" / module).mkdir(parents=True)
    (tmp_path / "runs" / module / "evil.py").write_text(EVIL.format(marker=str(marker)))
    monkeypatch.syspath_prepend(tmp_path / "runs")  # as where a script lies above the run
    monkeypatch.setenv(trust.SWITCH, "")
    yield f"{module}.evil:Evil-v0", marker
    gym.registry.pop("Evil-v0", None)
    for name in [n for n in sys.modules if n.startswith(module)]:
        del sys.modules[name]


def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ends = np.arange(N) % 20 == 19
    return {
        "observations": rng.normal(size=(N, 3)).astype(np.float32),
        "actions": rng.uniform(-1.5, 1.5, (N, 1)).astype(np.float32),
        "rewards": rng.normal(size=N).astype(np.float32),
        "terminals": np.zeros(N, bool),
        "timeouts": ends,
    }


def record(env_id: str, **arguments: Any) -> dict[str, Any]:
    """What offrl writes beside data, checksum and all."""
    values = columns()
    raw = RawData({k: values[k] for k in ("observations", "actions", "rewards")}, discrete=False, name="x")
    made = describe(raw, values["timeouts"], offrl.Task("x", env_id="Pendulum-v1"), {}).to_json()
    made["spec"]["task"] |= {"env_id": env_id, "env_kwargs": arguments}
    made["spec"] |= {"action_low": [-1.5], "action_high": [1.5]}
    from offrl.data.formats.provenance import _digest

    return made | {"sha256": _digest({k: v for k, v in made.items() if k != "sha256"})}


def d4rl(folder: Path, attribute: str, **texts: str) -> Path:
    path = folder / "x.hdf5"
    with h5py.File(path, "w") as file:
        for key, value in columns().items():
            file[key] = value
        if attribute:
            file.attrs["env_id"] = attribute
        for key, text in texts.items():
            file[f"metadata/{key}"] = text
    return path


def minari(folder: Path, spec: dict[str, Any], **meta: Any) -> Path:
    values = columns()
    box = {"type": "Box", "dtype": "float32"}
    spaces = {"observation_space": box | {"shape": [3], "low": [-9] * 3, "high": [9] * 3}}
    spaces["action_space"] = box | {"shape": [1], "low": [-2], "high": [2]}
    data = folder / "set" / "data"
    data.mkdir(parents=True)
    about = {k: json.dumps(v) for k, v in spaces.items()} | {
        "total_steps": N,
        "total_episodes": 2,
        "data_format": "hdf5",
    }
    (data / "metadata.json").write_text(
        json.dumps(about | {"dataset_id": "set-v0", "env_spec": json.dumps(spec)} | meta)
    )
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for number in range(2):
            rows, group = slice(20 * number, 20 * number + 20), file.create_group(f"episode_{number}")
            group["observations"] = np.concatenate([values["observations"][rows], np.zeros((1, 3), np.float32)])
            for key, name in (
                ("actions", "actions"),
                ("rewards", "rewards"),
                ("terminals", "terminations"),
                ("timeouts", "truncations"),
            ):
                group[name] = values[key][rows]
    return folder / "set"


def text_lines(folder: Path, env_id: str, **arguments: Any) -> Path:
    path = folder / "x.jsonl"
    header = {"offrl": {"name": "x", "task": {"name": "x", "env_id": env_id, "env_kwargs": arguments}}}
    turns = [{"obs": "a", "action": "b", "reward": 1.0}]
    lines = [header, *({"turns": turns, "final_obs": None, "terminated": True, "truncated": False} for _ in range(3))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


FORMS: dict[str, Callable[[Path, str], Path]] = {
    "attribute": lambda folder, env_id: d4rl(folder, env_id),
    "metadata": lambda folder, env_id: d4rl(folder, "", env_id=env_id),
    "record": lambda folder, env_id: d4rl(folder, "", offrl=json.dumps(record(env_id))),
    "minari": lambda folder, env_id: minari(
        folder, {"id": env_id, "kwargs": {}}, eval_env_spec=json.dumps({"id": env_id})
    ),
    "minari-record": lambda folder, env_id: minari(folder, {"id": env_id}, offrl=record(env_id)),
    "text": lambda folder, env_id: text_lines(folder, env_id),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_command_on_data_imports_what_a_file_names(tmp_path: Path, evil: tuple[str, Path], form: str) -> None:
    """Rows 9 and 10: inspect, convert and merge show the id and go on, and what is trained on the data asks for it to
    be typed.
    """
    env_id, marker = evil
    path = FORMS[form](tmp_path, env_id)
    config = DatasetConfig(name=str(path), cache="never")
    shown = str(inspect_dataset(config))
    assert "Evil-v0" in shown
    task = load_dataset(config).spec.task
    assert task is not None and task.env_id == env_id
    convert(config, str(tmp_path / ("out.jsonl" if form == "text" else "out.hdf5")))
    convert(config, str(tmp_path / "out" / "again-v0"), "minari")
    merge([config, config], str(tmp_path / ("both.jsonl" if form == "text" else "both.hdf5")))
    with pytest.raises(UserError, match=rf"{re.escape(env_id)}' is named by a file.*trust=true"):
        make_env(task)
    assert not marker.exists()
    with trust.trusted():
        make_env(task).close()
    assert marker.read_text() == "ran"  # the attack works where a person has it work


@pytest.mark.nightly
def test_the_doctor_imports_nothing(tmp_path: Path, evil: tuple[str, Path]) -> None:
    """Row 10: the page names the environment, and says why its range is not known."""
    found = doctor(DatasetConfig(name=str(d4rl(tmp_path, evil[0])), cache="never"), tmp_path / "page")
    assert evil[0] in found.environment and "is named by the file alone" in " ".join(found.notes)
    assert not evil[1].exists()


SAVED = Path(__file__).parents[2] / "data" / "run"


@pytest.mark.parametrize("place", ["task", "env"])
def test_a_run_of_a_stranger_imports_nothing(tmp_path: Path, evil: tuple[str, Path], place: str) -> None:
    """Row 9: `offrl.load(RUN).evaluate()` under a script that lies above the run. The honest run is scored as
    before.
    """
    shutil.copytree(SAVED, run := tmp_path / "runs" / "a")
    for path in (run, run / "run.json"):
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    honest = SavedRun(run).task()
    assert honest is not None and honest.env_id == "Hopper-v5"
    about = json.loads((run / "run.json").read_text())
    if place == "env":
        about["env"] = evil[0]
    else:
        about["spec"]["task"]["env_id"] = evil[0]
    (run / "run.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="is named by a file"):
        SavedRun(run).task()
    assert not evil[1].exists()
    with pytest.raises(
        UserError, match="observations"
    ):  # typed, it is imported, and is another environment than the run's
        SavedRun(run).task(env=evil[0])
    assert evil[1].exists()


def test_what_a_person_names_is_made(evil: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own module, in Python or by a table of a plugin, works as before; so it does in processes that this
    one starts.
    """
    env_id, marker = evil
    values = columns()
    data = from_arrays(values["observations"], values["actions"], values["rewards"], env=env_id)
    assert data.spec.task is not None and env_id in os.environ[trust.SWITCH].split()
    make_env(data.spec.task).close()
    assert marker.exists()
    monkeypatch.setenv(trust.SWITCH, "")
    file = {"arguments": {"xml_file": "/home/me/robot.xml"}}
    with pytest.raises(UserError, match="named by a file with xml_file"):
        trust.check_environment("Ant-v5", file["arguments"])
    task = offrl.Task("mine", env_id=env_id, env_kwargs={"xml_file": "/home/me/robot.xml"})
    trust.check_environment(env_id, task.env_kwargs)
    trust.check_environment("Ant-v5", {"opponent": print})  # no file holds a function

    monkeypatch.setenv(trust.SWITCH, "")
    # a run on a plugin's dataset: its table has the same
    saved = task_from_json({"name": "of-a-plugin", "env_id": env_id})
    with pytest.raises(UserError, match="is named by a file"):
        make_env(saved)

    def table(name: str) -> offrl.Task | None:
        return offrl.Task(name, env_id=env_id) if name == "of-a-plugin" else None

    monkeypatch.setitem(registry._table["task"], "plugin", table)
    make_env(saved).close()


# ------------------------------------------------------------------------------------------------------- what files may
# name


@pytest.mark.parametrize(
    "env_id",
    [
        "venv.__main__:X-v0",
        "this:X-v0",
        "offrl.cli.__main__:X-v0",
        "offrl.cli.main:X-v0",
        "gymnasium.utils.play:X-v0",
        "offrl._x:X-v0",
        "minigrid.manual_control:X-v0",
        "offrl.envs:evil:X-v0",
        ".evil:X-v0",
        "offrl.envs..evil:X-v0",
        "offrl.envs.__main__:X-v0",
        ":X-v0",
        "gymnasium_evil:X-v0",
        "offrl.envs.a b:X-v0",
        3,
        None,
        ["a:b"],
        {"id": "x"},
    ],
)
def test_modules_that_no_registration_needs(env_id: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 10: any installed module was imported, also those that do something when they are."""
    monkeypatch.setenv(trust.SWITCH, "")
    with pytest.raises(UserError):
        trust.check_environment(env_id)


def test_the_environments_of_all_named_data_sets_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tables name may stand in files, and the list holds nothing besides them and what extras install to be
    named so.
    """
    from offrl.envs.neorl2 import TASKS

    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: object())
    monkeypatch.setenv(trust.SWITCH, "")
    known = ["pointmaze-medium-navigate-v0", *TASKS, *registry.names("task")]
    known += [name for listed in registry.names("task_names").values() for name in listed()]
    tasks = [task for task in map(lookup, known) if task is not None]
    assert len(tasks) > 100
    for task in tasks:
        trust.check_environment(str(task.env_id), task_from_json(json.loads(json.dumps(vars(task)))).env_kwargs)
    tables = {str(t.env_id).partition(".")[0].partition(":")[0] for t in tasks if ":" in str(t.env_id)}
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    installed = set(re.findall(r'^(?:robotics|ogbench|babyai) = \["([a-z-]+)', project, re.M)) | {"gymnasium"}
    assert tables | {name.replace("-", "_") for name in installed} == trust.ENVIRONMENTS


def test_levels_of_babyai_and_ogbench_are_checked_too(evil: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of offrl's that makes another by a name among its arguments, which a file gives."""
    monkeypatch.setattr(
        "offrl.envs.text.babyai.package",
        lambda *_: type("", (), {f"{k}_TO_IDX": {} for k in ("OBJECT", "COLOR", "STATE")}),
    )
    from offrl.envs.text.babyai import TextBabyAI

    with pytest.raises(UserError, match="is named by a file"):
        TextBabyAI(level=evil[0])
    for env_id, arguments in (
        ("offrl.envs.text.babyai:offrl/TextBabyAI-v0", {"level": evil[0]}),
        ("Ant-v5", {"name": evil[0]}),
    ):
        with pytest.raises(UserError, match="may open or start"):
            make_env(task_from_json({"name": "x", "env_id": env_id, "env_kwargs": arguments}))
    pytest.importorskip("ogbench")
    from offrl.envs.ogbench_env import make

    with pytest.raises(UserError, match="is named by a file"):
        make(evil[0])
    assert not evil[1].exists()


# -------------------------------------------------------------------------------------------------------------
# arguments


HOSTILE: dict[str, dict[str, Any]] = {
    "absolute": {"xml_file": "/tmp/evil.xml"},
    "relative": {"xml_file": "./evil.xml"},
    "above": {"xml_file": "..evil.xml"},
    "home": {"xml_file": "~/evil.xml"},
    "folder": {"model_path": "runs/evil.xml"},
    "windows": {"xml_file": "C:evil.xml"},
    "address": {"dataset": "http://x"},
    "module": {"env_id": "evil:X-v0"},
    "nested": {"files": [{"a": ["/etc/passwd"]}]},
    "program": {"engine": "reboot"},
    "options": {"settings": {"Debug Log File": "bashrc"}},
    "run": {"model": "evil"},
    "game": {"game": "evil.z8"},
    "code": {"name": "code:CodeContest-v0"},
    "window": {"render_mode": "human"},
    "newline": {"xml_file": "a\nb"},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_arguments_of_files_open_and_start_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 17 and beyond: MuJoCo's model, a chess engine's program and the log that it writes, a run, code that a policy
    wrote.
    """
    monkeypatch.setenv(trust.SWITCH, "")
    with pytest.raises(UserError, match="may open or start what the file chooses") as caught:
        trust.check_environment("Hopper-v5", HOSTILE[case])
    assert "\n" not in str(caught.value)
    with trust.trusted():
        trust.check_environment("Hopper-v5", HOSTILE[case])


def test_arguments_that_honest_files_have_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Minari's own data sets. How it was drawn is dropped: row 17, no display, abort in glfw."""
    monkeypatch.setenv(trust.SWITCH, "")
    arguments = {
        "maze_map": [[1, "r", "g", "c"], [1, 0, 0, 1]],
        "reward_type": "sparse",
        "continuing_task": True,
        "tasks_to_complete": ["slide cabinet"],
        "game": "breakout",
        "mode": None,
        "repeat_action_probability": 0.25,
        "xml_file": "hopper.xml",
        "name": "game:Sokoban-v0-easy",
        "default_camera_config": {"distance": 4.0, "lookat": [0.0, 0.0, 1.15]},
        "level": "BabyAI-GoToLocal-v0",
        "reset_noise_scale": 1e-3,
    }
    trust.check_environment("Hopper-v5", arguments)
    task = load_dataset(
        str(minari(tmp_path, {"id": "Pendulum-v1", "kwargs": {"g": 9.0, "render_mode": "human"}}))
    ).spec.task
    assert task is not None and task.env_kwargs == {"g": 9.0}
    assert task_from_json({"name": "x", "env_kwargs": {"g": 9.0, "render_mode": "human"}}).env_kwargs == {"g": 9.0}
    made = read_raw(str(d4rl(tmp_path, "", offrl=json.dumps(record("Pendulum-v1", g=9.0, render_mode="human"))))).task
    assert made is not None and made.env_kwargs == {"g": 9.0}
    assert Record.from_json(record("Pendulum-v1")).rows == N


def test_minaris_wrappers_and_entry_points_are_never_used(tmp_path: Path, evil: tuple[str, Path]) -> None:
    """Harmless before, and to stay so: `entry_point` and `additional_wrappers` of env_spec name code."""
    module = evil[0].partition(":")[0]
    wrapper = {"name": "Evil", "entry_point": f"{module}:Wrapper", "kwargs": {}}
    spec = {
        "id": "Pendulum-v1",
        "entry_point": f"{module}:Env",
        "vector_entry_point": f"{module}:Env",
        "additional_wrappers": [wrapper],
    }
    data = load_dataset(str(minari(tmp_path, spec)))
    task = resolve_task(data.spec.task, EvalConfig())
    assert task is not None and "the recorded wrappers Evil are left out" in task.note
    env = make_env(task)
    assert type(env.unwrapped).__name__ == "PendulumEnv" and module not in sys.modules
    env.close()


@pytest.mark.parametrize(
    "change",
    [
        {"env_id": 3},
        {"env_id": ["a"]},
        {"env_kwargs": [1]},
        {"env_kwargs": "a"},
        {"max_episode_steps": -5},
        {"name": 1},
        {"note": {}},
        {"max_episode_steps": "a"},
        {"max_episode_steps": True},
        {"ref_min": "low"},
        {"ref_max": float("inf")},
        {"ref_min": 10**400},
        {"starts": [1]},
        {"starts": "abc"},
        {"observation_keys": [1]},
        {"observation_keys": {"a": 1}},
        {"scored_by": None},
    ],
    ids=str,
)
def test_tasks_of_other_kinds_are_one_line(change: dict[str, Any]) -> None:
    """Row 21: tracebacks."""
    with pytest.raises(UserError, match=next(iter(change))) as caught:
        task_from_json({"name": "x"} | change)
    assert "\n" not in str(caught.value)


def test_a_function_that_a_file_names_makes_no_environment() -> None:
    """`env_factory` is a function of this program, never a word in a file."""
    assert task_from_json({"name": "x", "env_factory": "os:abort"}).env_factory is None
