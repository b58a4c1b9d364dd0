"""Images among the observations of Minari datasets, as numbers or as JPEG."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from offrl.data.containers.images import decode, decoder, digest_of, frame_shape
from offrl.data.memory import Memory
from offrl.data.raw.streams import RawStream
from offrl.errors import UserError


def is_image(space: Mapping[str, Any]) -> bool:
    """Whether a space is of images: uint8 Boxes [H, W] or [H, W, C]."""
    return space["type"] == "Box" and space.get("dtype") == "uint8" and len(space["shape"]) in (2, 3)


def decoded(values: Any, shape: tuple[int, ...], where: str) -> Any:
    """Images of uint8 of this shape [R, ...] where encoded ones are given; other values as they are."""
    if not encoded(values, math.prod(shape[1:])):
        return values
    decode(values, out := np.empty(shape, np.uint8), where)
    return out


def encoded(values: Any, width: int) -> bool:
    """True for what holds an encoded image for each row, and not its `width` numbers."""
    return (
        isinstance(values, list)
        or values.dtype.kind == "O"
        or (values.dtype == np.uint8 and values.ndim == 2 and values.size != len(values) * width)
    )


class Images:
    """An entry's images of all episodes, of which each has one more than steps."""

    def __init__(self, space: Mapping[str, Any], where: str) -> None:
        """Raises UserError for what are no images."""
        self.shape = frame_shape((1, *space["shape"]), np.dtype(np.uint8), lambda: np.zeros(0), where)  # (H, W, C)

    def begin(self, count: int, memory: Memory, name: str) -> None:
        """Make room for so many images of all episodes."""
        self.values, self.used = memory.empty(name, (count, *self.shape), np.uint8), 0
        self.digests: list[bytes] = []  # of the episodes whose images are encoded

    def add(self, images: Any, count: int, where: str) -> None:
        """One episode's. Raises UserError for others than `count` images of the size that is due."""
        out = self.values[self.used : self.used + count]
        self.used += count
        if encoded(images, math.prod(out.shape[1:])):
            self.digests.append(digest_of(images))
            decode(images, out, where)
        elif images.dtype != np.uint8 or images.shape not in (out.shape, out.shape[:3] * (out.shape[3] == 1)):
            raise UserError(
                f"{where} holds {images.dtype} values of shape {list(images.shape)}; uint8 {list(out.shape)} are due"
            )
        else:
            out[:] = images.reshape(out.shape)

    def stream(self, lengths: Sequence[int]) -> RawStream:
        """The stream, for episodes of so many steps."""
        numbers, steps = np.arange(len(lengths)), np.array(lengths, np.int64)
        entries = np.arange(int(steps.sum())) + np.repeat(numbers, steps)
        # of the pixels where not all episodes are encoded
        digests = self.digests if len(self.digests) == len(lengths) else []
        digest = hashlib.sha256(b"".join([decoder().encode(), *digests])).hexdigest() if digests else ""
        return RawStream(self.values[: self.used], entries, np.cumsum(steps) + numbers, digest)
