"""One source read and checked, with nothing done to it, from the file or from the flat cache."""

from __future__ import annotations

import time

import numpy as np

from offrl.data import cache as flat
from offrl.data.assemble import assemble
from offrl.data.dataset import Dataset
from offrl.data.formats import Source, load_text, read_raw
from offrl.data.memory import Memory
from offrl.data.raw import RawData
from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig


def load_one(source: Source, config: DatasetConfig, memory: Memory) -> Dataset:
    """One source, read and checked, with nothing done to it."""
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
    folder = flat.entry(source, config) if config.cache != "never" else None
    if folder is not None and (cached := flat.read(folder, memory)):
        for text in cached[1]:
            warn(text)
        return cached[0]
    began = time.perf_counter()
    raw = read_raw(source.name, config, memory, source, ("rewards",) if _rewardless(config) else ())
    bare = _add_rewards(raw, config)
    dataset = assemble(raw, config, memory)
    slow = time.perf_counter() - began > flat.SLOW
    # What went into mapped files is kept by those; and a file that changed while it was read is read again the next
    # time.
    if (
        folder is not None
        and not bare
        and (slow or config.cache == "always")
        and memory.folder is None
        and flat.entry(source, config) == folder
    ):
        problem = flat.write(folder, dataset, raw.warnings, config.cache_limit_gb * 1e9)
        if problem and config.cache == "always":
            warn(f"{raw.where}: not kept in {folder.parent}: {problem}")
    return dataset


def _rewardless(config: DatasetConfig) -> bool:
    """True where data may lack rewards: a function will give them, or an expert is to be imitated."""
    return config.reward_labels is not None or config.expert is not None


def _add_rewards(raw: RawData, config: DatasetConfig) -> bool:
    """Zeros for rewards that the file lacks, where that is no fault; whether it lacked them."""
    bare = _rewardless(config) and "rewards" not in raw.columns
    if bare:
        raw.columns["rewards"] = np.zeros(raw.rows, np.float32)
    return bare
