"""D4RL's HDF5 layout, by path or by name. Neither `d4rl` nor old gym is imported."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.data.config import DatasetConfig
from offrl.data.download import cache_dir, fetch
from offrl.data.mmap import Memory
from offrl.data.raw import RawData
from offrl.data.sources.files import finish, hdf5_keys, open_hdf5, read_hdf5
from offrl.errors import UserError, nearest
from offrl.tasks import Task, lookup

REQUIRED = {"observations": "observations", "actions": "actions", "rewards": "rewards", "terminations": "terminals"}
OPTIONAL = {"truncations": "timeouts", "next_observations": "next_observations", "final_observations": "final_observations"}


def locate(task: Task, config: DatasetConfig) -> Path:
    """The file of a D4RL data set: where the d4rl package keeps it, in our cache, or downloaded to there."""
    name = str(task.url).rsplit("/", 1)[1]
    for folder in (os.environ.get("D4RL_DATASET_DIR"), "~/.d4rl/datasets"):
        if folder and (Path(folder).expanduser() / name).is_file():
            return Path(folder).expanduser() / name
    return fetch(str(task.url), cache_dir(config.cache_dir) / "d4rl", verify, config.mirror, f"D4RL data set {task.name}")


def verify(path: Path) -> None:
    """Raises UserError unless the file opens and has D4RL's columns, equally long."""
    with open_hdf5(path) as file:
        missing = [k for k in REQUIRED.values() if k not in file]
        if missing:
            raise UserError(f"{path} has no '{missing[0]}'; it has {', '.join(sorted(file))}")
        lengths = {k: file[k].shape[0] for k in (*REQUIRED.values(), "timeouts") if k in file}
        if len(set(lengths.values())) > 1:
            raise UserError(f"{path} has columns of different lengths: {lengths}")


def read(path: Path, config: DatasetConfig, memory: Memory, task: Task | None = None) -> RawData:
    """A file in D4RL's layout. `task` when it was asked for by name; else it is guessed from the file's metadata and name."""
    columns = {}
    with open_hdf5(path) as file:
        items = hdf5_keys(file)
        keys = {c: k for c, k in (REQUIRED | OPTIONAL).items() if k in items or c in REQUIRED}
        for column, key in config.fields.items():
            keys[column] = str(key)
        for column, key in keys.items():
            if key not in items:
                raise UserError(f"{path} has no '{key}' ({column}).{nearest(key, items)} It has: {', '.join(sorted(items))}")
            columns[column] = read_hdf5(column, items[key], memory, str(path))
        env_id = _text(file.attrs.get("env_id")) or _text(items["metadata/env_id"][()] if "metadata/env_id" in items else None)
        dataset_id = _text(file.attrs.get("dataset_id"))
        references = [file.attrs.get(k) for k in ("ref_min_score", "ref_max_score")]
    raw = finish(columns, path, "d4rl")
    raw.task = task or guess_task(path.stem, env_id)
    if dataset_id:
        raw.name = dataset_id
    if references[0] is not None and references[1] is not None:
        label = "offrl" if dataset_id.startswith("offrl/") else "the file"
        base = raw.task or Task(name=raw.name)
        raw.task = replace(base, name=raw.name, ref_min=float(references[0]), ref_max=float(references[1]), ref_label=label, note="")
        if label == "offrl" and env_id:
            raw.task = replace(raw.task, env_id=env_id, env_kwargs={}, max_episode_steps=None)
    return raw


def _text(value: Any) -> str:
    """A string from an HDF5 attribute or scalar."""
    if value is None:
        return ""
    return value.decode() if isinstance(value, bytes) else str(value)


def guess_task(stem: str, env_id: str = "") -> Task | None:
    """The task of a file called `stem`, recorded in `env_id`: reference scores by the name, the environment by what the file says."""
    name = stem.replace("_", "-")
    task = lookup(name)
    for candidate in registry.names("task_guess").values():
        task = task or candidate(stem)
    if not env_id:
        return task
    if task is None:
        return Task(name=stem, env_id=env_id)
    version = env_id.rpartition("-v")[2]
    if env_id == task.env_id or (version.isdigit() and int(version) < 4 and task.env_id):
        return task  # an environment of mujoco-py's time: the table knows what stands for it today
    same = bool(task.env_id) and str(task.env_id).partition("-v")[0] == env_id.partition("-v")[0]
    if not same:  # the name says one robot, the file another: the reference scores are not the file's
        return Task(name=task.name, env_id=env_id)
    return replace(task, env_id=env_id, env_kwargs={}, note="")
