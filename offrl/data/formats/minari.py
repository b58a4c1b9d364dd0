"""Minari datasets, by id or folder, read straight from their storage: whole episodes at a time, into preallocated
arrays.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import FREE, reading
from offrl.data.containers.plain_files import refuse_link
from offrl.data.formats.minari_episodes import Buffers, Leaf, Overflow, episodes
from offrl.data.formats.minari_images import Images, is_image
from offrl.data.formats.minari_infos import costs_of
from offrl.data.formats.minari_spaces import Metadata, load_metadata, width_of
from offrl.data.formats.provenance import INFOS, Record, extra_columns, fits, read_record, restore
from offrl.data.memory import Memory, next_rows
from offrl.data.raw import RawData
from offrl.errors import UserError, nearest, some
from offrl.settings.dataset import DatasetConfig
from offrl.system import trust
from offrl.tasks.entries import OWN_ORDER, entries
from offrl.tasks.task import Task, recorded_arguments

ID = re.compile(r"(?:[\w-]+/)*[\w-]+-v\d+")
FLATTEN = "FlattenObservation"
RECORD = "offrl"  # in metadata.json: see offrl.data.formats.provenance
NOT_ABOUT = (
    "total_episodes",
    "total_steps",
    "dataset_size",
    "data_format",
    "jpeg_encoding",
    "dataset_id",
    "minari_version",
    "action_space",
    RECORD,
)


def root() -> Path:
    """The folder of Minari's datasets: $MINARI_DATASETS_PATH or ~/.minari/datasets."""
    return Path(os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets").expanduser()


def installed() -> list[str]:
    """The ids found under `root()`."""
    base = root()
    if not base.is_dir():
        return []
    return sorted(str(p.parent.parent.relative_to(base)) for p in base.glob("**/data/metadata.json"))


def locate(name: str) -> Path:
    """The folder of the dataset `name`, downloaded with Minari's own client when it is not there. Raises UserError if
    it cannot be had.
    """
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
            f"Minari dataset '{name}' is not in {root()} and cannot be downloaded "
            f"({reason}).{nearest(name, installed())} Without a network, copy its folder there or set "
            "MINARI_DATASETS_PATH"
        ) from None
    if not (folder / "data" / "metadata.json").is_file():
        _remove_empty(folder)
        raise UserError(f"Minari dataset '{name}' was not found on the server.{nearest(name, installed())}")
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
    """The folder with metadata.json for a path that is a Minari dataset, its data folder or its main_data.hdf5; else
    None.
    """
    for candidate in (path / "data", path, path.parent):
        file = candidate / "metadata.json"
        with reading(file):
            if file.is_file() and (size := file.stat().st_size) > FREE:
                raise UserError(f"{file} has {size:,} bytes, which no metadata have")
            if file.is_file() and "action_space" in file.read_text(errors="replace"):
                return candidate
    return None


def refuse_links(path: Path) -> None:
    """Raises UserError for a link in the dataset at `path` that leads out of it, and for what is neither file nor
    folder. The folder that a person typed may be a link."""
    folder = data_folder(path)
    assert folder is not None
    if path.is_dir():
        refuse_link(folder, path)
    trust.check_folder(folder, of="dataset")


def files(path: Path) -> list[Path]:
    """The files of the dataset at `path`, for which `data_folder` finds a folder."""
    folder = data_folder(path)
    assert folder is not None
    if (folder / "main_data.hdf5").is_file():
        return [folder / "metadata.json", folder / "main_data.hdf5"]
    episodes = (Path(base) / name for base, _, names in os.walk(folder) for name in names if base != str(folder))
    return [folder / "metadata.json", *sorted(episodes)]


