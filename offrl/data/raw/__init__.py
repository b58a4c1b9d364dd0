"""Raw columns as a source reads them, unchecked, in the dtypes and ranks of a `Dataset`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offrl.data.dataset import ColumnSpec
from offrl.data.raw.streams import RawImages, RawStream
from offrl.errors import UserError, some, warn
from offrl.tasks.entries import entries
from offrl.tasks.task import Task

FLAGS = ("terminations", "truncations")
AMOUNTS = ("rewards", "costs")  # a number a step
MOST_VALUES = 65_536  # of a discrete action or observation: a network has an output, or an input, for each
BLOCKS, BLOCK = 20, 1000  # rows that are looked at for what float32 does not tell apart
STEPS = 4096  # of float32, by which a column varies at least that is not looked at
ALIKE = 0.9  # share of numbers that stay different, at least
SUCCESSORS = ("next_observations", "final_observations")  # of which is said what is said of observations
CORE = ("observations", "actions", "rewards", *FLAGS, "next_observations")


@dataclass
class RawData:
    """Unchecked data of a source: columns by canonical name, whose lengths may disagree, and the facts that the source
    knows about them.
    """

    columns: dict[str, np.ndarray]
    episode_ends: np.ndarray | None = None  # bool [R], True on each episode's last row; None: the flags say it
    name: str = ""
    source: str = "file"  # d4rl | minari | ogbench | d3rlpy | file | arrays | builtin
    path: str = ""
    version: str = ""
    task: Task | None = None
    action_low: Any = None  # the environment's range, a number or one per dimension; None: unknown
    action_high: Any = None
    range_known: bool | None = None  # False: that range is a guess; None: `action_range` finds out
    discrete: bool | None = None  # None: the dtype of the actions says it
    num_actions: int = 0  # 0: the largest action seen, plus 1
    final_observations: np.ndarray | None = None  # [E, *O], the successor of each episode's last row
    final_known: np.ndarray | None = (
        None  # bool [E]: False where `final_observations` merely repeats the last one; None: all are known
    )
    jump_rows: np.ndarray | None = (
        None  # filled by `find_ends`: rows whose stored successor is not the next row's, though no end is marked
    )
    last_complete: bool | None = None  # filled by `find_ends`: False when the data stop inside the last episode
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # what `warn` printed
    # what the source says of itself (author, algorithm, ...): `offrl data` keeps it
    metadata: dict[str, Any] = field(default_factory=dict)
    # of tables: the columns that each of ours is made of
    source_columns: dict[str, tuple[ColumnSpec, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()  # what the choices of discrete actions are called
    # [E, ...] an extra column after each episode's last row, if known
    final_columns: dict[str, np.ndarray] = field(default_factory=dict)
    streams: dict[str, RawStream] = field(default_factory=dict)  # observations beside the vector
    left_out: Sequence[str] = ()  # images that nobody asked for
    images: dict[str, RawImages] = field(default_factory=dict)  # of which `assemble` makes more of them

    @property
    def rows(self) -> int:
        return len(self.columns["observations"]) if "observations" in self.columns else 0

    def column_specs(self, column: str) -> tuple[ColumnSpec, ...]:
        """The columns of a table that the dimensions of a column of ours were read from; () where these have no names
        of their own.
        """
        specs, values = self.source_columns.get(column, ()), self.columns[column]
        width = int(np.prod(values.shape[1:], dtype=int))
        return () if len(specs) != width or specs == (ColumnSpec(column),) else specs

    def dimension_names(self, column: str) -> list[str]:
        """The names of the dimensions of a column of ours, with their units; [] where a file has none."""
        return [f"{c.name} [{c.unit}]" if c.unit else c.name for c in self.column_specs(column)]

    def note(self, text: str) -> None:
        """Remember, once, what a person should know about how these data were read."""
        if text not in self.notes:
            self.notes.append(text)

    def warn(self, text: str) -> None:
        """Print a warning about these data, and remember it."""
        self.warnings.append(f"{self.where}: {text}")
        warn(self.warnings[-1])

    def state_range(self, low: Sequence[float], high: Sequence[float]) -> None:
        """Take a range of the actions that a person gave: one number, or one for each dimension."""
        self.action_low, self.action_high = (low[0], high[0]) if len(low) == len(high) == 1 else (low, high)
        self.range_known = True

    def as_amounts(self) -> None:
        """Whole numbers of actions as amounts, for a range is stated; not where the number of choices is."""
        actions = self.columns.get("actions")
        if actions is not None and actions.dtype.kind in "iu" and actions.ndim == 1 and not self.num_actions:
            self.columns["actions"], self.discrete = actions.astype(np.float32)[:, None], False

    def settle_kind(self) -> None:
        """Find out whether the actions are discrete, by their type, where nobody said it."""
        if self.discrete is None:
            actions = self.columns.get("actions")
            self.discrete = actions is not None and actions.dtype.kind in "iu" and actions.ndim == 1

    @property
    def where(self) -> str:
        return self.path or self.name


def join_observations(values: Mapping[str, Any], keys: Sequence[str], where: str) -> np.ndarray:
    """Dict observations as one float32 array [R, O]: their `entries`, flattened and joined. Raises UserError for what
    are no numbers, and for entries of different length.
    """
    parts = {"/".join(path): np.asarray(part) for path, part in entries(values, keys, f"{where}: the observations")}
    try:
        flat = [p.reshape(len(p), -1).astype(np.float32, copy=False) for p in parts.values()]
        return np.concatenate(flat, axis=1)
    except (TypeError, ValueError):
        shown = some(f"{name} {part.dtype} {list(part.shape)}" for name, part in parts.items())
        raise UserError(
            f"{where}: the entries of observations must be numbers with one row for each step; they are {shown}"
        ) from None


def sampled(rows: int) -> list[slice]:
    """Some rows in a row, here and there: all where these are few."""
    if rows <= BLOCKS * BLOCK:
        return [slice(0, rows)]
    return [slice(start, start + BLOCK) for start in np.linspace(0, rows - BLOCK, BLOCKS).astype(int).tolist()]


def wide(dtype: np.dtype) -> bool:
    """Whether numbers of this type may be more than float32 tells apart."""
    return dtype.kind in "iuf" and dtype.itemsize >= 4 and dtype != np.float32


def coarse(values: np.ndarray) -> np.ndarray:
    """Whether each dimension of numbers [n, D] varies by no more than `STEPS` steps of float32, bool [D]."""
    with np.errstate(over="ignore", invalid="ignore"):
        numbers = np.where(np.isfinite(values), values, np.nan).astype(np.float64)
        largest = np.nanmax(np.abs(numbers), 0, initial=0.0)
        steps = np.spacing(largest.astype(np.float32)).astype(np.float64)
        middle = np.nan_to_num(np.nanmax(numbers, 0, initial=-np.inf) / 2 + np.nanmin(numbers, 0, initial=np.inf) / 2)
        spread = np.sqrt(np.nan_to_num((numbers - middle) ** 2).mean(0)) if len(numbers) else np.zeros(numbers.shape[1])
    return np.asarray((largest > 0) & (spread < STEPS * steps))


def lost(name: str, values: np.ndarray) -> str:
    """What to say of numbers [n, ...], in the type they are recorded in, that float32 does not tell apart; "" where it
    does.
    """
    if not wide(values.dtype) or values.ndim == 0 or not values.size:
        return ""
    flat = np.concatenate([values[part].reshape(len(values[part]), -1) for part in sampled(len(values))])
    for d in np.flatnonzero(coarse(flat)):
        column = flat[np.isfinite(flat[:, d]), d]
        narrow = column.astype(np.float32)
        # no rounding errors of float64
        real = np.abs(np.diff(column.astype(np.float64))) > 64 * np.spacing(float(np.abs(column).max()))
        before, after = len(np.unique(column)), len(np.unique(narrow))
        same = real & (narrow[1:] == narrow[:-1])
        if real.any() and (after < ALIKE * before or same.sum() > (1 - ALIKE) * real.sum()):
            label = f"{name}, dimension {d}" if flat.shape[1] > 1 else name
            offset = f"{float(np.median(column)):.6g}"
            return (
                f"{label}: of {before:,} different numbers, about {offset}, {after:,} stay different in float32, which "
                f"holds 7 digits and in which all is learnt: subtract an offset, such as {offset}, from the column"
            )
    return ""


def canonical(
    name: str, values: Any, where: str = "", discrete: bool | None = None, notes: list[str] | None = None
) -> np.ndarray:
    """An array of the dtype and rank the column has in a `Dataset`. Copies only where the dtype changes.

    notes: takes what is to be said of numbers that float32 does not tell apart.
    """
    array = _canonical(name, values, where, discrete)
    if notes is not None and array.dtype == np.float32 and (text := lost(name, np.asarray(values))):
        notes.append(text)
    return array


def _canonical(name: str, values: Any, where: str, discrete: bool | None) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise UserError(f"{where}: column '{name}' holds {array.dtype} values, not numbers")
    if name in (*FLAGS, *AMOUNTS):
        array = as_vector(array)
        if name in FLAGS:
            _refuse_other_flags(name, array, where)
        return array.astype(bool if name in FLAGS else np.float32, copy=False)
    if name == "actions":
        if discrete is None:
            discrete = array.dtype.kind in "biu" and (array.ndim == 1 or array.shape[1:] == (1,))
        if discrete:
            return array.reshape(len(array)).astype(np.int64, copy=False) if array.size == len(array) else array
        return (array[:, None] if array.ndim == 1 else array).astype(np.float32, copy=False)
    observed = name in ("observations", "next_observations")
    if observed and array.ndim == 1:
        array = array[:, None]
    if array.dtype.kind == "f" or (observed and (array.dtype != np.uint8 or array.ndim < 3)):
        return array.astype(np.float32, copy=False)
    return array if array.dtype in (np.uint8, bool) else array.astype(np.int64, copy=False)


def as_vector(values: np.ndarray) -> np.ndarray:
    """A column [R, 1] as [R]; others as they are."""
    return values[:, 0] if values.ndim == 2 and values.shape[1] == 1 else values


def _refuse_other_flags(name: str, values: np.ndarray, where: str) -> None:
    """Raises UserError where a column of flags has no value in some row, for NaN would count as True, and where it
    holds other numbers than 0 and 1, or a byte's 0 and 255."""
    if values.dtype == bool or not len(values):
        return
    rows = values.reshape(len(values), -1)
    if not (finite := np.isfinite(rows)).all():
        raise UserError(
            f"{where}: column '{name}' has no value in row {int(np.argmin(finite.all(1)))} ({int((~finite).sum()):,} "
            "such rows): write 0 or 1, or a number"
        )
    flags = (rows == 0) | (rows == 1)
    if values.dtype.itemsize == 1:
        flags |= rows == np.array(255, np.uint8).astype(values.dtype)
    if not flags.all():
        row = int(np.argmin(flags.all(1)))
        raise UserError(
            f"{where}: column '{name}' holds {rows[row][~flags[row]][0]} in row {row}, which is no flag: write 0 or 1"
        )


