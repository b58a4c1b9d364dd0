"""The episodes of a Minari dataset, read straight from HDF5 or Arrow files into preallocated arrays."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.containers.hdf5 import Links, open_hdf5, refuse_absent
from offrl.data.containers.images import decode
from offrl.data.containers.parquet import arrow_values, read_table
from offrl.data.containers.stored import Stored
from offrl.data.formats.minari_spaces import one_hot, width_of
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical
from offrl.errors import UserError

Leaf = tuple[tuple[str, ...], dict[str, Any]]  # path inside the observation, and the space there
Read = Callable[[str, tuple[str, ...], np.ndarray | None], Any]  # see `Buffers.add`


class Overflow(Exception):
    def __init__(self, rows: int) -> None:
        self.rows = rows


class Buffers:
    """Arrays for all steps. Observations come as T + 1 rows of which the last is put aside: the next episode overwrites
    it.

    held: bytes of the dataset's files, which bound what the metadata may ask for.
    """

    def __init__(
        self,
        rows: int,
        leaves: list[Leaf],
        goals: dict[str, list[Leaf]],
        actions: dict[str, Any],
        memory: Memory,
        name: str,
        held: int,
        infos: dict[str, tuple[str, ...]],
        with_actions: bool = True,
    ) -> None:
        self.infos, self.memory, self.with_actions = infos, memory, with_actions
        self.info_columns: dict[str, np.ndarray] = {}
        self.info_finals: dict[str, list[np.ndarray]] = {}
        self.rows, self.leaves, self.goals, self.name = rows, leaves, goals, name
        self.single = len(leaves) == 1 and not goals and leaves[0][1]["type"] == "Box"
        shape: tuple[int, ...] = (sum(width_of(s) for _, s in leaves),)
        dtype: Any = np.float32
        if self.single and len(leaves[0][1]["shape"]) > 1:
            shape = tuple(leaves[0][1]["shape"])
            dtype = np.uint8 if leaves[0][1]["dtype"] == "uint8" else dtype
        width = (math.prod(actions["shape"]),) if actions["type"] == "Box" else ()
        widths = {k: sum(width_of(s) for _, s in parts) for k, parts in goals.items()}
        step = math.prod(shape) * np.dtype(dtype).itemsize + 4 * (math.prod(width) + sum(widths.values())) + 6
        refuse_growth(f"{name}: {rows:,} steps, as its metadata declare,", rows * step, held)
        self.observations = memory.empty("observations", (rows + 1, *shape), dtype)
        self.actions = memory.empty("actions", (rows, *width), np.float32 if width else np.int64)
        self.rewards = memory.empty("rewards", (rows,), np.float32)
        self.flags = [np.zeros(rows, bool), np.zeros(rows, bool)]
        self.goal_columns = {k: memory.empty(k, (rows + 1, width), np.float32) for k, width in widths.items()}
        self.finals: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.at, self.stored = 0, Stored(rows)

    def add(self, steps: int, read: Read, episode: str) -> None:
        """One episode. `read(column, path, out)` fills `out` and returns it, or, where `out` is None or the file holds
        encoded images (bytes, or an array of bytes, for each), returns what the file holds."""
        if steps == 0:  # recorded by a collector that was reset twice; its columns are there, and empty
            if self.with_actions:
                read("actions", (), np.empty((0, *self.actions.shape[1:]), np.float32))
            for key in ("rewards", "terminations", "truncations"):
                read(key, (), np.empty(0, np.float32 if key == "rewards" else bool))
            return
        start, stop = self.at, self.at + steps
        if stop > self.rows:
            raise Overflow(-1)
        out, looked = self.observations[start : stop + 1], self.stored.looks_at(start)
        if self.single:
            path, space = self.leaves[0]
            if looked and out.dtype == np.float32:
                self.stored.keep("observations", read("observations", path, None))
            if (frames := read("observations", path, out)) is not out:
                decode(frames, out.reshape(len(out), *space["shape"]), self._place(episode, path))
        else:
            self._join("observations", self.leaves, out, read, episode, looked)
            for key, parts in self.goals.items():
                self._join(key, parts, self.goal_columns[key][start : stop + 1], read, episode, looked)
        if self.with_actions:
            read("actions", (), self.actions[start:stop])
        else:
            self.actions[start:stop] = 0
        read("rewards", (), self.rewards[start:stop])
        for name in (
            ("rewards", "actions")[: 1 + (self.with_actions and self.actions.dtype == np.float32)] if looked else ()
        ):
            self.stored.keep(name, read(name, (), None)[:steps])  # Arrow has a row more
        for flags, key in zip(self.flags, ("terminations", "truncations"), strict=True):
            read(key, (), flags[start:stop])
        for name, inside in self.infos.items():
            self._add_info(name, read("infos", inside, None), steps, f"{episode}: 'infos/{'/'.join(inside)}'")
        self.finals.append(self.observations[stop].copy())
        self.lengths.append(steps)
        self.at = stop

    def _place(self, episode: str, path: tuple[str, ...]) -> str:
        return f"{self.name}: {episode}: '{'/'.join(('observations', *path))}'"

    def _add_info(self, column: str, values: np.ndarray, steps: int, where: str) -> None:
        """T rows, or T + 1 of which the last comes after the last step and is put aside."""
        values = canonical(column, values, f"{self.name}: {where}")
        if not values.ndim:
            raise UserError(f"{self.name}: {where} is a single value; one for each of {steps} steps is due")
        if column not in self.info_columns:
            self.info_columns[column] = self.memory.empty(column, (self.rows, *values.shape[1:]), values.dtype)
            self.info_finals[column] = []
        out = self.info_columns[column]
        if len(values) not in (steps, steps + 1) or values.shape[1:] != out.shape[1:] or values.dtype != out.dtype:
            raise UserError(
                f"{self.name}: {where} has {values.dtype} values of shape {list(values.shape)}, expected {out.dtype} "
                "of "
                f"{[steps, *out.shape[1:]]} or one row more"
            )
        out[self.at : self.at + steps] = values[:steps]
        if len(values) > steps:
            self.info_finals[column].append(values[steps])

    def _join(self, name: str, leaves: list[Leaf], out: np.ndarray, read: Read, episode: str, looked: bool) -> None:
        """Entries of one episode's observations [T + 1, ...] side by side into `out`, a part of column `name`."""
        column, rows = 0, len(out)
        for path, space in leaves:
            where, width = self._place(episode, path), width_of(space)
            values = read("observations", path, None)
            if space["type"] == "Box" and space.get("dtype") == "uint8" and _encoded(values, width):
                frames, values = values, np.empty((rows, *space["shape"]), np.uint8)
                decode(frames, values, where)
            if looked and space["type"] == "Box":
                self.stored.keep(f"{name}, entry {'/'.join(path)}", values)
            values = canonical("observations", values, where)
            if len(values.shape) == 0 or len(values) != rows:
                shape = list(values.shape)
                raise UserError(
                    f"{where} has {shape[0] if shape else 'one'} observations for {rows - 1} steps; {rows} are expected"
                )
            due = 1 if space["type"] == "Discrete" else width
            if values.size != rows * due:
                raise UserError(f"{where} has shape {list(values.shape)}; {due} numbers for each row are due")
            if space["type"] == "Discrete":
                values = one_hot(values.reshape(-1), width, int(space.get("start", 0)), where)
            out[:, column : column + width] = values.reshape(rows, width)
            column += width

    def result(self) -> RawData:
        n = self.at
        columns = {
            "observations": self.observations[:n],
            "actions": self.actions[:n],
            "rewards": self.rewards[:n],
            "terminations": self.flags[0][:n],
            "truncations": self.flags[1][:n],
        }
        columns |= {k: v[:n] for k, v in (self.goal_columns | self.info_columns).items()}
        ends = np.zeros(n, bool)
        ends[np.cumsum(self.lengths, dtype=np.int64) - 1] = True
        raw = RawData(columns, episode_ends=ends, source="minari", notes=self.stored.notes())
        raw.final_observations = np.stack(self.finals) if self.finals else None
        raw.final_columns = {k: np.stack(v) for k, v in self.info_finals.items() if len(v) == len(self.lengths)}
        return raw


