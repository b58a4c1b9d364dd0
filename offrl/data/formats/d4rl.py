"""D4RL's HDF5 layout, by path or by name. Neither `d4rl` nor old gym is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl import registry
from offrl.data.containers.guard import from_json, reading
from offrl.data.containers.hdf5 import hdf5_keys, open_hdf5, refuse_absent, refuse_loops, value_of
from offrl.data.formats import image_columns
from offrl.data.formats.download import fetch, local_file
from offrl.data.formats.provenance import Record, fits, read_record, restore
from offrl.data.memory import Memory, chunks, rows_at_once
from offrl.data.raw import FLAGS, RawData
from offrl.data.tables.build import build, read_chosen
from offrl.data.tables.keyed import Hdf5Table
from offrl.data.tables.mapping import Chosen, Term
from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig
from offrl.system.files import cache_dir
from offrl.tasks.task import Task, lookup

REQUIRED = {"observations": "observations", "actions": "actions", "rewards": "rewards", "terminations": "terminals"}
FINALS = "metadata/offrl_final"  # extra columns after the episodes' last rows
RECORD = "metadata/offrl"  # see offrl.data.formats.provenance
OPTIONAL = {
    "truncations": "timeouts",
    "next_observations": "next_observations",
    "final_observations": "final_observations",
}


def locate(task: Task, config: DatasetConfig) -> Path:
    """The file of a D4RL dataset: where the d4rl package keeps it, in our cache, or downloaded to there."""
    name = str(task.url).rsplit("/", 1)[1]
    if path := local_file(name, "D4RL_DATASET_DIR", "~/.d4rl/datasets"):
        return path
    title, target = f"D4RL dataset {task.name}", cache_dir(config.cache_dir) / "d4rl"
    return fetch(
        str(task.url), target, verify, config.mirror, title, known=task.file, limit_gb=config.download_limit_gb
    )


def verify(path: Path) -> None:
    """Raises UserError unless the file opens and has D4RL's columns, equally long."""
    with open_hdf5(path) as file:
        items = hdf5_keys(file)
        missing = [k for k in REQUIRED.values() if k not in items]
        if missing:
            raise UserError(f"{path} has no '{missing[0]}'; it has {', '.join(sorted(file))}")
        lengths = {k: (items[k].shape or (0,))[0] for k in (*REQUIRED.values(), "timeouts") if k in items}
        if len(set(lengths.values())) > 1:
            raise UserError(f"{path} has columns of different lengths: {lengths}")


def read(path: Path, config: DatasetConfig, memory: Memory, task: Task | None = None) -> RawData:
    """A file in D4RL's layout. `task` when it was named; else it is the file's own, or guessed from its metadata and
    name.
    """
    with open_hdf5(path) as file:
        record = record_of(hdf5_keys(file), path)
        names, config = ((), config) if record is None else image_columns.asked(record, config, str(path))
        table = Hdf5Table(file, path, config.fields, own_names=("infos/", "metadata/"))
        items = table.items
        attributes = {k: _attribute(file, k, path) for k in ("env_id", "dataset_id", "ref_min_score", "ref_max_score")}
        env_id = _text(attributes["env_id"]) or _text(
            value_of(items["metadata/env_id"], str(path)) if "metadata/env_id" in items else None
        )
        dataset_id = _text(attributes["dataset_id"])
        references = [_score(attributes[k], k, path) for k in ("ref_min_score", "ref_max_score")]
        finals, final_columns = None, {}
        if record is None:  # another program's
            raw = build(table, config, memory, name=path.stem, source="d4rl", example=str(path))
        else:
            refuse_lists(config, path)
            keys = _keys(items, record, config, path)
            chosen: Chosen = {column: (Term(key),) for column, key in keys.items()}
            kind = "auto" if record.spec.discrete else "continuous"
            raw = read_chosen(table, chosen, replace(config, action_kind=kind), memory, path.stem, "d4rl")
            for name in (k for k in record.final_columns if f"{FINALS}/{k}" in items):
                final_columns[name] = value_of(items[f"{FINALS}/{name}"], str(path), "biuf")
            if record.finals and {"next_observations", "timeouts"} <= set(items) and "next_observations" not in keys:
                with reading(f"{path}: 'next_observations'"):
                    finals = _last_successors(raw, items["next_observations"], str(path))
        raw.metadata = _about(items, str(path))
    if record is not None:
        ends = np.zeros(raw.rows, bool)
        for name in FLAGS:
            if len(flags := raw.columns.get(name, ends)) == raw.rows:
                ends |= flags
        if fits(raw, record, ends):
            restore(raw, record, ends, config.fields)
            raw.final_columns = {k: v for k, v in final_columns.items() if k in raw.columns}
            raw.final_observations = raw.final_observations if finals is None else finals
            if names:
                image_columns.take(raw, record, names, config)
            raw.name = dataset_id or raw.name
            if task is not None:
                raw.task = task
            return raw
    raw.task = task or guess_task(path.stem, env_id)
    if dataset_id:
        raw.name = dataset_id
    if references[0] is not None and references[1] is not None:
        label = "offrl" if dataset_id.startswith("offrl/") else "the file"
        base = raw.task or Task(name=raw.name)
        raw.task = replace(base, name=raw.name, ref_min=references[0], ref_max=references[1], ref_label=label, note="")
        if label == "offrl" and env_id:
            raw.task = replace(raw.task, env_id=env_id, env_kwargs={}, max_episode_steps=None)
    return raw


