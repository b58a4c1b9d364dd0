"""Streams of observations as sources hand them over."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class RawStream:
    """Images or rows of a table, of which an episode's stand one after another."""

    values: np.ndarray  # [F, H, W, C] uint8 frames, or [F, L] float32 rows of a table
    entries: np.ndarray  # [R] int64: the entry of each row's observation
    final: np.ndarray | None = None  # [E] int64: the entry after each episode's last row, -1 where not known
    digest: str = ""  # of decoded images: sha256 of the encoded bytes, the size and the decoder; "": of the values
