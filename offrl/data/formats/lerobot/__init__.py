"""LeRobot datasets, v2.1 and v3.0 (huggingface/lerobot at 7427f31, src/lerobot/datasets), read without that package.

Their rows hold what is observed, the action, and where a recording has them `next.reward` and `next.success`, which
followed that action. What follows an episode's last row is not recorded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from offrl.data.dataset import ColumnSpec
from offrl.data.formats.lerobot.meta import Feature, LerobotMetadata, listed, load
from offrl.data.formats.lerobot.rows import LerobotRows
from offrl.data.formats.lerobot.video import streams
from offrl.data.memory import Memory
from offrl.data.raw import RawData, canonical, lost
from offrl.errors import UserError, nearest, some
from offrl.settings.dataset import DatasetConfig

USUAL = ("observation.state", "observation.environment_state")  # first of the vectors, where none are named
REWARDS, TERMINATED = ("next.reward", "reward"), ("next.terminated", "next.success")
DONE, TASK = "next.done", "task_index"
FIXED = ("observations", "next_observations", "episode_ends", "episode_ids", "truncations", "time")


def read(path: Path, config: DatasetConfig, memory: Memory) -> RawData:
    """The dataset in the folder `path`: the vectors joined, images as streams where `config.observation_keys` names
    them or there is no vector. Raises UserError.
    """
    meta = load(path)
    vectors, images = _observed(meta, config)
    keys = _columns(meta, config)
    videos = [image.name for image in images if image.dtype == "video"]
    episodes = meta.episodes(config.episodes, videos)
    table = LerobotRows(meta, episodes, [*(v.name for v in vectors), *keys.values()])
    notes: list[str] = []
    columns = {name: canonical(name, table.values(key), f"{path}: '{key}'", None, notes) for name, key in keys.items()}
    columns["observations"] = _joined(table, vectors, memory, notes)
    raw = RawData(columns, table.ends, path.resolve().name, "lerobot", str(path), meta.version, notes=notes)
    _ends(raw, meta, keys.get("terminations", ""))
    if "rewards" not in columns:
        columns["rewards"] = np.zeros(table.rows, np.float32)
        raw.note("there are no rewards in the data, and zeros are taken: dataset.reward_labels=... gives some")
    raw.streams = streams(table, images, config.image_size, memory)
    cameras = [f.name for f in meta.features.values() if f.image and f.name not in raw.streams]
    if cameras and not config.observation_keys:
        raw.note(f"images are left out ({some(cameras)}): dataset.observation_keys=[...] names what is observed")
    for column, features in (("observations", vectors), ("actions", [meta.features[keys["actions"]]])):
        raw.source_columns[column] = tuple(ColumnSpec(name) for name in _dimensions(features))
    tasks = meta.tasks()
    known = {str(number): tasks[number] for number in np.unique(columns.get("task", [])).tolist() if number in tasks}
    raw.metadata = {"fps": float(meta.info["fps"]), "robot_type": str(meta.info.get("robot_type"))[:80], "tasks": known}
    if "rewards" not in keys:
        raw.metadata["rewards"] = "absent"
    return raw


def _observed(meta: LerobotMetadata, config: DatasetConfig) -> tuple[list[Feature], list[Feature]]:
    """The vectors and the images that make an observation. Raises UserError for what cannot be read."""
    features, keys = meta.features, list(config.observation_keys)
    if not keys:
        usual = [k for k in USUAL if k in features and features[k].numeric]
        flat = [
            k
            for k, f in features.items()
            if k.startswith("observation.") and f.numeric and len(f.shape) <= 1 and k not in usual
        ]
        keys = [*usual, *flat] or [k for k, f in features.items() if f.image]
    if not keys:
        raise UserError(f"{meta.root} has nothing to observe; it has: {listed(features)}")
    for key in keys:
        if key not in features:
            raise UserError(
                f"dataset.observation_keys: {meta.root} has no '{key}'.{nearest(key, features)} It has: "
                f"{listed(features)}"
            )
        if not (features[key].numeric or features[key].image):
            raise UserError(
                f"{meta.root}: '{key}' is {features[key].dtype}, which is not read: choose others with "
                "dataset.observation_keys=[...]"
            )
    if len(set(keys)) < len(keys):
        raise UserError(f"dataset.observation_keys={keys} names one twice")
    chosen = [features[key] for key in keys]
    return [f for f in chosen if not f.image], [f for f in chosen if f.image]


def _columns(meta: LerobotMetadata, config: DatasetConfig) -> dict[str, str]:
    """Columns of ours but the observations, and the features they are. Raises UserError where one is missing."""
    features = meta.features
    keys = {"actions": "action"}
    for column, names in (("rewards", REWARDS), ("terminations", TERMINATED), ("task", (TASK,))):
        if known := [name for name in names if name in features]:
            keys[column] = known[0]
    for column, key in config.fields.items():
        if column in FIXED:
            raise UserError(
                f"dataset.fields.{column}={key}: of LeRobot data that is fixed (dataset.observation_keys=[...] chooses "
                "what is observed)"
            )
        keys[column] = str(key)
    for column, key in keys.items():
        if key not in features or not features[key].numeric:
            raise UserError(
                f"{meta.root} has no numbers '{key}' for the column {column}.{nearest(key, features)} It has: "
                f"{listed(features)}; dataset.fields.{column}=NAME chooses another"
            )
    return keys


def _joined(table: LerobotRows, vectors: Sequence[Feature], memory: Memory, notes: list[str]) -> np.ndarray:
    """The vectors side by side, float32 [R, O]."""
    widths = [math.prod(v.shape) for v in vectors]
    out, first = memory.empty("observations", (table.rows, sum(widths)), np.float32), 0
    for vector, width in zip(vectors, widths, strict=True):
        values = table.values(vector.name).reshape(table.rows, width)
        if text := lost(vector.name, values):
            notes.append(text)
        out[:, first : first + width] = values
        first += width
    return out


def _dimensions(features: Sequence[Feature]) -> list[str]:
    """A name for each dimension, which tells those of several features apart."""
    names = []
    for f in features:
        labels = f.names or tuple(map(str, range(math.prod(f.shape))))
        names += [n if f.names and len(features) == 1 else f"{f.name}.{n}" for n in labels]
    return names


def _ends(raw: RawData, meta: LerobotMetadata, key: str) -> None:
    """Terminations, of the feature `key`, where an episode ends; all other ends are those of a recording."""
    ends = raw.episode_ends
    assert ends is not None
    if (success := raw.columns.get("terminations")) is not None:
        if inside := int((success & ~ends).sum()):
            raw.note(f"{key} is true in {inside:,} rows before their episode's end, where nothing ends")
        raw.columns["terminations"] = success & ends
    elif DONE in meta.features:
        raw.note(f"{DONE} says that a recording ended, and is taken for no termination: all ends are time-outs")
