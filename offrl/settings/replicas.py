"""The replicas of a run: every seed with every combination of a grid's values (`grid.temperature=[1,3,10] seeds=4`).

Imports no torch, so that help and mistakes in a command are quick.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from offrl.errors import UserError, nearest
from offrl.settings import known
from offrl.settings.field import check, marked, shown_value
from offrl.settings.groups import grouped_name
from offrl.settings.train import MOST_SEEDS, TrainConfig, seed_list

# of one cell of a grid: (field of the algorithm's Config, value) in the grid's order
Values = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Replica:
    """One of the policies that a run trains. `str` gives what messages call it."""

    seed: int
    values: Values = ()

    @property
    def cell(self) -> str:
        """`temperature=3,expectile=0.7`: what the seeds of one cell of the grid share; empty without a grid."""
        return cell_name(self.values)

    @property
    def name(self) -> str:
        """`seed_0`, or `temperature=3,expectile=0.7,seed=0` in a grid: its name in files and in TensorBoard."""
        return f"{self.cell},seed={self.seed}" if self.values else f"seed_{self.seed}"

    def __str__(self) -> str:
        return self.name if self.values else f"seed {self.seed}"


def number(value: float) -> str:
    """The shortest text that reads back as the same number, without a decimal point where it is whole: `3`, `0.7`,
    `1e-05`.
    """
    return repr(float(value)).removesuffix(".0")


def cell_name(values: Values) -> str:
    """`temperature=3,expectile=0.7`."""
    return ",".join(f"{field}={number(value)}" for field, value in values)


def grid_text(grid: Mapping[str, Sequence[float]]) -> str:
    """`grid.temperature=[1,3] grid.expectile=[0.7,0.9]`, as it would be written in a command; `no grid` for an empty
    one.
    """
    return " ".join(f"grid.{field}=[{','.join(map(number, values))}]" for field, values in grid.items()) or "no grid"


def replicas(config: TrainConfig) -> list[Replica]:
    """Cells in the grid's order (the last field varies fastest), all seeds of a cell side by side. Without a grid: one
    for each seed.
    """
    return expand(config.grid, seed_list(config.seeds), config.paired)


def expand(grid: Mapping[str, Sequence[float]], seeds: Sequence[int], paired: bool = False) -> list[Replica]:
    """See `replicas`. paired: the fields' first values are one cell, their second ones the next, and so on."""
    columns = [[(field, float(value)) for value in values] for field, values in grid.items()]
    cells: Iterable[Values] = zip(*columns, strict=True) if paired and grid else itertools.product(*columns)
    return [Replica(seed, cell) for cell in cells for seed in seeds]


def hyper(replicas: Sequence[Replica]) -> dict[str, list[float]]:
    """field -> one value for each replica; {} without a grid."""
    fields = [field for field, _ in replicas[0].values] if replicas else []
    return {field: [dict(r.values)[field] for r in replicas] for field in fields}


def by_cell(replicas: Sequence[Replica]) -> dict[Values, list[int]]:
    """The positions of each cell's replicas, in the grid's order; {(): all of them} without a grid."""
    cells: dict[Values, list[int]] = {}
    for i, replica in enumerate(replicas):
        cells.setdefault(replica.values, []).append(i)
    return cells


# ------------------------------------------------------------------------------------------------------------ what is
# allowed


def scalars(config_class: type) -> list[str]:
    """Names of the fields of an algorithm's Config that hold a real number."""
    hints = get_type_hints(config_class)
    real = (float, {float, type(None)})  # float | None too
    return [
        f.name
        for f in dataclasses.fields(config_class)
        if hints[f.name] in real or set(get_args(hints[f.name])) in real
    ]


def varied(config_class: type) -> list[str]:
    """The scalar settings that a grid can vary."""
    fixed = marked(config_class, "structural", "shared")
    return [name for name in scalars(config_class) if name not in fixed]


