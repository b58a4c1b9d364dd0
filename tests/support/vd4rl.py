"""Small folders in V-D4RL's layouts, whose rows are states with the actions and rewards that led to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

STATES = (4, 3, 5)  # of the episodes; the rewards of the first are 1, 2, 3


def image(episode: int, state: int, size: int) -> np.ndarray:
    """uint8 [size, size, 3], unlike any other of the data."""
    return (np.arange(size * size * 3).reshape(size, size, 3) % 97 + 20 * episode + state).astype(np.uint8)


def episode(number: int, size: int) -> dict[str, np.ndarray]:
    """The columns of an episode as an npz file holds them."""
    count = STATES[number]
    steps = np.arange(count)
    return {
        "image": np.stack([image(number, step, size) for step in steps]),
        "action": np.stack([steps / 10, -steps / 10 * (number + 1) / 3], 1).astype(np.float32),
        "reward": (steps * (10**number)).astype(np.float32),
        "discount": np.where((number == 1) & (steps == count - 1), 0.0, 1.0).astype(np.float32),
        "is_first": steps == 0,
        "is_last": steps == count - 1,
        "is_terminal": np.zeros(count, bool),
        "orientations": np.stack([steps, np.full(count, number)], 1).astype(np.float64),
    }


def write_npz(folder: Path, size: int = 6, **changed: Any) -> Path:
    """The first two episodes. changed: other values in the second; None takes a column out."""
    folder.mkdir(parents=True)
    for number in range(2):
        columns = episode(number, size) | (changed if number else {})
        name = f"20220101T00000{number}-{'ba'[number] * 8}-{STATES[number]}.npz"
        np.savez_compressed(folder / name, **{k: v for k, v in columns.items() if v is not None})
    return folder


def write_shards(folder: Path, size: int = 7, cuts: tuple[int, ...] = (6,), start: int = 9, **changed: Any) -> Path:
    """All episodes in HDF5 files that begin at the states `cuts` as well, the files being numbered from `start`."""
    folder.mkdir(parents=True)
    parts = [episode(number, size) for number in range(len(STATES))]
    columns = {k: np.concatenate([part[k] for part in parts]) for k in ("image", "action", "reward", "discount")}
    columns["observation"] = columns.pop("image").transpose(0, 3, 1, 2)
    columns["step_type"] = np.concatenate([[0.0, *[1.0] * (count - 2), 2.0] for count in STATES])
    columns |= changed
    bounds = [0, *cuts, sum(STATES)]
    for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        with h5py.File(folder / f"{start + number}.hdf5", "w") as file:
            for key, values in columns.items():
                file.create_dataset(key, data=values[begin:end], compression="gzip")
    return folder
