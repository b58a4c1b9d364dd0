"""The episodes of a Minari dataset, read straight from HDF5 or Arrow files into preallocated arrays."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.formats.files import arrow_values, open_hdf5
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical
from offrl.errors import UserError

Leaf = tuple[tuple[str, ...], dict[str, Any]]  # path inside the observation, and the space there


def _width(space: dict[str, Any]) -> int:
    if space["type"] == "Discrete":
        return int(space["n"])  # one-hot, as gymnasium.spaces.flatten does it
    return int(np.prod(space["shape"] if space["type"] == "Box" else space["n"]))


class Overflow(Exception):
    def __init__(self, rows: int) -> None:
        self.rows = rows


class Buffers:
    """Arrays for all steps. Observations come as T + 1 rows of which the last is put aside: the next episode overwrites it."""

    def __init__(
        self,
        rows: int,
        leaves: list[Leaf],
        goals: dict[str, list[Leaf]],
        actions: dict[str, Any],
        memory: Memory,
        name: str,
        jpeg: bool,
        infos: dict[str, tuple[str, ...]],
        with_actions: bool = True,
    ) -> None:
        self.infos, self.memory, self.with_actions = infos, memory, with_actions
        self.info_columns: dict[str, np.ndarray] = {}
        self.info_finals: dict[str, list[np.ndarray]] = {}
        self.rows, self.leaves, self.goals, self.name = rows, leaves, goals, name
        self.single = len(leaves) == 1 and not goals and leaves[0][1]["type"] == "Box"
        shape: tuple[int, ...] = (sum(_width(s) for _, s in leaves),)
        dtype: Any = np.float32
        self.jpeg = False
        if self.single and len(leaves[0][1]["shape"]) > 1:
            shape = tuple(leaves[0][1]["shape"])
            self.jpeg = jpeg and leaves[0][1]["dtype"] == "uint8" and len(shape) == 3 and shape[-1] in (1, 3)
        if self.single and leaves[0][1]["dtype"] == "uint8" and len(shape) > 1:
            dtype = np.uint8
        self.observations = memory.empty("observations", (rows + 1, *shape), dtype)
        width = (int(np.prod(actions["shape"])),) if actions["type"] == "Box" else ()
        self.actions = memory.empty("actions", (rows, *width), np.float32 if width else np.int64)
        self.rewards = memory.empty("rewards", (rows,), np.float32)
        self.flags = [np.zeros(rows, bool), np.zeros(rows, bool)]
        widths = {k: sum(_width(s) for _, s in parts) for k, parts in goals.items()}
        self.goal_columns = {k: memory.empty(k, (rows + 1, width), np.float32) for k, width in widths.items()}
        self.finals: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.at = 0

    def add(self, steps: int, read: Callable[[str, tuple[str, ...], np.ndarray | None], np.ndarray], episode: str) -> None:
        """One episode. `read(column, path, out)` fills `out` and returns it, or returns an array when `out` is None."""
        if steps == 0:  # recorded by a collector that was reset twice
            return
        start, stop = self.at, self.at + steps
        if stop > self.rows:
            raise Overflow(-1)
        if self.single and not self.jpeg:
            read("observations", self.leaves[0][0], self.observations[start : stop + 1])
        elif self.jpeg:
            for i, frame in enumerate(read("observations", self.leaves[0][0], None)):
                self.observations[start + i] = _decode(frame)
        else:
            out = self.observations[start : stop + 1]
            self._join(self.leaves, out, read, episode)
            for key, parts in self.goals.items():
                self._join(parts, self.goal_columns[key][start : stop + 1], read, episode)
        if self.with_actions:
            read("actions", (), self.actions[start:stop])
        else:
            self.actions[start:stop] = 0
        read("rewards", (), self.rewards[start:stop])
        for flags, key in zip(self.flags, ("terminations", "truncations"), strict=True):
            read(key, (), flags[start:stop])
        for name, inside in self.infos.items():
            self._add_info(name, read("infos", inside, None), steps, f"{episode}: 'infos/{'/'.join(inside)}'")
        self.finals.append(self.observations[stop].copy())
        self.lengths.append(steps)
        self.at = stop

    def _add_info(self, column: str, values: np.ndarray, steps: int, where: str) -> None:
        """T rows, or T + 1 of which the last comes after the last step and is put aside."""
        values = canonical(column, values, f"{self.name}: {where}")
        if column not in self.info_columns:
            self.info_columns[column] = self.memory.empty(column, (self.rows, *values.shape[1:]), values.dtype)
            self.info_finals[column] = []
        out = self.info_columns[column]
        if len(values) not in (steps, steps + 1) or values.shape[1:] != out.shape[1:]:
            raise UserError(f"{self.name}: {where} has shape {list(values.shape)}, expected {[steps, *out.shape[1:]]} or one row more")
        out[self.at : self.at + steps] = values[:steps]
        if len(values) > steps:
            self.info_finals[column].append(values[steps])

    def _join(
        self, leaves: list[Leaf], out: np.ndarray, read: Callable[[str, tuple[str, ...], np.ndarray | None], np.ndarray], episode: str
    ) -> None:
        """Entries of one episode's observations [T + 1, ...] side by side into `out`."""
        column, rows = 0, len(out)
        for path, space in leaves:
            width = _width(space)
            values = read("observations", path, None)
            if len(values) != rows:
                raise UserError(f"{self.name}: {episode} has {len(values)} observations for {rows - 1} steps; {rows} are expected")
            out[:, column : column + width] = (
                np.eye(width, dtype=np.float32)[values.astype(np.int64).reshape(-1) - space.get("start", 0)]
                if space["type"] == "Discrete"
                else values.reshape(rows, width)
            )
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
        ends[np.cumsum(self.lengths) - 1] = True
        raw = RawData(columns, episode_ends=ends, source="minari")
        raw.final_observations = np.stack(self.finals) if self.finals else None
        raw.final_columns = {k: np.stack(v) for k, v in self.info_finals.items() if len(v) == len(self.lengths)}
        return raw


