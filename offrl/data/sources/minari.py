"""Minari data sets, by id or folder, read straight from their storage: whole episodes at a time, into preallocated arrays."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.config import DatasetConfig
from offrl.data.mmap import Memory
from offrl.data.raw import RawData
from offrl.data.sources.files import arrow_values, open_hdf5
from offrl.data.sources.hdf5map import Hdf5Map, Located
from offrl.errors import UserError, nearest
from offrl.tasks import Task

ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+")
Leaf = tuple[tuple[str, ...], dict[str, Any]]  # path inside the observation, and the space there


def root() -> Path:
    """Where Minari keeps data sets: $MINARI_DATASETS_PATH or ~/.minari/datasets."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()


def installed() -> list[str]:
    """The ids found under `root()`."""
    base = root()
    if not base.is_dir():
        return []
    return sorted(str(p.parent.parent.relative_to(base)) for p in base.glob("**/data/metadata.json"))


def locate(name: str) -> Path:
    """The folder of the data set `name`, downloaded with Minari's own client when it is not there. Raises UserError if it cannot be had."""
    if not ID.fullmatch(name):
        raise UserError(f"'{name}' is no Minari id; one looks like D4RL/door/human-v2.{nearest(name, installed())}")
    folder = root() / name
    if (folder / "data" / "metadata.json").is_file():
        return folder
    existed = folder.exists()
    try:
        import minari

        minari.download_dataset(name)
    except Exception as error:  # whatever the network, the hub or the archive raise
        if not existed:
            _remove_empty(folder)
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"Minari data set '{name}' is not in {root()} and cannot be downloaded ({reason}).{nearest(name, installed())} "
            "Without a network, copy its folder there or set MINARI_DATASETS_PATH"
        ) from None
    if not (folder / "data" / "metadata.json").is_file():
        _remove_empty(folder)
        raise UserError(f"Minari data set '{name}' was not found on the server.{nearest(name, installed())}")
    return folder


def _remove_empty(folder: Path) -> None:
    """Remove a folder tree without files, and its parents while they are empty."""
    for path in sorted(folder.rglob("*"), reverse=True) if folder.is_dir() else []:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    while folder != root() and folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def data_folder(path: Path) -> Path | None:
    """The folder with metadata.json for a path that is a Minari data set, its data folder or its main_data.hdf5; else None."""
    for candidate in (path / "data", path, path.parent):
        if (candidate / "metadata.json").is_file() and "action_space" in (candidate / "metadata.json").read_text(errors="replace"):
            return candidate
    return None


def files(path: Path) -> list[Path]:
    """The files of the data set at `path`, for which `data_folder` finds a folder."""
    folder = data_folder(path)
    assert folder is not None
    if (folder / "main_data.hdf5").is_file():
        return [folder / "metadata.json", folder / "main_data.hdf5"]
    episodes = (Path(base) / name for base, _, names in os.walk(folder) for name in names if base != str(folder))
    return [folder / "metadata.json", *sorted(episodes)]


def read(path: Path, config: DatasetConfig, memory: Memory, name: str = "") -> RawData:
    """The data set in the folder `path`."""
    folder = data_folder(path)
    if folder is None:
        raise UserError(f"{path} holds no Minari data set (no data/metadata.json)")
    try:
        meta = json.loads((folder / "metadata.json").read_text())
        actions, observations = json.loads(meta["action_space"]), json.loads(meta["observation_space"])
        rows, kind = int(meta["total_steps"]), meta.get("data_format", "hdf5")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / 'metadata.json'} is damaged ({type(error).__name__}: {error})") from None
    name = name or str(meta.get("dataset_id", folder.parent.name))
    leaves, goals, keys = _observation_leaves(observations, config, name)
    discrete = actions["type"] == "Discrete"
    if actions["type"] not in ("Box", "Discrete") or actions.get("start", 0) != 0:
        kind_of = actions["type"] + (f" from {actions['start']}" if actions.get("start") else "")
        raise UserError(f"{name}: actions of the space {kind_of} are not supported (Box and Discrete from 0 are)")
    jpeg = bool(meta.get("jpeg_encoding"))
    reader = _read_hdf5 if kind == "hdf5" else _read_arrow
    buffers = _Buffers(rows, leaves, goals, actions, memory, name, jpeg)
    try:
        reader(folder, kind, buffers)
    except _Overflow as more:  # the metadata promised fewer steps than there are
        buffers = _Buffers(more.rows, leaves, goals, actions, memory, name, jpeg)
        reader(folder, kind, buffers)
    raw = buffers.result()
    raw.name, raw.path, raw.version, raw.discrete = name, str(folder), str(meta.get("minari_version", "")), discrete
    if discrete:
        raw.num_actions = int(actions["n"])
    else:
        raw.action_low, raw.action_high = (np.asarray(actions[k], np.float32).reshape(-1) for k in ("low", "high"))
    raw.task = _task(meta, name, keys)
    return raw