def read(path: Path, config: DatasetConfig, memory: Memory, name: str = "", with_actions: bool = True) -> RawData:
    """The dataset in the folder `path`. Without actions their column is zeros, whether or not there are any."""
    folder = data_folder(path)
    if folder is None:
        raise UserError(f"{path} holds no Minari dataset (no data/metadata.json)")
    metadata = load_metadata(folder)
    meta, actions, observations, kind = metadata.values, metadata.actions, metadata.observations, metadata.format
    name = name or str(meta.get("dataset_id", folder.parent.name))
    leaves, goals, keys = _observation_leaves(observations, config, name)
    pictures, unused = [leaf for leaf in leaves if leaf[0] and is_image(leaf[1])], list[str]()
    leaves = [leaf for leaf in leaves if leaf not in pictures]
    if pictures and leaves and not config.observation_keys:
        keys, unused = tuple("/".join(path) for path, _ in leaves), ["/".join(path) for path, _ in pictures]
        pictures = []
    images = {path: Images(space, f"{name}: '{'/'.join(path)}'") for path, space in pictures}
    if not images and not sum(width_of(space) for _, space in leaves):
        raise UserError(f"{name}: the observations hold no numbers; choose others with dataset.observation_keys=[...]")
    discrete, start = actions["type"] == "Discrete", int(actions.get("start", 0))
    if actions["type"] not in ("Box", "Discrete"):
        raise UserError(f"{name}: actions of the space {actions['type']} are not supported (Box and Discrete are)")
    record = record_of(meta, folder)
    infos = _infos(config, record, name)
    if record is None:
        infos = costs_of(folder, kind) | infos
    size = sum(file.stat().st_size for file in files(path))

    def read_episodes(rows: int, count: int) -> RawData:
        buffers = Buffers(rows, leaves, images, count, goals, actions, memory, name, size, infos, with_actions)
        for episode in episodes(folder, kind, metadata.rows):
            with reading(f"{folder}: {episode.name}"):
                buffers.add(episode)
        return buffers.result()

    try:
        raw = read_episodes(metadata.rows, int(meta.get("total_episodes", 0)))
    except Overflow:  # the metadata promised fewer steps or episodes than there are
        lengths = [episode.steps for episode in episodes(folder, kind, metadata.rows)]
        raw = read_episodes(sum(lengths), len(lengths))
    raw.name, raw.path, raw.version, raw.discrete = name, str(folder), str(meta.get("minari_version", "")), discrete
    if discrete:
        raw.num_actions = int(actions["n"])
        if start and with_actions:
            raw.columns["actions"] -= start  # as the environment numbers them; ours count from 0
    else:
        raw.action_low, raw.action_high = (np.asarray(actions[k], np.float32).reshape(-1) for k in ("low", "high"))
    raw.task = replace(recorded_task(metadata, name, keys), action_start=start or None)
    if raw.task.note:
        raw.note(raw.task.note)
    if raw.task.observation_keys == OWN_ORDER:
        raw.note(
            f"the recorded wrapper {FLATTEN} joined the observations: a Dict's entries are in the environment's own "
            "order"
        )
    if unused:
        raw.left_out = unused
        raw.note(
            f"not used: {some(unused)} (images are streams where they are asked for: "
            f"dataset.observation_keys=[{','.join((*keys, *unused))}])"
        )
    raw.metadata = {
        k: v
        for k, v in meta.items()
        if k not in NOT_ABOUT and (k != "observation_space" or observations["type"] == "Dict")
    }
    if record is not None and raw.episode_ends is not None and fits(raw, record, raw.episode_ends):
        _restore(raw, record, config, memory)
    return raw


def record_of(meta: dict[str, Any], folder: Path) -> Record | None:
    """The record that offrl made when it wrote the dataset; None for other programs' datasets."""
    if RECORD not in meta:
        return None
    return read_record(lambda: meta[RECORD], f"{folder / 'metadata.json'}: '{RECORD}'")


def _infos(config: DatasetConfig, record: Record | None, name: str) -> dict[str, tuple[str, ...]]:
    """Columns that lie under Minari's infos, with their path there: those offrl put there, and those that
    `dataset.fields` asks for.
    """
    infos = {
        c: tuple(c.removeprefix(INFOS).split("/"))
        for c in (extra_columns(record) if record else ())
        if not c.startswith(INFOS)
    }
    for column, key in config.fields.items():
        if not str(key).startswith(INFOS):
            raise UserError(
                f"{name}: dataset.fields.{column}={key}: of a Minari dataset only infos/... can be chosen; the rest is "
                "fixed"
            )
        infos[column] = tuple(str(key).removeprefix(INFOS).split("/"))
    return infos


