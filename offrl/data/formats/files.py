"""Plain files with a key per column (npz, HDF5, Parquet), and the finishing of columns that other sources share."""

from __future__ import annotations

import gzip
import zipfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers import rlds
from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.containers.hdf5 import column_dtype, hdf5_keys, open_hdf5, read_hdf5, refuse_groups
from offrl.data.containers.npz import Npz
from offrl.data.containers.parquet import arrow_values, open_parquet
from offrl.data.containers.plain_files import refuse_special
from offrl.data.memory import Memory
from offrl.data.raw import BLOCK, BLOCKS, FLAGS, NAMES, SUCCESSORS, RawData, canonical, coarse, ends_from, lost, refuse_gaps, sampled, wide
from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig

KNOWN = ("observations", "actions", "rewards", *FLAGS, "next_observations", "episode_ends", "episode_ids", "final_observations")
_MAGIC = {b"\x89HDF\r\n\x1a\n": "hdf5", b"PK\x03\x04": "npz", b"PK\x05\x06": "npz", b"PAR1": "parquet"}


def file_type(path: Path) -> str:
    """hdf5 | npz | parquet, from the first bytes. Raises UserError for an empty file or another type."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not head:
        raise UserError(f"{path} is empty (0 bytes): download or copy it again")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            if kind == "npz" and pickled(path):
                raise UserError(
                    f"{path} is a file of PyTorch, a pickle, which may run code when it is read, and is refused on purpose. Where you "
                    "trust it, torch.load(FILE, weights_only=True) reads its tensors, numpy.savez writes them (docs/datasets.md#pickles)"
                )
            return kind
    if head.startswith(b"\x93NUMPY"):
        if _objects(path):
            raise UserError(
                f"{path} holds Python objects, a pickle, which may run code and is not read; where you trust it, write its arrays with "
                "numpy.savez and give that file (docs/language-labels.md has the lines)"
            )
        raise UserError(f"{path} is a single .npy array; save all columns with numpy.savez and give that file")
    if pickled(path):
        raise UserError(
            f"{path} is a pickle, which may run code when it is read, and is refused on purpose. Where you trust it, three lines of Python "
            f"make an npz file of a list of episodes: p = pickle.load(open({path.name!r}, 'rb')); ids = numpy.repeat(range(len(p)), "
            f"[len(e['rewards']) for e in p]); numpy.savez({path.name.partition('.')[0] + '.npz'!r}, episode_ids=ids, **{{k: "
            "numpy.concatenate([e[k] for e in p]) for k in p[0]}) (docs/datasets.md#pickles: other layouts)"
        )
    raise UserError(
        f"{path} is neither HDF5 nor npz nor Parquet (it starts with {head!r}); it may be damaged or an error page (the name of a CSV "
        "file ends in .csv or .csv.gz)"
    )


def pickled(path: Path) -> bool:
    """Whether a file is a pickle by its first bytes (of protocol 0 and 1 by its name), maybe packed, or PyTorch's zip around one."""
    try:
        with path.open("rb") as file:
            head = file.read(4)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(path) as packed:
                head = packed.read(4)
        if head.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            return any(n.endswith((".pkl", ".pickle", ".pth")) for n in names) and not any(n.endswith(".npy") for n in names)
    except Exception:  # of damaged ones, which their reader names
        return False
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return True
    return path.name.lower().endswith((".pkl", ".pickle", ".pkl.gz")) and bool(head) and head[:1] in b"(cdli}]"


def _objects(path: Path) -> bool:
    """True where a .npy file holds Python objects, by its header."""
    try:
        return bool(np.load(path, mmap_mode="r", allow_pickle=False).dtype.hasobject)
    except ValueError:  # NumPy maps no objects
        return True
    except OSError:
        return False


