"""OGBench's npz files: trajectories in a row, `terminals` on the last state of each, no rewards."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np

from offrl.data.config import DatasetConfig
from offrl.data.download import cache_dir, fetch
from offrl.data.mmap import Memory
from offrl.data.raw import RawData, canonical
from offrl.data.sources.files import Npz
from offrl.errors import UserError
from offrl.tasks import lookup

URL = "https://rail.eecs.berkeley.edu/datasets/ogbench/"
NAME = re.compile(
    r"(visual-)?(pointmaze|antmaze|humanoidmaze|antsoccer|cube|scene|puzzle|powderworld)-([a-z0-9]+-)*(navigate|stitch|explore|play|noisy)-v\d+(-val)?"
)


def locate(name: str, config: DatasetConfig) -> Path:
    """The file of an OGBench data set: where the ogbench package keeps it, in our cache, or downloaded to there."""
    for folder in (os.environ.get("OGBENCH_DATASET_DIR"), "~/.ogbench/data"):
        if folder and (Path(folder).expanduser() / f"{name}.npz").is_file():
            return Path(folder).expanduser() / f"{name}.npz"
    return fetch(f"{URL}{name}.npz", cache_dir(config.cache_dir) / "ogbench", verify, config.mirror, f"OGBench data set {name}")


def verify(path: Path) -> None:
    """Raises UserError unless the file opens and has OGBench's arrays."""
    keys = Npz(path).shapes
    missing = [k for k in ("observations", "actions", "terminals") if k not in keys]
    if missing:
        raise UserError(f"{path} has no '{missing[0]}'; it has {', '.join(sorted(keys))}")


def read(path: Path, config: DatasetConfig, memory: Memory) -> RawData:
    """Rewards are zeros: the goal decides them. A trajectory's last row has no successor, and is never an environment's termination."""
    archive = Npz(path)
    verify(path)
    columns = {}
    for name, key in (("observations", "observations"), ("actions", "actions"), ("truncations", "terminals"), *config.fields.items()):
        if str(key) not in archive.shapes:
            raise UserError(f"{path} has no '{key}' (dataset.fields.{name}); it has {', '.join(sorted(archive.shapes))}")
        columns[name] = canonical(name, archive.read(str(key), name, memory), str(path))
    columns.setdefault("rewards", np.zeros(len(columns["observations"]), np.float32))
    columns["terminations"] = np.zeros(len(columns["observations"]), bool)
    raw = RawData(columns, name=path.stem, source="ogbench", path=str(path), action_low=-1.0, action_high=1.0)
    raw.task = lookup(path.stem.removesuffix("-val"))
    return raw