def _task(meta: dict[str, Any], name: str, keys: tuple[str, ...]) -> Task:
    """The environment Minari recorded, and its reference scores where it has them."""
    spec = json.loads(meta["env_spec"]) if meta.get("env_spec") else {}
    wrappers = [w["name"] for w in spec.get("additional_wrappers") or () if isinstance(w, dict) and "name" in w]
    low, high = meta.get("ref_min_score"), meta.get("ref_max_score")
    if low is None or high is None:  # one alone normalises nothing
        low = high = None
    return Task(
        name=name,
        env_id=spec.get("id"),
        env_kwargs=dict(spec.get("kwargs") or {}),
        max_episode_steps=spec.get("max_episode_steps"),
        ref_min=low,
        ref_max=high,
        ref_label="" if low is None else "Minari",
        observation_keys=keys,
        note=f"the recorded wrappers {', '.join(wrappers)} are left out" if wrappers else "",
    )


def _observation_leaves(space: dict[str, Any], config: DatasetConfig, name: str) -> tuple[list[Leaf], dict[str, Leaf], tuple[str, ...]]:
    """The entries that make the flat observation, the goals, and the keys of the top level (none when it is no Dict)."""
    if space["type"] != "Dict":
        if config.observation_keys:
            raise UserError(f"{name}: dataset.observation_keys is set, but the observations are no Dict")
        return _leaves(space, (), name), {}, ()
    there = space["subspaces"]
    for key in config.observation_keys:
        if key not in there:
            raise UserError(f"{name} has no observation '{key}'.{nearest(key, there)} It has: {', '.join(sorted(there))}")
    keys = tuple(config.observation_keys) or tuple(sorted(there))
    leaves = [leaf for key in keys for leaf in _leaves(there[key], (key,), name)]
    boxes = [k for k in ("achieved_goal", "desired_goal") if k in there and there[k]["type"] == "Box"]
    goals: dict[str, Leaf] = {k + "s": ((k,), there[k]) for k in boxes}
    return leaves, goals, keys


def _leaves(space: dict[str, Any], path: tuple[str, ...], name: str) -> list[Leaf]:
    if space["type"] == "Dict":
        return [leaf for key in sorted(space["subspaces"]) for leaf in _leaves(space["subspaces"][key], (*path, key), name)]
    if space["type"] not in ("Box", "Discrete", "MultiBinary"):
        where = f"the observation '{'/'.join(path)}'" if path else "the observation"
        raise UserError(f"{name}: {where} is a {space['type']} space; choose others with dataset.observation_keys=[...]")
    return [(path, space)]


def _width(space: dict[str, Any]) -> int:
    if space["type"] == "Discrete":
        return int(space["n"])  # one-hot, as gymnasium.spaces.flatten does it
    return int(np.prod(space["shape"] if space["type"] == "Box" else space["n"]))


class _Overflow(Exception):
    def __init__(self, rows: int) -> None:
        self.rows = rows