def ends_of(lengths: Any) -> np.ndarray:
    """The last rows of episodes of these lengths, of which those of no row are passed over: bool [R]."""
    lengths = np.asarray(lengths, np.int64)
    ends = np.zeros(int(lengths.sum()), bool)
    ends[np.cumsum(lengths)[lengths > 0] - 1] = True
    return ends


def bounds_of(ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The first row of each episode and the one after its last, [E] each, from their last rows, bool [R]."""
    stops = np.flatnonzero(ends) + 1
    return np.concatenate([[0], stops[:-1]]), stops


def ends_from(values: np.ndarray, rows: int, where: str) -> np.ndarray:
    """Flags [R] from flags, or from the row numbers of last rows, which count from 0, ascend, and end with R - 1.

    Other numbers could mean two things (starts, lengths, ends that are exclusive, or counted from 1), and are refused.
    """
    ends = as_vector(values)
    due = f"flags, one per row, or row numbers from 0 to {rows - 1} that ascend and end with {rows - 1}"
    if ends.dtype.kind not in "biuf" or ends.ndim != 1:
        raise UserError(
            f"{where}: episode_ends have shape {list(ends.shape)} and type {ends.dtype}; they must be {due}"
        )
    if ends.dtype == bool or (len(ends) == rows and rows > 1 and np.isin(ends, (0, 1)).all()):
        if ends.dtype != bool and rows == 2 and ends.tolist() == [0, 1]:
            raise UserError(
                f"{where}: episode_ends are 0, 1 of 2 rows: flags (one episode), or row numbers (two)? Write flags as "
                "booleans"
            )
        return ends.astype(bool)
    if not np.equal(np.mod(ends, 1), 0).all():
        raise UserError(f"{where}: episode_ends must be {due}")
    if not len(ends):
        return np.zeros(rows, bool)
    if not (np.diff(ends.astype(np.float64)) > 0).all() or ends[0] < 0 or ends[-1] != rows - 1:
        raise UserError(f"{where}: episode_ends must be {due}. {_other_reading(ends, rows)}")
    flags = np.zeros(rows, bool)
    flags[ends.astype(np.int64)] = True
    return flags


def _other_reading(ends: np.ndarray, rows: int) -> str:
    """What numbers that are no last rows of `rows` rows may mean instead, and the cure."""
    shown = "They are " + ", ".join(f"{v:g}" for v in ends[:3].tolist())
    shown += f", ..., {ends[-1]:g}" if len(ends) > 3 else ""
    if not (np.diff(ends.astype(np.float64)) > 0).all():
        if ends.min() >= 0 and ends.sum() == rows:
            return f"{shown}, which add up to {rows}: lengths of episodes? Give numpy.cumsum(lengths) - 1"
        return f"{shown}, which do not ascend"
    first = int(ends[0])
    if first < 0 or ends[-1] > rows:
        return shown
    if ends[-1] == rows:
        if first == 0:
            return f"{shown}: bounds of episodes? Leave out the first, and subtract 1 from the others"
        return f"{shown}: ends that are exclusive, or counted from 1? Subtract 1"
    last_rows = f"add {rows - 1}, or give flags where the data stop inside an episode"
    if first == 0:
        return (
            f"{shown}: either the first rows of episodes (then give the rows before them, without the first, and "
            f"{rows - 1}), or last rows, with a first episode of one row (then {last_rows})"
        )
    return (
        f"{shown}: either last rows, so that the first episode has {first + 1} rows (then {last_rows}), or ends that "
        f"are exclusive or counted from 1, so that it has {first} (then subtract 1 and add {rows - 1})"
    )
