"""Contents and faults of a dataset: sizes, returns, ranges, and every fault with its episode and row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from offrl.data.loading.assemble import without_pixels
from offrl.data.loading.read import read_raw
from offrl.data.memory import chunks
from offrl.data.raw import RawData, bounds_of
from offrl.data.raw.checks import find_faults
from offrl.data.raw.infer import find_ends
from offrl.data.text import tools as text_tools
from offrl.data.text.inspect import TextReport, text_report
from offrl.data.tools.findings import Findings, aligned, scores_of
from offrl.data.tools.streams import StreamSummary, described, entry_hashes, image_faults, row_bytes, shown_by
from offrl.settings.dataset import DatasetConfig
from offrl.system import trust

MOST_DIMENSIONS, LONG = 30, 40  # of a column, that have rows of their own; characters of their names
VECTORS = ("observations", "actions")  # whose dimensions have: next_observations are observations again


@dataclass(frozen=True)
class Spread:
    """One dimension of a column, a sensor's say, and the spread of its finite values."""

    name: str  # as the file calls it; else its number
    low: float
    high: float
    mean: float
    std: float

    def numbers(self) -> list[str]:
        """Its numbers as texts."""
        return [f"{v:.4g}" for v in (self.low, self.high, self.mean, self.std)]


@dataclass(frozen=True)
class Column(Spread):
    """One column's layout and the spread of its finite values, over all entries together."""

    dtype: str
    shape: tuple[int, ...]
    constant: tuple[int, ...] = ()  # flat dimensions that never change; empty for columns of one number
    dimensions: tuple[Spread, ...] = ()  # of observations and actions of several, the first MOST_DIMENSIONS
    has_names: bool = False  # by the file


@dataclass(frozen=True, kw_only=True)
class Report(Findings):
    """The findings of `inspect_dataset`."""

    rows: int
    columns: list[Column]
    terminations: int = 0
    streams: list[StreamSummary] = field(default_factory=list)
    duplicates: int = 0  # rows whose observation, action and reward occurred before
    first_duplicate: tuple[int, int] | None = None  # the first such row, and the row it repeats

    refusal: ClassVar[str] = "fault(s) would corrupt training"

    def counts(self) -> str:
        if self.returns is None or not len(self.returns):
            return f"  {self.rows:,} rows"
        kinds = f"{self.terminations} terminated, {len(self.returns) - self.terminations} timed out or cut"
        return f"  {self.rows:,} rows, {len(self.returns):,} episodes ({kinds})"

    def tables(self) -> list[str]:
        lines = [*_table(self.columns), *(f"  {stream}" for stream in self.streams)]
        for column in self.columns:
            if column.constant:
                total = int(np.prod(column.shape[1:], dtype=int))
                constants = (
                    ", ".join(column.dimensions[d].name for d in column.constant)
                    if column.has_names
                    else _ranges(column.constant)
                )
                lines.append(
                    f"  constant: {len(column.constant)} of {total} dimensions of {column.name} never change "
                    f"({constants})"
                )
        if self.first_duplicate is not None:
            share = 100 * self.duplicates / max(1, self.rows)
            later, earlier = self.first_duplicate
            lines.append(
                f"  duplicates: {self.duplicates:,} rows ({share:.1f}%) repeat an earlier one, row {later} the first "
                f"(of row {earlier})"
            )
        return lines


def inspect_dataset(config: DatasetConfig | str) -> Report | TextReport:
    """Read a dataset by path, name or id without refusing it for its faults, and report on it. Raises UserError when it
    is unreadable.
    """
    config = DatasetConfig(name=config) if isinstance(config, str) else config
    texts = text_tools.read(config, faults=True)
    if texts is not None:
        return text_report(texts, config.name)
    return report(read_raw(config.name, config), config)


def report(raw: RawData, config: DatasetConfig) -> Report:
    """The report on columns that were already read."""
    raw.settle_kind()
    shown = shown_by(raw)
    plain = without_pixels(raw) if shown else raw
    faults = image_faults(shown) + find_faults(raw, clip_actions=config.clip_actions)
    complete = not any(f.kind in ("missing", "empty", "length", "shape") for f in faults)
    returns = lengths = costs = None
    terminated, duplicates, first, streams = 0, 0, None, list[StreamSummary]()
    if complete:
        ends = find_ends(raw)
        start, stop = bounds_of(ends)
        returns = np.add.reduceat(raw.columns["rewards"], start, dtype=np.float64)
        lengths = stop - start
        if "costs" in raw.columns:
            costs = np.add.reduceat(raw.columns["costs"], start, dtype=np.float64)
        if "terminations" in raw.columns:
            terminated = int(raw.columns["terminations"][stop - 1].sum())
        hashes = entry_hashes(shown)
        duplicates, first = _duplicates(plain, hashes)
        streams = described(shown, hashes, ends)
    environment = ""
    if (task := raw.task) is not None:
        name = task.env_id or "none"
        environment = name.rpartition(":")[2] if trust.importable(name) else name  # without a module that is known
        environment += f": {task.note}" if task.note else ""
    return Report(
        name=raw.name,
        source=" ".join(w for w in (raw.source, raw.version) if w),
        path=raw.path,
        rows=raw.rows,
        columns=[
            _column(name, column, raw.dimension_names(name))
            for name, column in plain.columns.items()
            if column.shape[1:] != (0,)
        ],
        faults=faults,
        notes=list(raw.notes),
        environment=environment,
        actions=_actions(raw),
        returns=returns,
        lengths=lengths,
        costs=costs,
        **scores_of(task, returns),
        terminations=terminated,
        streams=streams,
        duplicates=duplicates,
        first_duplicate=first,
    )


