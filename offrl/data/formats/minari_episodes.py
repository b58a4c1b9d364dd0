"""The episodes of a Minari dataset, read straight from HDF5 or Arrow files into preallocated arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from offrl.data.containers.guard import reading, refuse_growth
from offrl.data.containers.hdf5 import open_hdf5, refuse_absent
from offrl.data.containers.parquet import arrow_values, read_table
from offrl.data.containers.stored import Stored
from offrl.data.formats.minari_images import Images, decoded
from offrl.data.formats.minari_spaces import fill, one_hot, width_of
from offrl.data.memory import Memory
from offrl.data.raw import FLAGS, RawData, canonical, ends_of
from offrl.errors import UserError

Leaf = tuple[tuple[str, ...], dict[str, Any]]  # path inside the observation, and the space there


class Overflow(Exception):
    """The episodes have more steps, or are more, than the buffers hold."""


class Recording(Protocol):
    """One episode in a file."""

    name: str
    steps: int

    def where(self, column: str, leaf: tuple[str, ...] = ()) -> str:
        """A column's place, for messages."""

    def read(self, column: str, leaf: tuple[str, ...] = ()) -> Any:
        """A column, or an entry of it, as the file holds it: numbers, or of observations encoded images (bytes, or an
        array of bytes, for each)."""

    def infos(self) -> dict[str, Any]:
        """Paths such as "infos/success" of the numbers for each step, and what must be alike in all episodes."""


