"""npz files, member by member."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from tests.fuzz.oracle.verdict import LARGE, Doubts, Refused, Unknown


class File:
    kind = "npz"

    def __init__(self, path: Path, doubts: Doubts) -> None:
        self.doubts = doubts
        try:
            self.zip = zipfile.ZipFile(path)
            names = self.zip.namelist()
        except Exception as error:
            raise Refused(f"no zip file: {error}") from None
        self.keys = [n.removesuffix(".npy") for n in names if n.endswith(".npy")]
        self.paths = self.keys
        if len(set(names)) < len(names):
            doubts.add("two members of one name")
        for name in names:
            try:
                if not name.endswith(".npy"):
                    continue
                shape, dtype, size = self._header(name)
                declared = dtype.itemsize
                for n in shape:
                    declared *= n
                if dtype.hasobject or size > LARGE or size != declared:
                    doubts.add(f"{name} holds objects, is large, or of another size than its header says")
            except (Refused, Unknown) as error:
                doubts.add(f"a member that may not be asked for is damaged: {error}")

    def close(self) -> None:
        self.zip.close()

    def _header(self, name: str) -> tuple[tuple[int, ...], np.dtype, int]:
        """Shape, type, and bytes that follow the header, as the list of members says."""
        try:
            info = self.zip.getinfo(name)
            with self.zip.open(name) as file:
                version = np.lib.format.read_magic(file)
                reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[
                    version
                ]
                shape, _, dtype = reader(file)
                head = file.tell()
        except Exception as error:
            raise Refused(f"{name} cannot be opened: {error!r}"[:120]) from None
        return shape, dtype, info.file_size - head

    def shape(self, key: str) -> tuple[int, ...] | None:
        try:
            return self._header(f"{key}.npy")[0] if key in self.keys else None
        except Refused:
            return None

    def get(self, key: str) -> np.ndarray | None:
        if key not in self.keys:
            return None
        shape, dtype, size = self._header(f"{key}.npy")
        if dtype.kind not in "biuf":
            if dtype.kind in "SU":
                raise Unknown(f"'{key}' holds texts, which may be numbers")
            raise Refused(f"'{key}' holds {dtype}, no numbers")
        if not shape:
            raise Refused(f"'{key}' is no column")
        declared = dtype.itemsize
        for n in shape:
            declared *= n
        if declared < 0 or any(n < 0 for n in shape):
            raise Refused(f"'{key}' has less than no rows")
        if declared > size:
            raise Refused(f"'{key}' declares {declared} bytes and has {size}")
        if max(declared, size) > LARGE:
            raise Unknown(f"'{key}' has {size} bytes")
        try:
            data = self.zip.read(f"{key}.npy")
            values = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
        except Exception as error:
            raise Refused(f"'{key}' cannot be read: {error!r}"[:120]) from None
        if size != declared or not data.endswith(values.tobytes("A")):
            self.doubts.add(f"'{key}' has bytes that are not its own")
        return values
