"""What reports on data say of their images and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from offrl.data.loading.assemble import without_pixels
from offrl.data.memory import chunks, rows_at_once
from offrl.data.raw import RawData
from offrl.data.raw.checks import Fault
from offrl.data.raw.streams import check_images
from offrl.errors import UserError

Shown = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by name: a stream's entries [F, ...], and which the rows show [R]


@dataclass(frozen=True)
class StreamSummary:
    """What a stream holds."""

    name: str
    shape: tuple[int, ...]  # of an entry
    entries: int
    repeated: float | None = None  # share of an episode's images that are the one before again; None: of a table

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        if self.repeated is None:
            return f"{self.name}: a table of {self.entries:,} rows of {size} numbers"
        return (
            f"{self.name}: {self.entries:,} images of {size}, of which {100 * self.repeated:.1f}% repeat the one before"
        )


def shown_by(raw: RawData) -> Shown:
    """The streams of data as they were read, faults and all."""
    if "observations" not in raw.columns:
        return {}
    raw = without_pixels(raw)
    images = {name: (i.values, np.arange(len(i.values))) for name, i in raw.images.items()}
    return images | {name: (s.values, s.entries) for name, s in raw.streams.items()}


def entry_hashes(shown: Shown) -> dict[str, np.ndarray]:
    """A 64-bit hash of what each row shows in each stream, int64 [R]."""
    hashes = {}
    for name, (values, entries) in shown.items():
        of_entries = np.zeros(len(values), np.int64)
        for part in chunks(len(values), rows_at_once(values)):
            of_entries[part] = [hash(row) for row in row_bytes(values[part])]
        hashes[name] = of_entries[entries]
    return hashes


def row_bytes(column: np.ndarray) -> list[bytes]:
    """The bytes of each row."""
    flat = np.ascontiguousarray(column).reshape(len(column), -1)
    return flat.view(f"V{flat.shape[1] * flat.itemsize}")[:, 0].tolist() if flat.size else [b""] * len(flat)


def described(shown: Shown, hashes: Mapping[str, np.ndarray], ends: np.ndarray) -> list[StreamSummary]:
    """What the streams hold. hashes: `entry_hashes`. ends: the episodes' last rows, bool [R]."""
    streams = []
    for name, (values, _) in shown.items():
        same = (hashes[name][1:] == hashes[name][:-1])[~ends[:-1]]
        repeated = None if values.ndim < 3 else float(same.mean()) if len(same) else 0.0
        streams.append(StreamSummary(name, values.shape[1:], len(values), repeated))
    return streams


def image_faults(shown: Shown) -> list[Fault]:
    """Images of another type, order or size than are read."""
    faults = []
    for name, (values, _) in shown.items():
        if values.ndim >= 3:
            try:
                check_images(values, f"'{name}'")
            except UserError as error:
                faults.append(Fault("shape", "corrupting", str(error)))
    return faults