def _encoded(values: Any, width: int) -> bool:
    """True for what holds an encoded image for each row, and not its `width` numbers."""
    return (
        isinstance(values, list)
        or values.dtype.kind == "O"
        or (values.dtype == np.uint8 and values.size != len(values) * width)
    )


def numbered(names: Iterable[str], prefix: str) -> list[str]:
    children = [n for n in names if n.startswith(prefix) and n[len(prefix) :].isdecimal()]
    return sorted(children, key=lambda n: int(n[len(prefix) :]))


class _Hdf5Episode:
    """The group of one episode, through h5py's low-level interface: its `Dataset` objects take three times as long for
    small arrays.
    """

    def __init__(self, links: Links, name: str, where: str) -> None:
        import h5py

        self.h5, self.links, self.name, self.where = h5py, links, name, f"{where}: {name}"
        self.numbers = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM, h5py.h5t.BITFIELD)
        self.group = h5py.h5g.open(links.file.id, name.encode())
        links.check(self.group, f"{name}/")
        self.looked: set[tuple[str, ...]] = set()
        self.rewards = self.open("rewards")
        if not (shape := self.rewards.shape):
            raise UserError(f"{self.where}: 'rewards' is a single value; one for each step is due")
        self.steps = int(shape[0])

    def open(self, path: str) -> Any:
        try:
            return self.h5.h5d.open(self.group, path.encode())
        except KeyError:
            raise UserError(f"{self.where} has no {path}") from None
        except ValueError as error:
            raise UserError(f"{self.where}: '{path}' cannot be opened ({error}); the file is damaged") from None

    def read(self, column: str, leaf: tuple[str, ...], out: np.ndarray | None) -> Any:
        """See `Buffers.add`. HDF5 converts on the way into `out`; what is too large for a float32 becomes infinite."""
        path = "/".join((column, *leaf))
        for depth in range(len(leaf)):
            self._refuse_links((column, *leaf[:depth]))
        item, where = self.rewards if path == "rewards" else self.open(path), f"{self.where}: '{path}'"
        stored = item.get_type()
        kind = stored.get_class()
        if kind not in self.numbers and not (column == "observations" and kind == self.h5.h5t.VLEN):
            raise UserError(f"{where} holds {item.dtype} values, not numbers")
        refuse_absent(item, where, self.links.file, stored.get_size())
        if out is None or kind == self.h5.h5t.VLEN:
            return self.h5.Dataset(item)[()]
        if item.shape != out.shape:
            if (
                item.shape[:1] != out.shape[:1]
                or math.prod(item.shape) != out.size
                or (out.ndim == 1 and len(item.shape) > 2)
            ):
                if (
                    column == "observations"
                    and out.dtype == np.uint8
                    and len(item.shape) == 2
                    and item.dtype == np.uint8
                ):
                    return self.h5.Dataset(item)[()]  # JPEG images of one size
                raise UserError(f"{where} has shape {list(item.shape)}, expected {list(out.shape)}")
            out = out.reshape(item.shape)
        if (
            out.dtype == bool
            and kind == self.h5.h5t.ENUM
            and not stored.equal(self.h5.h5t.py_create(out.dtype))
            and stored.dtype != bool
        ):
            raise UserError(
                f"{where} holds true and false under other names or numbers than FALSE=0 and TRUE=1; the file is "
                "damaged, or write 0 and 1"
            )
        if out.dtype == bool and kind != self.h5.h5t.ENUM:
            out[:] = canonical("terminations", self.h5.Dataset(item)[()], where)  # flags stored as numbers
        elif out.dtype.kind == "i" and kind == self.h5.h5t.FLOAT:
            raise UserError(f"{where} holds {item.dtype} values, where whole numbers are due")
        else:
            item.read(self.h5.h5s.ALL, self.h5.h5s.ALL, out, self.h5.h5t.py_create(out.dtype))
        return out

    def _refuse_links(self, path: tuple[str, ...]) -> None:
        if path not in self.looked:
            self.looked.add(path)
            with contextlib.suppress(KeyError):  # `open` says that it is not there
                self.links.check(
                    self.h5.h5g.open(self.group, "/".join(path).encode()), f"{self.name}/{'/'.join(path)}/"
                )


