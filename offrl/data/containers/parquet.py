"""Parquet and Arrow of strangers: columns of numbers as NumPy, and the limits of what they unpack to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading, refuse_columns, refuse_growth
from offrl.data.containers.plain_files import refuse_special
from offrl.errors import UserError


def open_parquet(path: Path) -> Any:
    """A pyarrow ParquetFile whose metadata do not declare more than the file may hold. Raises UserError."""
    try:
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("Parquet files need pyarrow: pip install 'offrl[parquet]'") from None
    refuse_special(path)
    with reading(path, " as Parquet"):
        file = pq.ParquetFile(path)
        meta = file.metadata
        refuse_columns(str(path), meta.num_columns)
        # Not `column` of a group: where its statistics are damaged, pyarrow ends the process.
        groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        rows, size = sum(g.num_rows for g in groups), sum(g.total_byte_size for g in groups)
        if any(g.num_rows < 0 or g.total_byte_size < 0 for g in groups):
            raise UserError(f"{path} declares row groups of less than nothing; the file is damaged")
        refuse_growth(str(path), size, path.stat().st_size)
        if rows != meta.num_rows:
            raise UserError(f"{path} declares {meta.num_rows:,} rows, and its row groups {rows:,}; the file is damaged")
        return file


def read_columns(file: Any, path: Path, names: Sequence[str] | None = None) -> Any:
    """Columns of the ParquetFile `file` of `path`, without `names` all, as a pyarrow table; read a part at a time, for
    values that repeat take no place in the file. Raises UserError for a column that is missing.
    """
    import pyarrow as pa

    if absent := [name for name in names or () if name not in file.schema_arrow.names]:
        raise UserError(f"{path} has no column '{absent[0]}'; it is incomplete: get the file again")
    batches, size = [], 0
    with reading(path):
        for batch in file.iter_batches(columns=names):
            batches.append(batch)
            size += batch.nbytes
            refuse_growth(str(path), size, path.stat().st_size)
        return pa.Table.from_batches(batches) if batches else file.read(columns=names)


def arrow_values(array: Any, where: str) -> np.ndarray:
    """A pyarrow array of numbers [R], or of equally long (nested) lists [R, ...], as NumPy; without a Python object per
    row.
    """
    import pyarrow as pa

    with reading(where):
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        shape = [len(array)]
        while (
            pa.types.is_fixed_size_list(array.type)
            or pa.types.is_list(array.type)
            or pa.types.is_large_list(array.type)
        ):
            if array.null_count:
                raise UserError(f"{where} has empty entries (null)")
            flat, rows = array.flatten(), len(array)
            uneven = (
                not pa.types.is_fixed_size_list(array.type) and len(np.unique(np.asarray(array.value_lengths()))) > 1
            )
            if uneven or (rows and len(flat) % rows):
                raise UserError(f"{where} has lists of different lengths")
            shape.append(len(flat) // rows if rows else 0)
            array = flat
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)):
            raise UserError(f"{where} holds {array.type} values, not numbers")
        if array.null_count and not pa.types.is_floating(array.type):
            raise UserError(f"{where} has empty entries (null)")
        values = array.to_numpy(zero_copy_only=False)  # a null float becomes NaN, which the checks report
        return values.reshape(shape)


def _read_arrow(pa: Any, file: Path) -> Any:
    """The table of an Arrow file, batch by batch, for compressed ones grow."""
    refuse_special(file)
    reader, batches, size = pa.ipc.open_file(pa.memory_map(str(file))), [], 0
    for number in range(reader.num_record_batches):
        batches.append(reader.get_batch(number))
        size += batches[-1].nbytes
        refuse_growth(str(file), size, file.stat().st_size)
    return pa.Table.from_batches(batches, reader.schema)


def read_table(folder: Path, kind: str) -> tuple[Any, Path]:
    """The pyarrow table of all .arrow or .parquet files in a folder, and the first of them. Raises UserError."""
    try:
        import pyarrow as pa
    except ImportError:
        raise UserError("this dataset is stored as Arrow: pip install pyarrow") from None
    files = sorted(p for p in folder.iterdir() if p.suffix == f".{kind}")
    if not files:
        raise UserError(f"{folder} has no .{kind} file; the dataset is incomplete")
    tables = []
    for file in files:
        with reading(file):
            table = read_columns(open_parquet(file), file) if kind == "parquet" else _read_arrow(pa, file)
            table.validate(full=True)
            refuse_growth(str(file), table.nbytes, file.stat().st_size)
            tables.append(table)
    with reading(files[0]):
        return (pa.concat_tables(tables) if len(tables) > 1 else tables[0]).combine_chunks(), files[0]