def _restore(raw: RawData, record: Record, config: DatasetConfig, memory: Memory) -> None:
    """Undo what `offrl.data.writing.write_minari` added to fit the layout, as the record says; in place."""
    ends, finals = raw.episode_ends, raw.final_observations
    assert ends is not None and raw.task is not None
    # entries of a Dict in the file
    chosen = config.observation_keys and raw.task.observation_keys == tuple(config.observation_keys)
    if "next_observations" in record.columns:
        last = np.flatnonzero(ends)
        observations = raw.columns["observations"]
        if record.successors == "next row":
            successors = next_rows(observations, memory)
            successors[last] = finals
            raw.columns["next_observations"] = successors
        successors = raw.columns["next_observations"]
        successors[last[record.unknown]] = observations[(last[record.unknown] + 1) % raw.rows]
    if not record.finals:
        raw.final_observations = None
    raw.final_columns = {
        k: v for k, v in raw.final_columns.items() if k in record.final_columns and k != "next_observations"
    }
    restore(raw, record, ends)
    if chosen and raw.task is not None:
        raw.task = replace(raw.task, observation_keys=tuple(config.observation_keys))


def recorded_task(metadata: Metadata, name: str, keys: tuple[str, ...]) -> Task:
    """The environment Minari recorded, and its reference scores where it has them."""
    meta, spec = metadata.values, metadata.env_spec
    wrappers = [str(w["name"]) for w in spec.get("additional_wrappers") or () if isinstance(w, dict) and "name" in w]
    joined = FLATTEN in wrappers and not keys
    if joined:
        wrappers.remove(FLATTEN)
    low, high = meta.get("ref_min_score"), meta.get("ref_max_score")
    if low is None or high is None:  # one alone normalises nothing
        low = high = None
    return Task(
        name=name,
        env_id=spec.get("id"),
        env_kwargs=recorded_arguments(spec.get("kwargs") or {}),
        max_episode_steps=spec.get("max_episode_steps"),
        ref_min=low,
        ref_max=high,
        ref_label="" if low is None else "Minari",
        observation_keys=OWN_ORDER if joined else keys,
        note=f"the recorded wrappers {', '.join(wrappers)} are left out" if wrappers else "",
    )


def _observation_leaves(
    space: dict[str, Any], config: DatasetConfig, name: str
) -> tuple[list[Leaf], dict[str, list[Leaf]], tuple[str, ...]]:
    """The entries that make the flat observation, those of the goals, and the keys of the top level (none when it is no
    Dict).
    """
    if space["type"] != "Dict":
        return _leaves(space, (), name), {}, ()
    subspaces = space["subspaces"]
    keys = tuple(config.observation_keys) or tuple(sorted(subspaces))
    kinds = [k for k in ("achieved_goal", "desired_goal") if k in subspaces and subspaces[k]["type"] in ("Box", "Dict")]
    goals = {k + "s": _leaves(space, (k,), name) for k in kinds}
    goals = {k: leaves for k, leaves in goals.items() if not any(is_image(leaf) for _, leaf in leaves)}
    return _leaves(space, keys, name), goals, keys


def _leaves(space: dict[str, Any], keys: tuple[str, ...], name: str) -> list[Leaf]:
    leaves: list[Leaf] = [((), space)]
    if keys:
        leaves = entries(space, keys, f"{name}: the observations", lambda s: s.get("subspaces"))
    for path, leaf in leaves:
        if leaf["type"] not in ("Box", "Discrete", "MultiBinary"):
            where, cure = "the observation", "write what gymnasium.spaces.flatten makes of it into a Box"
            if path:
                where, cure = f"the observation '{'/'.join(path)}'", "choose others with dataset.observation_keys=[...]"
            raise UserError(f"{name}: {where} is a {leaf['type']} space; {cure}")
    return leaves
