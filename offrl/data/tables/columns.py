"""The chosen columns of a table, read in the order of its rows and in the dtypes of ours."""

from __future__ import annotations

import numpy as np

from offrl.data.memory import Memory
from offrl.data.raw import RawData, as_vector, canonical, ends_from, lost
from offrl.data.tables import values as cells
from offrl.data.tables.mapping import Chosen, Term
from offrl.data.tables.tabular import Tabular
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

OBSERVATIONS = ("observations", "next_observations", "final_observations")
MARKS = ("terminations", "truncations", "dones", "episode_ends")  # flags of ends


class Columns:
    """The chosen columns of a table, in the order of the rows; where it can be, each is read when it is needed."""

    def __init__(self, table: Tabular, chosen: Chosen, config: DatasetConfig, memory: Memory, raw: RawData) -> None:
        self.table, self.chosen, self.memory, self.raw = table, chosen, memory, raw
        self.exact = _exact(chosen, config)
        self.order: np.ndarray | None = None
        # of dimensions of observations, what is added to them since float32 merges what is recorded
        self.offsets: dict[int, float] = {}
        names = dict.fromkeys(part.column for parts in chosen.values() for part in parts)
        self.loaded = {} if table.by_column else table.read(list(names), self.exact)

    @property
    def files(self) -> np.ndarray | None:
        """Of several files: which one a row is from."""
        return self.loaded.get("\0file")

    def __getitem__(self, name: str) -> np.ndarray:
        values = self.loaded[name] if self.loaded else self.table.read([name], self.exact)[name]
        return values if self.order is None or len(values) != len(self.order) else values[self.order]

    def single(self, column: str) -> np.ndarray:
        """The values [R] of a column of ours that is one of the table's. Raises UserError for another shape."""
        name = self.chosen[column][0].column
        values = as_vector(self[name])
        rows = self.raw.rows
        if values.shape != (rows,):
            label = f"'{name}'" + ("" if name == column else f" ({column})")
            shape = list(values.shape)
            raise UserError(
                f"{self.table.where}: column {label} has shape {shape}; one value for each of {rows} rows is due"
            )
        return values

    def flags(self, column: str, rows: int) -> np.ndarray:
        """The flags of a column of ours, bool [R]; of episode_ends also from row numbers (see `ends_from`)."""
        name, where = self.chosen[column][0].column, self.table.where
        if column == "episode_ends":
            return ends_from(cells.flags(self[name], name, where), rows, where)
        array = self.array(column)
        values = cells.flags(self[name] if array is None else array, name, where)
        return canonical("truncations" if column == "dones" else column, values, where)

    def ordered(self, column: str, values: np.ndarray) -> np.ndarray:
        """Values [R, ...] in the order of the rows, in memory of their kind."""
        if self.order is None or len(values) != len(self.order):
            return values
        return self.memory.taken(column, values, self.order)

    def column(self, column: str) -> np.ndarray:
        """A column of ours in its dtype and rank."""
        return canonical(column, self.values(column), self.table.where, notes=self.raw.notes)

    def array(self, column: str) -> np.ndarray | None:
        """The array that a column of ours is in the table; None where it is made of others, or of texts."""
        parts = self.chosen[column]
        plain = len(parts) == 1 and parts[0].plain
        values = self.table.array(parts[0].column, column, self.memory, self.raw.notes) if plain else None
        return None if values is None else self.ordered(column, values)

    def values(self, column: str) -> np.ndarray:
        """The values of a column of ours, [R, ...] or, of several of the table's, [R, parts]."""
        parts = self.chosen[column]
        if (array := self.array(column)) is not None:
            return array
        blocks = [self.scaled(parts[0])]
        if len(parts) == 1 and (column not in OBSERVATIONS or blocks[0].ndim > 1):
            return blocks[0]
        out = self.memory.empty(column, (len(blocks[0]), len(parts)), np.float32)
        for i, part in enumerate(parts):
            values = self.scaled(part) if i else blocks[0]
            if len(values) != len(out):
                raise UserError(
                    f"{self.table.where}: column '{part.column}' has {len(values)} rows, and '{parts[0].column}' has "
                    f"{len(out)}"
                )
            if values.ndim > 1:  # lists, or an array beside columns
                numbers = [self.scaled(p) for p in parts]
                for p, block in zip(parts, numbers, strict=True):
                    self._say_lost(column, p, block)
                return np.concatenate([b.reshape(len(b), -1).astype(np.float32, copy=False) for b in numbers], 1)
            if column == "observations" and not part.offset and lost(part.column, values):
                self._choose_offset(i, part, values)
            if column in OBSERVATIONS and i in self.offsets:
                values = values + self.offsets[i]
            self._say_lost(column, part, values)
            with np.errstate(over="ignore"):
                out[:, i] = values
        return out

    def _choose_offset(self, dimension: int, part: Term, values: np.ndarray) -> None:
        """Make observations of a column from the number of fewest digits that lies among its values."""
        finite = values[np.isfinite(values)].astype(np.float64)
        middle, spread = float(np.median(finite)), float(np.ptp(finite))
        rounded = (float(f"{middle:.{digits}g}") for digits in range(1, 18))
        offset = self.offsets[dimension] = -next(x for x in rounded if abs(x - middle) <= spread)
        self.raw.note(
            f"{part.column}: float32, which holds 7 digits, would merge most of its numbers, so that observations are "
            f"the column {'minus' if offset < 0 else 'plus'} {abs(offset):.15g}, and policies take it so (offset in "
            "policy.json)"
        )

    def scaled(self, part: Term) -> np.ndarray:
        """The numbers of a column of the table, times the scale of `part` plus its offset."""
        values = cells.numbers(self[part.column], part.column, self.table.where)
        return values if part.plain else values * part.scale + part.offset

    def _say_lost(self, column: str, part: Term, values: np.ndarray) -> None:
        if column != "next_observations" and (text := lost(part.column, values)):
            self.raw.note(text)


def _exact(chosen: Chosen, config: DatasetConfig) -> dict[str, str]:
    """See `Tabular.read`."""
    labels = (
        len(chosen.get("actions", ())) == 1 and config.action_kind in ("auto", "discrete") and not config.action_low
    )
    kinds = {
        "terminations": "whole",
        "truncations": "whole",
        "dones": "whole",
        "actions": "label" if labels else "whole",
        "episode_ids": "name",
    }
    times = {part.column for part in chosen.get("time", ())}
    parts = [(part, kind) for column, kind in kinds.items() for part in chosen.get(column, ()) if part.plain]
    return {part.column: kind for part, kind in parts if not (kind == "name" and part.column in times)}
