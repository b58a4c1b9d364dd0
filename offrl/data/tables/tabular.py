"""Tables of every kind: named columns of R rows each, from a file, a DataFrame or arrays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from offrl.data.memory import Memory
from offrl.errors import UserError


class Tabular(ABC):
    """Named columns of R rows each."""

    where: str
    names: list[str]
    by_column = False  # whether reading a column does not read the others as well
    units: Mapping[str, str] = MappingProxyType({})  # of columns, where the table says them
    # beginnings of names that belong to the file's layout: nothing is said where nothing takes these
    own_names: tuple[str, ...] = ()

    def refuse_doubles(self, names: Sequence[str]) -> None:
        """Raises UserError where two columns have one of these names."""
        if twice := sorted({n for n in names if names.count(n) > 1}):
            raise UserError(f"{self.where} has a column twice: {', '.join(n or 'one without a name' for n in twice)}")

    @abstractmethod
    def read(self, names: Collection[str], exact: Mapping[str, str]) -> dict[str, np.ndarray]:
        """Columns [R]: numbers, times (datetime64) or texts (object).

        exact: the columns whose whole numbers must stay integers. Of these a "name" (1.10, 007) is no number unless all
        are whole, and a "label" is none where one is written with zeros before it.
        """

    @abstractmethod
    def kinds(self) -> dict[str, str]:
        """What the columns hold, by their first rows or their types: number, text, time or other."""

    def array(self, name: str, column: str, memory: Memory, notes: list[str]) -> np.ndarray | None:
        """The numbers [R, ...] of a column in the dtype in which our `column` keeps them, without another copy; None:
        `read` gives them.

        notes: takes what float32 does not tell apart.
        """
        return None
