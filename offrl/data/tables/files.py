"""Tables in files: CSV and wide Parquet, one file, a list, a glob or a folder of them."""

from __future__ import annotations

import glob
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from offrl.data.containers.file_type import file_type
from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.containers.hdf5 import column_dtype
from offrl.data.containers.parquet import arrow_values, open_parquet, read_columns
from offrl.data.memory import Memory
from offrl.data.raw import BLOCK, BLOCKS, RawData, lost
from offrl.data.tables.build import build
from offrl.data.tables.csv_file import SUFFIXES, CsvFile, is_csv
from offrl.data.tables.keyed import suspect
from offrl.data.tables.mapping import UNNAMED
from offrl.data.tables.tabular import Tabular
from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig

SOME = 8  # columns that a note lists
BATCH = 1 << 16  # rows of lists read at once
PARQUET = (".parquet", ".pq")


def is_table(path: Path) -> bool:
    """True for the name of a file that is a table: CSV or Parquet."""
    return is_csv(path) or path.suffix.lower() in PARQUET


def listed(name: str) -> list[Path] | None:
    """The files that a list "[a.csv,b.csv]", a glob or a folder names, in the order of their names; None for one file.

    Raises UserError where a glob fits nothing.
    """
    if name.startswith("[") and name.endswith("]"):
        parts = [part.strip().strip("'\"") for part in name[1:-1].split(",")]
        return [path for part in parts if part for path in (listed(part) or [Path(part).expanduser()])]
    path = Path(name).expanduser()
    if path.is_dir():
        return (
            sorted(p for p in path.iterdir() if p.is_file() and is_table(p) and not p.name.startswith((".", "_")))
            or None
        )
    if any(c in name for c in "*?") and not path.exists():
        matches = sorted(Path(p) for p in glob.glob(str(path)) if Path(p).is_file())
        if not matches:
            raise UserError(f"no file fits dataset={name}, seen from {Path.cwd()}")
        return matches
    return None


