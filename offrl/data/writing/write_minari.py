"""`RawData` in Minari's HDF5 layout: one group of arrays for each episode, and metadata.json, which Minari itself
begins.

Minari's own writer makes every array one that can grow, which takes several times as long and as much disk where
episodes are short. Here each is written in one piece, through h5py's low-level interface.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.hdf5_sink import new_hdf5
from offrl.data.formats import minari as source
from offrl.data.formats.provenance import INFOS, Record, dict_space, extra_columns, to_plain, written_truncations
from offrl.data.raw import RawData
from offrl.errors import UserError
from offrl.system import trust
from offrl.tasks.task import Task

# keys of metadata.json that the storage writes, or that follow from the record
_OURS = (*source.NOT_ABOUT, "observation_space", "env_id", "env_kwargs", "ref_label")


def write(
    folder: Path, data_id: str, raw: RawData, ends: np.ndarray, record: Record, advance: Callable[[int], None]
) -> None:
    """The dataset `data_id` in a new folder. Raises UserError where the installed Minari cannot hold it exactly.

    Where the final observation of an episode is not known, its last observation stands there twice; the record says so.
    """
    import gymnasium as gym
    import minari
    from minari.dataset.minari_storage import MinariStorage

    observation_space, split = _observation_space(raw, record)
    shape = record.spec.observation_shape
    options: dict[str, Any] = {}
    if "jpeg_encoding" in inspect.signature(MinariStorage.new).parameters:
        options["jpeg_encoding"] = False
    elif raw.columns["observations"].dtype == np.uint8 and len(shape) in (2, 3):
        raise UserError(
            f"{raw.where}: Minari {minari.__version__} keeps images as JPEG, which loses bits: pip install "
            "'minari>=0.5.4'"
        )
    if record.spec.discrete:
        action_space: gym.Space = gym.spaces.Discrete(record.spec.num_actions)
    else:
        low, high = record.spec.action_bounds
        action_space = gym.spaces.Box(low, high, dtype=np.float32)
    spaces = observation_space, action_space
    meta = _about(raw, record) | {source.RECORD: record.to_json()}
    episodes = _episodes(raw, ends, record, split, advance)
    write_dataset(folder, data_id, spaces, episodes, raw.rows, int(ends.sum()), meta, **options)


def write_dataset(
    folder: Path,
    data_id: str,
    spaces: tuple[Any, Any],
    episodes: Iterator[dict[str, Any]],
    rows: int,
    count: int,
    meta: Mapping[str, Any],
    **options: Any,
) -> None:
    """A dataset of `count` episodes with `rows` steps in a new folder. spaces: of observations and actions. meta: what
    stands in metadata.json besides. options: of Minari's storage."""
    import minari
    from minari.dataset.minari_storage import MinariStorage

    data = folder / "data"
    data.mkdir(parents=True)
    MinariStorage.new(data, *spaces, data_format="hdf5", **options)
    write_episodes(data / "main_data.hdf5", episodes)
    path = data / "metadata.json"
    size = sum(p.stat().st_size for p in data.iterdir()) / 1e6
    sizes = {"total_steps": rows, "total_episodes": count, "dataset_size": round(size, 1)}
    names = {"dataset_id": data_id, "minari_version": str(minari.__version__)}
    path.write_text(json.dumps({**meta, **json.loads(path.read_text()), **sizes, **names}))


def add_namespaces(folder: Path, data_id: str) -> None:
    """Minari keeps a file in each folder between its root and a dataset; write those that are missing."""
    for depth in range(1, data_id.count("/") + 1):
        file = folder.parents[depth - 1] / "namespace_metadata.json"
        if folder.as_posix().endswith(f"/{data_id}") and not file.exists():
            file.write_text("{}")


def write_episodes(path: Path, episodes: Iterator[dict[str, Any]]) -> None:
    """The groups episode_0, episode_1, ... with their arrays, and how many steps each has."""
    from h5py import h5a, h5d, h5g, h5p, h5s, h5t

    types: dict[Any, Any] = {}
    scalar, timeless = h5s.create(h5s.SCALAR), h5p.create(h5p.DATASET_CREATE)
    timeless.set_obj_track_times(False)  # the same data make the same file

    def attribute(group: Any, key: bytes, value: int) -> None:
        h5a.create(group, key, h5t.NATIVE_INT64, scalar).write(np.array(value, np.int64))

    def put(group: Any, name: str, value: Any) -> None:
        if isinstance(value, dict):
            inner = h5g.create(group, name.encode())
            for key, part in value.items():
                put(inner, key, part)
            return
        value = np.ascontiguousarray(value)
        kind = types.setdefault(value.dtype, h5t.py_create(value.dtype, logical=True))
        item = h5d.create(group, name.encode(), kind, h5s.create_simple(value.shape), timeless)
        item.write(h5s.ALL, h5s.ALL, value)

    with new_hdf5(path) as (file, sink):
        for number, episode in enumerate(episodes):
            group = h5g.create(file.id, f"episode_{number}".encode())
            attribute(group, b"id", number)
            attribute(group, b"total_steps", len(episode["rewards"]))
            for name, value in episode.items():
                put(group, name, value)
            sink.check()