def _decode(frame: Any) -> np.ndarray:
    """One JPEG image."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("this dataset holds JPEG images: pip install pillow") from None
    return np.asarray(Image.open(io.BytesIO(bytes(frame))))


def numbered(names: Iterator[str], prefix: str) -> list[str]:
    children = [n for n in names if n.startswith(prefix) and n[len(prefix) :].isdigit()]
    return sorted(children, key=lambda n: int(n[len(prefix) :]))


class _Hdf5Episode:
    """The group of one episode, through h5py's low-level interface: its `Dataset` objects take three times as long for small arrays."""

    def __init__(self, file: Any, name: str, where: str) -> None:
        import h5py

        self.h5, self.name, self.where = h5py, name, where
        self.group = h5py.h5g.open(file.id, name.encode())
        self.steps = int(self.open("rewards").shape[0])

    def open(self, path: str) -> Any:
        try:
            return self.h5.h5d.open(self.group, path.encode())
        except KeyError:
            raise UserError(f"{self.where}: {self.name} has no {path}") from None
        except ValueError as error:
            raise UserError(f"{self.where}: {self.name}: '{path}' cannot be opened ({error}); the file is damaged") from None

    def read(self, column: str, leaf: tuple[str, ...], out: np.ndarray | None) -> np.ndarray:
        """See `Buffers.add`. HDF5 converts on the way into `out`; what is too large for a float32 becomes infinite."""
        item = self.open("/".join((column, *leaf)))
        if out is None:
            return self.h5.Dataset(item)[()]
        if item.shape != out.shape:
            if item.shape[0] != len(out) or int(np.prod(item.shape[1:])) != int(np.prod(out.shape[1:])):
                raise UserError(f"{self.where}: {self.name}: '{column}' has shape {list(item.shape)}, expected {list(out.shape)}")
            out = out.reshape(item.shape)
        if out.dtype == bool and item.get_type().get_class() != self.h5.h5t.ENUM:
            out[:] = self.h5.Dataset(item)[()] != 0  # flags stored as numbers
        else:
            item.read(self.h5.h5s.ALL, self.h5.h5s.ALL, out, self.h5.h5t.py_create(out.dtype))
        return out


def read_hdf5(folder: Path, kind: str, buffers: Buffers) -> None:
    """Episode after episode, converted to the buffers' dtypes on the way into them."""
    path = folder / "main_data.hdf5"
    if not path.is_file():
        raise UserError(f"{path} is missing; the dataset is incomplete")
    with open_hdf5(path) as file:
        names = numbered(iter(file), "episode_")
        for name in names:
            episode = _Hdf5Episode(file, name, str(path))
            try:
                buffers.add(episode.steps, episode.read, name)
            except Overflow:
                raise Overflow(sum(_Hdf5Episode(file, n, str(path)).steps for n in names)) from None


def read_arrow(folder: Path, kind: str, buffers: Buffers) -> None:
    """Arrow or Parquet: one folder per episode; every column has T + 1 rows, of which only the observations use the last."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("this dataset is stored as Arrow: pip install pyarrow") from None
    names = numbered((p.name for p in folder.iterdir() if p.is_dir()), "")
    for index, name in enumerate(names):
        files = sorted(p for p in (folder / name).iterdir() if p.suffix == f".{kind}")
        if not files:
            raise UserError(f"{folder / name} has no .{kind} file; the dataset is incomplete")
        try:
            tables = [pq.read_table(p) if kind == "parquet" else pa.ipc.open_file(pa.memory_map(str(p))).read_all() for p in files]
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{files[0]} cannot be read ({' '.join(str(error).split())}); the file is damaged or incomplete") from None
        table = (pa.concat_tables(tables) if len(tables) > 1 else tables[0]).combine_chunks()
        steps = table.num_rows - 1

        def read(column: str, leaf: tuple[str, ...], out: np.ndarray | None) -> np.ndarray:
            where = f"{files[0]}: '{'/'.join((column, *leaf))}'"  # noqa: B023 (called at once)
            try:
                array = table.column(column).combine_chunks()  # noqa: B023
                for key in leaf:
                    array = array.field(key)
            except KeyError:
                raise UserError(f"{where} is missing") from None
            if pa.types.is_binary(array.type):
                return array.to_pylist()
            values = arrow_values(array, where)
            if out is None:
                return values
            if len(values) < len(out):
                raise UserError(f"{where} has {len(values)} rows, expected {len(out)}")
            out[:] = values[: len(out)].reshape(out.shape)
            return out

        try:
            buffers.add(steps, read, f"episode {name}")
        except Overflow:
            total = buffers.at + sum(_steps(folder / n, kind) for n in names[index:])
            raise Overflow(total) from None


def _steps(folder: Path, kind: str) -> int:
    """Steps of one episode's folder."""
    import pyarrow.dataset as ds

    return ds.dataset([str(p) for p in folder.iterdir() if p.suffix == f".{kind}"], format=kind).count_rows() - 1
