"""Images beside a vector of numbers in files that offrl writes: columns infos/images/NAME, uint8 [R, H, W, C], and what
they show after each episode's last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from offrl.data.formats.provenance import INFOS, Record
from offrl.data.raw import RawData
from offrl.data.raw.streams import RawImages
from offrl.errors import UserError, nearest, some
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.task import Task

PREFIX = f"{INFOS}images/"
STATE = "state"  # the vector, where no Dict observation names its parts


def asked(record: Record, config: DatasetConfig, where: str) -> tuple[tuple[str, ...], DatasetConfig]:
    """(the parts of an observation by name, settings that read the images among them): those of
    `dataset.observation_keys`, or without them the vector, or the images where there is none.

    Raises UserError for names that the file does not have, or not in this order.
    """
    images = [name.removeprefix(PREFIX) for name in record.infos if name.startswith(PREFIX)]
    if not images or any(str(column).startswith(PREFIX) for column in config.fields):
        return (), config  # as columns, for a copy of the file
    vector = _vector(record, images)
    names = tuple(config.observation_keys) or tuple(vector or images)
    for name in names:
        if name not in (known := [*vector, *images]):
            raise UserError(
                f"{where}: the observations have no entry '{name}'; they have {', '.join(known)}.{nearest(name, known)}"
            )
    if (parts := [name for name in names if name not in images]) not in ([], vector):
        raise UserError(
            f"{where}: the numbers are joined of {','.join(vector)}, and dataset.observation_keys names "
            f"{','.join(parts)}: name all of them, in that order, or none"
        )
    chosen = {PREFIX + name: PREFIX + name for name in names if name in images}
    return names, replace(config, fields={**config.fields, **chosen})


def take(raw: RawData, record: Record, names: Sequence[str], config: DatasetConfig) -> None:
    """Make streams of the images among `names`, in place."""
    images = [name.removeprefix(PREFIX) for name in record.infos if name.startswith(PREFIX)]
    vector = _vector(record, images)
    for name in (name for name in names if name in images):
        raw.images[name] = RawImages(raw.columns.pop(PREFIX + name), None, raw.final_columns.pop(PREFIX + name, None))
    if not set(names) & set(vector):
        raw.columns["observations"] = np.zeros((raw.rows, 0), np.float32)
        raw.source_columns.pop("observations", None)
        raw.columns.pop("next_observations", None)
        raw.final_observations = raw.final_known = None
    base = raw.task or Task(name=raw.name)
    if config.observation_keys or base.observation_keys:
        raw.task = replace(base, observation_keys=tuple(names))
    if unused := [name for name in images if name not in names]:
        raw.note(
            f"not used: {some(unused)} (images are streams where they are asked for: "
            f"dataset.observation_keys=[{','.join((*names, *unused))}])"
        )


def _vector(record: Record, images: Sequence[str]) -> list[str]:
    keys = record.spec.task.observation_keys if record.spec.task is not None else ()
    parts = [key for key in keys if key not in images]
    return parts or [STATE] * (record.spec.observation_shape != (0,))
