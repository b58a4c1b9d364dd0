"""The images of a LeRobot dataset: of videos, decoded in child processes, each frame once and in order, or of the data
files.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading, words
from offrl.data.containers.images import decode_one
from offrl.data.containers.parquet import open_parquet
from offrl.data.containers.video import EDGE, FRAME, HEAD, LONGEST, TOLERANCE
from offrl.data.formats.lerobot.meta import Feature
from offrl.data.formats.lerobot.rows import LerobotRows
from offrl.data.memory import Memory, free_bytes
from offrl.data.raw.streams import RawStream
from offrl.errors import UserError, note
from offrl.system import processes
from offrl.system.progress import FIRST, Progress, duration

READER = "1: rgb24 by av, BOX by Pillow"  # changes with the pixels that are made of a file


@dataclass
class Span:
    """The frames of an episode in a video."""

    episode: int
    begin: float  # seconds
    times: np.ndarray  # [T] of the rows, in seconds from the episode's first
    frames: np.ndarray  # [T, H, W, C] uint8, to be filled


@dataclass
class Video:
    """A file, and what is read of it, in the order of time."""

    path: Path
    shape: tuple[int, ...]  # [H, W, C] that it is to have
    spans: list[Span] = field(default_factory=list)


class _Decoder:
    """A child process and the video that it is decoding."""

    def __init__(self) -> None:
        try:
            self.process, self.link = processes.launch("offrl.data.containers.video:work")
        except OSError as error:
            raise UserError(f"video is decoded in processes of their own, and none can be started: {error}") from None

    def begin(self, video: Video, threads: int) -> None:
        self.video, self.span, self.row = video, 0, 0
        shape = video.spans[0].frames.shape[1:]
        job = {
            "path": str(video.path),
            "shape": video.shape,
            "size": shape[:2],
            "spans": [(span.begin, len(span.times)) for span in video.spans],
            "threads": threads,
        }
        self.buffer = bytearray(max(HEAD.size + int(np.prod(shape)), LONGEST + 1))
        with contextlib.suppress(OSError):  # `receive` says how it ended
            self.link.send_bytes(json.dumps(job).encode())

    def receive(self) -> bool:
        """Take the next frame; whether it was the last. Raises UserError."""
        span = self.video.spans[self.span]
        try:
            size = self.link.recv_bytes_into(self.buffer)
        except (EOFError, OSError):
            raise UserError(
                f"{self.video.path}: its decoder {processes.ending(self.process)}: encode the video again, or leave "
                "the episode out with dataset.episodes"
            ) from None
        if self.buffer[:1] != FRAME or size != HEAD.size + span.frames[0].size:
            raise UserError(f"{self.video.path} {self.buffer[1:size].decode(errors='replace')}")
        shown, due = HEAD.unpack_from(self.buffer)[1], span.begin + float(span.times[self.row])
        # float32, as the times are kept, has larger steps than the tolerance after an hour
        if not abs(shown - due) <= TOLERANCE + float(np.spacing(np.float32(span.times[self.row]))):
            raise UserError(
                f"{self.video.path}: a frame is shown at {shown:.4f} s where row {self.row} of episode {span.episode} "
                f"is due at {due:.4f} s: frames are missing, or the video is not this episode's; get it again, or "
                "leave the episode out with dataset.episodes"
            )
        pixels = np.frombuffer(self.buffer, np.uint8, span.frames[0].size, HEAD.size)
        span.frames[self.row] = pixels.reshape(span.frames.shape[1:])
        self.row += 1
        if self.row == len(span.times):
            self.span, self.row = self.span + 1, 0
        return self.span == len(self.video.spans)

    def close(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.wait()


def decode(videos: Sequence[Video], title: str) -> None:
    """Fill the frames of all spans. Raises UserError."""
    if importlib.util.find_spec("av") is None:
        raise UserError(f"{title}: videos need av: pip install 'offrl[video-data]'")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count, start = min(cores, len(videos)), time.monotonic()
    total, done, todo = sum(len(s.times) for v in videos for s in v.spans), 0, list(reversed(videos))
    decoders: dict[Connection, _Decoder] = {}
    try:
        with Progress(f"{title}: decoding", total, "frames", quiet=False, stderr=True) as bar:
            for _ in range(count):
                decoder = _Decoder()
                decoders[decoder.link] = decoder
                decoder.begin(todo.pop(), cores // count)
            busy = list(decoders)
            while busy:
                for link in wait(busy):
                    assert isinstance(link, Connection)
                    last = decoders[link].receive()
                    done += 1
                    bar.update(done)
                    if last and todo:
                        decoders[link].begin(todo.pop(), cores // count)
                    elif last:
                        busy.remove(link)
    finally:
        for decoder in decoders.values():
            decoder.close()
    if (seconds := time.monotonic() - start) > FIRST:
        note(
            f"{title}: {total:,} frames decoded in {duration(seconds)}, {total / seconds:.0f} frames/s of {count} "
            "processes"
        )


def digest_of(videos: Sequence[Video]) -> str:
    """A sha256 of what the frames of videos are decoded from, and how."""
    result = hashlib.sha256(READER.encode())
    for video in videos:
        for span in video.spans:
            result.update(f" {span.begin!r} {span.frames.shape} ".encode())
        with video.path.open("rb") as file:
            while block := file.read(1 << 20):
                result.update(block)
    return result.hexdigest()


def streams(
    table: LerobotRows, images: Sequence[Feature], image_size: Sequence[int] | None, memory: Memory
) -> dict[str, RawStream]:
    """The images of all rows, uint8 [R, H, W, C], resized where `image_size` says so. Raises UserError."""
    result, root = {}, table.meta.root
    size = tuple(image_size or ())
    if size and (len(size) != 2 or not 1 <= min(size) <= max(size) <= EDGE):
        raise UserError(f"dataset.image_size={list(size)} must be [height, width], from 1 to {EDGE} each")
    videos: dict[str, list[Video]] = {}
    for image in images:
        shape = (table.rows, *(size or image.shape[:2]), image.shape[2])
        _refuse_large(f"{root}: '{image.name}'", shape, memory)
        frames = memory.empty(image.name, shape, np.uint8)
        recorded = image.shape[:2] if shape[1:3] != tuple(image.shape[:2]) else ()
        result[image.name] = RawStream(frames, np.arange(table.rows), recorded=recorded)
        if image.dtype == "video":
            videos[image.name] = _videos(table, image, frames)
        else:
            result[image.name].digest = _decode_images(table, image, frames)
    if videos:
        decode([video for of_camera in videos.values() for video in of_camera], str(root))
    for name, of_camera in videos.items():
        result[name].digest = digest_of(of_camera)
    return result


def _refuse_large(where: str, shape: Sequence[int], memory: Memory) -> None:
    """Raises UserError for images that fit neither into memory nor, mapped, on the disk."""
    need, free = math.prod(shape), free_bytes()
    if need > free and (memory.cache is None or memory.used + need <= memory.budget):
        factor = math.sqrt(free / 2 / need)
        height, width = (max(1, int(edge * factor)) for edge in shape[1:3])
        raise UserError(
            f"{where}: {shape[0]:,} images of {shape[1]} x {shape[2]} take {words(need)}, and {words(int(free))} are "
            f"free: dataset.image_size=[{height},{width}], fewer dataset.episodes, or dataset.memory=mmap"
        )


def _videos(table: LerobotRows, image: Feature, frames: np.ndarray) -> list[Video]:
    """The files of a camera, and the rows that their frames fill."""
    videos: dict[Path, Video] = {}
    start = 0
    for k, episode in enumerate(table.episodes):
        path, begin = episode.videos[image.name]
        rows = frames[start : start + episode.length]
        start += episode.length
        videos.setdefault(path, Video(path, image.shape)).spans.append(
            Span(episode.number, begin, table.times(k), rows)
        )
    for video in videos.values():
        video.spans.sort(key=lambda span: span.begin)
    return list(videos.values())


def _decode_images(table: LerobotRows, image: Feature, frames: np.ndarray) -> str:
    """Fill `frames` with the images in the data files; the digest of JPEG images, "" where there are none."""
    digest, lossy = hashlib.sha256(f"{READER} {frames.shape} ".encode()), False
    for path, targets in table.rows_of.items():
        with reading(path):
            # one by one: an image that many rows share is in the file once
            batches = open_parquet(path).iter_batches(batch_size=1, columns=[image.name])
            entries = (entry for batch in batches for entry in batch.column(image.name).to_pylist())
            for row, (target, entry) in enumerate(zip(targets.tolist(), entries, strict=True)):
                if target < 0:
                    continue
                where = f"{path}: '{image.name}' in row {row}"
                encoded: Any = entry.get("bytes") if isinstance(entry, dict) else entry
                if not isinstance(encoded, bytes):
                    raise UserError(f"{where} is no image in the file itself: write its bytes there")
                frames[target], jpeg = decode_one(encoded, image.shape, frames.shape[1:3], where)
                lossy |= jpeg
                digest.update(encoded)
    return digest.hexdigest() if lossy else ""
