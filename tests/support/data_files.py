"""Small files of data, and the ways in which a part of an HDF5 file may lie outside it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

N = 60  # three episodes of twenty rows; the first two are cut off


def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(N, 4)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (N, 2)).astype(np.float32),
        "rewards": rng.normal(size=N).astype(np.float32),
        "terminals": np.arange(N) == N - 1,
        "timeouts": (np.arange(N) % 20 == 19) & (np.arange(N) < N - 1),
    }


def other_file(folder: Path) -> Path:
    with h5py.File(folder / "other.hdf5", "w") as file:
        file["x"] = columns()["timeouts"]
    return folder / "other.hdf5"


def external_storage(file: Any, key: str, folder: Path) -> None:
    (folder / "secret").write_bytes(bytes(N))
    file.create_dataset(key, (N,), bool, external=[(str(folder / "secret"), 0, N)])


def virtual(file: Any, key: str, folder: Path) -> None:
    layout = h5py.VirtualLayout((N,), bool)
    layout[:] = h5py.VirtualSource(str(other_file(folder)), "x", shape=(N,))
    file.create_virtual_dataset(key, layout)


def soft(file: Any, key: str, folder: Path) -> None:
    file[key] = h5py.SoftLink("/nowhere")


def external(file: Any, key: str, folder: Path) -> None:
    file[key] = h5py.ExternalLink(str(other_file(folder)), "/x")


def through(file: Any, key: str, folder: Path) -> None:
    file["beside"] = h5py.ExternalLink(str(other_file(folder)), "/")
    file[key] = h5py.SoftLink("/beside/x")


def minari(folder: Path, shape: tuple[int, ...] = (4,), dtype: str = "float64", encode: bool = False) -> Path:
    """Three episodes of ten steps in Minari's HDF5, as its own storage writes them."""
    rng = np.random.default_rng(0)
    place = folder / "set"
    (place / "data").mkdir(parents=True)
    image = dtype == "uint8"
    space = {"type": "Box", "dtype": dtype, "shape": list(shape), "low": np.full(shape, 0 if image else -1).tolist()}
    space["high"] = np.full(shape, 255 if image else 1).tolist()
    action = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    meta = {
        "action_space": json.dumps(action),
        "observation_space": json.dumps(space),
        "total_steps": 30,
        "total_episodes": 3,
    }
    meta |= {"data_format": "hdf5", "dataset_id": "set-v0", "jpeg_encoding": True}
    (place / "data" / "metadata.json").write_text(json.dumps(meta))
    with h5py.File(place / "data" / "main_data.hdf5", "w") as file:
        for number in range(3):
            group = file.create_group(f"episode_{number}")
            frames = np.full((11, *shape), 20 * number, np.uint8) if image else rng.uniform(-1, 1, (11, *shape))
            if encode:
                pil = pytest.importorskip("PIL.Image")
                streams = [io.BytesIO() for _ in frames]
                for stream, frame in zip(streams, frames, strict=True):
                    pil.fromarray(frame).save(stream, format="JPEG")
                frames = np.stack([np.frombuffer(s.getvalue(), np.uint8) for s in streams])
            group["observations"] = frames
            group["actions"] = rng.uniform(-1, 1, (10, 2)).astype(np.float32)
            group["rewards"] = rng.normal(size=10)
            group["terminations"], group["truncations"] = np.zeros(10, bool), np.arange(10) == 9
    return place


def minari_streams(
    folder: Path, entries: dict[str, tuple[str, tuple[int, ...]]], lengths: tuple[int, ...] = (5, 7), jpeg: str = ""
) -> tuple[Path, list[dict[str, np.ndarray]]]:
    """Episodes whose observations are a Dict of entries (type and shape of each), and their values [T + 1, ...].

    jpeg: the entry that is stored as JPEG images.
    """
    rng = np.random.default_rng(0)
    (data := folder / "set" / "data").mkdir(parents=True)
    boxes = {
        name: {"type": "Box", "dtype": kind, "shape": list(shape), "low": 0, "high": 255}
        for name, (kind, shape) in entries.items()
    }
    meta = {
        "action_space": json.dumps({"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}),
        "observation_space": json.dumps({"type": "Dict", "subspaces": boxes}),
        "total_steps": sum(lengths),
        "total_episodes": len(lengths),
        "data_format": "hdf5",
        "dataset_id": "set-v0",
    }
    (data / "metadata.json").write_text(json.dumps(meta))
    recorded = []
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for number, steps in enumerate(lengths):
            values = {n: rng.integers(0, 255, (steps + 1, *shape)).astype(kind) for n, (kind, shape) in entries.items()}
            group = file.create_group(f"episode_{number}")
            for name, array in values.items():
                if name == jpeg:
                    group[f"observations/{name}"] = jpegs(array)
                else:
                    group[f"observations/{name}"] = array
            group["actions"] = rng.uniform(-1, 1, (steps, 2)).astype(np.float32)
            group["rewards"] = rng.normal(size=steps)
            group["terminations"], group["truncations"] = np.zeros(steps, bool), np.arange(steps) == steps - 1
            recorded.append(values)
    return folder / "set", recorded


def jpegs(frames: np.ndarray) -> np.ndarray:
    """Images [R, H, W, C] as JPEG, padded with zeros to one length."""
    pil = pytest.importorskip("PIL.Image")
    encoded = []
    for frame in frames:
        pil.fromarray(frame).save(stream := io.BytesIO(), format="JPEG")
        encoded.append(np.frombuffer(stream.getvalue(), np.uint8))
    longest = max(map(len, encoded))
    return np.stack([np.pad(e, (0, longest - len(e))) for e in encoded])


def text_minari(folder: Path, **changed: np.ndarray) -> Path:
    """One episode of one turn."""
    data = folder / "set" / "data"
    data.mkdir(parents=True)
    space = json.dumps({"type": "Text", "max_length": 50, "min_length": 0, "charset": "ab"})
    meta = {
        "action_space": space,
        "observation_space": space,
        "total_steps": 1,
        "total_episodes": 1,
        "data_format": "hdf5",
    }
    (data / "metadata.json").write_text(json.dumps(meta | {"dataset_id": "set-v0"}))
    values: dict[str, Any] = {
        "observations": np.array([b"a\n", b"b"]),
        "actions": np.array([b"x"]),
        "rewards": np.ones(1),
    }
    values |= {"terminations": np.ones(1, bool), "truncations": np.zeros(1, bool)} | changed
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for key, value in values.items():
            file[f"episode_0/{key}"] = value
    return folder / "set"


def minari_arrow(folder: Path, observations: Any, rewards: Any) -> Path:
    """One episode of two steps whose observations are a Dict of x."""
    pa = pytest.importorskip("pyarrow")
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1, -1], "high": [1, 1]}
    space = {"type": "Dict", "subspaces": {"x": box}}
    meta = {
        "action_space": json.dumps(box),
        "observation_space": json.dumps(space),
        "total_steps": 2,
        "total_episodes": 1,
    }
    (folder / "0").mkdir(parents=True)
    (folder / "metadata.json").write_text(json.dumps(meta | {"data_format": "arrow", "dataset_id": "set-v0"}))
    ends = {"terminations": [False] * 3, "truncations": [False, True, True]}
    table = pa.table({"observations": observations, "actions": [[0.5, 0.5]] * 3, "rewards": rewards, **ends})
    with pa.OSFile(str(folder / "0" / "0.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return folder
