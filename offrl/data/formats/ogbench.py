"""OGBench's npz files: trajectories in a row, `terminals` on the last state of each; rewards only for one of its tasks
at a time.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.npz import Npz
from offrl.data.formats.download import fetch, local_file
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.system.files import cache_dir
from offrl.tasks.task import lookup

URL = "https://rail.eecs.berkeley.edu/datasets/ogbench/"
NAME = re.compile(
    r"(visual-)?(pointmaze|antmaze|humanoidmaze|antsoccer|cube|scene|puzzle|powderworld)-([a-z0-9]+-)*(navigate|stitch|explore|play|noisy)((-sparse)?-singletask(-task[1-5])?)?-v\d+(-val)?"
)
SINGLE = re.compile(r"(-sparse)?-singletask(-task[1-5])?")
XY_FIRST = ("pointmaze", "antmaze")  # whose observations begin as `qpos` does


def is_own(path: Path, arrays: set[str]) -> bool:
    """True for a file of OGBench by its name, or by the states of the physics that its recordings hold. Other files
    that lack rewards have lost them: they are not to be taken for data whose goals decide the rewards."""
    layout = {"observations", "actions", "terminals"} <= arrays and not {
        "rewards",
        "timeouts",
        "next_observations",
    } & arrays
    return layout and (NAME.fullmatch(path.stem) is not None or "qpos" in arrays)


def locate(name: str, config: DatasetConfig) -> Path:
    """The file of an OGBench dataset: where the ogbench package keeps it, in our cache, or downloaded to there. Of a
    single task's data too it is the one without rewards."""
    name = SINGLE.sub("", name)
    if path := local_file(f"{name}.npz", "OGBENCH_DATASET_DIR", "~/.ogbench/data"):
        return path
    title, target = f"OGBench dataset {name}", cache_dir(config.cache_dir) / "ogbench"
    return fetch(f"{URL}{name}.npz", target, verify, config.mirror, title, limit_gb=config.download_limit_gb)


def verify(path: Path) -> None:
    """Raises UserError unless the file opens and has OGBench's arrays."""
    keys = Npz(path).shapes
    missing = [k for k in ("observations", "actions", "terminals") if k not in keys]
    if missing:
        raise UserError(f"{path} has no '{missing[0]}'; it has {', '.join(sorted(keys))}")


def read(path: Path, config: DatasetConfig, memory: Memory, name: str) -> RawData:
    """Rewards are zeros: the goal decides them. A trajectory's last row has no successor, and is never an environment's
    termination.

    With a name such as "antmaze-large-navigate-singletask-task1-v0" rewards and terminations are those of that task;
    with "scene-play-sparse-singletask-task1-v0" the rewards are -1 until all of it is done (Q-chunking's protocol,
    arXiv 2507.07969)."""
    archive = Npz(path)
    verify(path)
    columns, notes = {}, list[str]()
    for column, key in (
        ("observations", "observations"),
        ("actions", "actions"),
        ("truncations", "terminals"),
        *config.fields.items(),
    ):
        if str(key) not in archive.shapes:
            raise UserError(
                f"{path} has no '{key}' (dataset.fields.{column}); it has {', '.join(sorted(archive.shapes))}"
            )
        columns[column] = canonical(column, archive.read(str(key), column, memory, notes), str(path))
    columns.setdefault("rewards", np.zeros(len(columns["observations"]), np.float32))
    columns["terminations"] = np.zeros(len(columns["observations"]), bool)
    single = SINGLE.search(name) is not None and SINGLE.sub("", name) == path.stem
    name = name if single else path.stem
    if single:
        columns["rewards"], columns["terminations"] = relabelled(
            archive, name, columns["observations"], memory, str(path)
        )
        columns["truncations"] &= ~columns["terminations"]
        if "-sparse-" in name:
            columns["rewards"] = -(columns["rewards"] != 0.0).astype(np.float32)
    raw = RawData(columns, name=name, source="ogbench", path=str(path), action_low=-1.0, action_high=1.0, notes=notes)
    raw.task = lookup(name.removesuffix("-val"))
    return raw


def relabelled(
    archive: Npz, name: str, observations: np.ndarray, memory: Memory, where: str
) -> tuple[np.ndarray, np.ndarray]:
    """(rewards, terminations) [R] of a single task's data, by the ogbench package: -1 for each part of the task not yet
    done, 0 and an end where all of it is. Raises UserError without the package, and where the file lacks the positions
    that decide it."""
    if importlib.util.find_spec("ogbench") is None:
        raise UserError(f"{name}: rewards of a single task come from the package ogbench: pip install 'offrl[ogbench]'")
    from offrl.tasks.environments import make_env

    data: dict[str, Any] = {k: archive.read(k, k, memory) for k in ("qpos", "button_states") if k in archive.shapes}
    if "qpos" not in data and name.startswith(XY_FIRST):
        data["qpos"] = observations
    needed = "button_states" if "puzzle" in name else "qpos"
    if needed not in data:
        raise UserError(
            f"{where} has no '{needed}', which decides the rewards of {name}: take OGBench's own file, which has it"
        )
    task = lookup(name.removesuffix("-val"))
    assert task is not None
    env = make_env(task)
    env.reset(seed=0)
    package = importlib.import_module("ogbench.relabel_utils")
    package.relabel_dataset(name.replace("-sparse-", "-"), env.unwrapped, data)
    env.close()
    return np.asarray(data["rewards"], np.float32), np.asarray(data["masks"]) == 0.0
