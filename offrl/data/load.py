"""`load_dataset`: resolve, read, check, assemble, transform, and put the columns where they fit."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path

from offrl.data import flat
from offrl.data.config import DatasetConfig
from offrl.data.dataset import Dataset
from offrl.data.download import cache_dir
from offrl.data.mmap import Memory, free_bytes, mapped_bytes, open_mapped
from offrl.data.raw import RawData, assemble
from offrl.data.sources import Source, read_raw, resolve
from offrl.data.transforms import apply_transforms
from offrl.errors import UserError, warn

LAYOUT = 2  # raise it when the files of a cached data set change meaning


def load_dataset(config: DatasetConfig | str | Dataset, device: str = "cpu") -> Dataset:
    """The data set that `config` (or a name or path alone) describes; a `Dataset` is returned as it is.

    The columns are on the CPU, in memory, or memory-mapped when `config.memory` says so or when they need more than the memory limit of
    the host or of `device`, the one they are meant for; `Dataset.to` moves them. Raises UserError, in one line, for whatever is wrong.
    """
    if isinstance(config, Dataset):
        return config
    if isinstance(config, str | Path):
        config = DatasetConfig(name=str(config))
    config.validate()
    names = [config.name, *config.concatenate]
    sources = [resolve(name, config) for name in names]
    budget = float("inf")
    if config.memory == "mmap":
        budget = -1.0
    elif config.memory == "auto":
        budget = config.memory_limit_gb * 1e9 if config.memory_limit_gb else free_bytes(device) / 2
    cache = cache_dir(config.cache_dir) / "mapped"
    target = cache / _key(config, sources)
    cached = mapped_bytes(target) if all(s.kind != "registered" for s in sources) else None
    if cached is not None and cached > budget:
        return open_mapped(target)
    memory = Memory(budget, cache)
    try:
        parts = [_load_one(source, config, memory) for source in sources]
        dataset = apply_transforms(parts, config, memory, owned=all(s.kind != "registered" for s in sources))
        if config.memory == "mmap" or memory.folder is not None or dataset.nbytes > budget:
            return memory.finish(dataset, target)
        return dataset
    except OSError as error:
        raise UserError(f"cannot write memory-mapped columns under {cache} ({error.strerror}); set dataset.cache_dir") from None
    finally:
        memory.discard()


def _load_one(source: Source, config: DatasetConfig, memory: Memory) -> Dataset:
    if source.loader is not None:
        made = source.loader(config)
        if isinstance(made, RawData):
            return assemble(made, config, memory)
        if not isinstance(made, Dataset):
            raise UserError(f"the registered data set '{source.name}' returned {type(made).__name__}, not a Dataset or RawData")
        return made
    folder = flat.entry(source, config) if config.cache != "never" else None
    if folder is not None and (found := flat.read(folder, memory)):
        for text in found[1]:
            warn(text)
        return found[0]
    began = time.perf_counter()
    raw = read_raw(source.name, config, memory, source)
    dataset = assemble(raw, config, memory)
    slow = time.perf_counter() - began > flat.SLOW
    # What went into mapped files is kept by those; and a file that changed while it was read is read again the next time.
    if folder is not None and (slow or config.cache == "always") and memory.folder is None and flat.entry(source, config) == folder:
        problem = flat.write(folder, dataset, raw.warnings, config.cache_limit_gb * 1e9)
        if problem and config.cache == "always":
            warn(f"{raw.where}: not kept in {folder.parent}: {problem}")
    return dataset


def _key(config: DatasetConfig, sources: list[Source]) -> str:
    """Names the memory-mapped form of these files under these settings."""
    plain = asdict(replace(config.anywhere(), concatenate=[]))
    text = json.dumps([LAYOUT, plain, [s.identity() for s in sources]], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