class ParquetTable(Tabular):
    """A Parquet file with a column for each number, or lists of numbers."""

    by_column = True

    def __init__(self, path: Path) -> None:
        self.path, self.where = path, str(path)
        self.file = open_parquet(path)
        self.sizes: dict[str, int] = {}
        self.names = [str(n) for n in self.file.schema_arrow.names]
        self.refuse_doubles(self.names)

    def _refuse_growth(self, name: str, size: int) -> None:
        self.sizes[name] = size
        refuse_growth(self.where, sum(self.sizes.values()), self.path.stat().st_size)

    def kinds(self) -> dict[str, str]:
        """See `Tabular`."""
        types = [(str(f.name), str(f.type)) for f in self.file.schema_arrow]
        prefixes = {"time": ("timestamp", "date", "time"), "text": ("string", "large_string", "dictionary")}
        return {n: next((k for k, starts in prefixes.items() if t.startswith(starts)), "number") for n, t in types}

    def read(self, names: Collection[str], exact: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Columns as numbers, datetime64 in UTC or objects; missing numbers as NaN."""
        import pyarrow as pa

        result = {}
        for name in names:
            with reading(f"{self.where}: '{name}'"):
                column = read_columns(self.file, self.path, [name]).column(0).combine_chunks()
                self._refuse_growth(name, column.nbytes)
                if len(column) != self.file.metadata.num_rows:
                    raise UserError(
                        f"{self.where}: '{name}' declares {self.file.metadata.num_rows:,} rows, and the file holds "
                        f"{len(column):,}"
                    )
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                if pa.types.is_decimal(column.type):
                    column = column.cast(pa.float64())
                if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
                    result[name] = (
                        column.cast(pa.timestamp("us")).to_numpy(zero_copy_only=False).astype("datetime64[us]")
                    )
                elif pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                    result[name] = column.to_numpy(zero_copy_only=False)
                else:
                    if column.null_count and (pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
                        column = column.cast(pa.float64())
                    result[name] = arrow_values(column, f"{self.where}: '{name}'")
        return result

    def array(self, name: str, column: str, memory: Memory, notes: list[str]) -> np.ndarray | None:
        """See `Tabular`; of a column of lists, read a part at a time."""
        if not str(self.file.schema_arrow.field(name).type).startswith(("list", "large_list", "fixed_size_list")):
            return None
        rows, row, recorded = self.file.metadata.num_rows, 0, []
        where = f"{self.where}: '{name}'"
        values = np.zeros((0, 0), np.float32)
        with reading(where):
            for batch in self.file.iter_batches(columns=[name], batch_size=BATCH):
                block = arrow_values(batch.column(0), where)
                recorded.append(block[: 1 + BLOCKS * BLOCK * len(block) // max(1, rows)])
                if not row:
                    dtype = np.dtype(column_dtype(column, block.dtype))
                    self._refuse_growth(name, rows * int(np.prod(block.shape[1:], dtype=np.int64)) * dtype.itemsize)
                    values = memory.empty(column, (rows, *block.shape[1:]), dtype)
                if block.shape[1:] != values.shape[1:]:
                    raise UserError(f"{where} has lists of different lengths (near row {row})")
                if row + len(block) > rows:
                    break
                values[row : row + len(block)] = block
                row += len(block)
        if row != rows:
            raise UserError(f"{where} declares {rows:,} rows, and the file holds {row:,}; it is damaged or incomplete")
        if recorded and suspect(column, values, recorded[0].dtype):
            notes += filter(None, [lost(column, np.concatenate(recorded))])
        return values


class Files(Tabular):
    """Several tables with the same columns one after the other. The column "\\0file" says which one a row is from."""

    def __init__(self, tables: Sequence[Tabular], where: str) -> None:
        self.tables, self.where = tables, where
        self.names = [n for n in tables[0].names if all(n in t.names for t in tables)]
        self.partial = {n: t.where for t in tables for n in t.names if n not in self.names}
        self.notes = list(dict.fromkeys(note for t in tables for note in getattr(t, "notes", ())))
        if names := [n for n in self.partial if n and not n.startswith(UNNAMED)]:
            has = [sum(n in t.names for t in tables) for n in names[:SOME]]
            shown = [
                f"{n} (in {k} of {len(tables)}, not in {next(Path(t.where).name for t in tables if n not in t.names)})"
                for n, k in zip(names, has, strict=False)
            ]
            more = f" and {len(names) - SOME} more" if len(names) > SOME else ""
            self.notes.append(f"columns that not all files have are left out: {', '.join(shown)}{more}")

    def kinds(self) -> dict[str, str]:
        """See `Tabular`; those of the first file."""
        return self.tables[0].kinds()

    def read(self, names: Collection[str], exact: Mapping[str, str]) -> dict[str, np.ndarray]:
        """See `Tabular`. A column that is text in one of them is text in all."""
        blocks = [t.read(names, exact) for t in self.tables]
        result = {}
        for name in names:
            kinds = {b[name].dtype.kind for b in blocks if len(b[name])}
            if len({b[name].shape[1:] for b in blocks}) > 1:
                raise UserError(f"{self.where}: '{name}' has lists of different lengths")
            mixed = len(kinds) > 1 and not kinds <= set("biuf")
            result[name] = np.concatenate(
                [b[name].astype(object) if mixed else b[name] for b in blocks if len(b[name]) or not kinds]
            )
        counts = [len(next(iter(b.values()))) for b in blocks]
        result["\0file"] = np.repeat(np.arange(len(counts)), counts)
        return result


def read(
    name: str, paths: Sequence[Path], config: DatasetConfig, memory: Memory, optional: Collection[str] = ()
) -> RawData:
    """The data of one file, or of several as one dataset: each of them is an episode, or several where the columns say
    so.

    Raises UserError, naming file, column and row.
    """
    for path in paths:
        if not path.exists():
            siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
            raise UserError(f"there is no file {path}.{nearest(path.name, siblings)}")
        if not is_csv(path) and file_type(path) != "parquet":
            raise UserError(f"{path} is no Parquet file, whatever its name says")
    tables = [CsvFile(p, config.decimal) if is_csv(p) else ParquetTable(p) for p in paths]
    table: Tabular = tables[0]
    if len(tables) == 1:
        stem = paths[0].name
    else:
        table = Files(tables, f"{paths[0].parent}/ ({len(paths)} files)")
        stem = (
            paths[0].parent.resolve().name
            if name.startswith("[") or "*" in name or "?" in name
            else Path(name).resolve().name
        )
    for suffix in (".gz", *SUFFIXES, *PARQUET):
        stem = stem[: -len(suffix)] if stem.lower().endswith(suffix) and len(stem) > len(suffix) else stem
    shown = f'"{name}"' if any(c in name for c in "*?[ ") else name
    try:
        return build(table, config, memory, optional, name=stem, example=shown)
    except UserError as error:
        partial = getattr(table, "partial", {})
        hint = ", ".join(f"{n} (in {w})" for n, w in list(partial.items())[:3])
        if partial and ("has no column" in str(error) or "is not clear" in str(error)):
            raise UserError(f"{error} [columns that not all files have: {hint}]") from None
        raise
