"""Arrow's columns, value by value, and Parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.oracle.verdict import LARGE, Doubts, Refused, Unknown


class ParquetFile:
    kind = "parquet"

    def __init__(self, path: Path, doubts: Doubts) -> None:
        self.doubts = doubts
        try:
            file = pq.ParquetFile(path)
            self.schema = file.schema_arrow
            self.file, self.rows = file, file.metadata.num_rows
        except Exception as error:
            raise Refused(f"no Parquet file: {error}"[:120]) from None
        names = list(self.schema.names)
        if len(set(names)) < len(names):
            raise Unknown("two columns of one name")
        self.series: dict[str, list[str]] = {}
        for name in names:
            stem, _, number = name.rpartition("_")
            if number.isdigit() and stem not in names:
                self.series.setdefault(stem, []).append(name)
        for stem, members in list(self.series.items()):
            numbers = sorted(int(m.rpartition("_")[2]) for m in members)
            if numbers != list(range(len(numbers))) or sorted(members) != sorted(f"{stem}_{k}" for k in numbers):
                doubts.add(f"{stem}_0 to {stem}_{len(numbers)} are not all there")
                del self.series[stem]
        self.keys = self.paths = [*names, *self.series]

    def close(self) -> None:
        self.file.close()

    def shape(self, key: str) -> tuple[int, ...] | None:
        return (self.rows,) if key in self.keys else None

    def get(self, key: str) -> np.ndarray | None:
        if key not in self.keys:
            return None
        if key in self.series:
            parts = [self._read(f"{key}_{k}") for k in range(len(self.series[key]))]
            return np.array([list(row) for row in zip(*parts, strict=True)])
        return self._read(key)

    def values(self, key: str) -> list[Any]:
        try:
            if self.rows > LARGE // 8:
                raise Unknown(f"'{key}' has {self.rows} rows")
            return self.file.read(columns=[key]).column(0).to_pylist()
        except Unknown:
            raise
        except Exception as error:
            raise Refused(f"'{key}' cannot be read: {error}"[:120]) from None

    def is_text(self, key: str) -> bool:
        return key in self.schema.names and bool(
            pa.types.is_string(kind := self.schema.field(key).type) or pa.types.is_large_string(kind)
        )

    def numbered(self, key: str) -> np.ndarray:
        """Texts as numbers, equal ones alike."""
        texts = self.values(key)
        if None in texts:
            raise Refused(f"'{key}' has nulls")
        first: dict[str, int] = {}
        return np.array([first.setdefault(text, len(first)) for text in texts])

    def _read(self, key: str) -> np.ndarray:
        field = self.schema.field(key)
        return numbers(self.values(key), field.type, key, self.doubts)


def numbers(values: list[Any], kind: Any, key: str, doubts: Doubts) -> np.ndarray:
    """Values of a column, numbers or equally long lists of them. A missing float is NaN, any other a refusal."""
    inside = kind
    while pa.types.is_list(inside) or pa.types.is_large_list(inside) or pa.types.is_fixed_size_list(inside):
        inside = inside.value_type
    if pa.types.is_dictionary(inside) or pa.types.is_decimal(inside):
        doubts.add(f"'{key}' is {inside}")
        if pa.types.is_decimal(inside):
            doubts.lose("decimals")
        inside = inside.value_type if pa.types.is_dictionary(inside) else pa.float64()
    if not (pa.types.is_integer(inside) or pa.types.is_floating(inside) or pa.types.is_boolean(inside)):
        if pa.types.is_string(inside) or pa.types.is_large_string(inside):
            raise Unknown(f"'{key}' holds texts, which may be numbers")
        raise Refused(f"'{key}' holds {kind}, no numbers")

    def plain(value: Any, depth: int) -> Any:
        if isinstance(value, list):
            return [plain(v, depth + 1) for v in value]
        if value is None:
            if pa.types.is_floating(inside) and depth == _depth(kind):
                return float("nan")
            raise Refused(f"'{key}' has nulls")
        return value

    rows = [plain(v, 0) for v in values]
    try:
        array = np.array(rows, inside.to_pandas_dtype())
    except ValueError:
        raise Refused(f"'{key}' has lists of different lengths") from None
    return array.reshape(0) if not rows else array


def _depth(kind: Any) -> int:
    depth = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind, depth = kind.value_type, depth + 1
    return depth
