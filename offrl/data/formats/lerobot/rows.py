"""The rows of a LeRobot dataset, from its Parquet files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from offrl.data.containers.guard import reading
from offrl.data.containers.parquet import arrow_values, open_parquet, read_columns
from offrl.data.formats.lerobot.meta import EpisodeFiles, LerobotMetadata
from offrl.data.raw import as_vector, ends_of
from offrl.errors import UserError

INDEX = ("episode_index", "frame_index", "timestamp")


class LerobotRows:
    """The rows of some episodes, episode by episode."""

    def __init__(self, meta: LerobotMetadata, episodes: Sequence[EpisodeFiles], keys: Sequence[str]) -> None:
        """Raises UserError, naming file and episode, for rows that are not those of the episodes."""
        self.meta, self.episodes = meta, episodes
        self.rows_of: dict[Path, np.ndarray] = {}  # of each file's rows: the row here, -1 for none
        parts: dict[int, dict[str, np.ndarray]] = {}
        files: dict[Path, list[int]] = {}
        for k, episode in enumerate(episodes):
            files.setdefault(episode.data, []).append(k)
        starts = np.cumsum([0, *(e.length for e in episodes)])
        for path, inside in files.items():
            values = self._read(path, list(dict.fromkeys([*INDEX, *keys])))
            order = np.argsort(values["episode_index"], kind="stable")
            numbers = values["episode_index"][order]
            self.rows_of[path] = np.full(len(order), -1, np.int64)
            for k in inside:
                episode = episodes[k]
                first, stop = (int(np.searchsorted(numbers, episode.number, side)) for side in ("left", "right"))
                rows = order[first:stop]
                numbered = np.array_equal(values["frame_index"][rows], np.arange(len(rows)))
                if not (numbered and len(rows) == episode.length > 0):
                    raise UserError(
                        f"{path}: the {len(rows)} rows of episode {episode.number} are not numbered 0 to "
                        f"{episode.length - 1} by frame_index, as meta says; get the file again, or leave the episode "
                        "out with dataset.episodes"
                    )
                self.rows_of[path][rows] = np.arange(starts[k], starts[k + 1])
                parts[k] = {name: column[rows] for name, column in values.items()}
        self._parts = [parts[k] for k in range(len(episodes))]
        self.ends = ends_of([e.length for e in episodes])
        self.rows = len(self.ends)

    def _read(self, path: Path, keys: Sequence[str]) -> dict[str, np.ndarray]:
        table = read_columns(open_parquet(path), path, keys)
        with reading(path):
            table.validate(full=True)
        values = {k: as_vector(arrow_values(table[k], f"{path}: '{k}'")) for k in keys}
        for k, column in values.items():
            due = self.meta.features[k].shape if k in self.meta.features else (1,)
            if column[:1].size != math.prod(due) and len(column):
                raise UserError(
                    f"{path}: '{k}' has {column[:1].size} numbers in a row, where info.json says {list(due)}: correct "
                    "one of them"
                )
        return values

    def values(self, key: str) -> np.ndarray:
        """A feature of all rows, [R] or [R, ...], as recorded."""
        return np.concatenate([part[key] for part in self._parts])

    def times(self, k: int) -> np.ndarray:
        """When the rows of an episode were recorded, in seconds from its first one."""
        return np.asarray(self._parts[k]["timestamp"], np.float64)
