"""Small LeRobot datasets, v2.1 and v3.0: three episodes of 5, 7 and 6 rows, two cameras of 32 x 48 pixels."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

LENGTHS, FPS, SHAPE = (5, 7, 6), 10, (32, 48, 3)
CAMERAS = ("observation.images.front", "observation.images.top")
TASKS = ("pick", "place")
FILES = (0, 1, 0)  # of v3.0: the data file and the video of each episode, so that their order crosses a file


def pictures(camera: int, episode: int) -> np.ndarray:
    """A gradient whose brightness tells camera, episode and row apart, uint8 [T, H, W, C]."""
    rows = np.arange(LENGTHS[episode])[:, None, None, None]
    ramp = np.arange(SHAPE[1])[None, None, :, None] + np.arange(SHAPE[0])[None, :, None, None]
    return np.broadcast_to(ramp + 10 * rows + 40 * episode + 20 * camera, (len(rows), *SHAPE)).astype(np.uint8)


def rows(episode: int) -> dict[str, np.ndarray]:
    """The vectors and numbers of an episode."""
    count, rng = LENGTHS[episode], np.random.default_rng(episode)
    first = sum(LENGTHS[:episode])
    return {
        "observation.state": rng.normal(size=(count, 3)).astype(np.float32),
        "observation.force": rng.normal(size=(count, 2)).astype(np.float32),
        "action": rng.uniform(-40, 90, (count, 2)).astype(np.float32),
        "timestamp": (np.arange(count) / FPS).astype(np.float32),
        "frame_index": np.arange(count),
        "episode_index": np.full(count, episode),
        "index": np.arange(first, first + count),
        "task_index": np.full(count, episode % 2),
    }


def video(path: Path, frames: np.ndarray, codec: str = "libx264", **options: Any) -> None:
    """uint8 [T, H, W, C] as an mp4 file. options: of `av.open`."""
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w", format="mp4", **options) as file:
        stream = file.add_stream(codec, rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *frames.shape[1:3], "yuv420p"
        stream.options = {"g": "2", "crf": "18"} if codec == "libx264" else {}
        for pixels in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")))
        file.mux(stream.encode(None))


def png(pixels: np.ndarray, form: str = "PNG") -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, form)
    return buffer.getvalue()


def table(episodes: Sequence[int], images: str, **more: Sequence[np.ndarray]) -> pa.Table:
    """The rows of some episodes as lerobot writes them. more: further columns, an array for each episode."""
    columns: dict[str, Any] = {}
    for name in rows(0):
        values = np.concatenate([rows(e)[name] for e in episodes])
        if values.ndim == 2:
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
        else:
            columns[name] = pa.array(values)
    columns |= {name: pa.array(np.concatenate([values[e] for e in episodes])) for name, values in more.items()}
    if images == "image":
        for number, camera in enumerate(CAMERAS):
            frames = np.concatenate([pictures(number, e) for e in episodes])
            columns[camera] = pa.array([{"bytes": png(f), "path": "a.png"} for f in frames])
    return pa.table(columns)


def write(folder: Path, version: str = "v2.1", images: str = "video", **more: Sequence[np.ndarray]) -> Path:
    """A dataset in `folder`. images: video, image or "" for none; more: further columns, an array for each episode."""
    three = version == "v3.0"
    vectors = {"observation.state": (3, [["x", "y", "z"]]), "observation.force": (2, None)}
    features: dict[str, Any] = {
        **{k: {"dtype": "float32", "shape": [n], "names": names} for k, (n, names) in vectors.items()},
        "action": {"dtype": "float32", "shape": [2], "names": {"motors": ["shoulder", "elbow"]}},
        **{k: {"dtype": "int64", "shape": [1], "names": None} for k in ("frame_index", "episode_index", "task_index")},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{k: {"dtype": str(v[0].dtype), "shape": [1], "names": None} for k, v in more.items()},
    }
    for camera in CAMERAS if images else ():
        axes = ["height", "width", "channels" if three else "channel"]
        features[camera] = {"dtype": images, "shape": list(SHAPE), "names": axes}
    info = {"codebase_version": version, "robot_type": "arm", "fps": FPS, "features": features, "chunks_size": 1000}
    (folder / "meta").mkdir(parents=True)
    (_write_three if three else _write_two)(folder, info, images, more)
    (folder / "meta" / "info.json").write_text(json.dumps(info))
    return folder


def _write_two(folder: Path, info: dict[str, Any], images: str, more: dict[str, Sequence[np.ndarray]]) -> None:
    info["data_path"] = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    info["video_path"] = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    (folder / "data" / "chunk-000").mkdir(parents=True)
    for episode in range(len(LENGTHS)):
        name = f"chunk-000/episode_{episode:06d}.parquet"
        pq.write_table(table([episode], images, **more), folder / "data" / name)
        for number, camera in enumerate(CAMERAS if images == "video" else ()):
            file = folder / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4"
            video(file, pictures(number, episode))
    lines = [{"episode_index": e, "tasks": [TASKS[e % 2]], "length": n} for e, n in enumerate(LENGTHS)]
    (folder / "meta" / "episodes.jsonl").write_text("".join(json.dumps(v) + "\n" for v in lines))
    lines = [{"task_index": k, "task": text} for k, text in enumerate(TASKS)]
    (folder / "meta" / "tasks.jsonl").write_text("".join(json.dumps(v) + "\n" for v in lines))


def _write_three(folder: Path, info: dict[str, Any], images: str, more: dict[str, Sequence[np.ndarray]]) -> None:
    info["data_path"] = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    for part in ("data/chunk-000", "meta/episodes/chunk-000"):
        (folder / part).mkdir(parents=True)
    begins = []
    for number in sorted(set(FILES)):
        inside = [e for e, file in enumerate(FILES) if file == number]
        pq.write_table(table(inside, images, **more), folder / f"data/chunk-000/file-{number:03d}.parquet")
        begins += zip(inside, np.cumsum([0, *(LENGTHS[e] / FPS for e in inside)]), strict=False)
        for k, camera in enumerate(CAMERAS if images == "video" else ()):
            frames = np.concatenate([pictures(k, e) for e in inside])
            video(folder / f"videos/{camera}/chunk-000/file-{number:03d}.mp4", frames)
    meta = {"episode_index": range(len(LENGTHS)), "length": LENGTHS}
    meta |= {"data/chunk_index": [0] * len(LENGTHS), "data/file_index": FILES}
    for camera in CAMERAS if images == "video" else ():
        meta |= {f"videos/{camera}/chunk_index": [0] * len(LENGTHS), f"videos/{camera}/file_index": FILES}
        meta[f"videos/{camera}/from_timestamp"] = [float(begin) for _, begin in sorted(begins)]
    pq.write_table(pa.table({k: list(v) for k, v in meta.items()}), folder / "meta/episodes/chunk-000/file-000.parquet")
    tasks = pa.table({"task_index": list(range(len(TASKS))), "__index_level_0__": list(TASKS)})
    pq.write_table(tasks, folder / "meta" / "tasks.parquet")


def set_info(folder: Path, **changes: Any) -> None:
    """Change info.json; of a feature by name: `set_info(folder, **{"features.action.shape": [3]})`."""
    path = folder / "meta" / "info.json"
    info = json.loads(path.read_text())
    for name, value in changes.items():
        part, (*parents, last) = info, _parts(name, info["features"])
        for key in parents:
            part = part[key]
        part[last] = value
    path.write_text(json.dumps(info))


def _parts(name: str, features: dict[str, Any]) -> list[str]:
    if not name.startswith("features."):
        return [name]
    feature = next(f for f in sorted(features, key=len, reverse=True) if name[9:].startswith(f"{f}."))
    return ["features", feature, name[9 + len(feature) + 1 :]]


def alias(path: Path, target: Path) -> None:
    """Make the track of an mp4 file one whose samples lie in the file `target`, by an alias of QuickTime's."""
    content = path.read_bytes()
    at = content.index(b"url ") - 4
    name = str(target).encode()
    name += bytes(len(name) % 2)
    record = bytes(10) + b"\x04" + b"disk".ljust(27, b"\0") + bytes(12) + b"\x01a".ljust(64, b"\0") + bytes(16)
    record += b"\0\1\0\1" + bytes(16) + b"\0\2" + len(name).to_bytes(2, "big") + name + b"\xff\xff\0\0"
    entry = (12 + len(record)).to_bytes(4, "big") + b"alis" + bytes(4) + record
    out = bytearray(content[:at] + entry + content[at + 12 :])
    for box in (b"dref", b"dinf", b"minf", b"mdia", b"trak", b"moov"):
        start = out.rindex(box, 0, at) - 4
        size = int.from_bytes(out[start : start + 4], "big") + len(entry) - 12
        out[start : start + 4] = size.to_bytes(4, "big")
    path.write_bytes(bytes(out))


def fall_over(number: str) -> None:
    """A decoder that a damaged video kills."""
    os.abort()
