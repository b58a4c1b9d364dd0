"""Streams of observations as sources hand them over, and as `Dataset.stores`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from offrl.data.memory import Memory, chunks
from offrl.data.store import Store, StreamSpec
from offrl.errors import UserError

CHANNELS = (1, 2, 3, 4)  # of one frame
EDGE = 4096  # pixels at most


@dataclass
class RawStream:
    """Images or rows of a table, of which an episode's stand one after another."""

    values: np.ndarray  # [F, H, W, C] uint8 frames, or [F, L] float32 rows of a table
    entries: np.ndarray  # [R] int64: the entry of each row's observation
    final: np.ndarray | None = None  # [E] int64: the entry after each episode's last row, -1 where not known
    digest: str = ""  # of decoded images: sha256 of the encoded bytes, the size and the decoder; "": of the values
    recorded: tuple[int, ...] = ()  # height and width before they were resized

    def store(self, start: np.ndarray, stop: np.ndarray) -> Store:
        """The dataset's store, for episodes of rows `start` to `stop` - 1."""
        following, last = self.entries.copy(), stop - 1
        inside = np.ones(len(following), bool)
        inside[last] = False
        rows = np.flatnonzero(inside)
        following[rows] = self.entries[rows + 1]
        if self.final is not None:
            following[last] = np.where(self.final >= 0, self.final, self.entries[last])
        first = np.repeat(self.entries[start], stop - start)
        values, *numbers = map(torch.from_numpy, (self.values, self.entries, following, first))
        return Store(values, *numbers)

    def update(self, digest: hashlib._Hash, name: str) -> None:
        """Add this stream to the fingerprint of a dataset."""
        digest.update(f"stream {name} {self.values.dtype.str} {self.values.shape} {self.digest} ".encode())
        for numbers in (self.entries, self.final if self.final is not None else np.zeros(0, np.int64)):
            digest.update(np.ascontiguousarray(numbers, "<i8").data)
        for part in chunks(0 if self.digest else len(self.values), 1 << 12):
            digest.update(np.ascontiguousarray(self.values[part]).data)


def streams_of(streams: Mapping[str, RawStream]) -> tuple[StreamSpec, ...]:
    """The description of streams, in their order."""
    return tuple(StreamSpec(name, tuple(s.values.shape[1:]), tuple(s.recorded)) for name, s in streams.items())


def check_images(images: np.ndarray, where: str) -> np.ndarray:
    """Images as [R, H, W, C]; [R, H, W] are of one channel. Raises UserError for other orders, types and sizes."""
    shape = list(images.shape[1:])
    if images.dtype != np.uint8:
        low, high = (float(f(images[: 1 << 10])) for f in (np.min, np.max)) if images.size else (0.0, 0.0)
        scale = "numpy.rint(255 * x)" if high <= 1.0 and low >= 0.0 else "numpy.rint(x)"
        raise UserError(
            f"{where}: images {shape} of {images.dtype} from {low:g} to {high:g}; images are uint8, 0 to 255: give "
            f"{scale}.astype(numpy.uint8)"
        )
    if images.ndim == 3:
        return images[..., None]
    if shape[0] in CHANNELS and shape[-1] not in CHANNELS:
        raise UserError(
            f"{where}: images of shape {shape} have their channels first; height x width x channels are due: give "
            "numpy.moveaxis(x, 1, -1)"
        )
    if len(shape) != 3 or shape[-1] not in CHANNELS:
        raise UserError(
            f"{where}: images of shape {shape}; height x width x channels are due, with 1 to {CHANNELS[-1]} channels "
            "(a stack of frames is made by dataset.frames=, of single ones)"
        )
    if not 1 <= min(shape) <= max(shape) <= EDGE:
        raise UserError(
            f"{where}: images of {shape[0]} x {shape[1]} pixels; at least 1 and at most {EDGE} an edge are read"
        )
    return images


@dataclass
class RawImages:
    """Images with a row per step, as files and arrays hold them."""

    values: np.ndarray  # [R, H, W, C], or [R, H, W] of one channel
    following: np.ndarray | None = None  # the successors' images, likewise
    finals: np.ndarray | None = None  # in their place, those of each episode's last row [E, H, W, C]

    def stream(self, known: np.ndarray, stop: np.ndarray, memory: Memory, name: str, where: str) -> RawStream:
        """The stream of these images. known [E]: whether what followed each episode is known; stop [E]: the rows after
        their last ones.

        Raises UserError where a successor inside an episode is not the next row's image, and for what are no images,
        or not one for each row.
        """
        where, rows = f"{where}: '{name}'", int(stop[-1])
        images, last = check_images(self.values, where), stop - 1
        for values in (images, self.following):
            if values is not None and len(values) != rows:
                raise UserError(f"{where} has {len(values):,} images for {rows:,} rows; one for each is needed")
        finals = None if self.finals is None else check_images(self.finals, where)
        if self.following is not None:
            following = check_images(self.following, where)
            for part in chunks(len(images) - 1, 1 << 12):
                inside = np.setdiff1d(np.arange(part.start, part.stop), last, assume_unique=True)
                differs = (following[inside] != images[inside + 1]).any((1, 2, 3))
                if differs.any():
                    raise UserError(
                        f"{where}: the image after row {int(inside[int(differs.argmax())])} is not the next row's, "
                        "though no episode ends there: mark where episodes end, or leave next_observations out"
                    )
            finals = following[last]
        if finals is None or not known.any():
            return RawStream(images, np.arange(len(images)))
        values = memory.empty(name, (len(images) + int(known.sum()), *images.shape[1:]), np.uint8)
        entries, final = np.empty(len(images), np.int64), np.full(len(stop), -1, np.int64)
        at = start = 0
        for episode, end in enumerate(stop.tolist()):
            size = end - start
            values[at : at + size], entries[start:end] = images[start:end], np.arange(at, at + size)
            at, start = at + size, end
            if known[episode]:
                values[at], final[episode] = finals[episode], at
                at += 1
        return RawStream(values, entries, final)


def resized(stream: RawStream, size: tuple[int, int], memory: Memory, name: str) -> RawStream:
    """The stream with images of `size` (height, width), each pixel the mean of what it covers; itself where they have
    it.
    """
    if stream.values.ndim != 4 or stream.values.shape[1:3] == size:
        return stream
    values = memory.empty(name, (len(stream.values), *size, stream.values.shape[3]), np.uint8)
    for i, frame in enumerate(stream.values):
        values[i] = resize(frame, size)
    return replace(stream, values=values, recorded=stream.values.shape[1:3])


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """An image [H, W, C] of uint8 as [*size, C], each pixel the mean of what it covers."""
    from PIL import Image

    if image.shape[-1] == 1:
        return np.asarray(Image.fromarray(image[..., 0]).resize(size[::-1], Image.Resampling.BOX))[..., None]
    return np.asarray(Image.fromarray(image).resize(size[::-1], Image.Resampling.BOX))


def size_of(values: Sequence[int]) -> tuple[int, int]:
    """The setting dataset.image_size as (height, width); one number is both. Raises UserError for others."""
    if len(values) not in (1, 2) or max(values) > EDGE:
        raise UserError(f"dataset.image_size={list(values)} is [height,width], at most {EDGE} each, such as [64,64]")
    return values[0], values[-1]