class _Buffers:
    """Arrays for all steps. Observations come as T + 1 rows of which the last is put aside: the next episode overwrites it."""

    def __init__(
        self, rows: int, leaves: list[Leaf], goals: dict[str, Leaf], actions: dict[str, Any], memory: Memory, name: str, jpeg: bool
    ) -> None:
        self.rows, self.leaves, self.goals, self.actions_space, self.name = rows, leaves, goals, actions, name
        self.single = len(leaves) == 1 and not goals and leaves[0][1]["type"] == "Box"
        shape: tuple[int, ...] = (sum(_width(s) for _, s in leaves),)
        dtype: Any = np.float32
        self.jpeg = False
        if self.single and len(leaves[0][1]["shape"]) > 1:
            shape = tuple(leaves[0][1]["shape"])
            self.jpeg = jpeg and leaves[0][1]["dtype"] == "uint8" and len(shape) == 3 and shape[-1] in (1, 3)
        if self.single and leaves[0][1]["dtype"] == "uint8":
            dtype = np.uint8
        self.observations = memory.empty("observations", (rows + 1, *shape), dtype)
        width = (int(np.prod(actions["shape"])),) if actions["type"] == "Box" else ()
        self.actions = memory.empty("actions", (rows, *width), np.float32 if width else np.int64)
        self.rewards = memory.empty("rewards", (rows,), np.float32)
        self.flags = [np.zeros(rows, bool), np.zeros(rows, bool)]
        self.goal_columns = {k: memory.empty(k, (rows + 1, _width(s)), np.float32) for k, (_, s) in goals.items()}
        self.finals: list[np.ndarray] = []
        self.lengths: list[int] = []
        self.at = 0

    def add(self, steps: int, read: Callable[[str, tuple[str, ...], np.ndarray | None], np.ndarray], episode: str) -> None:
        """One episode. `read(column, path, out)` fills `out` and returns it, or returns an array when `out` is None."""
        if steps == 0:  # recorded by a collector that was reset twice
            return
        start, stop = self.at, self.at + steps
        if stop > self.rows:
            raise _Overflow(-1)
        if self.single and not self.jpeg:
            read("observations", self.leaves[0][0], self.observations[start : stop + 1])
        elif self.jpeg:
            for i, frame in enumerate(read("observations", self.leaves[0][0], None)):
                self.observations[start + i] = _decode(frame)
        else:
            column = 0
            for path, space in self.leaves:
                width = _width(space)
                out = self.observations[start : stop + 1, column : column + width]
                values = read("observations", path, None)
                if len(values) != steps + 1:
                    raise UserError(f"{self.name}: {episode} has {len(values)} observations for {steps} steps; {steps + 1} are expected")
                out[:] = (
                    np.eye(width, dtype=np.float32)[values.astype(np.int64).reshape(-1) - space.get("start", 0)]
                    if space["type"] == "Discrete"
                    else (values.reshape(steps + 1, width))
                )
                column += width
            for key, (path, _) in self.goals.items():
                self.goal_columns[key][start : stop + 1] = read("observations", path, None).reshape(steps + 1, -1)
        read("actions", (), self.actions[start:stop])
        read("rewards", (), self.rewards[start:stop])
        for flags, key in zip(self.flags, ("terminations", "truncations"), strict=True):
            read(key, (), flags[start:stop])
        self.finals.append(self.observations[stop].copy())
        self.lengths.append(steps)
        self.at = stop

    def result(self) -> RawData:
        n = self.at
        columns = {
            "observations": self.observations[:n],
            "actions": self.actions[:n],
            "rewards": self.rewards[:n],
            "terminations": self.flags[0][:n],
            "truncations": self.flags[1][:n],
        }
        columns |= {k: v[:n] for k, v in self.goal_columns.items()}
        ends = np.zeros(n, bool)
        ends[np.cumsum(self.lengths) - 1] = True
        raw = RawData(columns, episode_ends=ends, source="minari")
        raw.final_observations = np.stack(self.finals) if self.finals else None
        return raw


