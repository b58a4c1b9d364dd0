"""HDF5 files of strangers: nothing outside the file is read, what is named in it can be read, and it holds what it
declares.
"""

from __future__ import annotations

import contextlib
import functools
import math
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import DEPTH, reading, refuse_empty_rows, refuse_growth
from offrl.data.containers.plain_files import refuse_special
from offrl.data.memory import Memory, chunks
from offrl.data.raw import AMOUNTS, FLAGS
from offrl.errors import UserError

_HARD, _SOFT = 0, 1  # types of links; any other (64, external) leads out of the file
_CURE = "the file is damaged or incomplete: delete it and download or copy it again"
_OUTSIDE = "which leads out of the file and is not followed: copy the data into it, with h5repack or h5py"


@contextlib.contextmanager
def open_hdf5(path: Path) -> Iterator[Any]:
    """An open h5py.File, of which no link leads nowhere, or out of the file. What HDF5 says about damaged files becomes
    a one-line UserError, also while reading."""
    import h5py

    refuse_special(path)
    with reading(path, " as HDF5", _CURE), h5py.File(path, "r") as file:
        if _SOFT in checked_links(file).values():
            hdf5_keys(file)
        yield file


def hdf5_keys(file: Any) -> dict[str, Any]:
    """All h5py datasets of a file by their path, "group/x". Raises UserError for a link that leads nowhere."""
    import h5py

    links = checked_links(file)  # all of them first: a soft link's way may lead through an external one
    items = {name: _behind(file, name) if kind == _SOFT else file[name] for name, kind in links.items()}
    return {name: item for name, item in items.items() if isinstance(item, h5py.Dataset)}


def checked_links(file: Any) -> dict[str, int]:
    """The types of all links of a file by their path. Raises UserError for one that leads out of it."""
    links: dict[str, int] = {}
    _walk(file.id, "", 0, links, set(), str(file.filename))
    for name, kind in links.items():
        if kind not in (_HARD, _SOFT):
            raise UserError(f"{file.filename}: '{name}' is an external link, {_OUTSIDE}")
    return links


def _walk(group: Any, within: str, depth: int, links: dict[str, int], visited: set[Any], where: str) -> None:
    """Put the links of an h5py.h5g.GroupID and of its subgroups, each once, into `links`.

    HDF5's own visit goes down by recursion, and ends the process where groups lie deep in one another. Raises UserError
    for such."""
    from h5py import h5g, h5o

    if depth > DEPTH:
        raise UserError(
            f"{where}: more than {DEPTH} groups lie in one another ('{within[:40]}...'); write them side by side"
        )
    children: list[tuple[bytes, int]] = []
    group.links.iterate(lambda name, info: children.append((name, info.type)), info=True)
    for name, kind in children:
        path = within + name.decode(errors="replace")
        links[path] = kind
        if (
            kind == _HARD
            and (target := h5o.get_info(group, name)).type == h5o.TYPE_GROUP
            and (target.fileno, target.addr) not in visited
        ):
            visited.add((target.fileno, target.addr))
            _walk(h5g.open(group, name), f"{path}/", depth + 1, links, visited, where)


def refuse_groups(file: Any, names: Iterable[str]) -> None:
    """Raises UserError where one of these names, at the root of an h5py.File, is no dataset: what is named would be
    left out in silence.
    """
    import h5py

    for name in names:
        if not issubclass(kind := file.get(name, h5py.Dataset, getclass=True), h5py.Dataset):
            type_name = "group" if issubclass(kind, h5py.Group) else "type"
            raise UserError(
                f"{file.filename}: '{name}' is a {type_name}, where a column is due: write its values there, or rename "
                "it"
            )


def _behind(file: Any, name: str) -> Any:
    """What a soft link leads to."""
    try:
        return file[name]
    except (KeyError, OSError, RuntimeError, ValueError):
        target = getattr(file.get(name, getlink=True), "path", "?")
        raise UserError(
            f"{file.filename}: '{name}' is a link to '{target}', which is not in the file: put the data there, or "
            "remove the link"
        ) from None