def choose_keys(config: DatasetConfig, keys: Mapping[str, Any], where: str, optional: Collection[str] = ()) -> dict[str, str]:
    """Column -> key: what `dataset.fields` says, our own and D4RL's names for the rest. Raises UserError for a key that is not there.

    optional: columns that may be missing, also where `dataset.fields` names them.
    """
    chosen = {}
    for column, key in config.fields.items():
        if column in optional and str(key) not in keys:
            continue
        if str(key) not in keys:
            listing = ", ".join(sorted(keys)) or "nothing"
            raise UserError(f"{where} has no '{key}' (dataset.fields.{column}).{nearest(str(key), keys)} It has: {listing}")
        chosen[column] = str(key)
    for column in KNOWN:
        matches = [k for k in (column, *NAMES.get(column, ())) if k in keys]
        if column not in chosen and matches:
            chosen[column] = matches[0]
    chosen |= rlds.usual(keys, chosen)
    for column in ("observations", "actions", "rewards"):
        if column not in chosen and column not in optional:
            listing = ", ".join(sorted(keys)) or "nothing"
            guess = nearest(column, keys)
            other = ", or dataset.format=ogbench for goal data that need none" if column == "rewards" and "terminals" in keys else ""
            raise UserError(f"{where} has no '{column}'.{guess} It has: {listing}; say which one with dataset.fields.{column}=...{other}")
    return chosen


def read(path: Path, config: DatasetConfig, memory: Memory, kind: str, optional: Collection[str] = ()) -> RawData:
    """A file with a key per column. optional: columns that may be missing."""
    columns: dict[str, np.ndarray] = {}
    notes: list[str] = []
    if kind == "hdf5":
        with open_hdf5(path) as file:
            items = hdf5_keys(file)
            refuse_groups(file, (k for c in KNOWN if c not in config.fields for k in (c, *NAMES.get(c, ()))))
            chosen = choose_keys(config, items, str(path), optional)
            for name, key in chosen.items():
                columns[name] = read_item(name, items[key], memory, str(path), notes)
    elif kind == "npz":
        archive = Npz(path)
        chosen = choose_keys(config, archive.shapes, str(path), optional)
        for name, key in chosen.items():
            columns[name] = archive.read(key, name, memory, notes)
    else:
        columns = _read_parquet(path, config, memory, optional, notes)
        chosen = choose_keys(config, _parquet_keys(open_parquet(path).schema_arrow.names), str(path), optional)
    flags = {column: chosen[column] for column in rlds.ENDS if column in chosen}
    own = columns.get("episode_ends")
    raw = finish(columns, path, notes=notes)
    if rlds.is_steps(flags):
        last = raw.columns["truncations"] if flags.get("truncations") == rlds.LAST else ends_from(own, raw.rows, str(path))
        assert last is not None
        rlds.without_last(raw, last)
    return raw


def suspect(name: str, values: np.ndarray, stored: np.dtype) -> bool:
    """Whether float32 may have lost what a column as it is stored tells apart."""
    if name in SUCCESSORS or values.dtype != np.float32 or not wide(stored) or not values.ndim:
        return False
    parts = [values[part].reshape(len(values[part]), -1) for part in sampled(len(values))]
    return bool(coarse(np.concatenate(parts)).any())


def read_item(name: str, item: Any, memory: Memory, where: str, notes: list[str]) -> np.ndarray:
    """`read_hdf5`, and in `notes` what float32 does not tell apart."""
    values = read_hdf5(name, item, memory, where)
    if suspect(name, values, item.dtype):
        with reading(f"{where}: '{item.name.strip('/')}'"):
            notes.append(lost(name, np.concatenate([item[part] for part in sampled(len(values))])))
    return values


def finish(columns: dict[str, np.ndarray], path: Path, source: str = "file", notes: Sequence[str] = ()) -> RawData:
    """Columns of a file as RawData: dtypes made canonical, the columns that mark episodes taken out. notes: empty ones are left out."""
    ends, ids = columns.pop("episode_ends", None), columns.pop("episode_ids", None)
    final = columns.pop("final_observations", None)
    raw = RawData({k: canonical(k, v, str(path)) for k, v in columns.items()}, name=path.stem, source=source, path=str(path))
    raw.notes += filter(None, notes)
    raw.final_observations = None if final is None else canonical("next_observations", final, str(path))
    raw.episode_ends = ends_from(ends, raw.rows, str(path))
    if ids is not None and raw.rows:
        refuse_gaps("episode_ids", ids, str(path))
        if ids.shape not in ((raw.rows,), (raw.rows, 1)):
            raise UserError(f"{path}: column 'episode_ids' has shape {list(ids.shape)}; one number for each of {raw.rows} rows is due")
        ids = ids.reshape(-1)
        change = np.append(ids[1:] != ids[:-1], True)
        if (number := len(np.unique(ids))) < change.sum():
            raw.notes.append(_returning(ids, change, number))
        raw.episode_ends = change if raw.episode_ends is None or len(raw.episode_ends) != len(change) else raw.episode_ends | change
    return raw