def _decode(frame: Any) -> np.ndarray:
    """One JPEG image."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError("this data set holds JPEG images: pip install pillow") from None
    return np.asarray(Image.open(io.BytesIO(bytes(frame))))


def _numbered(names: Iterator[str], prefix: str) -> list[str]:
    found = [n for n in names if n.startswith(prefix) and n[len(prefix) :].isdigit()]
    return sorted(found, key=lambda n: int(n[len(prefix) :]))


class _Hdf5Reader:
    """Reads from where `Hdf5Map` found the data; what it did not find, through h5py's low-level interface."""

    def __init__(self, file: Any, names: list[str], where: str, located: Hdf5Map) -> None:
        import h5py

        self.h5, self.file, self.names, self.where = h5py, file, names, where
        self.types = {np.dtype(t): h5py.h5t.py_create(np.dtype(t)) for t in (np.float32, np.bool_, np.int64, np.uint8)}
        self.map = located
        self.located: dict[tuple[str, ...], Located | None] = {}
        self.index, self.group = 0, None

    def select(self, index: int) -> int:
        """Turn to an episode by its position in `names`; the number of its steps."""
        self.index, self.group = index, None
        found = self.find(("rewards",))
        return found.rows[index] if found is not None else int(self.open("rewards").shape[0])

    def find(self, path: tuple[str, ...]) -> Located | None:
        """Where the dataset lies, if that is known for the current episode."""
        if path not in self.located:
            self.located[path] = self.map.locate(path)
        found = self.located[path]
        return found if found is not None and found.rows[self.index] >= 0 else None

    def open(self, path: str) -> Any:
        name = self.names[self.index]
        try:
            if self.group is None:
                self.group = self.h5.h5g.open(self.file.id, name.encode())
            return self.h5.h5d.open(self.group, path.encode())
        except KeyError:
            raise UserError(f"{self.where}: {name} has no {path}") from None
        except ValueError as error:
            raise UserError(f"{self.where}: {name}: '{path}' cannot be opened ({error}); the file is damaged") from None

    def read(self, column: str, leaf: tuple[str, ...], out: np.ndarray | None) -> np.ndarray:
        """See `_Buffers.add`."""
        path = (column, *leaf)
        found = self.find(path)
        item: Any = self.open("/".join(path)) if found is None else None
        if out is None:
            return found.read(self.index) if found is not None else self.h5.Dataset(item)[()]
        shape = (found.rows[self.index], *found.tail) if found is not None else item.shape
        if shape != out.shape:
            if shape[0] != len(out) or int(np.prod(shape[1:])) != int(np.prod(out.shape[1:])):
                name = self.names[self.index]
                raise UserError(f"{self.where}: {name}: '{column}' has shape {list(shape)}, expected {list(out.shape)}")
            out = out.reshape(shape)
        if found is not None and _converts_alike(found.dtype, out.dtype):
            return found.read(self.index, out)
        if found is not None and out.dtype == bool:
            out[:] = found.read(self.index) != 0  # flags stored as numbers
            return out
        item = item or self.open("/".join(path))
        if out.dtype == bool and item.get_type().get_class() != self.h5.h5t.ENUM:
            out[:] = self.h5.Dataset(item)[()] != 0
        else:
            item.read(self.h5.h5s.ALL, self.h5.h5s.ALL, out, self.types[out.dtype])
        return out


def _converts_alike(stored: np.dtype, wanted: np.dtype) -> bool:
    """True where NumPy's conversion gives what HDF5's does, to the bit."""
    if stored == wanted:
        return True
    return (wanted == np.float32 and stored.kind in "fiu") or (wanted == np.int64 and stored.kind in "iu" and stored != np.uint64)


def _read_hdf5(folder: Path, kind: str, buffers: _Buffers) -> None:
    """Episode after episode, converted to the buffers' dtypes on the way into them."""
    path = folder / "main_data.hdf5"
    if not path.is_file():
        raise UserError(f"{path} is missing; the data set is incomplete")
    with open_hdf5(path) as file, np.errstate(over="ignore"):  # what is too large for a float32 becomes infinite, as in HDF5
        names = _numbered(iter(file), "episode_")
        with Hdf5Map(file, names) as located:
            reader = _Hdf5Reader(file, names, str(path), located)
            for index, name in enumerate(names):
                steps = reader.select(index)
                try:
                    buffers.add(steps, reader.read, name)
                except _Overflow:
                    raise _Overflow(sum(reader.select(i) for i in range(len(names)))) from None


def _read_arrow(folder: Path, kind: str, buffers: _Buffers) -> None:
    """Arrow or Parquet: one folder per episode; every column has T + 1 rows, of which only the observations use the last."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("this data set is stored as Arrow: pip install pyarrow") from None
    names = _numbered((p.name for p in folder.iterdir() if p.is_dir()), "")
    for index, name in enumerate(names):
        files = sorted(p for p in (folder / name).iterdir() if p.suffix == f".{kind}")
        if not files:
            raise UserError(f"{folder / name} has no .{kind} file; the data set is incomplete")
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
        except _Overflow:
            total = buffers.at + sum(_steps(folder / n, kind) for n in names[index:])
            raise _Overflow(total) from None


def _steps(folder: Path, kind: str) -> int:
    """Steps of one episode's folder."""
    import pyarrow.dataset as ds

    return ds.dataset([str(p) for p in folder.iterdir() if p.suffix == f".{kind}"], format=kind).count_rows() - 1
