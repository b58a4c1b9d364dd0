"""Plain files with a key per column (npz, HDF5, Parquet), and the reading of HDF5 and npz that the other sources share."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.memory import Memory, chunks
from offrl.data.raw import FLAGS, NAMES, RawData, canonical, ends_from, refuse_gaps
from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig

KNOWN = ("observations", "actions", "rewards", *FLAGS, "next_observations", "episode_ends", "episode_ids", "final_observations")
_MAGIC = {b"\x89HDF\r\n\x1a\n": "hdf5", b"PK\x03\x04": "npz", b"PK\x05\x06": "npz", b"PAR1": "parquet"}


def file_type(path: Path) -> str:
    """hdf5 | npz | parquet, from the first bytes. Raises UserError for an empty file or another type."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not head:
        raise UserError(f"{path} is empty (0 bytes): download or copy it again")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head.startswith(b"\x93NUMPY"):
        if _objects(path):
            raise UserError(
                f"{path} holds Python objects, a pickle, which may run code and is not read; where you trust it, write its arrays with "
                "numpy.savez and give that file (docs/language-labels.md has the lines)"
            )
        raise UserError(f"{path} is a single .npy array; save all columns with numpy.savez and give that file")
    raise UserError(f"{path} is neither HDF5 nor npz nor Parquet (it starts with {head!r}); it may be damaged or an error page")


def _objects(path: Path) -> bool:
    """True where a .npy file holds Python objects, by its header."""
    try:
        return bool(np.load(path, mmap_mode="r", allow_pickle=False).dtype.hasobject)
    except ValueError:  # NumPy maps no objects
        return True
    except OSError:
        return False


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """An open h5py.File. What HDF5 says about damaged files becomes a one-line UserError, also while reading."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError) as error:  # h5py has both for HDF5's errors
        text = " ".join(str(error).split())
        cure = "the file is damaged or incomplete: delete it and download or copy it again"
        raise UserError(f"{path} cannot be read as HDF5 ({text}); {cure}") from None


def hdf5_keys(file: Any) -> dict[str, Any]:
    """All h5py datasets of a file by their path, "group/x"."""
    import h5py

    columns: dict[str, Any] = {}
    file.visititems(lambda name, item: columns.update({name: item}) if isinstance(item, h5py.Dataset) else None)
    return columns


def column_dtype(name: str, dtype: np.dtype) -> Any:
    """The dtype to read a column with; floats become float32 on the way in."""
    if name == "rewards" or (dtype.kind == "f" and name not in (*FLAGS, "episode_ends", "episode_ids")):
        return np.float32
    if name in ("observations", "next_observations", "final_observations") and dtype != np.uint8 and dtype.kind in "iub":
        return np.float32
    return dtype


def read_hdf5(name: str, item: Any, memory: Memory, where: str) -> np.ndarray:
    """One h5py dataset as a column. HDF5 itself converts float64 to float32 while it reads."""
    if item.dtype.kind not in "biuf":
        raise UserError(f"{where}: '{item.name.strip('/')}' holds {item.dtype} values, not numbers")
    if item.shape is None or not item.shape:
        raise UserError(f"{where}: '{item.name.strip('/')}' is a single value, not a column")
    dtype = item.dtype if item.dtype.kind == "b" else column_dtype(name, item.dtype)
    out = memory.empty(name, item.shape, dtype)
    if len(out):
        if isinstance(out, np.memmap) and item.chunks:  # whole chunks, so that none is decompressed twice
            for part in chunks(len(out), max(item.chunks[0], (1 << 17) // item.chunks[0] * item.chunks[0])):
                item.read_direct(out, part, part)
        else:
            item.read_direct(out)
    return out


class Npz:
    """The arrays of an npz file, read one at a time and block by block; never unpickles."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
            self.shapes = {n.removesuffix(".npy"): self._header(n)[:2] for n in self._zip.namelist() if n.endswith(".npy")}
        except (zipfile.BadZipFile, ValueError, OSError, EOFError) as error:
            raise UserError(f"{path} cannot be read as npz ({error}); the file is damaged or incomplete: get it again") from None

    def _header(self, member: str) -> tuple[tuple[int, ...], np.dtype, bool]:
        with self._zip.open(member) as file:
            return self._read_header(file)

    @staticmethod
    def _read_header(file: Any) -> tuple[tuple[int, ...], np.dtype, bool]:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        return shape, dtype, fortran

    def read(self, key: str, name: str, memory: Memory) -> np.ndarray:
        """Array `key` as column `name`."""
        try:
            with self._zip.open(f"{key}.npy") as file:
                shape, dtype, fortran = self._read_header(file)
                if dtype.kind not in "biuf":
                    raise UserError(f"{self.path}: '{key}' holds {dtype} values, not numbers")
                if not shape:
                    raise UserError(f"{self.path}: '{key}' is a single value, not a column")
                if fortran:
                    values = np.frombuffer(file.read(), dtype).reshape(shape[::-1]).T
                    return np.ascontiguousarray(values, column_dtype(name, dtype))
                out = memory.empty(name, shape, column_dtype(name, dtype))
                width = int(np.prod(shape[1:], dtype=np.int64))
                for part in chunks(shape[0]):
                    size = (part.stop - part.start) * width
                    block = file.read(size * dtype.itemsize)
                    out[part] = np.frombuffer(block, dtype, size).reshape(-1, *shape[1:])
                return out
        except (zipfile.BadZipFile, zipfile.zlib.error, ValueError, OSError, EOFError) as error:  # type: ignore[attr-defined]
            raise UserError(f"{self.path}: '{key}' cannot be read ({error}); the file is damaged or incomplete: get it again") from None


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
    if kind == "hdf5":
        with open_hdf5(path) as file:
            items = hdf5_keys(file)
            for name, key in choose_keys(config, items, str(path), optional).items():
                columns[name] = read_hdf5(name, items[key], memory, str(path))
    elif kind == "npz":
        archive = Npz(path)
        for name, key in choose_keys(config, archive.shapes, str(path), optional).items():
            columns[name] = archive.read(key, name, memory)
    else:
        columns = _read_parquet(path, config, memory, optional)
    return finish(columns, path)


