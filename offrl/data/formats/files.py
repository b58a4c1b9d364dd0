"""Plain files with an array for each column: npz and HDF5."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from offrl.data.containers.hdf5 import open_hdf5
from offrl.data.memory import Memory
from offrl.data.raw import RawData
from offrl.data.tables.build import build
from offrl.data.tables.keyed import Hdf5Table, NpzTable
from offrl.data.tables.names import column_of
from offrl.settings.dataset import DatasetConfig


def read(path: Path, config: DatasetConfig, memory: Memory, kind: str, optional: Collection[str] = ()) -> RawData:
    """The columns of a file. kind: hdf5 | npz. optional: columns that may be missing. Raises UserError."""
    if kind == "npz":
        return build(
            NpzTable(path, {*map(column_of, config.fields)}), config, memory, optional, path.stem, example=str(path)
        )
    with open_hdf5(path) as file:
        return build(
            Hdf5Table(file, path, {*map(column_of, config.fields)}),
            config,
            memory,
            optional,
            path.stem,
            example=str(path),
        )
