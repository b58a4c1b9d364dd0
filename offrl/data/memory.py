"""Storage of columns: in memory, or in files that the operating system pages in as they are read."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.store import Store
from offrl.errors import UserError
from offrl.system.files import BUILDING, discard_entry

MANIFEST = "manifest.json"
EPISODES = ("episode_start", "episode_end", "raw_returns", "complete")  # tensors of a dataset, beside its columns
PARTS = tuple(f"/{part.name}" for part in fields(Store))  # how the names of a store's arrays end
TEXTS = ("transforms", "notes", "strings", "metas")  # tuples of texts
LEAST = 4096  # bytes of an array that gets a file of its own while data are read
# the files of a dataset that is kept; the manifest is the last by name
OURS = r"(\d+-[\w-]+|column-\d+)\.npy|episodes\.npz|manifest\.json"


def chunks(rows: int, size: int = 1 << 17) -> Iterator[slice]:
    """Slices that cover `rows`: work on big columns needs temporary memory for one of them only."""
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))


def rows_at_once(column: Any) -> int:
    """The rows of an array, or of an h5py dataset, that fit into 64 MB, 131,072 at most: of images fewer than of
    numbers.
    """
    row = int(np.prod(column.shape[1:], dtype=np.int64)) * column.dtype.itemsize
    return max(1, min(1 << 17, (1 << 26) // max(1, row)))


def next_rows(column: np.ndarray, memory: Memory) -> np.ndarray:
    """For each row of `column` [R, ...] the next one, as next_observations; the last row is not set."""
    out = memory.empty("next_observations", column.shape, column.dtype)
    for part in chunks(len(column) - 1):
        out[part] = column[part.start + 1 : part.stop + 1]
    return out


class Memory:
    """Gives out arrays: plain ones until `budget` bytes are used, then memory-mapped ones in a new folder under
    `cache`.
    """

    def __init__(self, budget: float = float("inf"), cache: Path | None = None) -> None:
        self.budget, self.cache = budget, cache
        self.used = 0
        self.folder: Path | None = None
        self.files: dict[int, str] = {}  # address of the data -> file name
        self._keep: list[np.ndarray] = []  # an address stays taken as long as its array lives

    def empty(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """An uninitialised array. `name` only serves to recognise the file."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        self.used += size
        if self.used <= self.budget or self.cache is None or size < LEAST:
            return np.empty(shape, dtype)
        try:
            if self.folder is None:
                self.cache.mkdir(parents=True, exist_ok=True)
                self.folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=self.cache))
            file = f"{len(self.files)}-{''.join(c if c.isalnum() or c == '_' else '-' for c in name)}.npy"
            array = np.lib.format.open_memmap(self.folder / file, mode="w+", dtype=np.dtype(dtype), shape=shape)
            if hasattr(os, "posix_fallocate"):  # a full disk must be an error here, not a SIGBUS at some later write
                with open(self.folder / file, "r+b") as handle:
                    os.posix_fallocate(handle.fileno(), 0, size)
        except OSError as error:
            self.discard()
            raise UserError(
                f"cannot write memory-mapped columns under {self.cache}: {error.strerror}; set dataset.cache_dir"
            ) from None
        self.files[array.ctypes.data] = file
        self._keep.append(array)
        return array

    def taken(self, name: str, column: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Rows [N] of a column as an array of its own."""
        out = self.empty(name, (len(rows), *column.shape[1:]), column.dtype)
        for part in chunks(len(rows), rows_at_once(column)):
            out[part] = column[rows[part]]
        return out

    def joined(self, name: str, columns: Sequence[np.ndarray]) -> np.ndarray:
        """Columns [R, ...] of one type, one after the other."""
        out = self.empty(name, (sum(map(len, columns)), *columns[0].shape[1:]), columns[0].dtype)
        at = 0
        for column in columns:
            for part in chunks(len(column)):
                out[at + part.start : at + part.stop] = column[part]
            at += len(column)
        return out

    def discard(self) -> None:
        """Remove the files; for a load that failed."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None
        self.files.clear()
        self._keep.clear()

    def write(self, dataset: Dataset, target: Path, code: str, **more: Any) -> None:
        """Write what is not in a file yet and move the folder to `target` in one step. code: what made the columns; it
        goes into the manifest, as `more` does.
        """
        if self.folder is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            self.folder = Path(tempfile.mkdtemp(prefix=BUILDING, dir=target.parent))
        for array in self._keep:
            array.flush()  # type: ignore[attr-defined]
        manifest: dict[str, Any] = {"columns": {}}
        for name, column in arrays_of(dataset).items():
            values = column.numpy()
            file = self.files.get(values.ctypes.data)
            if file is None:
                file = f"column-{len(manifest['columns'])}.npy"
                np.save(self.folder / file, values)
            manifest["columns"][name] = {"file": file, "shape": values.shape}
        keep = {c["file"] for c in manifest["columns"].values()}
        for stale in self.folder.iterdir():
            if stale.name not in keep:
                stale.unlink()
        episodes: dict[str, Any] = {k: getattr(dataset, k).numpy() for k in EPISODES}
        if dataset.weights is not None:
            episodes["weights"] = dataset.weights.numpy()
        np.savez(self.folder / "episodes.npz", **episodes)
        manifest |= {k: getattr(dataset, k) for k in ("fingerprint", "nbytes", "stitch", *TEXTS)}
        manifest |= {"spec": dataset.spec.to_json(), "code": code, **more}
        (self.folder / MANIFEST).write_text(json.dumps(manifest))
        discard_entry(target, OURS)  # an older build
        try:
            os.replace(self.folder, target)
        except OSError:
            if not (target / MANIFEST).exists():
                raise
            shutil.rmtree(self.folder, ignore_errors=True)
        self.folder = None


IN_MEMORY = Memory()  # plain arrays, however many


def mapped_bytes(folder: Path, code: str | None = None) -> int | None:
    """The size of the columns kept in `folder`, or None when no finished dataset is there, or other code made it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return int(manifest["nbytes"]) if code in (None, manifest["code"]) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def column_file(folder: Path, entry: Mapping[str, Any]) -> Path:
    """The file of a column, from the manifest's entry. Raises ValueError for a name that `Memory` does not give."""
    if not re.fullmatch(OURS, entry["file"]):
        raise ValueError(f"{entry['file']!r} is no file of {folder}")
    return folder / str(entry["file"])


def open_mapped(folder: Path) -> Dataset:
    """A dataset written by `Memory.write`. Its columns are mapped copy-on-write: nothing done to them reaches the
    files.
    """
    manifest = json.loads((folder / MANIFEST).read_text())
    arrays = {}
    for name, entry in manifest["columns"].items():
        stored = np.load(column_file(folder, entry), mmap_mode="c", allow_pickle=False)
        arrays[name] = torch.from_numpy(stored[: entry["shape"][0]].reshape(entry["shape"]))
    return replace(dataset_from(manifest, folder, arrays), mapped=True)


def arrays_of(dataset: Dataset) -> dict[str, torch.Tensor]:
    """The columns, and the parts of the stores by names STREAM/PART."""
    stores = {f"{name}/{part}": x for name, store in dataset.stores.items() for part, x in vars(store).items()}
    return {**dataset.columns, **stores}


def dataset_from(manifest: dict[str, Any], folder: Path, arrays: dict[str, torch.Tensor]) -> Dataset:
    """The dataset of `arrays_of`, read from the files that `Memory.write` wrote to `folder`."""
    spec = DataSpec.from_json(manifest["spec"])
    stores = {s.name: Store(*(arrays.pop(f"{s.name}{part}") for part in PARTS)) for s in spec.streams}
    with np.load(folder / "episodes.npz", allow_pickle=False) as file:
        values: dict[str, Any] = {key: torch.from_numpy(file[key]) for key in file.files}
    values |= {k: tuple(manifest[k]) for k in TEXTS}
    return Dataset(
        columns=arrays,
        stores=stores,
        spec=spec,
        fingerprint=manifest["fingerprint"],
        stitch=float(manifest["stitch"]),
        **values,
    )


def memory_budget(device: str = "cpu") -> float:
    """Bytes that data may take in memory: half of what is free on the host, and a quarter of what is free on a GPU,
    which holds the columns and what a sampler makes of them at the same time, beside the networks."""
    half = free_bytes() / 2
    if device.startswith("cuda") and torch.cuda.is_available():
        return min(half, float(torch.cuda.mem_get_info(torch.device(device))[0]) / 4)
    return half


def free_bytes() -> float:
    """Free memory of the host, within the control group's limit."""
    free = float("inf")
    try:
        with open("/proc/meminfo") as file:
            info = dict(line.split(":", 1) for line in file)
        free = float(info["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        if hasattr(os, "sysconf"):
            free = float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE") / 2
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free = min(free, float(limit) - float(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(free, 0.0)
