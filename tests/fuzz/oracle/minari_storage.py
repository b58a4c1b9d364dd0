"""The episodes of a Minari dataset as they are stored: in one HDF5 file, or in a folder each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.oracle import arrow, hdf5
from tests.fuzz.oracle.verdict import Doubts, Refused


class Hdf5Episodes:
    def __init__(self, folder: Path, doubts: Doubts) -> None:
        path = folder / "main_data.hdf5"
        if not path.is_file():
            raise Refused("no main_data.hdf5")
        self.file, self.doubts = hdf5.File(path, doubts), doubts
        numbers = sorted(int(k[8:]) for k in self.file.keys if k.startswith("episode_") and k[8:].isdigit())
        if numbers != list(range(len(numbers))):
            doubts.add("episodes are missing")
        self.names = [f"episode_{n}" for n in numbers]

    def get(self, name: str, key: str) -> np.ndarray | None:
        return self.file.get(f"{name}/{key}")

    def texts(self, name: str, key: str) -> list[Any]:
        item = self.file.item(f"{name}/{key}")
        if item is None:
            raise Refused(f"{name} has no {key}")
        if key in ("observations", "actions"):
            try:
                if item.is_virtual and all(source.file_name == "." for source in item.virtual_sources()):
                    self.doubts.add("virtual texts")
                elif (
                    item.external
                    or item.is_virtual
                    or not item.shape
                    or item.dtype.kind not in "OS"
                    or item.size > 10**6
                ):
                    raise Refused(f"{name}: {key} holds no texts")
                hdf5.enough(item, key, self.file.size, self.doubts)
                return [v.decode() if isinstance(v, bytes) else v for v in _one_each(item[()], key).tolist()]
            except hdf5.ERRORS as error:
                raise Refused(f"{name}: {key}: {error}") from None
        values = _one_each(hdf5.column(item, key, self.file.size, self.doubts), key)
        return (values.astype(np.float64) if values.dtype.kind == "f" else values).tolist()

    def close(self) -> None:
        self.file.close()


def _one_each(values: np.ndarray, key: str) -> np.ndarray:
    """[R] of [R] or [R, 1]."""
    if values.shape not in ((len(values),), (len(values), 1)):
        raise Refused(f"'{key}' has shape {values.shape}, not one value for each row")
    return values.reshape(-1)


class ArrowEpisodes:
    """Every column has T + 1 rows, of which only the observations use the last."""

    def __init__(self, folder: Path, kind: str, doubts: Doubts) -> None:
        self.folder, self.kind, self.doubts = folder, kind, doubts
        numbers = sorted(int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdigit())
        if numbers != list(range(len(numbers))):
            doubts.add("episodes are missing")
        self.names = [str(n) for n in numbers]
        self.tables: dict[str, Any] = {}

    def _table(self, name: str) -> Any:
        if name not in self.tables:
            files = sorted(p for p in (self.folder / name).iterdir() if p.suffix == f".{self.kind}")
            if not files:
                raise Refused(f"episode {name} has no file")
            if len(files) > 1:
                self.doubts.lose("an episode in several files")
            try:
                if self.kind == "parquet":
                    self.tables[name] = pq.ParquetFile(files[0]).read()
                else:
                    self.tables[name] = pa.ipc.open_file(pa.BufferReader(files[0].read_bytes())).read_all()
                self.tables[name].validate(full=True)
            except Exception as error:
                raise Refused(f"episode {name}: {error}"[:120]) from None
        return self.tables[name]

    def _values(self, name: str, key: str) -> tuple[list[Any], Any] | None:
        table = self._table(name)
        first, *inside = key.split("/")
        if table.column_names.count(first) != 1:
            return None
        kind, values = table.schema.field(first).type, table.column(first).to_pylist()
        for part in inside:
            if not pa.types.is_struct(kind) or kind.get_field_index(part) < 0:
                return None
            kind, values = kind.field(part).type, [None if v is None else v[part] for v in values]
        return values, kind

    def get(self, name: str, key: str) -> np.ndarray | None:
        pair = self._values(name, key)
        if pair is None:
            return None
        values, kind = pair
        if not key.startswith("observations"):
            if values and arrow_null(values[-1]):
                self.doubts.add("a null in the row that is not used")
                values = values[:-1] + values[-2:-1]
            values = values[:-1]
        return arrow.numbers(values, kind, key, self.doubts)

    def texts(self, name: str, key: str) -> list[Any]:
        pair = self._values(name, key)
        if pair is None:
            raise Refused(f"episode {name} has no {key}")
        return pair[0] if key == "observations" else pair[0][:-1]

    def close(self) -> None:
        pass


def arrow_null(value: Any) -> bool:
    return value is None or (isinstance(value, list) and any(arrow_null(v) for v in value))
