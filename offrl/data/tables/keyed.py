"""Files with an array for each column (npz, HDF5), and arrays in memory, as tables."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading
from offrl.data.containers.hdf5 import hdf5_keys, read_hdf5, refuse_groups, value_of
from offrl.data.containers.npz import Npz
from offrl.data.memory import Memory
from offrl.data.raw import SUCCESSORS, coarse, lost, sampled, wide
from offrl.data.tables.columns import MARKS
from offrl.data.tables.names import REQUIRED, SINGLE, STEMS, USUAL, VECTORS, column_of
from offrl.data.tables.tabular import Tabular
from offrl.errors import UserError

NUMBERS, TEXTS, TIMES = "biuf", "SUO", "mM"


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
            notes += filter(None, [lost(name, np.concatenate([item[part] for part in sampled(len(values))]))])
    return values


def _texts(values: np.ndarray) -> np.ndarray:
    """Texts as objects, of bytes those of UTF-8."""
    return np.array([v.decode(errors="replace") if isinstance(v, bytes) else str(v) for v in values.tolist()], object)


class _Keyed(Tabular):
    """Arrays by name."""

    by_column = True

    def __init__(
        self, where: str, stored: Mapping[str, tuple[Sequence[int], np.dtype]], fields: Collection[str] = ()
    ) -> None:
        """stored: shapes and types. fields: our columns that are named otherwise. Single values are no columns: raises
        UserError where one is called as what each row needs."""
        self.where = where
        self.dtypes = {name: dtype for name, (shape, dtype) in stored.items() if len(shape)}
        self.names = list(self.dtypes)
        for name in (n for n in stored if n not in self.dtypes):
            column = column_of(name)
            needed = (*REQUIRED, *MARKS) if name != column else (*VECTORS, *SINGLE)
            if column in needed and column != "time" and column not in fields:
                raise UserError(f"{where}: '{name}' is a single value, not a column")

    def kinds(self) -> dict[str, str]:
        """See `Tabular`."""
        kinds = dict.fromkeys(NUMBERS, "number") | dict.fromkeys(TEXTS, "text") | dict.fromkeys(TIMES, "time")
        return {name: kinds.get(dtype.kind, "other") for name, dtype in self.dtypes.items()}

    def read(self, names: Collection[str], exact: Mapping[str, str]) -> dict[str, np.ndarray]:
        """See `Tabular`."""
        result = {}
        for name in names:
            values = self._native(name)
            result[name] = _texts(values) if values.dtype.kind in TEXTS and values.ndim == 1 else values
        return result

    @abstractmethod
    def _native(self, name: str) -> np.ndarray:
        """An array as it is kept."""


class NpzTable(_Keyed):
    """The arrays of an npz file."""

    def __init__(self, path: Path, fields: Collection[str]) -> None:
        self.file = Npz(path)
        super().__init__(str(path), self.file.shapes, fields)

    def _native(self, name: str) -> np.ndarray:
        return self.file.array(name, NUMBERS + "SU" + TIMES)

    def array(self, name: str, column: str, memory: Memory, notes: list[str]) -> np.ndarray | None:
        """See `Tabular`."""
        if self.dtypes[name].kind not in NUMBERS:
            return None
        return self.file.read(name, column, memory, notes)


class Hdf5Table(_Keyed):
    """The datasets of an h5py.File by their paths."""

    def __init__(self, file: Any, path: Path, fields: Collection[str], own_names: tuple[str, ...] = ()) -> None:
        """fields: the columns that are named otherwise. Raises UserError where another has a group's name."""
        self.items = hdf5_keys(file)
        usual = (w for entry in (STEMS | USUAL).items() if entry[0] not in fields for w in entry[1])
        refuse_groups(file, usual)
        self.own_names = own_names
        super().__init__(
            str(path),
            {k: (item.shape or (0,) * (item.shape is None), item.dtype) for k, item in self.items.items()},
            fields,
        )

    def _native(self, name: str) -> np.ndarray:
        return np.asarray(value_of(self.items[name], self.where))

    def array(self, name: str, column: str, memory: Memory, notes: list[str]) -> np.ndarray | None:
        """See `Tabular`."""
        return (
            None if self.dtypes[name].kind in TEXTS else read_item(column, self.items[name], memory, self.where, notes)
        )


class Arrays(_Keyed):
    """Arrays of a caller's by name; what is given out is a copy."""

    def __init__(self, values: Mapping[str, np.ndarray], where: str) -> None:
        self.values = values
        super().__init__(where, {k: (v.shape, v.dtype) for k, v in values.items()})

    def _native(self, name: str) -> np.ndarray:
        return self.values[name]

    def array(self, name: str, column: str, memory: Memory, notes: list[str]) -> np.ndarray | None:
        """See `Tabular`."""
        if self.dtypes[name].kind not in NUMBERS:
            return None
        if column not in SUCCESSORS and (text := lost(column, self.values[name])):
            notes.append(text)
        return self.values[name].copy()
