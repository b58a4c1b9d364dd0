"""npz files of strangers: read one array at a time and block by block; nothing is unpickled, and nothing grows beyond
what it declares.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import COLUMNS, reading, refuse_empty_rows, refuse_growth
from offrl.data.containers.hdf5 import column_dtype
from offrl.data.containers.plain_files import refuse_special
from offrl.data.containers.stored import Stored
from offrl.data.memory import Memory, chunks
from offrl.data.raw import BLOCK, BLOCKS, SUCCESSORS
from offrl.errors import UserError

_HEADER = 1 << 16  # bytes; NumPy's headers have some hundred, and it refuses more than 10,000
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what NumPy writes; others unpack without a bound
_BLOCK = 1 << 23  # bytes to unpack at once
NUMBERS = "biuf"


class Npz:
    """The arrays of an npz file. Raises UserError for a damaged one, and for an array that would unpack to too much."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._members: dict[str, zipfile.ZipInfo] = {}
        self.shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        with reading(path, " as npz"):
            refuse_special(path)
            self._zip = zipfile.ZipFile(path)
            members = [m for m in self._zip.infolist() if m.filename.endswith(".npy")]
        if len(members) > COLUMNS:
            raise UserError(
                f"{path} holds {len(members):,} arrays, and {COLUMNS:,} at most are read: write a column for all steps "
                "as one"
            )
        for member in members:
            key = member.filename.removesuffix(".npy")
            if key in self._members:
                raise UserError(f"{path} holds '{key}' twice; write each array once")
            self._members[key] = member
            with self._reading(key):
                shape, dtype, _, _ = self._header(member)
            self.shapes[key] = shape, dtype

    def _reading(self, key: str) -> AbstractContextManager[None]:
        return reading(f"{self.path}: '{key}'")

    def _header(self, member: zipfile.ZipInfo) -> tuple[tuple[int, ...], np.dtype, bool, int]:
        """Shape, type, whether columns come first, and the bytes before the numbers; checked against what the file
        declares and holds.
        """
        where = f"{self.path}: '{member.filename.removesuffix('.npy')}'"
        if member.compress_type not in _METHODS:
            raise UserError(f"{where} is packed by a method that NumPy does not write; write the file with numpy.savez")
        with self._zip.open(member) as packed:
            file = io.BytesIO(packed.read(_HEADER))
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if any(length < 0 for length in shape):
            raise UserError(f"{where} declares the shape {list(shape)}; the file is damaged")
        size = math.prod(shape) * dtype.itemsize
        refuse_empty_rows(where, shape if size else (*shape, 0))
        if not dtype.hasobject and file.tell() + size != member.file_size:
            raise UserError(
                f"{where} declares {size:,} bytes, shape {list(shape)}, and the file holds "
                f"{max(0, member.file_size - file.tell()):,}: it is damaged or incomplete, get it again"
            )
        if not dtype.hasobject:
            refuse_growth(where, size, member.compress_size)
        return shape, dtype, fortran, file.tell()

    def read(self, key: str, name: str, memory: Memory, notes: list[str] | None = None) -> np.ndarray:
        """Array `key` as column `name`. notes: takes what is to be said of numbers that float32 does not tell apart."""
        shape, dtype = self.shapes[key]
        self._refuse_other(key, NUMBERS)
        if not shape:
            raise UserError(f"{self.path}: '{key}' is a single value, not a column")
        samples, out = Stored(shape[0]), memory.empty(name, shape, column_dtype(name, dtype))
        width = max(1, math.prod(shape[1:]) * dtype.itemsize)
        parts = list(chunks(shape[0], max(1, min(max(BLOCK, shape[0] // BLOCKS), 1 << 17, _BLOCK // width))))
        for part, block in zip(parts, self._blocks(key, parts), strict=True):
            out[part] = block
            if samples.looks_at(part.start):
                samples.keep(name, block)
        if notes is not None and out.dtype == np.float32 and name not in SUCCESSORS:
            notes += samples.notes()
        return out

    def blocks(self, key: str, rows: int) -> Iterator[np.ndarray]:
        """Array `key` as it is stored, so many rows at a time, where it holds numbers."""
        self._refuse_other(key, NUMBERS)
        return self._blocks(key, list(chunks(self.shapes[key][0][0], rows)))

    def _blocks(self, key: str, parts: Sequence[slice]) -> Iterator[np.ndarray]:
        """Some rows of array `key` at a time, as they are stored."""
        shape, dtype = self.shapes[key]
        with self._reading(key), self._zip.open(self._members[key]) as file:
            _, _, fortran, start = self._header(self._members[key])
            file.read(start)
            stored = self.array(key) if fortran else None
            for part in parts:
                count = part.stop - part.start
                values = self._numbers(file, count * math.prod(shape[1:]), dtype) if stored is None else stored[part]
                yield values.reshape(count, *shape[1:])

    def array(self, key: str, kinds: str = NUMBERS) -> np.ndarray:
        """Array `key` as it is, where its type is of these kinds."""
        self._refuse_other(key, kinds)
        with self._reading(key), self._zip.open(self._members[key]) as file:
            shape, dtype, fortran, start = self._header(self._members[key])
            file.read(start)
            values = self._numbers(file, math.prod(shape), dtype)
            return values.reshape(shape[::-1]).T if fortran else values.reshape(shape)

    def _refuse_other(self, key: str, kinds: str) -> None:
        dtype = self.shapes[key][1]
        if dtype.kind not in kinds:
            raise UserError(f"{self.path}: '{key}' holds {dtype} values, not numbers")

    @staticmethod
    def _numbers(file: Any, count: int, dtype: np.dtype) -> np.ndarray:
        """The next `count` values. The end of a member is read too, where its checksum is compared."""
        out = np.empty(count, dtype)
        data = out.view(np.uint8) if out.size and dtype.itemsize else np.empty(0, np.uint8)
        at = 0
        while at < len(data):
            block = file.read(min(_BLOCK, len(data) - at))
            if not block:
                raise EOFError("it ends early")
            data[at : at + len(block)] = np.frombuffer(block, np.uint8)
            at += len(block)
        return out