def refuse_absent(item: Any, where: str, file: Any = None, width: int = 0) -> None:
    """Raises UserError where data (an h5py.h5d.DatasetID) lie outside the file, were never written, or would unpack to
    too much.

    `file`: the h5py.File, for virtual datasets, which are refused without it. `width`: bytes of an element, where they
    are known."""
    shape = item.shape
    if shape is None:
        raise UserError(f"{where} is empty: it has no values")
    refuse_empty_rows(where, shape)
    width = width or item.get_type().get_size()
    size = math.prod(shape) * width
    if item.get_offset() is not None:  # in one piece
        if (stored := item.get_storage_size()) < size:
            _refuse_missing(where, size, stored)
        return
    import h5py

    layout = (plist := item.get_create_plist()).get_layout()
    if layout == h5py.h5d.VIRTUAL:
        _refuse_foreign(plist, where, file)
        refuse_growth(where, size, Path(file.filename).stat().st_size)
        return
    if plist.get_external_count():
        raise UserError(
            f"{where} lies in another file ({plist.get_external(0)[0].decode(errors='replace')}), {_OUTSIDE}"
        )
    if not size or layout == h5py.h5d.COMPACT:
        return
    written = (stored := item.get_storage_size()) >= size
    if layout == h5py.h5d.CHUNKED:
        block = plist.get_chunk()
        refuse_growth(f"{where}: one of its blocks {list(block)}", math.prod(block) * width, stored)
        chunk_count = math.prod(-(-length // step) for length, step in zip(shape, block, strict=True))
        written = item.get_num_chunks() >= chunk_count and (written or plist.get_nfilters() > 0)
    if not written and plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        _refuse_missing(where, size, stored)
    refuse_growth(where, size, stored)


def _refuse_missing(where: str, size: int, stored: int) -> None:
    raise UserError(
        f"{where} declares more than the file holds ({size:,} bytes, {stored:,} stored): some of it was never written; "
        "write all of it"
    )


def _refuse_foreign(plist: Any, where: str, file: Any) -> None:
    """Raises UserError unless a virtual dataset is made of plain ones of the same file."""
    import h5py

    for number in range(plist.get_virtual_count()):
        other, name = plist.get_virtual_filename(number), plist.get_virtual_dsetname(number)
        if other != "." or "%" in name or file is None:
            raise UserError(f"{where} is a virtual dataset of '{other}', {_OUTSIDE}")
        hdf5_keys(file)  # no link leads out
        item = h5py.h5d.open(file.id, name.encode())
        if item.get_create_plist().get_layout() == h5py.h5d.VIRTUAL:
            raise UserError(
                f"{where} is a virtual dataset of virtual datasets, which are not read: copy the data, with h5repack "
                "or h5py"
            )
        refuse_absent(item, where)


def refuse_loops(path: Path) -> None:
    """Raises UserError for a damaged heap (where HDF5 keeps texts of any length) in which HDF5 would run round for
    ever.
    """
    status = path.stat()
    if (offset := _loop(path, status.st_size, status.st_mtime_ns)) >= 0:
        raise UserError(f"{path} cannot be read as HDF5 (its heap of texts at byte {offset} is damaged); {_CURE}")


def refuse_long_texts(item: Any, path: Path, where: str) -> None:
    """Raises UserError where texts of any length (of an h5py.h5d.DatasetID, packed ones not) declare more bytes than
    the file holds: HDF5 takes the memory before it looks."""
    import h5py

    kind = item.get_type()
    if kind.get_class() != h5py.h5t.VLEN and not (kind.get_class() == h5py.h5t.STRING and kind.is_variable_str()):
        return
    extents: list[tuple[int, int]] = []
    if (offset := item.get_offset()) is not None:
        extents.append((offset, item.get_storage_size()))
    elif (plist := item.get_create_plist()).get_layout() == h5py.h5d.CHUNKED and plist.get_nfilters() == 0:
        item.chunk_iter(lambda block: extents.append((block.byte_offset, block.size)))
    file_size = path.stat().st_size
    with path.open("rb") as file:
        for start, size in extents:
            file.seek(start)
            # length, address of 8 bytes, number there
            elements = np.frombuffer(file.read(size // 16 * 16), "<u4").reshape(-1, 4)
            if len(elements) and int(elements[:, 0].max()) > file_size:
                raise UserError(
                    f"{where} declares a text of {int(elements[:, 0].max()):,} bytes in a file of {file_size:,}; "
                    f"{_CURE}"
                )
            refuse_growth(where, int(elements[:, 0].sum(dtype=np.int64)), file_size)


@functools.lru_cache(maxsize=16)
def _loop(path: Path, size: int, changed: int) -> int:
    """The byte of a heap with free space of no size, at which HDF5 does not move on; -1 where there is none."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        heap = -1
        while (heap := data.find(b"GCOL\1\0\0\0", heap + 1)) >= 0:
            at, end = heap + 16, min(len(data), heap + int.from_bytes(data[heap + 8 : heap + 16], "little"))
            while at + 16 <= end:
                number, length = (
                    int.from_bytes(data[at : at + 2], "little"),
                    int.from_bytes(data[at + 8 : at + 16], "little"),
                )
                if number == 0:
                    if length == 0:
                        return heap
                    break  # free space comes last
                at += 16 + -(-length // 8) * 8
    return -1


def column_dtype(name: str, dtype: np.dtype) -> Any:
    """The dtype to read a column with; floats become float32 on the way in."""
    if name in AMOUNTS or (dtype.kind == "f" and name not in (*FLAGS, "episode_ends", "episode_ids")):
        return np.float32
    if (
        name in ("observations", "next_observations", "final_observations")
        and dtype != np.uint8
        and dtype.kind in "iub"
    ):
        return np.float32
    return dtype


def read_hdf5(name: str, item: Any, memory: Memory, where: str) -> np.ndarray:
    """One h5py dataset as a column. HDF5 itself converts float64 to float32 while it reads."""
    where = f"{where}: '{item.name.strip('/')}'"
    with reading(where):
        if item.dtype.kind not in "biuf":
            raise UserError(f"{where} holds {item.dtype} values, not numbers")
        if item.shape == ():
            raise UserError(f"{where} is a single value, not a column")
        refuse_absent(item.id, where, item.file)
        dtype = item.dtype if item.dtype.kind == "b" else column_dtype(name, item.dtype)
        out = memory.empty(name, item.shape, dtype)
        if out.size:
            if isinstance(out, np.memmap) and item.chunks:  # whole chunks, so that none is decompressed twice
                for part in chunks(len(out), max(item.chunks[0], (1 << 17) // item.chunks[0] * item.chunks[0])):
                    item.read_direct(out, part, part)
            else:
                item.read_direct(out)
        return out


def value_of(item: Any, where: str, dtype: str = "biufSO") -> Any:
    """All of a small h5py dataset as h5py gives it: a number, text (bytes) or an array."""
    where = f"{where}: '{item.name.strip('/')}'"
    with reading(where):
        if item.dtype.kind not in dtype:
            raise UserError(f"{where} holds {item.dtype} values")
        refuse_absent(item.id, where, item.file)
        if item.dtype.kind == "O":
            refuse_loops(path := Path(item.file.filename))
            refuse_long_texts(item.id, path, where)
        return item[()]
