"""The videos of a LeRobot dataset: one camera's episodes one after another, as H.264 in mp4 files."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from offrl.errors import UserError

VIDEO_MB, FILES = 200, 1000  # of a file, about; files of a folder
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"


def video_feature(shape: tuple[int, ...], fps: float) -> dict[str, Any]:
    """What info.json says of a camera's images of `shape` [H, W, C]."""
    height, width, channels = shape
    details = {"height": height, "width": width, "codec": "h264", "pix_fmt": "yuv420p", "is_depth_map": False}
    details = {f"video.{k}": v for k, v in {**details, "fps": fps, "channels": channels}.items()}
    axes = ["height", "width", "channels"]
    return {"dtype": "video", "shape": list(shape), "names": axes, "info": {**details, "has_audio": False}}


class VideoFiles:
    """The files of a camera, written one after the other."""

    def __init__(self, folder: Path, key: str, fps: float) -> None:
        self.folder, self.key = folder, key
        self.rate = Fraction(fps).limit_denominator(1001)
        self.number, self.frames, self.path = -1, 0, folder
        self.container: Any = None

    def add(self, values: np.ndarray, entries: np.ndarray) -> dict[str, Any]:
        """Append an episode's frames, those `entries` of `values`; where they are then. Raises UserError without av."""
        try:
            import av
        except ImportError:
            raise UserError("videos need av: pip install 'offrl[video-data]'") from None
        if self.container is None or self.path.stat().st_size >= VIDEO_MB * 1e6:
            self.close()
            self._open(values.shape[1:])
        first = self.frames
        for entry in entries:
            pixels = values[entry]
            gray = pixels.shape[2] == 1
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(pixels[..., 0] if gray else pixels), format="gray" if gray else "rgb24"
            )
            frame.pts, frame.time_base = self.frames, 1 / self.rate
            self.container.mux(self.stream.encode(frame))
            self.frames += 1
        location = {"chunk_index": self.number // FILES, "file_index": self.number % FILES}
        times = {"from_timestamp": float(first / self.rate), "to_timestamp": float(self.frames / self.rate)}
        return location | times

    def _open(self, shape: tuple[int, ...]) -> None:
        import av

        self.number, self.frames = self.number + 1, 0
        location = {"chunk_index": self.number // FILES, "file_index": self.number % FILES}
        self.path = self.folder / VIDEO_PATH.format(video_key=self.key, **location)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.container = av.open(str(self.path), "w", format="mp4")
        self.stream = self.container.add_stream("libx264", rate=self.rate, options={"g": "2", "crf": "18"})
        self.stream.height, self.stream.width, self.stream.pix_fmt = shape[0], shape[1], "yuv420p"

    def close(self) -> None:
        if self.container is not None:
            self.container.mux(self.stream.encode(None))
            self.container.close()
            self.container = None
