"""The flat cache: datasets that were slow to read, kept as plain columns, so that the next load of the same file is a
copy.

Kept is what `assemble` makes of one source, before the transforms: it serves every run on that file, whatever is done
to it afterwards. An entry is a folder of NumPy arrays and a manifest (`Memory.write`). Nothing here ever fails a load.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.loading.resolve import Source, guessed_task
from offrl.data.memory import (
    EPISODES,
    MANIFEST,
    OURS,
    Memory,
    arrays_of,
    column_file,
    dataset_from,
    mapped_bytes,
)
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.settings.field import without_places
from offrl.system.files import BUILDING, cache_dir, discard, discard_entry

SLOW = 0.5  # seconds; what loads faster is not worth the disk
STALE = 86400.0  # seconds after which a half-written entry is taken for a crashed process's


def entry(kind: str, config: DatasetConfig, sources: Sequence[Source], labels: str = "") -> Path:
    """The folder of what is kept of `sources`: "flat", one of them before the transforms, or "mapped", all that
    `config` makes of them, memory-mapped. Its name changes with whatever could change the content, except this code,
    which the manifest names (`code_id`).

    labels: a hash of the function that gives rewards.
    """
    if kind == "flat":
        config = replace(config, **{k: getattr(DatasetConfig(), k) for k in DatasetConfig.TRANSFORMS})
    tasks = [asdict(replace(task, env_factory=None)) if (task := guessed_task(s)) else None for s in sources]
    content = [without_places(config), [s.identity() for s in sources], tasks, labels]
    key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_dir(config.cache_dir) / kind / key


@functools.cache
def code_id() -> str:
    """Names offrl's version and the modules that read data: an entry made by others is not used."""
    digest = hashlib.sha256()
    with contextlib.suppress(PackageNotFoundError):
        digest.update(version("offrl").encode())
    folder = Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return digest.hexdigest()


def read(folder: Path, memory: Memory) -> tuple[Dataset, list[str]] | None:
    """The dataset kept in `folder`, in arrays of `memory`, and the warnings of its first load; None if there is none or
    it is damaged.
    """
    used = memory.used
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["code"] != code_id():
            raise ValueError("of other code")
        columns = {}
        for name, entry in manifest["columns"].items():
            stored = np.load(column_file(folder, entry), mmap_mode="r", allow_pickle=False)
            values = memory.empty(name, stored.shape, stored.dtype)
            values[...] = stored  # read, not mapped: nothing depends on the file afterwards
            columns[name] = torch.from_numpy(values)
        dataset = dataset_from(manifest, folder, columns)
        if _checksums(dataset) != manifest["sums"]:
            raise ValueError("damaged")
        warnings = [str(w) for w in manifest["warnings"]]
    except (UserError, MemoryError):
        raise
    except Exception:  # no entry, or whatever its damage makes json, zipfile or numpy raise
        memory.used = used
        return None
    with contextlib.suppress(OSError):
        os.utime(folder / MANIFEST)  # the least recently used entry is the first to go
    return dataset, warnings


def write(folder: Path, dataset: Dataset, warnings: Sequence[str], limit: float) -> str:
    """Keep `dataset`, removing the least recently used entries beyond `limit` bytes. "" if it was kept, or the reason
    why not.
    """
    try:
        stored_spec = DataSpec.from_json(json.loads(json.dumps(dataset.spec.to_json(), default=str)))
    except UserError:
        stored_spec = None
    if stored_spec != dataset.spec:
        return "its task holds what a file cannot (a function)"
    if folder.parent.is_symlink():
        return f"{folder.parent} is a link, and nothing is written or deleted through it; put a folder in its place"
    memory = Memory()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if dataset.nbytes > limit:
            return f"its {dataset.nbytes / 1e9:.3g} GB are more than dataset.cache_limit_gb"
        if dataset.nbytes * 2 > free:
            return f"only {free / 1e9:.3g} GB are free there"
        _make_room(folder.parent, limit - dataset.nbytes)
        memory.write(dataset, folder, code_id(), sums=_checksums(dataset), warnings=list(warnings))
    except OSError as error:
        return error.strerror or type(error).__name__
    finally:
        memory.discard()
    return ""


def _make_room(cache: Path, limit: float) -> None:
    """Remove what crashed writers left, and the least recently used entries until the others have `limit` bytes or
    fewer.

    Nothing else is: only folders of our names, in them only files of our names, and no entry without a manifest of
    ours.
    """
    entries = []
    for path in cache.iterdir():
        with contextlib.suppress(OSError):  # another process removes it at the same time
            if path.name.startswith(BUILDING):
                if time.time() - path.lstat().st_mtime > STALE:
                    discard(path, OURS)
            elif (
                re.fullmatch("[0-9a-f]{24}", path.name)
                and not path.is_symlink()
                and (size := mapped_bytes(path)) is not None
            ):
                entries.append(((path / MANIFEST).stat().st_mtime, path, size))
    total = sum(size for _, _, size in entries)
    for _, path, size in sorted(entries):
        if total <= limit:
            break
        discard_entry(path, OURS)
        total -= size


def _checksums(dataset: Dataset) -> list[int]:
    """For each array its sum as 64-bit words, modulo 2^64: it finds blocks of zeros and flipped bits at the speed of
    memory.
    """
    sums = []
    for values in (*arrays_of(dataset).values(), *(getattr(dataset, k) for k in EPISODES)):
        data = values.numpy().reshape(-1).view(np.uint8)
        size = len(data) // 8 * 8
        sums.append((int(data[:size].view(np.uint64).sum()) + int(data[size:].sum())) % (1 << 64))
    return sums
