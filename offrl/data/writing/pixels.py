"""Streams of images in layouts that have a single observation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offrl.data.memory import Memory
from offrl.data.raw import RawData
from offrl.data.raw.infer import find_ends
from offrl.errors import UserError, some
from offrl.tasks.entries import PIXELS


def with_pixels(raw: RawData, memory: Memory) -> RawData:
    """The data with a stream of images that has no name as the column of observations [R, H, W, C]; themselves where
    there are no streams.

    Raises UserError for other streams, and for images that were left out because nobody asked for them.
    """
    streams = [*raw.streams, *raw.images]
    if raw.left_out:
        raise UserError(
            f"{raw.where}: the images {some(raw.left_out)} would be missing in what is written: say what is wanted, "
            "dataset.observation_keys=[...]"
        )
    if not streams:
        return raw
    stream = raw.streams.get(PIXELS)
    if stream is None or len(streams) > 1 or stream.values.ndim != 4 or raw.columns["observations"].shape[1:] != (0,):
        raise UserError(
            f"{raw.where}: HDF5 and Minari are not written with {some(streams)}: convert them to OUT.lerobot, train on "
            "the data themselves (a part: dataset.episodes=0:100; several: dataset.concatenate=[...]), or write the "
            "numbers alone, dataset.observation_keys=[...]"
        )
    columns = raw.columns | {"observations": memory.taken("observations", stream.values, stream.entries)}
    raw = replace(raw, columns=columns, streams={})
    if stream.final is not None and (known := stream.final >= 0).any():
        last = stream.entries[np.flatnonzero(find_ends(raw))]
        finals = np.where(known, stream.final, last)
        raw.final_observations = memory.taken("final_observations", stream.values, finals)
        raw.final_known = None if known.all() else known
    return raw
