"""Videos of strangers, decoded in a process of their own, which imports no torch and may fall over.

What comes in through the pipe is JSON, what goes out are plain bytes: nothing that a damaged decoder may say is
unpickled. Frames are those of `av` in RGB (one channel: grey), resized by Pillow's BOX, the mean of the area that a
pixel covers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from offrl.errors import UserError, first_line, one_line

CODECS = ("av1", "h264", "hevc", "vp9")
EDGE, PIXELS = 4096, 1 << 24  # of one image, at most
FRAME, REFUSAL = b"f", b"r"  # the first byte of a message: of time and pixels, or of a text
HEAD = struct.Struct("<cd")  # of a frame
TOLERANCE = 1e-4  # seconds between when a frame is due and when it is shown, as lerobot's
MEMORY = 6 << 30  # bytes that a decoder may address
LONGEST = 2000  # bytes of a text


def frames(
    path: str,
    shape: Sequence[int],
    size: Sequence[int],
    spans: Sequence[tuple[float, int]],
    threads: int = 1,
) -> Iterator[tuple[float, Any]]:
    """Time in seconds and pixels, uint8 [H, W, C], of the frames of `spans`: (when the first is shown, how many).

    shape: [H, W, C] that the file must have; size: [H, W] to resize to. Raises UserError, which does not name the file,
    and whatever av raises.
    """
    import av
    import numpy as np
    from PIL import Image

    limit = {"max_pixels": str(PIXELS)}
    # The file, not its path: what is in it opens no other file and no address.
    with (
        open(path, "rb") as file,
        av.open(file, format="mp4", container_options={"enable_drefs": "0"}, io_open=_refuse_open) as container,
    ):
        if len(container.streams.video) != 1:
            raise UserError(f"holds {len(container.streams.video)} videos, and one is due")
        stream = container.streams.video[0]
        codec = stream.codec_context.codec.canonical_name if stream.codec_context else "something unknown"
        if codec not in CODECS:
            raise UserError(f"is coded as {codec}; {', '.join(CODECS)} are read: encode it again, with ffmpeg say")
        declared = (stream.height, stream.width)
        if declared != tuple(shape[:2]):
            raise UserError(
                f"has {declared[0]} x {declared[1]} pixels, where info.json says {shape[0]} x {shape[1]}: correct one "
                "of them"
            )
        stream.codec_context.options = limit
        stream.codec_context.thread_count, stream.codec_context.thread_type = threads, "AUTO"
        decoded, position = _decode(container, stream), -1.0
        for begin, count in spans:
            if begin > position + 1.0:  # decodes from the key frame before it
                container.seek(max(0, int((begin - TOLERANCE) / stream.time_base)), stream=stream)
                decoded = _decode(container, stream)
            taken = 0
            while taken < count:
                frame = next(decoded, None)
                if frame is None:
                    raise UserError(
                        f"ends after {taken} of {count} frames from second {begin:g} on"
                        + (" (an mp4 that refers to another file is not followed)" if position < 0 else "")
                        + ": it is cut off, or not this episode's; get it again"
                    )
                if frame.time is None:
                    raise UserError("has a frame without a time: encode it again, with ffmpeg say")
                position = frame.time
                if position < begin - TOLERANCE:
                    continue
                if frame.is_corrupt:
                    raise UserError(f"has a damaged frame at {position:g} s: get it again")
                if (frame.height, frame.width) != declared:
                    raise UserError(
                        f"has a frame of {frame.height} x {frame.width} pixels among others; encode it again"
                    )
                pixels = frame.to_ndarray(format="gray" if shape[2] == 1 else "rgb24")
                if tuple(size) != declared:
                    image = Image.fromarray(pixels).resize((size[1], size[0]), Image.Resampling.BOX)
                    pixels = np.asarray(image).reshape(*size, shape[2])
                yield position, pixels
                taken += 1


def _decode(container: Any, stream: Any) -> Iterator[Any]:
    """The frames of a stream in the order of their times. Raises UserError for a part that is not in the file."""
    for packet in container.demux(stream):
        if packet.is_corrupt:
            raise UserError("is cut off or damaged; get it again")
        yield from packet.decode()


def _refuse_open(url: str, flags: int, options: object) -> Any:
    raise UserError(f"refers to another file, {one_line(url)[:80]}, which is not opened; put its frames in it")


def work(number: str) -> None:
    """In a child: send the frames of the videos whose arguments of `frames` come in through pipe `number`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    link = Connection(int(number))
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = json.loads(link.recv_bytes())
            try:
                for time, pixels in frames(**job):
                    link.send_bytes(HEAD.pack(FRAME, time) + pixels.tobytes())
            except UserError as error:
                link.send_bytes(REFUSAL + str(error).encode()[:LONGEST])
            except Exception as error:  # whatever av raises for damage
                reason = getattr(error, "strerror", None) or first_line(error)  # without the file's name
                text = f"cannot be decoded ({reason}); it is damaged or cut off: get it again"
                link.send_bytes(REFUSAL + text.encode()[:LONGEST])
    os._exit(0)  # whatever state a library is in