class Buffers:
    """Arrays for all steps. Observations come as T + 1 rows of which the last is put aside: the next episode overwrites
    it.

    images: the entries that become streams, of which all T + 1 rows of each of `count` episodes are kept. stored: bytes
    of the dataset's files, which bound what the metadata may ask for.
    """

    def __init__(
        self,
        rows: int,
        leaves: list[Leaf],
        images: dict[tuple[str, ...], Images],
        count: int,
        goals: dict[str, list[Leaf]],
        actions: dict[str, Any],
        memory: Memory,
        name: str,
        stored: int,
        infos: dict[str, tuple[str, ...]],
        with_actions: bool = True,
    ) -> None:
        self.infos, self.memory, self.with_actions = infos, memory, with_actions
        self.info_columns: dict[str, np.ndarray] = {}
        self.info_finals: dict[str, list[np.ndarray]] = {}
        self.rows, self.name, self.images = rows, name, images
        self.joined = {"observations": leaves, **goals}  # column -> the entries that it is joined of
        shapes: dict[str, tuple[int, ...]] = {
            k: (sum(width_of(s) for _, s in parts),) for k, parts in self.joined.items()
        }
        pixels, space = False, leaves[0][1] if leaves else {}
        if len(leaves) == 1 and not goals and space["type"] == "Box" and len(space["shape"]) > 1:
            shapes["observations"], pixels = tuple(space["shape"]), space["dtype"] == "uint8"
        width = (math.prod(actions["shape"]),) if actions["type"] == "Box" else ()
        numbers = sum(map(math.prod, shapes.values()))
        step = numbers * (1 if pixels else 4) + 4 * math.prod(width) + 6
        size = rows * step + (rows + count) * sum(math.prod(i.shape) for i in images.values())
        refuse_growth(f"{name}: {rows:,} steps, as its metadata declare,", size, stored)
        for path, pictures in images.items():
            pictures.begin(rows + count, memory, path[-1])
        self.count = count if images else rows + 1
        dtype = np.uint8 if pixels else np.float32  # without goals beside pixels
        self.observations = {k: memory.empty(k, (rows + 1, *shape), dtype) for k, shape in shapes.items()}
        self.columns = {
            "actions": memory.empty("actions", (rows, *width), np.float32 if width else np.int64),
            "rewards": memory.empty("rewards", (rows,), np.float32),
            **{flag: np.zeros(rows, bool) for flag in FLAGS},
        }
        self.finals: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.at, self.samples = 0, Stored(rows)

    def add(self, episode: Recording) -> None:
        """Read one episode. Raises UserError, and Overflow where there is no room for it."""
        start, stop = self.at, self.at + episode.steps
        if stop > self.rows or len(self.lengths) == self.count:
            raise Overflow
        looked = episode.steps > 0 and self.samples.looks_at(start)
        for name, column in self.columns.items():
            if name == "actions" and not self.with_actions:
                column[start:stop] = 0
                continue
            values, out = episode.read(name), column[start:stop]
            if looked and out.dtype == np.float32:
                self.samples.keep(name, values)
            fill(values, out, episode.where(name))
        if not episode.steps:  # recorded by a collector that was reset twice
            return
        for name, column in self.observations.items():
            self._join(name, column[start : stop + 1], episode, looked)
        for path, images in self.images.items():
            images.add(episode.read("observations", path), episode.steps + 1, episode.where("observations", path))
        for name, path in self.infos.items():
            self._add_info(name, episode.read("infos", path), episode.steps, episode.where("infos", path))
        self.finals.append(self.observations["observations"][stop].copy())
        self.lengths.append(episode.steps)
        self.at = stop

    def _add_info(self, column: str, values: np.ndarray, steps: int, where: str) -> None:
        """T rows, or T + 1 of which the last comes after the last step and is put aside. Costs are of steps: of T + 1,
        as Minari's collector records what `step` and `reset` say, the first is the reset's and is left out.
        """
        values = canonical(column, values, where)
        if column == "costs" and len(values) == steps + 1:
            values = values[1:]
        if not values.ndim:
            raise UserError(f"{where} is a single value; one for each of {steps} steps is due")
        if column not in self.info_columns:
            self.info_columns[column] = self.memory.empty(column, (self.rows, *values.shape[1:]), values.dtype)
            self.info_finals[column] = []
        out = self.info_columns[column]
        if len(values) not in (steps, steps + 1) or values.shape[1:] != out.shape[1:] or values.dtype != out.dtype:
            raise UserError(
                f"{where} has {values.dtype} values of shape {list(values.shape)}, expected {out.dtype} of "
                f"{[steps, *out.shape[1:]]} or one row more"
            )
        out[self.at : self.at + steps] = values[:steps]
        if len(values) > steps:
            self.info_finals[column].append(values[steps])

    def _join(self, name: str, out: np.ndarray, episode: Recording, looked: bool) -> None:
        """Entries of one episode's observations [T + 1, ...] side by side into `out`, a part of column `name`."""
        rows, flat, at = len(out), out.reshape(len(out), -1), 0
        for path, space in self.joined[name]:
            where, width = episode.where("observations", path), width_of(space)
            values = episode.read("observations", path)
            if space["type"] == "Box" and space.get("dtype") == "uint8":
                values = decoded(values, (rows, *space["shape"]), where)
            if not isinstance(values, np.ndarray) or values.dtype.kind not in "biuf":
                raise UserError(f"{where} holds {getattr(values, 'dtype', 'bytes')} values, not numbers")
            if looked and space["type"] == "Box":
                self.samples.keep(f"{name}, entry {'/'.join(path)}" if path else name, values)
            if not values.ndim or len(values) != rows:
                raise UserError(
                    f"{where} has {len(values) if values.ndim else 'one'} observations for {rows - 1} steps; {rows} "
                    "are expected"
                )
            due = 1 if space["type"] == "Discrete" else width
            if values.size != rows * due:
                raise UserError(f"{where} has shape {list(values.shape)}; {due} numbers for each row are due")
            if space["type"] == "Discrete":
                values = one_hot(values.reshape(-1), width, int(space.get("start", 0)), where)
            flat[:, at : at + width] = values.reshape(rows, width)
            at += width

    def result(self) -> RawData:
        """The columns of all episodes."""
        columns = self.observations | self.columns | self.info_columns
        columns = {k: v[: self.at] for k, v in columns.items()}
        raw = RawData(columns, ends_of(self.lengths), source="minari", notes=self.samples.notes())
        raw.final_observations = np.stack(self.finals) if self.finals and self.joined["observations"] else None
        raw.streams = {"/".join(path): images.stream(self.lengths) for path, images in self.images.items()}
        raw.final_columns = {k: np.stack(v) for k, v in self.info_finals.items() if len(v) == len(self.lengths)}
        return raw


def numbered(names: Iterable[str], prefix: str) -> list[str]:
    """The names that are `prefix` and a number, by this number."""
    children = [n for n in names if n.startswith(prefix) and n[len(prefix) :].isdecimal()]
    return sorted(children, key=lambda n: int(n[len(prefix) :]))