def read_hdf5(folder: Path, kind: str, buffers: Buffers) -> None:
    """Episode after episode, converted to the buffers' dtypes on the way into them."""
    path = folder / "main_data.hdf5"
    if not path.is_file():
        raise UserError(f"{path} is missing; the dataset is incomplete")
    with open_hdf5(path) as file:
        links = Links(file)
        links.check(file.id)
        names = numbered(file, "episode_")
        for name in names:
            with reading(f"{path}: {name}"):
                episode = _Hdf5Episode(links, name, str(path))
                try:
                    buffers.add(episode.steps, episode.read, name)
                except Overflow:
                    raise Overflow(sum(_Hdf5Episode(links, n, str(path)).steps for n in names)) from None


def read_arrow(folder: Path, kind: str, buffers: Buffers) -> None:
    """Arrow or Parquet: one folder per episode; every column has T + 1 rows, of which only the observations use the
    last.
    """
    import pyarrow as pa

    names = numbered((p.name for p in folder.iterdir() if p.is_dir()), "")
    if not names and buffers.rows:
        raise UserError(
            f"{folder} has no episode of format {kind}, and its metadata declare {buffers.rows:,} steps; it is "
            "incomplete"
        )
    for index, name in enumerate(names):
        table, file = read_table(folder / name, kind)
        steps = table.num_rows - 1

        def read(column: str, leaf: tuple[str, ...], out: np.ndarray | None) -> Any:
            where = f"{file}: '{'/'.join((column, *leaf))}'"  # noqa: B023 (called at once)
            with reading(where):
                try:
                    array = table.column(column).combine_chunks()  # noqa: B023
                    for key in leaf:
                        if not pa.types.is_struct(array.type):
                            raise UserError(f"{where} is missing: {array.type} stands where the space has entries")
                        array = array.field(key)
                except KeyError:
                    raise UserError(f"{where} is missing") from None
                if column == "observations" and (
                    pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)
                ):
                    return array.to_pylist()
                values = arrow_values(array, where)
                if out is None:
                    return values
                width = math.prod(values.shape[1:])
                if len(values) < len(out) or width != math.prod(out.shape[1:]) or (out.ndim == 1 and values.ndim > 2):
                    raise UserError(f"{where} has shape {list(values.shape)}, expected {list(out.shape)}")
                if out.dtype.kind == "i" and values.dtype.kind == "f":
                    raise UserError(f"{where} holds {values.dtype} values, where whole numbers are due")
                values = values[: len(out)]
                out[:] = (canonical("terminations", values, where) if out.dtype == bool else values).reshape(out.shape)
                return out

        if steps < 0:
            raise UserError(f"{file} has no rows; the dataset is incomplete")
        try:
            buffers.add(steps, read, f"episode {name}")
        except Overflow:
            total = buffers.at + sum(read_table(folder / n, kind)[0].num_rows - 1 for n in names[index:])
            raise Overflow(total) from None
