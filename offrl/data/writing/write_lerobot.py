"""The layout of LeRobot datasets v3.0 (huggingface/lerobot at 7427f31, src/lerobot/datasets): rows as Parquet, images
as H.264.

What followed an episode's last row, the range of the actions and the environment have no place in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.memory import chunks
from offrl.data.raw import RawData, bounds_of
from offrl.data.writing.lerobot_video import FILES, VIDEO_MB, VIDEO_PATH, VideoFiles, video_feature
from offrl.errors import UserError

DATA_MB = 100  # of a file, about
QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
SAMPLED = 64  # frames that the statistics of a camera are of
KNOWN = ("observations", "next_observations", "actions", "rewards", "terminations", "truncations", "task")
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


def features_of(column: str) -> str:
    """What an extra column is called there: names with a slash are not allowed."""
    return column.replace("/", ".")


def refuse_other(raw: RawData, ends: np.ndarray, fps: float | None) -> float:
    """The frames per second. Raises UserError without them, and for what the layout cannot hold."""
    if fps is None or not 0.0 < fps <= 1e6:
        raise UserError("a LeRobot dataset needs the rows per second of the data: fps=30")
    if raw.columns["observations"].ndim != 2:
        shape = list(raw.columns["observations"].shape[1:])
        raise UserError(f"{raw.where}: observations of shape {shape} are no vectors")
    if (successors := raw.columns.get("next_observations")) is not None:
        for part in chunks(raw.rows - 1):
            after = raw.columns["observations"][part.start + 1 : part.stop + 1]
            differs = ~ends[part] & (successors[part] != after).any(1)
            if differs.any():
                raise UserError(
                    f"{raw.where}: what follows row {part.start + int(differs.argmax())} is not the next row, though "
                    "no episode ends there, and a LeRobot dataset holds no other successors: mark the ends"
                )
    for name, stream in raw.streams.items():
        height, width = stream.values.shape[1:3] if stream.values.ndim == 4 else (0, 0)
        if height % 2 or width % 2:
            raise UserError(
                f"{raw.where}: the images '{name}' have {height} x {width} pixels, and H.264 needs even edges: "
                "dataset.image_size=[H,W]"
            )
    return float(fps)


def write(
    path: Path, raw: RawData, ends: np.ndarray, fps: float, metadata: Mapping[str, Any], advance: Callable[[int], None]
) -> None:
    """Write the dataset to the new folder `path`."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise UserError("LeRobot datasets need pyarrow: pip install 'offrl[parquet]'") from None
    starts, stops = bounds_of(ends)
    columns, names = _columns(raw, ends, starts, stops, fps)
    texts = _tasks(raw, columns["task_index"])
    features = {name: _feature(name, values, names.get(name)) for name, values in columns.items()}
    stats = {name: _statistics(values.reshape(raw.rows, -1).astype(np.float64)) for name, values in columns.items()}
    videos = {}
    for name, stream in raw.streams.items():
        if stream.values.ndim == 4:
            key = name if name.startswith("observation.") else f"observation.images.{name}"
            videos[key] = VideoFiles(path, key, fps), stream
            features[key] = video_feature(stream.values.shape[1:], fps)
            rows = stream.entries[np.linspace(0, raw.rows - 1, min(SAMPLED, raw.rows)).astype(int)]
            pixels = stream.values[rows].reshape(-1, stream.values.shape[3]) / 255.0
            stats[key] = {k: v if k == "count" else [[[x]] for x in v] for k, v in _statistics(pixels).items()}
            stats[key]["count"] = [len(rows)]
    episodes: list[dict[str, Any]] = []
    for first, stop, number, pieces in _files(starts, stops, columns):
        location = {"chunk_index": number // FILES, "file_index": number % FILES}
        file = path / DATA_PATH.format(**location)
        file.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(_table(pa, {k: v[starts[first] : stops[stop - 1]] for k, v in columns.items()}), file)
        advance(pieces)
        for e in range(first, stop):
            used = [texts[k] for k in np.unique(columns["task_index"][starts[e] : stops[e]]).tolist()]
            entry = {"episode_index": e, "tasks": used, "length": int(stops[e] - starts[e])}
            entry |= {f"data/{k}": v for k, v in location.items()}
            entry |= {"dataset_from_index": int(starts[e]), "dataset_to_index": int(stops[e])}
            for key, (writer, stream) in videos.items():
                position = writer.add(stream.values, stream.entries[starts[e] : stops[e]])
                entry |= {f"videos/{key}/{k}": v for k, v in position.items()}
            episodes.append(entry | {"meta/episodes/chunk_index": 0, "meta/episodes/file_index": 0})
    for writer, _ in videos.values():
        writer.close()
    info = {
        "codebase_version": "v3.0",
        "robot_type": str(raw.metadata.get("robot_type", "unknown")),
        "total_episodes": len(starts),
        "total_frames": raw.rows,
        "total_tasks": len(texts),
        "chunks_size": FILES,
        "data_files_size_in_mb": DATA_MB,
        "video_files_size_in_mb": VIDEO_MB,
        "fps": int(fps) if fps == int(fps) else fps,
        "splits": {"train": f"0:{len(starts)}"},
        "data_path": DATA_PATH,
        "video_path": VIDEO_PATH if videos else None,
        "features": features,
        "offrl": {**raw.metadata, **metadata},
    }
    meta = path / "meta"
    (meta / "episodes" / "chunk-000").mkdir(parents=True)
    (meta / "info.json").write_text(json.dumps(info, indent=4, default=str))
    (meta / "stats.json").write_text(json.dumps(stats, indent=4))
    pq.write_table(pa.Table.from_pylist(episodes), meta / "episodes" / "chunk-000" / "file-000.parquet")
    tasks = pa.table({"task_index": list(range(len(texts))), "task": texts})
    # pandas takes the texts for the index, as lerobot does
    kinds = {"task_index": ("int64", "int64"), "task": ("unicode", "object")}
    described = [
        {"name": k, "field_name": k, "pandas_type": kind, "numpy_type": dtype, "metadata": None}
        for k, (kind, dtype) in kinds.items()
    ]
    index = {"index_columns": ["task"], "column_indexes": [], "columns": described, "pandas_version": "2.0.0"}
    pq.write_table(tasks.replace_schema_metadata({"pandas": json.dumps(index)}), meta / "tasks.parquet")


def _columns(
    raw: RawData, ends: np.ndarray, starts: np.ndarray, stops: np.ndarray, fps: float
) -> tuple[dict[str, np.ndarray], dict[str, list[str]]]:
    """The columns of the data files by their names there, and the names of their dimensions."""
    frame = np.arange(raw.rows) - np.repeat(starts, stops - starts)
    columns = {"observation.state": raw.columns["observations"]} if raw.columns["observations"].shape[1] else {}
    columns["action"] = raw.columns["actions"]
    for name, stream in raw.streams.items():
        if stream.values.ndim == 2:
            columns[name if name.startswith("observation.") else f"observation.{name}"] = stream.values[stream.entries]
    if raw.metadata.get("rewards") != "absent":  # else they are zeros that the reader made
        columns["next.reward"] = raw.columns["rewards"]
    columns["next.done"] = ends
    if "terminations" in raw.columns:
        columns["next.terminated"] = raw.columns["terminations"]
    columns |= {features_of(k): v for k, v in raw.columns.items() if k not in KNOWN}
    columns |= {
        "timestamp": (frame / fps).astype(np.float32),
        "frame_index": frame,
        "episode_index": np.repeat(np.arange(len(starts)), stops - starts),
        "index": np.arange(raw.rows),
        "task_index": raw.columns.get("task", np.zeros(raw.rows, np.int64)),
    }
    sources = {"observation.state": "observations", "action": "actions"}
    return columns, {name: raw.dimension_names(column) for name, column in sources.items()}


def _tasks(raw: RawData, numbers: np.ndarray) -> list[str]:
    """The texts of the tasks, by their numbers."""
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1 or numbers.min() < 0 or numbers.max() >= FILES:
        raise UserError(f"{raw.where}: the column task must hold numbers of tasks, from 0 to {FILES - 1}")
    known = raw.metadata.get("tasks")
    known = known if isinstance(known, dict) else {}
    return [str(known.get(str(k), raw.metadata.get("task", raw.name or "task"))) for k in range(int(numbers.max()) + 1)]


def _feature(name: str, values: np.ndarray, names: list[str] | None) -> dict[str, Any]:
    return {"dtype": values.dtype.name, "shape": list(values.shape[1:]) or [1], "names": names or None}


def _statistics(values: np.ndarray) -> dict[str, list[Any]]:
    """Of numbers [n, D]."""
    levels = np.quantile(values, list(QUANTILES.values()), axis=0)
    plain = {"min": values.min(0), "max": values.max(0), "mean": values.mean(0), "std": values.std(0)}
    plain |= dict(zip(QUANTILES, levels, strict=True))
    return {**{k: v.tolist() for k, v in plain.items()}, "count": [len(values)]}


def _files(
    starts: np.ndarray, stops: np.ndarray, columns: Mapping[str, np.ndarray]
) -> Iterator[tuple[int, int, int, int]]:
    """Of each data file the first episode, the one after its last, its number, and its bytes."""
    row = sum(v[:1].nbytes for v in columns.values())
    first = number = 0
    for e in range(1, len(starts) + 1):
        size = int(stops[e - 1] - starts[first]) * row
        if e == len(starts) or size >= DATA_MB * 1e6:
            yield first, e, number, size
            first, number = e, number + 1


def _table(pa: Any, columns: Mapping[str, np.ndarray]) -> Any:
    arrays = {}
    for name, values in columns.items():
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        for size in reversed(values.shape[1:]):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        arrays[name] = flat
    return pa.table(arrays)
