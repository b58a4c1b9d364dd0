"""The reading of one source: its raw columns, and the checked dataset of them, from the file or from the cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from offrl.data.containers.file_type import file_type
from offrl.data.containers.guard import reading
from offrl.data.containers.hdf5 import open_hdf5
from offrl.data.dataset import Dataset
from offrl.data.formats import d3rlpy, d4rl, lerobot, minari, ogbench, padded, robomimic, vd4rl
from offrl.data.loading import cache
from offrl.data.loading.assemble import assemble
from offrl.data.loading.part import part_of
from offrl.data.loading.resolve import Source, resolve
from offrl.data.memory import IN_MEMORY, Memory
from offrl.data.raw import RawData
from offrl.data.raw.infer import fitting_task
from offrl.data.tables import files as tables
from offrl.data.tables.build import build
from offrl.data.tables.csv_file import is_csv
from offrl.data.tables.keyed import Hdf5Table, NpzTable
from offrl.data.tables.names import column_of
from offrl.data.text import files as text
from offrl.data.text import minari as minari_text
from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig

# whose readers read the episodes of dataset.episodes alone
PARTIAL = ("lerobot",)


def load_one(source: Source, config: DatasetConfig, memory: Memory) -> Dataset:
    """One source, read and checked, or the episodes of it that `config` names; nothing else is done to it."""
    if not config.episodes or source.kind in PARTIAL:
        return load_whole(source, config, memory)
    return part_of(load_whole(source, replace(config, episodes=""), memory), config.episodes, memory)


def load_whole(source: Source, config: DatasetConfig, memory: Memory) -> Dataset:
    """All that the reader of a source gives."""
    if source.loader is not None:
        loaded = source.loader(config)
        if isinstance(loaded, RawData):
            _add_rewards(loaded, config)
            return assemble(loaded, config, memory)
        if not isinstance(loaded, Dataset):
            raise UserError(
                f"the registered dataset '{source.name}' returned {type(loaded).__name__}, not a Dataset or RawData"
            )
        return loaded
    if source.text:
        return load_text(source, config).dataset
    folder = cache.entry("flat", config, [source]) if config.cache != "never" else None
    if folder is not None and (cached := cache.read(folder, memory)):
        for text in cached[1]:
            warn(text)
        return cached[0]
    start = time.perf_counter()
    raw = read_raw(source.name, config, memory, source, ("rewards",) if _rewardless(config) else ())
    missing_rewards = _add_rewards(raw, config)
    dataset = assemble(raw, config, memory)
    slow = time.perf_counter() - start > cache.SLOW
    # What went into mapped files is kept by those; and a file that changed while it was read is read again the next
    # time.
    if (
        folder is not None
        and not missing_rewards
        and (slow or config.cache == "always")
        and memory.folder is None
        and cache.entry("flat", config, [source]) == folder
    ):
        problem = cache.write(folder, dataset, raw.warnings, config.cache_limit_gb * 1e9)
        if problem and config.cache == "always":
            warn(f"{raw.where}: not kept in {folder.parent}: {problem}")
    return dataset


def _rewardless(config: DatasetConfig) -> bool:
    """True where data may lack rewards: a function will give them, or an expert is to be imitated."""
    return config.reward_labels is not None or config.expert is not None


def _add_rewards(raw: RawData, config: DatasetConfig) -> bool:
    """Zeros for rewards that the file lacks, where that is no fault; whether it lacked them."""
    missing_rewards = _rewardless(config) and "rewards" not in raw.columns
    if missing_rewards:
        raw.columns["rewards"] = np.zeros(raw.rows, np.float32)
    return missing_rewards


def load_text(source: Source, config: DatasetConfig, faults: bool = False) -> text.TextFile:
    """The texts of a source that holds some. faults: leave faulty episodes out, and say what is wrong. Raises
    UserError.
    """
    assert source.path is not None
    with reading(source.path):
        return (minari_text if source.kind == "minari" else text).load(source.path, config, faults)


def read_raw(
    name: str,
    config: DatasetConfig | None = None,
    memory: Memory = IN_MEMORY,
    source: Source | None = None,
    optional: Collection[str] = (),
) -> RawData:
    """The columns of `name` as they are, faults and all. Raises UserError when they cannot be read.

    optional: of actions and rewards those that may be missing (from plain files with a key per column, and actions from
    Minari's)."""
    config = config or DatasetConfig()
    source = source or resolve(name, config)
    path = source.path
    config = replace(config, fields={column_of(column): key for column, key in config.fields.items()})
    if source.kind == "registered":
        raise UserError(f"'{source.name}' is made by a registered loader and has no raw columns")
    assert path is not None
    if source.text:
        raise UserError(f"{path} holds texts, not columns of numbers")
    table = (
        (source.kind == "columns" and bool(source.files))
        or is_csv(path)
        or (source.kind == "columns" and file_type(path) == "parquet")
    )
    if config.decimal != "auto" and not any(map(is_csv, source.files or (path,))):
        raise UserError(f"dataset.decimal={config.decimal} is for CSV, and {path} is none: its numbers are no texts")
    if config.episodes and source.kind not in PARTIAL:
        raise UserError(
            f"dataset.episodes={config.episodes} is for loading data, and here all of {path} is read; leave it out "
            "(offrl data subset keeps parts)"
        )
    if config.mask and source.kind != "robomimic":
        raise UserError(f"dataset.mask={config.mask} is for robomimic's files, and {path} is none; leave it out")
    if source.kind not in ("columns", "d4rl", "builtin"):
        d4rl.refuse_lists(config, path)
    if not table and source.kind in ("columns", "d4rl", "builtin", "d3rlpy", "ogbench", "robomimic"):
        kind = file_type(path)
        extension = {"columns": kind, "ogbench": "npz"}.get(source.kind, "hdf5")
        if kind != extension:
            raise UserError(
                f"{path} is {kind}, but the format {source.kind} is kept in {extension} files; leave dataset.format at "
                "auto"
            )
    # what float32 cannot hold becomes infinite, a fault of the data
    with reading(path), np.errstate(over="ignore", invalid="ignore"):
        if table:
            raw = tables.read(source.name, source.files or (path,), config, memory, optional)
            raw.task = None if source.files else d4rl.guess_task(path.stem)
        else:
            raw = _read(source, path, config, memory, optional)
    if all(k in raw.columns and raw.columns[k].ndim > 1 for k in ("observations", "actions")):
        raw.task = fitting_task(raw)
    _set_range(raw, config)
    return raw


def _read(source: Source, path: Path, config: DatasetConfig, memory: Memory, optional: Collection[str]) -> RawData:
    """The columns, by the reader of the source's layout."""
    if source.kind == "minari":
        raw = minari.read(path, config, memory, source.name, "actions" not in optional)
    elif source.kind == "ogbench":
        raw = ogbench.read(path, config, memory, source.name)
    elif source.kind == "d3rlpy":
        raw = d3rlpy.read(path, config, memory)
    elif source.kind == "lerobot":
        raw = lerobot.read(path, config, memory)
    elif source.kind == "padded":
        raw = padded.read(path, config, memory)
    elif source.kind == "robomimic":
        raw = robomimic.read(path, config, memory)
    elif source.kind == "vd4rl":
        raw = vd4rl.read(source.files or (path,), path, config, memory)
    elif source.kind == "columns":
        fields = {*map(column_of, config.fields)}
        with open_hdf5(path) if file_type(path) == "hdf5" else contextlib.nullcontext() as file:
            keyed = NpzTable(path, fields) if file is None else Hdf5Table(file, path, fields)
            raw = build(keyed, config, memory, optional, path.stem, example=str(path))
        raw.task = d4rl.guess_task(path.stem)
    else:
        raw = d4rl.read(path, config, memory, source.task)
        raw.source = source.kind
        if source.task is not None:
            raw.name = source.task.name
    return raw


def _set_range(raw: RawData, config: DatasetConfig) -> None:
    """Set the action range as far as it is known without the data: the user's word, or D4RL's convention that it is
    [-1, 1].
    """
    if config.action_low:
        raw.state_range(config.action_low, config.action_high)
        if config.action_kind in ("auto", "continuous"):
            raw.as_amounts()
    elif raw.action_low is None and raw.source in ("d4rl", "builtin"):
        known_range = raw.task is None or not raw.task.env_id or raw.task.ref_label in ("D4RL", "offrl")
        if known_range:  # another environment's range is that environment's own
            raw.action_low, raw.action_high = -1.0, 1.0
            raw.range_known = raw.task is not None and bool(raw.task.env_id)