def _episodes(
    raw: RawData, ends: np.ndarray, record: Record, split: Callable[[np.ndarray], Any], advance: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    """The data that Minari stores of each episode: views of the columns, and copies of one episode's observations."""
    columns, last = raw.columns, np.flatnonzero(ends)
    observations, successors = columns["observations"], columns.get("next_observations")
    terminations = columns.get("terminations", np.zeros(raw.rows, bool))
    truncations = written_truncations(raw, ends)
    extra = {name: tuple(name.removeprefix(INFOS).split("/")) for name in extra_columns(record)}
    if len(set(extra.values())) < len(extra):
        raise UserError(
            f"{raw.where}: two columns have one name, once with and once without {INFOS}; rename one of them"
        )
    unknown = set(record.unknown)
    start = 0
    for episode, stop in enumerate((last + 1).tolist()):
        rows = slice(start, stop)
        if successors is not None and episode not in unknown:
            final = successors[stop - 1 : stop]
        elif successors is None and raw.final_observations is not None:
            final = raw.final_observations[episode : episode + 1]
        else:
            final = observations[stop - 1 : stop]
        infos: dict[str, Any] = {}
        for name, path in extra.items():
            ending = (
                raw.final_columns[name][episode : episode + 1]
                if name in record.final_columns
                else columns[name][stop - 1 : stop]
            )
            node = infos
            for key in path[:-1]:
                node = node.setdefault(key, {})
            parts = [columns[name][rows], ending]
            if name == "costs":  # a row for the reset, as Minari's collector writes
                parts = [np.zeros_like(ending), columns[name][rows]]
            node[path[-1]] = np.concatenate(parts)
        yield {
            "observations": split(np.concatenate([observations[rows], final])),
            "actions": columns["actions"][rows],
            "rewards": columns["rewards"][rows],
            "terminations": terminations[rows],
            "truncations": truncations[rows],
            "infos": infos,
        }
        advance(sum(c[rows].nbytes for c in columns.values()))
        start = stop


def _observation_space(raw: RawData, record: Record) -> tuple[Any, Callable[[np.ndarray], Any]]:
    """The space, and how rows of observations are brought into its form."""
    from gymnasium import spaces

    space, shape, dtype = dict_space(record), record.spec.observation_shape, raw.columns["observations"].dtype
    if space is not None:
        boxes: dict[str, Any] = {}
        for key, box in sorted(space["subspaces"].items()):
            low, high = (np.asarray(box[k], np.float32).reshape(box["shape"]) for k in ("low", "high"))
            boxes[key] = spaces.Box(low, high, tuple(box["shape"]), np.float32)
        bounds = np.cumsum([math.prod(box.shape) for box in boxes.values()])[:-1]

        def split(rows: np.ndarray) -> Any:
            parts = zip(boxes.items(), np.split(rows, bounds, 1), strict=True)
            return {key: np.ascontiguousarray(part).reshape(-1, *box.shape) for (key, box), part in parts}

        return spaces.Dict(boxes), split
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, shape, dtype.type), lambda rows: rows


def _about(raw: RawData, record: Record) -> dict[str, Any]:
    """Further metadata of Minari: environment, reference scores, and the description of the data."""
    task = record.spec.task
    meta = {
        k: v for k, v in to_plain(record.about, "about").items() if k not in _OURS and not k.startswith("metadata/")
    }
    for key in ("author", "author_email"):
        if isinstance(meta.get(key), str):
            meta[key] = [meta[key]]
    meta.pop("ref_min_score", None), meta.pop("ref_max_score", None)
    for key in ("env_spec", "eval_env_spec"):
        if key in meta and not isinstance(meta[key], str):
            meta[key] = json.dumps(meta[key])
    if task is not None and task.env_id and not _names(meta.get("env_spec"), task.env_id):
        meta.pop("env_spec", None)
    meta |= task_metadata(task, "env_spec" in meta, raw.warn)
    meta.setdefault("description", f"{raw.name or 'data'}, written by offrl")
    return meta


def task_metadata(task: Task | None, described: bool, warn: Callable[[str], None]) -> dict[str, Any]:
    """The reference scores of a task, and its environment unless that is `described` already."""
    if task is None:
        return {}
    meta: dict[str, Any] = {}
    if task.ref_min is not None and task.ref_max is not None:
        meta = {"ref_min_score": task.ref_min, "ref_max_score": task.ref_max}
    if task.env_id and not described:
        if (spec := env_spec(task)) is not None:
            return {**meta, "env_spec": spec}
        reason = (
            "is not installed here"
            if trust.importable(str(task.env_id))
            else "is named by a file, for which its module is not imported"
        )
        warn(f"environment '{task.env_id}' {reason}: the metadata get no env_spec (offrl still knows its name)")
    return meta


def _names(spec: str | None, env_id: str) -> bool:
    try:
        return bool(spec) and json.loads(str(spec)).get("id") == env_id
    except ValueError:
        return False


def env_spec(task: Task) -> str | None:
    """Gymnasium's description of the task's environment as JSON, or None where it is not installed, has no JSON form,
    or only a file names the module that would be imported."""
    import gymnasium as gym

    from offrl.tasks.environments import ROBOTICS, quiet, register_robotics

    assert task.env_id is not None
    module, colon, name = task.env_id.rpartition(":")
    try:
        with quiet():
            trust.check_environment(task.env_id)
            if colon:
                importlib.import_module(module)
            elif name not in gym.registry and name.startswith(ROBOTICS):
                register_robotics(name)
            spec = copy.deepcopy(gym.spec(name))
        spec.kwargs = {**spec.kwargs, **task.env_kwargs}
        if task.max_episode_steps is not None:
            spec.max_episode_steps = task.max_episode_steps
        return spec.to_json()
    except Exception:  # not installed, not to be imported, or a callable as its entry point
        return None
