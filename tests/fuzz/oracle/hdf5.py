"""HDF5 files, link by link."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.fuzz.oracle.verdict import LARGE, Doubts, Refused, Unknown

ERRORS = (
    OSError,
    RuntimeError,
    ValueError,
    KeyError,
    TypeError,
    UnicodeError,
    MemoryError,
    AttributeError,
    IndexError,
    OverflowError,
)
RATIO = 1100  # no common filter packs numbers more tightly than deflate, which packs zeros 1 : 1032


class File:
    """Opens the file at `path`; what cannot be opened or listed is refused or doubted."""

    kind = "hdf5"

    def __init__(self, path: Path, doubts: Doubts) -> None:
        self.doubts, self.size = doubts, path.stat().st_size
        try:
            self.file = h5py.File(path, "r")
            self.keys = [k.decode() for k in self.file.id]
        except ERRORS as error:
            raise Refused(f"HDF5 cannot open it: {error}") from None
        problem = self._walk(self.file, 0)
        if problem:
            doubts.add(f"a part that is not asked for is damaged: {problem}")
        self.paths = self._paths(self.file, "", 0)

    def close(self) -> None:
        self.file.close()

    def _walk(self, group: Any, depth: int) -> str:
        """The first thing that cannot be listed or opened, in the whole file."""
        try:
            for name in list(group.id):
                kind = group.id.links.get_info(name).type
                if kind != h5py.h5l.TYPE_HARD:
                    self.doubts.add("links of other kinds")
                    continue
                item = group[name.decode()]
                self._attributes(item)
                if isinstance(item, h5py.Group) and depth < 6:
                    if problem := self._walk(item, depth + 1):
                        return problem
                elif isinstance(item, h5py.Dataset):
                    if (
                        item.dtype is None
                        or item.external
                        or item.is_virtual
                        or (item.shape and (item.id.get_storage_size() == 0 or item.nbytes > LARGE))
                    ):
                        self.doubts.add("a part that is not asked for lies elsewhere, or nowhere")
                    if not item.shape and not isinstance(item[()], bytes | np.number | np.bool_):
                        self.doubts.add("a single value of another type")
                    elif not item.shape and isinstance(item[()], bytes):
                        item[()].decode()
            self._attributes(group)
        except ERRORS as error:
            return str(error)[:80] or type(error).__name__
        return ""

    def _attributes(self, item: Any) -> None:
        for key in item.attrs:
            value = item.attrs[key]
            text, number = isinstance(value, bytes | str), isinstance(value, int | float | np.number)
            if isinstance(value, bytes):
                value.decode()
            sound = (text and not key.startswith("ref_")) or (number and np.isfinite(value) and not key.endswith("_id"))
            if not sound:
                self.doubts.add(f"the attribute {key} is of another type")

    def _paths(self, group: Any, prefix: str, depth: int) -> list[str]:
        paths: list[str] = []
        try:
            for name in list(group.id):
                key = prefix + name.decode()
                paths.append(key)
                if group.id.links.get_info(name).type == h5py.h5l.TYPE_HARD and depth < 6:
                    item = group[name.decode()]
                    if isinstance(item, h5py.Group):
                        paths += self._paths(item, key + "/", depth + 1)
        except ERRORS:
            pass
        return paths

    def item(self, key: str) -> Any:
        """The h5py object at a path, or None where no link has the name. Refuses links that lead out of the file or
        nowhere.
        """
        return self._follow(self.file, key, 0)

    def _follow(self, group: Any, key: str, depth: int) -> Any:
        if depth > 20:
            raise Refused(f"'{key}': links without end")
        if key.startswith("/"):
            group, key = self.file, key.strip("/")
        first, _, remainder = key.partition("/")
        try:
            if not isinstance(group, h5py.Group) or not group.id.links.exists(first.encode()):
                return None
            kind = group.id.links.get_info(first.encode()).type
            if kind == h5py.h5l.TYPE_SOFT:
                target = group.id.links.get_val(first.encode()).decode()
                item = self._follow(group, target, depth + 1)
                if item is None:
                    raise Refused(f"'{key}' is a link to nothing")
                self.doubts.add(f"'{key}' is a soft link")
            elif kind != h5py.h5l.TYPE_HARD:
                raise Refused(f"'{key}' is a link out of the file")
            else:
                item = group[first]
        except ERRORS as error:
            raise Refused(f"'{key}' cannot be opened: {error}") from None
        return self._follow(item, remainder, depth + 1) if remainder else item

    def shape(self, key: str) -> tuple[int, ...] | None:
        try:
            item = self.item(key)
            return tuple(item.shape) if isinstance(item, h5py.Dataset) and item.shape is not None else None
        except (Refused, *ERRORS):
            return None

    def get(self, key: str) -> np.ndarray | None:
        """The column at `key`; None where there is none."""
        item = self.item(key)
        return None if item is None else column(item, key, self.size, self.doubts)

    def single(self, key: str) -> Any:
        """A single value, or None."""
        item = self.item(key)
        if item is None:
            return None
        try:
            return item[()]
        except ERRORS as error:
            raise Refused(f"'{key}' cannot be read: {error}") from None


def column(item: Any, key: str, file_size: int, doubts: Doubts) -> np.ndarray:
    """The numbers of an h5py dataset. Refuses what is none, and what lies elsewhere."""
    if not isinstance(item, h5py.Dataset):
        raise Refused(f"'{key}' is a group")
    try:
        if item.external:
            raise Refused(f"'{key}' lies in another file")
        if item.is_virtual:
            if any(source.file_name != "." for source in item.virtual_sources()):
                raise Refused(f"'{key}' is virtual, of another file")
            doubts.add(f"'{key}' is virtual")
        if item.dtype.kind not in "biuf":
            if item.dtype.kind in "SO":
                raise Unknown(f"'{key}' holds texts, which may be numbers")
            raise Refused(f"'{key}' holds {item.dtype}, no numbers")
        if not item.shape:
            raise Refused(f"'{key}' is no column")
        if h5py.check_enum_dtype(item.dtype):
            doubts.add(f"'{key}' is an enum of other names than FALSE and TRUE")
        enough(item, key, file_size, doubts)
        return np.asarray(item[()])
    except ERRORS as error:
        raise Refused(f"'{key}' cannot be read: {error}") from None


def enough(item: Any, key: str, file_size: int, doubts: Doubts) -> None:
    """Whether what is declared can be in the file."""
    size, stored = item.dtype.itemsize, item.id.get_storage_size()
    for n in item.shape:
        size *= n
    if item.is_virtual:
        return
    plain = item.chunks is None
    if stored > file_size:
        doubts.add(f"'{key}' says to end beyond the file")
    if size > LARGE:
        if size > file_size * RATIO or (plain and stored < size):
            raise Refused(f"'{key}' declares {size} bytes in a file of {file_size}")
        raise Unknown(f"'{key}' has {size} bytes")
    if size and stored == 0:
        doubts.add(f"'{key}' is declared but not stored")
    elif plain and stored < size:
        doubts.add(f"'{key}' is not stored entirely")
    elif not plain and size:
        chunks = 1
        for n, c in zip(item.shape, item.chunks, strict=True):
            chunks *= -(-n // c)
        if item.id.get_num_chunks() < chunks:
            doubts.add(f"'{key}' lacks chunks")
        if item.id.get_create_plist().get_nfilters() == 0 and stored < size:
            doubts.add(f"'{key}' is not stored entirely")
