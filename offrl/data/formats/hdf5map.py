"""Where the datasets of an HDF5 file with very many groups lie, found for all groups at once.

HDF5 takes some 25 microseconds to open and read one small dataset, and a file of 50,000 short episodes holds 250,000 of them. Here the
file is mapped, and NumPy follows the same structures for all episodes side by side. Only what h5py writes by default is known: old-style
groups of up to eight members, version 1 object headers, contiguous or chunked storage without filters and with one B-tree leaf. Every
structure is checked (signatures, versions, sizes, and a header equal to that of a dataset which HDF5 itself describes, byte for byte but
for rows and addresses); a dataset that differs in any of it is not found here, and the caller reads it through HDF5.

Layout of the bytes: "HDF5 File Format Specification Version 3.0", sections III.A to III.D and IV.A.
"""

from __future__ import annotations

import functools
import itertools
import math
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np

Path = tuple[str, ...]
MEMBERS = 8  # a symbol table node holds as many, unless the file was made with other settings than HDF5's own
SHORT = 32  # elements
CONTINUATION, DATASPACE, LAYOUT, SYMBOLS = 0x10, 0x01, 0x08, 0x11  # messages of an object header


class Window:
    """Stretches of a file, of which the last one read is kept: data that lie one after another cost one system call for many."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "rb", buffering=0)  # noqa: SIM115 (lives as long as this object)
        self.buffer = bytearray(1 << 18)
        self.start = self.stop = 0
        self._scratch = bytearray(0)

    def seek(self, address: int, size: int) -> int:
        """Make sure that the `size` bytes at `address` are in `buffer`; where in it they are. The next call may overwrite them."""
        if address < self.start or address + size > self.stop:
            if size > len(self.buffer):
                self.buffer = bytearray(size)
            self.file.seek(address)
            self.start, self.stop = address, address
            view = memoryview(self.buffer)
            while self.stop < address + size:
                count = self.file.readinto(view[self.stop - address :])
                if not count:
                    raise OSError(f"the file ends before byte {address + size}")
                self.stop += count
        return address - self.start

    def scratch(self, count: int, dtype: np.dtype) -> np.ndarray:
        """Memory for `count` numbers, the same at each call."""
        if len(self._scratch) < count * dtype.itemsize:
            self._scratch = bytearray(count * dtype.itemsize)
        return np.ndarray((count,), dtype, self._scratch)


@functools.lru_cache(maxsize=64)
def _tiles(tail: tuple[int, ...], chunk: tuple[int, ...]) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """How blocks of the shape [rows, *chunk] cover [rows, *tail]: for each, its place and the part of it that is inside."""
    tiles = []
    for corner in itertools.product(*(range(0, size, step) for size, step in zip(tail, chunk, strict=True))):
        place = tuple(slice(a, min(a + step, size)) for a, step, size in zip(corner, chunk, tail, strict=True))
        inside = tuple(slice(p.stop - p.start) for p in place)
        tiles.append(((slice(None), *place), (slice(None), *inside)))
    return tiles


@functools.lru_cache(maxsize=64)
def _gather(tail: tuple[int, ...], chunk: tuple[int, ...]) -> np.ndarray:
    """For blocks of the shape `chunk` side by side, one after another in memory: where in them each element of [rows, *tail] is."""
    index = np.empty((chunk[0], *tail), np.intp)
    size = math.prod(chunk)
    for k, (place, inside) in enumerate(_tiles(tail, chunk[1:])):
        index[place] = np.arange(k * size, (k + 1) * size).reshape(chunk)[inside]
    return index.reshape(-1)


@dataclass(frozen=True)
class Located:
    """One dataset in each of E groups: `rows[e]` is -1 where it was not found."""

    window: Window
    dtype: np.dtype
    tail: tuple[int, ...]  # the shape after the rows, the same in all groups
    rows: list[int]
    whole: list[bool]  # stored in one piece
    adjacent: list[bool]  # its blocks lie one after another
    chunks: np.ndarray  # [E, rank] the shape of the blocks it is cut into, row block by row block; those at the edges are padded
    first: list[int]  # where the addresses of its blocks begin
    addresses: list[int]

    def read(self, index: int, out: np.ndarray | None = None) -> np.ndarray:
        """The dataset of group `index`, in `out` (of the same shape) if given."""
        shape, at = (self.rows[index], *self.tail), self.first[index]
        if out is None:
            out = np.empty(shape, self.dtype)
        if self.whole[index]:
            out[...] = self._block(self.addresses[at], shape)
            return out
        chunk = tuple(self.chunks[index].tolist())
        tiles = _tiles(self.tail, chunk[1:])
        # The rows of a block may be so short that NumPy spends its time between them: then elements are gathered from all blocks at once.
        index_of = _gather(self.tail, chunk) if self.adjacent[index] and out.flags.c_contiguous and math.prod(chunk[1:]) <= SHORT else None
        for top in range(0, shape[0], chunk[0]):
            rows = min(chunk[0], shape[0] - top)
            strip = out[top : top + rows]
            if index_of is not None:
                count = len(tiles) * math.prod(chunk)
                blocks = self.window.scratch(count, out.dtype)
                blocks[:] = self._block(self.addresses[at], (count,))
                blocks.take(index_of[: strip.size], out=strip.reshape(-1), mode="clip")
                at += len(tiles)
                continue
            for place, inside in tiles:
                strip[place] = self._block(self.addresses[at], chunk)[:rows][inside]
                at += 1
        return out

    def _block(self, address: int, shape: tuple[int, ...]) -> np.ndarray:
        at = self.window.seek(address, math.prod(shape) * self.dtype.itemsize)
        return np.ndarray(shape, self.dtype, self.window.buffer, at)


class Hdf5Map:
    """The datasets in the groups of an open h5py.File; the groups are members of its root. A context manager: reading ends with it."""

    def __init__(self, file: Any, names: list[str]) -> None:
        """`names`: the groups, whose positions are the indices used below."""
        self.file, self.names = file, names
        with open(file.filename, "rb") as handle:
            self.buffer = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        self.bytes = np.frombuffer(self.buffer, np.uint8)
        self.window = Window(file.filename)
        self._members: dict[Path, Any] = {}
        addresses: dict[bytes, int] = {}
        plain = file.userblock_size == 0 and file.id.get_create_plist().get_sizes() == (8, 8)
        if plain:  # hard links carry the address of what they lead to
            file.id.links.iterate(lambda name, link: addresses.__setitem__(name, link.u if link.type == 0 else 0), info=True)
        self.groups = np.array([addresses.get(n.encode(), 0) for n in names], np.uint64)

    def __enter__(self) -> Hdf5Map:
        return self

    def __exit__(self, *error: object) -> None:
        self.window.file.close()
        del self.bytes
        self.buffer.close()

    def locate(self, path: Path) -> Located | None:
        """The dataset `path` in all groups; None when it is found in none of them or is stored in an unknown way."""
        at = self._find(path)
        there = np.flatnonzero(at)
        if not len(there):
            return None
        template = int(there[0])
        try:
            form = _Form.of(self.file[self.names[template]]["/".join(path)], self.buffer, int(at[template]))
        except (KeyError, OSError, RuntimeError, ValueError, TypeError):  # damaged; HDF5 says how when the data are read
            form = None
        if form is None:
            return None
        heads = self._take(at, len(form.header))
        same = (heads == form.header) | form.varies
        found = same.all(1)
        rows, rank = _integers(heads, form.rows, 8), 1 + len(form.tail)
        found &= rows < np.uint64(1 << 48)
        rows = np.where(found, rows, 0).astype(np.int64)
        start = _integers(heads, form.address, 8)
        if form.chunked:
            chunk = np.stack([_integers(heads, form.address + 8 + 4 * k, 4) for k in range(rank)], 1).astype(np.int64)
            found, first, addresses, adjacent = self._chunks(found, rows, chunk, start, form)
        else:
            chunk = _shapes(rows, form)
            size = rows.astype(np.float64) * form.row_bytes
            found &= (rows > 0) & (start < len(self.bytes)) & (start.astype(np.float64) + size <= len(self.bytes))
            first, addresses, adjacent = np.arange(len(rows)), start, found
        kept, whole = np.where(found, rows, -1).tolist(), (chunk == _shapes(rows, form)).all(1).tolist()
        places = (adjacent.tolist(), chunk, first.tolist(), addresses.tolist())
        return Located(self.window, form.dtype, form.tail, kept, whole, *places)

    def _chunks(
        self, found: np.ndarray, rows: np.ndarray, chunk: np.ndarray, tree: np.ndarray, form: _Form
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Which datasets [E] have the one B-tree leaf they should have, where the addresses of each begin, all addresses, and which
        datasets have their blocks one after another."""
        rank = chunk.shape[1]
        node = self._take(tree, 24)
        found = found & (chunk > 0).all(1) & _is_node(node, 1)
        blocks = -(-_shapes(rows, form) // np.maximum(chunk, 1))
        count = _integers(node, 6, 2).astype(np.int64)
        found &= (blocks.prod(1) == count) & (count > 0) & (blocks.astype(np.float64).prod(1) < 1 << 16)
        count = np.where(found, count, 0)
        first = np.cumsum(count) - count
        owner = np.repeat(np.arange(len(rows)), count)
        step = 8 * (rank + 3)  # a key (size, filter mask, an offset per dimension and one more) and the address of the block
        turn = np.arange(len(owner)) - first[owner]
        keys = self._take(tree[owner] + np.uint64(24) + (turn * step).astype(np.uint64), step)
        bytes_each = chunk[owner].astype(np.float64).prod(1) * form.dtype.itemsize
        address = _integers(keys, step - 8, 8)
        right = (_integers(keys, 0, 4) == bytes_each) & (_integers(keys, 4, 4) == 0) & (_integers(keys, 8 + 8 * rank, 8) == 0)
        right &= (address < len(self.bytes)) & (address.astype(np.float64) + bytes_each <= len(self.bytes))
        for k in reversed(range(rank)):  # the blocks are in the order of their corners
            turn, index = np.divmod(turn, blocks[owner, k])
            right &= _integers(keys, 8 + 8 * k, 8) == index * chunk[owner, k]
        wrong = np.bincount(owner[~right], minlength=len(rows)) > 0
        follows = (owner[1:] != owner[:-1]) | (address[1:] == address[:-1] + bytes_each[:-1].astype(np.uint64))
        apart = np.bincount(owner[1:][~follows], minlength=len(rows)) > 0
        return found & ~wrong, first, address, ~apart

    def _find(self, path: Path) -> np.ndarray:
        """The address of the object `path` in each group, uint64 [E]; 0 where it was not found."""
        if not path:
            return self.groups
        parent = path[:-1]
        if parent not in self._members:
            self._members[parent] = self._open(self._find(parent))
        names, count, entries = self._members[parent]
        text = np.frombuffer(path[-1].encode() + b"\0", np.uint8)
        found = np.zeros(len(count), np.uint64)
        todo = np.arange(len(count))
        for k in range(MEMBERS):
            todo = todo[count[todo] > k]
            if not len(todo):
                break
            hit = (self._take(names[todo] + entries[todo, k, 0], len(text)) == text).all(1)
            hard = (entries[todo, k, 2] & np.uint64(0xFFFFFFFF)) <= 1  # 2 is a soft link
            found[todo[hit & hard]] = entries[todo[hit & hard], k, 1]
            todo = todo[~hit]
        return found

    def _open(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For groups at these addresses: where their members' names are, how many members there are (0 if unknown), and the members."""
        tree, heap, good = self._symbols(groups)
        tree, heap = self._take(tree, 40), self._take(heap, 40)
        good &= _is_node(tree, 0) & (_integers(tree, 6, 2) == 1)
        good &= (heap[:, :5] == np.frombuffer(b"HEAP\0", np.uint8)).all(1)
        table = self._take(_integers(tree, 32, 8), 8 + 40 * MEMBERS)
        good &= (table[:, :5] == np.frombuffer(b"SNOD\1", np.uint8)).all(1)
        entries = np.ascontiguousarray(table[:, 8:]).view("<u8").reshape(-1, MEMBERS, 5)
        return _integers(heap, 24, 8), np.where(good, _integers(table, 6, 2), 0), entries

    def _symbols(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The addresses of the tree and the heap of each group [E], from the message in its header, and whether there is one."""
        head = self._take(groups, 16)
        place = groups + np.uint64(16)
        end = place + _integers(head, 8, 4)
        found = np.zeros((len(groups), 2), np.uint64)
        todo = np.flatnonzero(head[:, 0] == 1)
        for _ in range(64):  # messages; attributes may come before it
            message = self._take(place[todo], 24)
            kind, size = _integers(message, 0, 2), _integers(message, 2, 2)
            first, second = _integers(message, 8, 8), _integers(message, 16, 8)
            inside = place[todo] + np.uint64(8) + size <= end[todo]
            hit = inside & (kind == SYMBOLS) & (size == 16)
            found[todo[hit]] = np.stack([first, second], 1)[hit]
            moves = kind == CONTINUATION  # to a block at `first`, of `second` bytes
            place[todo] = np.where(moves, first, place[todo] + np.uint64(8) + size)
            end[todo] = np.where(moves, first + second, end[todo])
            todo = todo[inside & ~hit]
            if not len(todo):
                break
        return found[:, 0], found[:, 1], found[:, 0] > 0

    def _take(self, at: np.ndarray, size: int) -> np.ndarray:
        """The `size` bytes at each address, uint8 [n, size]; zeros, which no check accepts, where they are not inside the file."""
        if len(self.bytes) < size:
            return np.zeros((len(at), size), np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(self.bytes, size)
        inside = at < len(windows)
        taken: np.ndarray = windows[np.where(inside, at, 0).astype(np.int64)]
        taken[~inside] = 0
        return taken


@dataclass(frozen=True)
class _Form:
    """The object header of one dataset, and where in it the things are that differ between groups."""

    header: np.ndarray  # uint8
    varies: np.ndarray  # bool, True for the bytes that hold rows, block shape and addresses
    rows: int  # position of the number of rows
    address: int  # position of the address of the data, or of the tree of blocks
    chunked: bool
    dtype: np.dtype
    tail: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.tail, dtype=np.int64)) * self.dtype.itemsize

    @staticmethod
    def of(dataset: Any, buffer: mmap.mmap, at: int) -> _Form | None:
        """The form of an h5py dataset at this address of the file; None when it is another than this module knows."""
        import h5py

        if not isinstance(dataset, h5py.Dataset):
            return None
        plist, rank = dataset.id.get_create_plist(), len(dataset.shape or ())
        kind = {h5py.h5d.CHUNKED: 2, h5py.h5d.CONTIGUOUS: 1}.get(plist.get_layout())
        if kind is None or not rank or plist.get_nfilters() or plist.get_external_count() or dataset.dtype.kind not in "biuf":
            return None
        if dataset.dtype.metadata and dataset.dtype != bool:  # an enumeration
            return None
        if dataset.id.get_type() != h5py.h5t.py_create(dataset.dtype, logical=True):  # bits that NumPy has no type for
            return None
        if h5py.h5o.get_info(dataset.id).addr != at or buffer[at] != 1:
            return None
        header = buffer[at : at + 16 + int.from_bytes(buffer[at + 8 : at + 12], "little")]
        where: dict[int, int] = {}
        position = 16
        while position + 8 <= len(header):
            message, size = (int.from_bytes(header[position + k : position + k + 2], "little") for k in (0, 2))
            where[message] = position + 8
            position += 8 + size
        if CONTINUATION in where or DATASPACE not in where or LAYOUT not in where:
            return None
        space, layout = where[DATASPACE], where[LAYOUT]
        dims = space + {1: 8, 2: 4}.get(header[space], 0)
        if dims == space or header[space + 1] != rank or header[layout] != 3 or header[layout + 1] != kind:
            return None
        address = layout + (3 if kind == 2 else 2)
        varies = np.zeros(len(header), bool)
        varies[dims : dims + 8] = True
        if header[space + 2] & 1:  # the largest number of rows follows the shape
            varies[dims + 8 * rank : dims + 8 * rank + 8] = True
        varies[address : address + 8 + (4 * rank if kind == 2 else 8)] = True
        return _Form(np.frombuffer(header, np.uint8), varies, dims, address, kind == 2, dataset.dtype, tuple(dataset.shape[1:]))


def _shapes(rows: np.ndarray, form: _Form) -> np.ndarray:
    """Shapes of datasets with so many rows [E], int64 [E, rank]."""
    return np.concatenate([rows[:, None], np.tile(np.array(form.tail, np.int64), (len(rows), 1))], 1)


def _is_node(node: np.ndarray, kind: int) -> np.ndarray:
    """Which of the bytes [n, 24 or more] begin a B-tree's only node: a leaf (level 0) of the kind, without siblings."""
    return (node[:, :6] == np.frombuffer(b"TREE" + bytes([kind, 0]), np.uint8)).all(1) & (node[:, 8:24] == 0xFF).all(1)


def _integers(table: np.ndarray, position: int, size: int) -> np.ndarray:
    """The little-endian unsigned integers of `size` bytes at `position` of each row, uint64 [n]."""
    return np.ascontiguousarray(table[:, position : position + size]).view(f"<u{size}")[:, 0].astype(np.uint64)
