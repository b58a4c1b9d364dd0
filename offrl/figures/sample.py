"""The rows of a dataset that its pictures are drawn from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offrl.data.raw import RawData
from offrl.data.tools.inspect import Report

SAMPLE = 50_000  # rows that the pictures of actions, rewards and observations are drawn from
SAMPLE_BYTES = 200_000_000  # of one column; fewer rows of large images


@dataclass(frozen=True)
class Sample:
    """Rows drawn from a dataset, by their numbers in ascending order; `episode` is each row's episode, or None where
    there are none.
    """

    rows: np.ndarray
    episode: np.ndarray | None
    all_rows: bool

    def take(self, column: np.ndarray) -> np.ndarray:
        """These rows of a column [R, ...] (which may be mapped, or too short) as [n, width] float64."""
        rows = self.rows[self.rows < len(column)]
        limit = max(1, int(SAMPLE_BYTES / max(1, 8 * int(np.prod(column.shape[1:], dtype=np.int64)))))
        rows = rows[:: -(-len(rows) // limit)] if len(rows) > limit else rows
        return np.asarray(column[rows], np.float64).reshape(len(rows), int(np.prod(column.shape[1:], dtype=np.int64)))


def sample_of(raw: RawData, findings: Report) -> Sample:
    """All rows, or SAMPLE of them at random."""
    all_rows = raw.rows <= SAMPLE
    rows = (
        np.arange(raw.rows) if all_rows else np.sort(np.random.default_rng(0).choice(raw.rows, SAMPLE, replace=False))
    )
    lengths = findings.lengths
    episode = None if lengths is None else np.searchsorted(np.cumsum(lengths), rows, side="right")
    return Sample(rows, episode, all_rows)
