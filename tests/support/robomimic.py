"""A small file in robomimic's layout: twelve demonstrations of three rows, of which demo_10 and demo_11 come last by
number and in the middle by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np

DEMOS, ROWS = 12, 3
MASKS = {"train": ("demo_10", "demo_9", "demo_0"), "valid": ("demo_1",)}
IMAGE = "agentview_image"


def state(demo: int, step: int) -> np.ndarray:
    """What stands in the vectors at a step, float64 [3], the last one under the key "object"."""
    return np.array([demo, step, 100 * demo + step], np.float64)


def image(demo: int, step: int) -> np.ndarray:
    """uint8 [4, 5, 3], unlike any other of the file."""
    return (np.arange(60).reshape(4, 5, 3) + 4 * demo + step).astype(np.uint8)


def write(path: Path, following: bool = True) -> Path:
    """Demonstrations of which the even ones succeed. following: with next_obs."""
    steps = range(ROWS + 1)
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["total"] = DEMOS * ROWS
        data.attrs["env_args"] = json.dumps({"env_name": "no_such_module:Lift", "env_kwargs": {"a": 1}}, indent=4)
        for demo in range(DEMOS):
            group = data.create_group(f"demo_{demo}")
            group.attrs["num_samples"] = ROWS
            states = np.stack([state(demo, step) for step in steps])
            images = np.stack([image(demo, step) for step in steps])
            for name, part in (("obs", slice(0, ROWS)), ("next_obs", slice(1, ROWS + 1)))[: 1 + following]:
                group[f"{name}/robot0_eef_pos"] = states[part, :2]
                group[f"{name}/object"] = states[part, 2:]
                group.create_dataset(f"{name}/{IMAGE}", data=images[part], compression="gzip")
            group["states"] = states[:ROWS] * 2
            group["actions"] = np.full((ROWS, 2), demo / 20) + np.arange(ROWS)[:, None] / 100
            group["rewards"] = np.float64([0, 0, demo % 2 == 0])
            group["dones"] = np.int64([0, 0, 1])
        for name, members in MASKS.items():
            file[f"mask/{name}"] = np.array(members, "S")
    return path


def change(path: Path, key: str, values: Any, **options: Any) -> Path:
    """Put other values under a key of the file; none takes it out."""
    with h5py.File(path, "a") as file:
        del file[key]
        if values is not None:
            file.create_dataset(key, data=values, **options)
    return path