def checked(
    grid: Mapping[str, Any], algo: Any, seeds: int, vectorized: bool, paired: bool = False
) -> dict[str, list[float]]:
    """The grid with every value as a float, in the order given.

    grid: {field of the algorithm's Config: a number or a list of numbers}, as read from a command or a file. algo: the
    Config itself. seeds: how many. vectorized: whether the algorithm trains several replicas at once. Raises UserError
    for what cannot be trained: unknown fields, fields that hold no real number, that are structural or shared, values
    outside the field's range, empty lists, repeated values (or, `paired`, cells, and lists of different lengths), an
    algorithm that trains one replica at a time, more than MOST_SEEDS replicas."""
    if not grid:
        return {}
    if not vectorized:
        raise UserError(
            f"algo={algo.name} trains one replica at a time and takes no grid; train each value by itself with "
            "algo.NAME=value"
        )
    result = {field: _values(field, values, algo, paired) for field, values in grid.items()}
    bounded(result, seeds, paired)
    return result


def bounded(grid: Mapping[str, Sequence[float]], seeds: int, paired: bool = False) -> None:
    """Raises UserError for more than MOST_SEEDS replicas, before any is made, a field without values, and lists that do
    not pair.
    """
    if empty := next((field for field, values in grid.items() if not values), ""):
        raise UserError(f"grid.{empty} has no values; write grid.{empty}=a,b")
    lengths = {field: len(values) for field, values in grid.items()}
    if paired and len(set(lengths.values())) > 1:
        counts = ", ".join(f"grid.{field} has {count}" for field, count in lengths.items())
        raise UserError(f"paired=true reads the grid's lists side by side, so they must be of equal length: {counts}")
    if paired and grid:
        cells = list(zip(*grid.values(), strict=True))
        if twice := next((cell for cell in cells if cells.count(cell) > 1), None):
            raise UserError(f"paired=true: the grid has {cell_name(tuple(zip(grid, twice, strict=True)))} twice")
    total = seeds * (next(iter(lengths.values()), 1) if paired else math.prod(lengths.values()))
    if total > MOST_SEEDS:
        sizes = (
            grid_text(grid)
            if sum(map(len, grid.values())) <= 20
            else f"a grid of {' x '.join(str(len(v)) for v in grid.values())} values"
        )
        raise UserError(
            f"{sizes} with {seeds} seeds is {total:,} replicas, at most {MOST_SEEDS:,} can be trained in one run"
        )


def _values(field: str, entries: Any, algo: Any, paired: bool) -> list[float]:
    """The values of one field. Raises UserError."""
    kind = type(algo)
    name, can = f"grid.{field}", varied(kind)
    if field not in scalars(kind):
        options = [*map(grouped_name, can)]
        able = f"a grid of {algo.name} varies {', '.join(options) or 'nothing'}"
        if any(f.name == field for f in dataclasses.fields(algo)):
            raise UserError(f"{name}: algo.{field} does not hold one real number; {able}")
        hint = known.elsewhere(name) or nearest(field, options)
        raise UserError(f"unknown setting '{name}'.{hint} {able[0].upper() + able[1:]}")
    values: list[float] = []
    if isinstance(entries, (list, tuple)) and len(entries) > MOST_SEEDS:
        raise UserError(
            f"{name} has {len(entries):,} values, at most {MOST_SEEDS:,} replicas can be trained in one run"
        )
    for item in entries if isinstance(entries, (list, tuple)) else [entries]:
        try:
            if isinstance(item, bool) or not isinstance(item, (int, float, str)):  # YAML takes 1e-4 for text
                raise ValueError
            value = float(item)
        except (ValueError, OverflowError):
            raise UserError(f"{name}: {shown_value(item)} must be a number; a list is written {name}=a,b") from None
        check(dataclasses.replace(algo, **{field: value}), "grid.")
        if value in values and not paired:
            raise UserError(f"{name} has the value {number(value)} twice")
        values.append(value)
    if not values:
        raise UserError(f"{name} has no values; write {name}=a,b")
    if field not in can:
        reason = (
            "how the networks are built or which terms a loss has"
            if field in marked(kind, "structural")
            else "what its replicas share"
        )
        raise UserError(
            f"{name}: algo.{field} decides {reason}; train it with separate runs, such as "
            f"algo.{field}={number(values[0])}"
        )
    return values