def _returning(ids: np.ndarray, change: np.ndarray, number: int) -> str:
    """What to say of ids of which some come again after others."""
    last = ids[change]
    later = np.ones(len(last), bool)
    later[np.unique(last, return_index=True)[1]] = False
    again = int(np.argmax(later))
    row = int(np.flatnonzero(change)[again - 1]) + 1
    return (
        f"episode_ids: {number:,} ids stand in {int(change.sum()):,} runs of rows, each of which is taken for an episode of its own; id "
        f"{last[again]:g} comes again at row {row}. Where equal ids are one episode, sort the rows by id first (in the order of time)"
    )


def _parquet_keys(names: Collection[str]) -> dict[str, list[str]]:
    """Key -> columns of a Parquet file: each column by its name, and x for x_0, x_1, ..."""
    keys: dict[str, list[str]] = {n: [n] for n in names}
    for stem in {n.rpartition("_")[0] for n in names if n.rpartition("_")[2].isdecimal()}:
        series = sorted(
            (n for n in names if n.rpartition("_")[0] == stem and n.rpartition("_")[2].isdecimal()), key=lambda n: int(n.rpartition("_")[2])
        )
        if [n.rpartition("_")[2] for n in series] == [str(i) for i in range(len(series))]:
            keys.setdefault(stem, series)
    return keys


def is_wide(path: Path, config: DatasetConfig, optional: Collection[str]) -> bool:
    """Whether a file is Parquet whose columns are to be mapped as those of any table (`offrl.data.tables`), for not all of ours stand there
    by their own names, or numbers of episodes are texts."""
    if file_type(path) != "parquet":
        return False
    default = DatasetConfig()
    if "time" in config.fields or any(getattr(config, n) != getattr(default, n) for n in ("action_kind", "max_gap", "missing")):
        return True
    schema = open_parquet(path).schema_arrow
    if len(set(schema.names)) < len(schema.names):
        return False  # refused where columns are read
    keys = _parquet_keys(schema.names)
    try:
        chosen = choose_keys(config, keys, str(path), optional)
    except UserError:
        return True
    ids = chosen.get("episode_ids")
    return ids in schema.names and str(schema.field(ids).type) in ("string", "large_string") if ids else False


def _read_parquet(path: Path, config: DatasetConfig, memory: Memory, optional: Collection[str], notes: list[str]) -> dict[str, np.ndarray]:
    """List columns, or one column per dimension, named x_0, x_1, ..."""
    file = open_parquet(path)
    names, rows = file.schema_arrow.names, file.metadata.num_rows
    if len(set(names)) < len(names):
        raise UserError(f"{path} has a column twice: {', '.join(sorted(n for n in set(names) if names.count(n) > 1))}")
    keys = _parquet_keys(names)
    columns: dict[str, np.ndarray] = {}
    size = 0
    for name, key in choose_keys(config, keys, str(path), optional).items():
        row, recorded = 0, []
        where = f"{path}: '{key}'"
        with reading(where):
            for batch in file.iter_batches(columns=keys[key], batch_size=1 << 16):
                parts = [arrow_values(batch.column(c), f"{path}: '{c}'") for c in keys[key]]
                block = np.stack(parts, 1) if len(parts) > 1 or key not in names else parts[0]
                recorded.append(block[: 1 + BLOCKS * BLOCK * len(block) // max(1, rows)])
                if name not in columns:
                    dtype = np.dtype(column_dtype(name, block.dtype))
                    size += rows * int(np.prod(block.shape[1:], dtype=np.int64)) * dtype.itemsize
                    refuse_growth(where, size, path.stat().st_size)
                    columns[name] = memory.empty(name, (rows, *block.shape[1:]), dtype)
                if block.shape[1:] != columns[name].shape[1:]:
                    raise UserError(f"{where} has lists of different lengths (near row {row})")
                if row + len(block) > rows:
                    break
                columns[name][row : row + len(block)] = block
                row += len(block)
        if row != rows:
            raise UserError(f"{where} declares {rows:,} rows, and the file holds {row:,}; it is damaged or incomplete")
        if recorded and suspect(name, columns[name], recorded[0].dtype):
            notes.append(lost(name, np.concatenate(recorded)))
        if name not in columns:
            columns[name] = np.zeros(0, np.float32)
    return columns