def finish(columns: dict[str, np.ndarray], path: Path, source: str = "file") -> RawData:
    """Columns of a file as RawData: dtypes made canonical, the columns that mark episodes taken out."""
    ends, ids = columns.pop("episode_ends", None), columns.pop("episode_ids", None)
    final = columns.pop("final_observations", None)
    raw = RawData({k: canonical(k, v, str(path)) for k, v in columns.items()}, name=path.stem, source=source, path=str(path))
    raw.final_observations = None if final is None else canonical("next_observations", final, str(path))
    raw.episode_ends = ends_from(ends, raw.rows, str(path))
    if ids is not None and len(ids):
        refuse_gaps("episode_ids", ids, str(path))
        change = np.append(ids.reshape(len(ids), -1)[1:, 0] != ids.reshape(len(ids), -1)[:-1, 0], True)
        raw.episode_ends = change if raw.episode_ends is None or len(raw.episode_ends) != len(change) else raw.episode_ends | change
    return raw


def _read_parquet(path: Path, config: DatasetConfig, memory: Memory, optional: Collection[str]) -> dict[str, np.ndarray]:
    """List columns, or one column per dimension, named x_0, x_1, ..."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("Parquet files need pyarrow: pip install pyarrow") from None
    try:
        file = pq.ParquetFile(path)
        names = file.schema_arrow.names
        keys: dict[str, list[str]] = {n: [n] for n in names}
        for stem in {n.rpartition("_")[0] for n in names if n.rpartition("_")[2].isdigit()}:
            series = sorted(
                (n for n in names if n.rpartition("_")[0] == stem and n.rpartition("_")[2].isdigit()),
                key=lambda n: int(n.rpartition("_")[2]),
            )
            if [n.rpartition("_")[2] for n in series] == [str(i) for i in range(len(series))]:
                keys.setdefault(stem, series)
        columns: dict[str, np.ndarray] = {}
        for name, key in choose_keys(config, keys, str(path), optional).items():
            row = 0
            for batch in file.iter_batches(columns=keys[key], batch_size=1 << 16):
                parts = [arrow_values(batch.column(c), f"{path}: '{c}'") for c in keys[key]]
                block = np.stack(parts, 1) if len(parts) > 1 or key not in names else parts[0]
                if name not in columns:
                    columns[name] = memory.empty(name, (file.metadata.num_rows, *block.shape[1:]), column_dtype(name, block.dtype))
                if block.shape[1:] != columns[name].shape[1:]:
                    raise UserError(f"{path}: '{key}' has lists of different lengths (near row {row})")
                columns[name][row : row + len(block)] = block
                row += len(block)
            if name not in columns:
                columns[name] = np.zeros(0, np.float32)
    except (pa.ArrowInvalid, OSError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({' '.join(str(error).split())}); the file is damaged or incomplete") from None
    return columns


def arrow_values(array: Any, where: str) -> np.ndarray:
    """A pyarrow array of numbers [R], or of equally long (nested) lists [R, ...], as NumPy; without a Python object per row."""
    import pyarrow as pa

    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type) or pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        if array.null_count:
            raise UserError(f"{where} has empty entries (null)")
        flat, rows = array.flatten(), len(array)
        uneven = not pa.types.is_fixed_size_list(array.type) and len(np.unique(np.asarray(array.value_lengths()))) > 1
        if uneven or (rows and len(flat) % rows):
            raise UserError(f"{where} has lists of different lengths")
        shape.append(len(flat) // rows if rows else 0)
        array = flat
    if array.null_count and not pa.types.is_floating(array.type):
        raise UserError(f"{where} has empty entries (null)")
    values = array.to_numpy(zero_copy_only=False)  # a null float becomes NaN, which the checks report
    return values.reshape(shape)
