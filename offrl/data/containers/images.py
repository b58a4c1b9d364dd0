"""Images of strangers, one for each row: arrays of them, and encoded ones."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from offrl.data.containers.guard import reading
from offrl.data.memory import chunks
from offrl.data.raw.streams import CHANNELS, EDGE, check_images
from offrl.errors import UserError

BLOCK = 1 << 24  # bytes of images to read at once


def frame_shape(shape: Sequence[int], dtype: np.dtype, first: Callable[[], np.ndarray], where: str) -> tuple[int, ...]:
    """(H, W, C) of images [R, H, W(, C)], as a file declares them. Nothing is read but, to say what is wrong with those
    of another type than uint8, the `first` one [1, H, W(, C)]. Raises UserError for what are no images.
    """
    if dtype.kind not in "biuf" or len(shape) < 3 or 0 in shape:
        raise UserError(f"{where} holds {dtype} values of shape {list(shape)}; images [R, H, W, C] of uint8 are due")
    pixels = np.broadcast_to(np.zeros((), dtype), (1, *shape[1:]))
    if dtype != np.uint8 and pixels.size <= CHANNELS[-1] * EDGE**2:
        pixels = first()
    return check_images(pixels, where).shape[1:]


def row_parts(item: Any) -> Iterator[slice]:
    """Slices that cover the rows of an h5py dataset, of whole chunks, so that none is decompressed twice."""
    step = item.chunks[0] if item.chunks else 1
    size = math.prod(item.shape[1:]) * item.dtype.itemsize
    return chunks(len(item), max(1, BLOCK // (step * size)) * step)


def decoder() -> str:
    """The name and version of what decodes images; versions may differ in the last bit."""
    return f"Pillow {version('pillow')}"


def digest_of(frames: Sequence[Any]) -> bytes:
    """sha256 of encoded images, whatever zeros they are padded with."""
    digest = hashlib.sha256()
    for frame in frames:
        encoded = bytes(frame).rstrip(b"\0")
        digest.update(f"{len(encoded)} ".encode() + encoded)
    return digest.digest()


def decode(frames: Sequence[Any], out: np.ndarray, where: str) -> None:
    """JPEG images (bytes, or arrays of bytes padded with zeros) into `out`, uint8 [R, H, W(, C)]. Raises UserError
    where one differs.
    """
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise UserError("this dataset holds JPEG images: pip install pillow") from None
    if len(frames) != len(out):
        raise UserError(f"{where} has {len(frames)} images for {len(out) - 1} steps; {len(out)} are expected")
    for row, frame in enumerate(frames):
        with reading(f"{where}: image {row}"):
            try:  # no other of Pillow's formats: for some it starts programs
                image = Image.open(io.BytesIO(bytes(frame)), formats=("JPEG",))  # its header alone
            except UnidentifiedImageError:
                raise UserError(f"{where}: image {row} is no JPEG image, as Minari writes them") from None
            size = (image.size[1], image.size[0], *((len(image.getbands()),) if len(image.getbands()) > 1 else ()))
            if out.shape[1:] not in (size, (*size, 1)):
                raise UserError(f"{where}: image {row} has shape {list(size)}, expected {list(out.shape[1:])}")
            out[row] = np.asarray(image).reshape(out.shape[1:])


def decode_one(encoded: bytes, shape: Sequence[int], size: Sequence[int], where: str) -> tuple[np.ndarray, bool]:
    """A PNG or JPEG image of `shape` [H, W, C], resized to `size` [H, W] by Pillow's BOX, the mean of the area that a
    pixel covers; and whether it is JPEG, of which decoders make different pixels. Raises UserError.
    """
    from PIL import Image

    with reading(where):
        try:  # no other of Pillow's formats: for some it starts programs
            image = Image.open(io.BytesIO(encoded), formats=("PNG", "JPEG"))  # its header alone
        except Image.DecompressionBombError:
            raise UserError(
                f"{where} has more pixels than an image may, where {list(shape)} is declared; the file is damaged, or "
                "made to exhaust memory"
            ) from None
        due = "L" if shape[2] == 1 else "RGB"
        if (image.height, image.width, image.mode) != (*shape[:2], due):
            raise UserError(
                f"{where} has {image.height} x {image.width} pixels of {image.mode}, where {shape[0]} x {shape[1]} of "
                f"{due} are declared: correct one of them"
            )
        resized = image if tuple(size) == tuple(shape[:2]) else image.resize((size[1], size[0]), Image.Resampling.BOX)
        return np.asarray(resized).reshape(*size, shape[2]), image.format == "JPEG"