def refuse_lists(config: DatasetConfig, path: Path) -> None:
    """Raises UserError for settings of own data in a layout whose columns are what it says."""
    for column, key in config.fields.items():
        if not isinstance(key, str):
            reason = f"lists of columns are for own data; the layout of {path} has a key for each of ours"
            raise UserError(f"dataset.fields.{column}={key}: {reason}")
    if changed := config.changed(("action_kind", "max_gap", "missing")):
        name = changed[0]
        raise UserError(
            f"dataset.{name}={getattr(config, name)} is for own data, and the layout of {path} says what its columns "
            "are"
        )


def _keys(items: Mapping[str, Any], record: Record, config: DatasetConfig, path: Path) -> dict[str, str]:
    """Column -> key of a file with a record. Raises UserError where one is not there."""
    keys = {c: k for c, k in (REQUIRED | OPTIONAL).items() if k in items or c in REQUIRED}
    keys |= {c: c for c in record.columns if c not in keys and c in items}
    if "next_observations" not in record.columns:
        keys.pop("next_observations", None)
    keys |= {column: str(key) for column, key in config.fields.items()}
    for column, key in keys.items():
        if key not in items:
            raise UserError(
                f"{path} has no '{key}' ({column}).{nearest(key, items)} It has: {', '.join(sorted(items))}"
            )
    return keys


def record_of(items: dict[str, Any], path: Path) -> Record | None:
    """The record that offrl made when it wrote the file; None for other programs' files."""
    if RECORD not in items:
        return None
    return read_record(lambda: from_json(_text(value_of(items[RECORD], str(path)))), f"{path}: '{RECORD}'")


def _attribute(file: Any, name: str, path: Path) -> Any:
    """One attribute of an h5py.File, or None."""
    if name not in file.attrs:
        return None
    refuse_loops(path)
    with reading(f"{path}: the attribute '{name}'"):
        return file.attrs[name]


def _score(value: Any, name: str, path: Path) -> float | None:
    if value is None:
        return None
    with reading(f"{path}: the attribute '{name}'", cure="a single number is due"):
        if not np.isfinite(score := float(value)):
            raise ValueError(f"it is {score}")
        return score


def _about(items: dict[str, Any], where: str) -> dict[str, Any]:
    """The contents of metadata/: text and single numbers by their names, arrays (D4RL's policies) with the prefix."""
    aliases = {"algorithm": "algorithm_name"}
    metadata: dict[str, Any] = {}
    for key, item in items.items():
        name = key.removeprefix("metadata/")
        if key == name or key in (RECORD, "metadata/env_id") or key.startswith(FINALS):
            continue
        if item.shape == () and item.dtype.kind in "biufSO":
            value = value_of(item, where)
            if isinstance(value, bytes | str | np.generic):
                metadata[aliases.get(name, name)] = _text(value) if isinstance(value, bytes | str) else value.item()
        elif item.shape and item.dtype.kind in "biuf":
            metadata[key] = value_of(item, where)
    return metadata


def _last_successors(raw: RawData, item: Any, where: str) -> np.ndarray:
    """The next observation of each episode's last row, [E, *O]; without keeping the others."""
    last = raw.columns["terminations"] | raw.columns["truncations"]
    refuse_absent(item.id, f"{where}: '{item.name.strip('/')}'", item.file)
    return np.concatenate([item[part][last[part]] for part in chunks(len(last), rows_at_once(item))])


def _text(value: Any) -> str:
    """A string from an HDF5 attribute or scalar."""
    if value is None:
        return ""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def guess_task(stem: str, env_id: str = "") -> Task | None:
    """The task of a file called `stem`, recorded in `env_id`: reference scores by the name, the environment by what the
    file says.
    """
    name = stem.replace("_", "-")
    task = lookup(name)
    for candidate in registry.names("task_guess").values():
        task = task or candidate(stem)
    if not env_id:
        return task
    if task is None:
        return Task(name=stem, env_id=env_id)
    version = env_id.rpartition("-v")[2]
    if env_id == task.env_id:
        return task
    # of mujoco-py's time: the table knows what stands for it today
    if version.isdigit() and int(version) < 4 and task.env_id:
        recorded = next(filter(None, (candidate(env_id) for candidate in registry.names("task_guess").values())), task)
        robots = (recorded.observation_dim, recorded.action_dim) == (task.observation_dim, task.action_dim)
        return (
            task
            if recorded.env_id == task.env_id or not robots
            else replace(recorded.without_references(), name=task.name, url=None)
        )
    same = bool(task.env_id) and str(task.env_id).partition("-v")[0] == env_id.partition("-v")[0]
    if not same:  # the name says one robot, the file another: the reference scores are not the file's
        return Task(name=task.name, env_id=env_id)
    note = f"recorded in {env_id}, for which the reference scores of {task.env_id} do not hold"
    return replace(task.without_references(), env_id=env_id, env_kwargs={}, note=note)
