"""Streams of observations as sources hand them over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offrl.errors import UserError

PIXELS = "pixels"  # the name of a stream that has none, Gymnasium's
CHANNELS = (1, 2, 3, 4)  # of one frame
EDGE = 4096  # pixels at most


@dataclass
class RawStream:
    """Images or rows of a table, of which an episode's stand one after another."""

    values: np.ndarray  # [F, H, W, C] uint8 frames, or [F, L] float32 rows of a table
    entries: np.ndarray  # [R] int64: the entry of each row's observation
    final: np.ndarray | None = None  # [E] int64: the entry after each episode's last row, -1 where not known
    digest: str = ""  # of decoded images: sha256 of the encoded bytes, the size and the decoder; "": of the values


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
    if max(shape) > EDGE:
        raise UserError(f"{where}: images of {shape[0]} x {shape[1]} pixels; at most {EDGE} an edge are read")
    return images
