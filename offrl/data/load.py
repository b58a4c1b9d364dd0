"""`load_dataset`: resolve, read, check, assemble, transform, and put the columns where they fit."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from offrl.data import cache as flat
from offrl.data.assemble import assemble
from offrl.data.dataset import Dataset
from offrl.data.formats import Source, load_text, read_raw, resolve
from offrl.data.memory import Memory, affordable, mapped_bytes, open_mapped
from offrl.data.raw import RawData
from offrl.data.text.dataset import refuse_settings
from offrl.data.transforms import apply_transforms
from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig
from offrl.settings.field import without_places
from offrl.system.files import cache_dir

LAYOUT = 2  # raise it when the files of a cached data set change meaning


def load_dataset(config: DatasetConfig | str | Dataset, device: str = "cpu", quiet: bool = False) -> Dataset:
    """The data set that `config` (or a name or path alone) describes; a `Dataset` is returned as it is.

    The columns are on the CPU, in memory, or memory-mapped when `config.memory` says so or when they need more than the memory limit of
    the host or of `device`, the one they are meant for; `Dataset.to` moves them. `quiet`: no progress of models that label
    data. Raises UserError, in one line, for whatever is wrong.
    """
    if isinstance(config, Dataset):
        return config
    if isinstance(config, str | Path):
        config = DatasetConfig(name=str(config))
    config.validate()
    names = [config.name, *config.concatenate]
    sources = [resolve(name, config) for name in names]
    sources += [resolve(name, config.of_any_layout("actions")) for name in config.action_free]
    if config.expert is not None:
        sources.append(resolve(config.expert, config))
    sources += [resolve(name, config.of_any_layout()) for name in config.imagined]
    for source in sources:
        if source.text:
            refuse_settings(config, str(source.path))
    budget = float("inf")
    if config.memory == "mmap":
        budget = -1.0
    elif config.memory == "auto":
        budget = config.memory_limit_gb * 1e9 if config.memory_limit_gb else affordable(device)
    cache = cache_dir(config.cache_dir) / "mapped"
    target = cache / _key(config, sources)
    files = all(s.kind != "registered" for s in sources)
    cached = mapped_bytes(target) if files else None
    if cached is not None and cached > budget:
        return open_mapped(target)
    memory = Memory(budget, cache)
    try:
        parts = [load_one(source, config, memory) for source in sources[: len(names)]]
        dataset = apply_transforms(parts, config, memory, files, device, quiet)
        if config.memory == "mmap" or memory.folder is not None or dataset.nbytes > budget:
            return memory.finish(dataset, target)
        return dataset
    except OSError as error:
        raise UserError(f"cannot write memory-mapped columns under {cache} ({error.strerror}); set dataset.cache_dir") from None
    finally:
        memory.discard()


def load_one(source: Source, config: DatasetConfig, memory: Memory) -> Dataset:
    """One source, read and checked, with nothing done to it."""
    if source.loader is not None:
        made = source.loader(config)
        if isinstance(made, RawData):
            _add_rewards(made, config)
            return assemble(made, config, memory)
        if not isinstance(made, Dataset):
            raise UserError(f"the registered data set '{source.name}' returned {type(made).__name__}, not a Dataset or RawData")
        return made
    if source.text:
        return load_text(source, config).dataset
    folder = flat.entry(source, config) if config.cache != "never" else None
    if folder is not None and (found := flat.read(folder, memory)):
        for text in found[1]:
            warn(text)
        return found[0]
    began = time.perf_counter()
    raw = read_raw(source.name, config, memory, source, ("rewards",) if _rewardless(config) else ())
    bare = _add_rewards(raw, config)
    dataset = assemble(raw, config, memory)
    slow = time.perf_counter() - began > flat.SLOW
    # What went into mapped files is kept by those; and a file that changed while it was read is read again the next time.
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
    """Whether data may lack rewards: a function will give them, or an expert is to be imitated."""
    return config.reward_labels is not None or config.expert is not None


def _add_rewards(raw: RawData, config: DatasetConfig) -> bool:
    """Zeros for rewards that the file lacks, where that is no fault; whether it lacked them."""
    bare = _rewardless(config) and "rewards" not in raw.columns
    if bare:
        raw.columns["rewards"] = np.zeros(raw.rows, np.float32)
    return bare


def _key(config: DatasetConfig, sources: list[Source]) -> str:
    """Names the memory-mapped form of these files under these settings."""
    plain = without_places(replace(config, concatenate=[]))
    about = [LAYOUT, plain, [s.identity() for s in sources]]
    if config.reward_labels is not None:
        from offrl.data.reward_labels import labeller

        about.append(labeller(config.reward_labels)[1])
    text = json.dumps(about, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
