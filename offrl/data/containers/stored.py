"""Numbers as a file stores them, of which a reader that converts to float32 keeps some to say what that does not tell
apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.data.raw import BLOCK, BLOCKS, lost, wide


class Stored:
    """Some rows of each column, from about BLOCKS places."""

    def __init__(self, rows: int) -> None:
        """rows: of all episodes."""
        self.every, self.next = max(1, rows // BLOCKS), 0
        self.samples: dict[str, list[np.ndarray]] = {}

    def looks_at(self, row: int) -> bool:
        """Whether the episode that begins at `row` is one of those to `keep`. Asked in order."""
        looked = row >= self.next
        self.next = row + self.every if looked else self.next
        return looked

    def keep(self, name: str, values: Any) -> None:
        """Rows of column `name` as they are stored; what is no array of wide numbers is not kept."""
        if isinstance(values, np.ndarray) and values.ndim and wide(values.dtype):
            self.samples.setdefault(name, []).append(values[:BLOCK].reshape(len(values[:BLOCK]), -1))

    def notes(self) -> list[str]:
        """What to say of the columns that were kept."""
        return [text for name, rows in self.samples.items() if (text := lost(name, np.concatenate(rows)))]