def _actions(raw: RawData) -> str:
    actions = raw.columns.get("actions")
    if actions is None or not len(actions):
        return ""
    if raw.discrete:
        values, counts = np.unique(actions, return_counts=True)
        shown = ", ".join(f"{v}: {100 * c / len(actions):.0f}%" for v, c in list(zip(values, counts, strict=True))[:12])
        return f"discrete, {shown}" + (", ..." if len(values) > 12 else "")
    if raw.action_low is None or raw.action_high is None:
        return f"continuous, {actions.shape[-1]} dimensions"
    low, high = np.unique(raw.action_low), np.unique(raw.action_high)
    span = (
        f"[{low[0]:g}, {high[0]:g}]"
        if len(low) == len(high) == 1
        else f"between {low.min():g} and {high.max():g}, by dimension"
    )
    slack = 1e-4 * (raw.action_high - raw.action_low)
    blocks = (actions[part] for part in chunks(len(actions)))
    edge = sum(int(((b <= raw.action_low + slack) | (b >= raw.action_high - slack)).sum()) for b in blocks)
    return (
        f"continuous, {actions.shape[-1]} dimensions, range {span}; {100 * edge / actions.size:.1f}% of the entries "
        "lie on its edge"
    )


def _column(name: str, column: np.ndarray, names: Sequence[str]) -> Column:
    """Statistics in one pass over blocks, so that memory-mapped columns need no copy. names: of its dimensions, where
    the file has any.
    """
    width = int(np.prod(column.shape[1:], dtype=int))
    if not width:
        return Column(name, np.nan, np.nan, np.nan, np.nan, str(column.dtype), tuple(column.shape))

    def blocks() -> Iterator[np.ndarray]:
        """Some rows at a time, float64 [n, width], NaN in place of what is not finite."""
        for part in chunks(len(column)):
            block = np.asarray(column[part]).reshape(-1, width).astype(np.float64)
            yield np.where(np.isfinite(block), block, np.nan)

    low, high = np.full(width, np.inf), np.full(width, -np.inf)
    count, total, squares = np.zeros(width), np.zeros(width), np.zeros(width)
    for block in blocks():
        low, high = np.fmin(low, np.fmin.reduce(block, 0)), np.fmax(high, np.fmax.reduce(block, 0))
        count += np.isfinite(block).sum(0)
        total += np.nansum(block, 0)
    with np.errstate(invalid="ignore"):
        means = total / count
        mean = total.sum() / count.sum()
        for block in blocks():
            squares += np.nansum((block - means) ** 2, 0)
        stds = np.sqrt(squares / count)
        spread = np.sqrt(np.nansum(squares + count * (means - mean) ** 2) / count.sum())
    constant = tuple(int(d) for d in np.flatnonzero(low == high)) if len(column) > 1 and width > 1 else ()
    has_names = len(names) == width <= MOST_DIMENSIONS
    shown = range(min(width, MOST_DIMENSIONS) if name in VECTORS and (has_names or width > 1) else 0)
    rows = np.stack([low, high, means, stds], 1).tolist()
    dimensions = tuple(Spread(names[d][:LONG] if has_names else str(d), *rows[d]) for d in shown)
    has_names = has_names and bool(dimensions)
    ends = float(low.min()), float(high.max())
    return Column(
        name, *ends, float(mean), float(spread), str(column.dtype), column.shape, constant, dimensions, has_names
    )


def _duplicates(raw: RawData, images: Mapping[str, np.ndarray]) -> tuple[int, tuple[int, int] | None]:
    """Rows that repeat an earlier row's observation, action and reward, by a 64-bit hash of their bytes; and the first
    such pair. images: hashes of what each row shows in each stream.
    """
    hashes = np.zeros(raw.rows, np.int64)
    columns = [raw.columns[name] for name in ("observations", "actions", "rewards")] + [*images.values()]
    for part in chunks(raw.rows, 1 << 14):
        rows = [row_bytes(column[part]) for column in columns]
        hashes[part] = [hash(b"".join(row)) for row in zip(*rows, strict=True)]
    order = np.argsort(hashes, kind="stable")
    same = np.concatenate([[False], hashes[order][1:] == hashes[order][:-1]])
    if not same.any():
        return 0, None
    later = order[same]
    at = int(later.argmin())
    return int(same.sum()), (int(later[at]), int(order[np.flatnonzero(same)[at] - 1]))


def _table(columns: list[Column]) -> list[str]:
    rows: list[tuple[str, ...]] = [("column", "type", "shape", "lowest", "highest", "mean", "std")]
    for c in columns:
        rows.append((c.name, c.dtype, "x".join(map(str, c.shape)), *c.numbers()))
        rows += [(f"  {d.name}", "", "", *d.numbers()) for d in c.dimensions]
        if c.dimensions and (more := int(np.prod(c.shape[1:], dtype=int)) - len(c.dimensions)):
            rows.append((f"  {more:,} more", "", "", "", "", "", ""))
    return aligned(rows, 3)


def _ranges(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 7) -> "0-2, 7"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    shown = ", ".join("-".join(map(str, p)) for p in parts[:8])
    return shown + (", ..." if len(parts) > 8 else "")
