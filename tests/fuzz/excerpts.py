"""Excerpts of real files: the shipped one, and those under ../shared/data where that is."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.fuzz.drafts import Draft, Rng

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def real_files() -> dict[str, Path]:
    """Those that are here, by the source they come from."""
    import offrl

    files = {
        "builtin": Path(offrl.__file__).parent / "assets" / "hopper-mixed-v0.hdf5",
        "d4rl": SHARED / "d4rl" / "hopper_medium_replay.hdf5",
        "minari": SHARED / "minari" / "D4RL" / "door" / "human-v2" / "data",
        "ogbench": SHARED / "ogbench" / "pointmaze-medium-navigate-v0-val.npz",
        "d3rlpy": SHARED / "d3rlpy" / "pendulum_v1.1.0.h5",
        "text": SHARED / "text" / "archer_guess_my_city.json",
    }
    return {name: path for name, path in files.items() if path.exists()}


@functools.cache
def _columns(source: str, path: Path) -> dict[str, Any]:
    """The first rows of a file's columns; of Minari the first two episodes; of texts the first episodes."""
    rows = 400
    if source == "text":
        return {"lines": json.loads(path.read_text())[:5]}
    if source == "ogbench":
        with np.load(path) as file:
            return {k: file[k][:rows] for k in file.files}
    if source == "minari":
        columns: dict[str, Any] = {"meta": json.loads((path / "metadata.json").read_text())}
        with h5py.File(path / "main_data.hdf5") as file:
            for name in ("episode_0", "episode_1"):
                table: dict[str, Any] = {}
                file[name].visititems(
                    lambda key, item, table=table: table.update({key: item[()]}) if hasattr(item, "shape") else None
                )
                columns[name] = table
        return columns
    with h5py.File(path) as file:
        columns = {k: item[:rows] if item.shape else item[()] for k, item in file.items() if hasattr(item, "shape")}
    if "final_observations" in columns:
        ends = columns["terminals"].astype(bool) | columns["timeouts"].astype(bool)
        ends[-1] = True
        columns["final_observations"] = columns["final_observations"][: int(ends.sum())]
    return columns


def real(rng: Rng) -> Draft:
    """An excerpt of one of the real files, drawn at random."""
    files = real_files()
    source = str(rng.choice(sorted(files)))
    columns = dict(_columns(source, files[source]))
    if source == "text":
        return Draft("json", "case.jsonl", lines=[dict(line) for line in columns["lines"]])
    if source == "ogbench":
        return Draft("npz", files[source].name, {"": columns})
    if source == "minari":
        meta = dict(columns.pop("meta"))
        tables = {name: dict(table) for name, table in columns.items()}
        meta |= {"total_episodes": len(tables), "total_steps": sum(len(t["rewards"]) for t in tables.values())}
        return Draft("minari", "human-v2", tables, meta=meta)
    return Draft("hdf5", "excerpt.hdf5", {"": columns})