class _Hdf5Episode:
    """The group of one episode, through h5py's low-level interface: its `Dataset` objects take three times as long for
    small arrays.
    """

    def __init__(self, file: Any, name: str) -> None:
        import h5py

        self.h5, self.file, self.name, self.label = h5py, file, name, f"{file.filename}: {name}"
        self.numbers = (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.ENUM, h5py.h5t.BITFIELD)
        self.group = h5py.h5g.open(file.id, name.encode())
        self.rewards = self.open("rewards")
        if not (shape := self.rewards.shape):
            raise UserError(f"{self.label}: 'rewards' is a single value; one for each step is due")
        self.steps = int(shape[0])

    def where(self, column: str, leaf: tuple[str, ...] = ()) -> str:
        return f"{self.label}: '{'/'.join((column, *leaf))}'"

    def open(self, path: str) -> Any:
        """The h5py.h5d.DatasetID of a column."""
        try:
            return self.h5.h5d.open(self.group, path.encode())
        except KeyError:
            raise UserError(f"{self.label} has no {path}") from None
        except ValueError as error:
            raise UserError(f"{self.label}: '{path}' cannot be opened ({error}); the file is damaged") from None

    def read(self, column: str, leaf: tuple[str, ...] = ()) -> Any:
        where, item = (
            self.where(column, leaf),
            self.rewards if column == "rewards" else self.open("/".join((column, *leaf))),
        )
        stored = item.get_type()
        kind = stored.get_class()
        if kind not in self.numbers and not (column == "observations" and kind == self.h5.h5t.VLEN):
            raise UserError(f"{where} holds {item.dtype} values, not numbers")
        refuse_absent(item, where, self.file, stored.get_size())
        if kind == self.h5.h5t.VLEN:
            return self.h5.Dataset(item)[()]
        if kind == self.h5.h5t.ENUM and item.dtype != bool:
            raise UserError(
                f"{where} holds true and false under other names or numbers than FALSE=0 and TRUE=1; the file is "
                "damaged, or write 0 and 1"
            )
        values = np.empty(item.shape, item.dtype)
        if values.size:
            item.read(self.h5.h5s.ALL, self.h5.h5s.ALL, values)
        return values

    def infos(self) -> dict[str, Any]:
        sizes: dict[str, Any] = {}

        def add(path: str, item: Any) -> None:
            numbers = isinstance(item, self.h5.Dataset) and item.dtype.kind in "biuf"
            if numbers and item.shape and item.shape[0] in (self.steps, self.steps + 1):
                sizes[f"infos/{path}"] = item.shape[1:]

        if "infos" in (group := self.file[self.name]):
            group["infos"].visititems(add)
        return sizes


class _ArrowEpisode:
    """The table of one episode: every column has T + 1 rows, of which actions, rewards and flags use T."""

    def __init__(self, folder: Path, name: str, form: str) -> None:
        self.table, self.file = read_table(folder / name, form)
        self.name, self.steps = name, self.table.num_rows - 1
        if self.steps < 0:
            raise UserError(f"{self.file} has no rows; the dataset is incomplete")

    def where(self, column: str, leaf: tuple[str, ...] = ()) -> str:
        return f"{self.file}: '{'/'.join((column, *leaf))}'"

    def read(self, column: str, leaf: tuple[str, ...] = ()) -> Any:
        import pyarrow as pa

        where = self.where(column, leaf)
        with reading(where):
            try:
                array = self.table.column(column).combine_chunks()
                for key in leaf:
                    if not pa.types.is_struct(array.type):
                        raise UserError(f"{where} is missing: {array.type} stands where the space has entries")
                    array = array.field(key)
            except KeyError:
                raise UserError(f"{where} is missing") from None
            if column == "observations" and (pa.types.is_binary(array.type) or pa.types.is_large_binary(array.type)):
                return array.to_pylist()
            values = arrow_values(array, where)
        return values if column in ("observations", "infos") else values[: self.steps]

    def infos(self) -> dict[str, Any]:
        import pyarrow as pa

        types: dict[str, Any] = {}

        def add(path: str, kind: Any) -> None:
            if pa.types.is_struct(kind):
                for field in kind:
                    add(f"{path}/{field.name}", field.type)
                return
            inner = kind
            while pa.types.is_fixed_size_list(inner) or pa.types.is_list(inner):
                inner = inner.value_type
            if pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner):
                types[path] = kind

        if "infos" in self.table.schema.names:
            add("infos", self.table.schema.field("infos").type)
        return types


def episodes(folder: Path, form: str, rows: int) -> Iterator[Recording]:
    """The episodes of a dataset in a folder, one after the other. rows: of all, as the metadata declare. Raises
    UserError."""
    if form == "hdf5":
        path = folder / "main_data.hdf5"
        if not path.is_file():
            raise UserError(f"{path} is missing; the dataset is incomplete")
        with open_hdf5(path) as file:
            for name in numbered(file, "episode_"):
                with reading(f"{path}: {name}"):
                    episode = _Hdf5Episode(file, name)
                yield episode
        return
    names = numbered((p.name for p in folder.iterdir() if p.is_dir()), "")
    if not names and rows:
        raise UserError(
            f"{folder} has no episode of format {form}, and its metadata declare {rows:,} steps; it is incomplete"
        )
    for name in names:
        yield _ArrowEpisode(folder, name, form)
