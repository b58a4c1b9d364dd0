"""HDF5 files written by d3rlpy: `MDPDataset.dump` of version 1 and `ReplayBuffer.dump` of version 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading
from offrl.data.containers.hdf5 import hdf5_keys, open_hdf5, read_hdf5, refuse_absent, refuse_groups, value_of
from offrl.data.containers.stored import Stored
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical, ends_of
from offrl.data.tables.keyed import read_item
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig


def read(path: Path, config: DatasetConfig, memory: Memory) -> RawData:
    """`terminals` are the environment's terminations, `episode_terminals` the ends of episodes for whatever reason."""
    with open_hdf5(path) as file:
        items = hdf5_keys(file)
        refuse_groups(file, ("version", "discrete_action", "episode_terminals"))
        if "observations_0_0" in items:
            raise UserError(
                f"{path} holds d3rlpy's tuple observations, several arrays for each step ('observations_0_0', "
                "'observations_0_1', ...), which are not supported: join them into one (numpy.concatenate along the "
                "last axis), and dump d3rlpy's episodes again"
            )
        if "observations_0" in items:
            return _read_v2(path, items, memory)
        missing = [k for k in ("observations", "actions", "rewards", "terminals") if k not in items]
        if missing:
            raise UserError(
                f"{path} has no '{missing[0]}', which every d3rlpy file has; it has {', '.join(sorted(items))}"
            )
        if "version" not in items:
            raise UserError(
                f"{path} was written by d3rlpy before 1.0, whose rewards belong to the row before; load and dump it "
                "with d3rlpy 1.x, or, if its rewards are in place, set dataset.format=columns"
            )
        discrete = _flag(items["discrete_action"], str(path)) if "discrete_action" in items else None
        keys = {"observations": "observations", "actions": "actions", "rewards": "rewards", "terminations": "terminals"}
        columns, notes = {}, list[str]()
        for name, key in keys.items() | config.fields.items():
            if key not in items:
                raise UserError(f"{path} has no '{key}' (dataset.fields.{name}); it has {', '.join(sorted(items))}")
            columns[name] = canonical(
                name,
                read_item(name, items[key], memory, str(path), notes),
                str(path),
                discrete if name == "actions" else None,
            )
        ends = None
        if "episode_terminals" in items:
            flags = read_hdf5("terminations", items["episode_terminals"], memory, str(path))
            ends = canonical("terminations", flags, f"{path}: 'episode_terminals'")
    return RawData(
        columns,
        episode_ends=ends,
        name=path.stem,
        source="d3rlpy",
        path=str(path),
        discrete=discrete,
        notes=notes,
    )


def _flag(item: Any, where: str) -> bool:
    """A single 0 or 1."""
    value = np.asarray(value_of(item, where, "biuf")).reshape(-1)
    if len(value) != 1 or value[0] not in (0, 1):
        raise UserError(f"{where}: '{item.name.strip('/')}' is no single flag, 0 or 1")
    return bool(value[0])


def _read_v2(path: Path, items: dict[str, Any], memory: Memory) -> RawData:
    """One set of datasets per episode: observations_0, actions_0, rewards_0 [T, 1], terminated_0."""
    count = sum(key.startswith("observations_") for key in items)
    for number in range(count):
        for name in ("observations", "actions", "rewards", "terminated"):
            if f"{name}_{number}" not in items:
                raise UserError(
                    f"{path} has no '{name}_{number}', though it has {count} episodes; the file is damaged or "
                    "incomplete"
                )
    lengths = [(items[f"actions_{i}"].shape or (0,))[0] for i in range(count)]
    stops = np.cumsum(lengths)
    rows = int(stops[-1])
    columns: dict[str, np.ndarray] = {}
    stored = Stored(rows)
    looked = [i for i in range(count) if lengths[i] and stored.looks_at(int(stops[i]) - lengths[i])]
    for name in ("observations", "actions", "rewards"):
        first = items[f"{name}_0"]
        for i in range(count):
            _refuse_unlike(items[f"{name}_{i}"], first, lengths[i], str(path))
        out = memory.empty(name, (rows, *first.shape[1:]), np.float32 if first.dtype.kind == "f" else first.dtype)
        for i, (length, stop) in enumerate(zip(lengths, stops.tolist(), strict=True)):
            with reading(f"{path}: '{name}_{i}'"):
                values = items[f"{name}_{i}"][()]
            out[stop - length : stop] = values
            if i in looked and (name != "actions" or out.dtype == np.float32):
                stored.keep(name, values)
        columns[name] = canonical(name, out, str(path))
    flags = [_flag(items[f"terminated_{i}"], str(path)) for i in range(count)]
    ends = ends_of(lengths)
    columns["terminations"] = ends & np.repeat(flags, lengths)
    return RawData(columns, episode_ends=ends, name=path.stem, source="d3rlpy", path=str(path), notes=stored.notes())


def _refuse_unlike(item: Any, first: Any, rows: int, path: str) -> None:
    """Raises UserError unless an episode's column has the type and shape of the first episode's, and so many rows."""
    where = f"{path}: '{item.name.strip('/')}'"
    if item.dtype.kind not in "biuf":
        raise UserError(f"{where} holds {item.dtype} values, not numbers")
    if not item.shape or item.dtype.kind != first.dtype.kind or item.shape != (rows, *first.shape[1:]):
        due = [rows, *(first.shape or ())[1:]]
        raise UserError(
            f"{where} holds {item.dtype} values of shape {list(item.shape or ())}; {first.dtype} of {due} is due"
        )
    refuse_absent(item.id, where, item.file)
