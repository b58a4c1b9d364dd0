"""Contents and faults of a dataset: sizes, returns, ranges, and every fault with its episode and row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from offrl.data.memory import chunks
from offrl.data.raw import RawData
from offrl.data.raw.checks import Fault, find_faults
from offrl.data.raw.infer import find_ends
from offrl.errors import one_line
from offrl.settings.dataset import DatasetConfig
from offrl.system import trust

if TYPE_CHECKING:
    from offrl.data.text.inspect import TextReport

BINS = 10
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


@dataclass(frozen=True)
class Column:
    """One column's layout and the spread of its finite values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    mean: float
    std: float  # over all entries together
    constant: tuple[int, ...] = ()  # flat dimensions that never change; empty for columns of one number
    dimensions: tuple[Spread, ...] = ()  # of observations and actions of several, the first MOST_DIMENSIONS
    has_names: bool = False  # by the file


@dataclass(frozen=True)
class Report:
    """The findings of `inspect_dataset`. `str(report)` is the text that `offrl data inspect` prints."""

    name: str
    source: str
    path: str
    rows: int
    columns: list[Column]
    faults: list[Fault]
    notes: list[str]
    environment: str = ""
    actions: str = ""
    returns: np.ndarray | None = (
        None  # [episodes] float64, of the rewards as recorded; None where the faults leave no episodes
    )
    lengths: np.ndarray | None = None  # [episodes] int64
    scores: np.ndarray | None = None  # [episodes] normalised returns, where there are reference scores
    reference: str = ""
    terminations: int = 0
    duplicates: int = 0  # rows whose observation, action and reward occurred before
    first_duplicate: tuple[int, int] | None = None  # the first such row, and the row it repeats

    @property
    def corrupting(self) -> list[Fault]:
        """Faults that would make training go wrong."""
        return [f for f in self.faults if f.severity == "corrupting"]

    def render(self) -> str:
        """The report as plain text."""
        lines = [f"{self.name} ({self.source})" + (f"  {self.path}" if self.path and self.path != self.name else "")]
        returns, lengths = self.returns, self.lengths
        if returns is None or not len(returns):
            lines.append(f"  {self.rows:,} rows")
        else:
            kinds = f"{self.terminations} terminated, {len(returns) - self.terminations} timed out or cut"
            lines.append(f"  {self.rows:,} rows, {len(returns):,} episodes ({kinds})")
        lines += [
            f"  {word}: {text}" for word, text in (("environment", self.environment), ("actions", self.actions)) if text
        ]
        lines += [f"  note: {note}" for note in self.notes]
        lines += ["", *_table(self.columns)]
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
        if returns is not None and lengths is not None and len(returns):
            lines += returns_and_lengths(returns, lengths, self.scores, self.reference)
        refusal = f"{len(self.corrupting)} fault(s) would corrupt training: offrl refuses this dataset as it is"
        return "\n".join(map(one_line, [*lines, "", *fault_lines(self.faults, refusal)]))

    __str__ = render


def inspect_dataset(config: DatasetConfig | str) -> Report | TextReport:
    """Read a dataset by path, name or id without refusing it for its faults, and report on it. Raises UserError when it
    is unreadable.
    """
    from offrl.data.loading.read import read_raw
    from offrl.data.text import tools as text_tools
    from offrl.data.text.inspect import text_report

    config = DatasetConfig(name=config) if isinstance(config, str) else config
    texts = text_tools.read(config, faults=True)
    if texts is not None:
        return text_report(texts, config.name)
    return report(read_raw(config.name, config), config)


def report(raw: RawData, config: DatasetConfig) -> Report:
    """The report on columns that were already read."""
    raw.settle_kind()
    faults = find_faults(raw, clip_actions=config.clip_actions)
    complete = not any(f.kind in ("missing", "empty", "length", "shape") for f in faults)
    returns = lengths = scores = None
    terminated = 0
    if complete:
        ends = find_ends(raw)
        last = np.flatnonzero(ends)
        start = np.concatenate([[0], last[:-1] + 1])
        returns = np.add.reduceat(raw.columns["rewards"], start, dtype=np.float64)
        lengths = last - start + 1
        if "terminations" in raw.columns:
            terminated = int(raw.columns["terminations"][last].sum())
        scores = raw.task.normalise(returns) if raw.task is not None else None
    duplicates, first = _duplicates(raw) if complete else (0, None)
    task = raw.task
    return Report(
        name=raw.name,
        source=" ".join(w for w in (raw.source, raw.version) if w),
        path=raw.path,
        rows=raw.rows,
        columns=[_column(name, column, raw.dimension_names(name)) for name, column in raw.columns.items()],
        faults=faults,
        notes=list(raw.notes),
        environment=""
        if task is None
        else _environment(task.env_id or "none") + (f": {task.note}" if task.note else ""),
        actions=_actions(raw),
        returns=returns,
        lengths=lengths,
        scores=scores,
        reference=task.ref_label or "reference scores of the dataset" if task is not None else "",
        terminations=terminated,
        duplicates=duplicates,
        first_duplicate=first,
    )


def _environment(env_id: str) -> str:
    """Its id, without a module that is known."""
    return env_id.rpartition(":")[2] if trust.importable(env_id) else env_id


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
        return Column(name, str(column.dtype), tuple(column.shape), np.nan, np.nan, np.nan, np.nan)

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
    numbers = zip(low.tolist(), high.tolist(), means.tolist(), stds.tolist(), strict=True)
    dimensions = tuple(
        Spread(names[d][:LONG] if has_names else str(d), *row) for d, row in zip(shown, numbers, strict=False)
    )
    has_names = has_names and bool(dimensions)
    ends = float(low.min()), float(high.max())
    return Column(
        name, str(column.dtype), column.shape, *ends, float(mean), float(spread), constant, dimensions, has_names
    )


def _duplicates(raw: RawData) -> tuple[int, tuple[int, int] | None]:
    """Rows that repeat an earlier row's observation, action and reward, by a 64-bit hash of their bytes; and the first
    such pair.
    """
    hashes = np.zeros(raw.rows, np.int64)
    for part in chunks(raw.rows, 1 << 14):
        rows = [_row_bytes(raw.columns[name][part]) for name in ("observations", "actions", "rewards")]
        hashes[part] = [hash(b"".join(row)) for row in zip(*rows, strict=True)]
    order = np.argsort(hashes, kind="stable")
    same = np.concatenate([[False], hashes[order][1:] == hashes[order][:-1]])
    if not same.any():
        return 0, None
    later = order[same]
    at = int(later.argmin())
    return int(same.sum()), (int(later[at]), int(order[np.flatnonzero(same)[at] - 1]))


def _row_bytes(column: np.ndarray) -> list[bytes]:
    """The bytes of each row."""
    flat = np.ascontiguousarray(column).reshape(len(column), -1)
    return flat.view(f"V{flat.shape[1] * flat.itemsize}")[:, 0].tolist() if flat.size else [b""] * len(flat)


def _table(columns: list[Column]) -> list[str]:
    rows: list[tuple[str, ...]] = [("column", "type", "shape", "lowest", "highest", "mean", "std")]
    for c in columns:
        rows.append(
            (c.name, c.dtype, "x".join(map(str, c.shape)), *(f"{v:.4g}" for v in (c.low, c.high, c.mean, c.std)))
        )
        rows += [(f"  {d.name}", "", "", *(f"{v:.4g}" for v in (d.low, d.high, d.mean, d.std))) for d in c.dimensions]
        if c.dimensions and (more := int(np.prod(c.shape[1:], dtype=int)) - len(c.dimensions)):
            rows.append((f"  {more:,} more", "", "", "", "", "", ""))
    return aligned(rows, 3)


def aligned(rows: Sequence[Sequence[str]], left_columns: int) -> list[str]:
    """Lines of a table, of whose columns the first `left_columns` are flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [v.ljust(n) if k < left_columns else v.rjust(n) for k, (v, n) in enumerate(zip(r, widths, strict=True))]
        for r in rows
    ]
    return ["  " + "  ".join(row).rstrip() for row in cells]


def returns_and_lengths(
    returns: np.ndarray, lengths: np.ndarray, scores: np.ndarray | None, reference: str
) -> list[str]:
    """Lines with the spread of episodes' returns, scores and lengths [E]."""
    lines = ["", *histogram("episode returns", returns)]
    if scores is not None:
        lowest, highest = scores.min(), scores.max()
        lines.append(
            f"  normalised ({reference}): mean {scores.mean():.1f}, lowest {lowest:.1f}, highest {highest:.1f}"
        )
    return [*lines, "", *histogram("episode lengths", lengths.astype(np.float64))]


def fault_lines(faults: Sequence[Fault], refusal: str) -> list[str]:
    """Lines with the faults, and what follows from corrupting ones."""
    corrupting = [f.severity == "corrupting" for f in faults]
    lines = [f"  {'FAULT' if bad else 'warning'} [{f.kind}] {f}" for f, bad in zip(faults, corrupting, strict=True)]
    return (lines or ["  no faults found"]) + [f"  {refusal}"] * any(corrupting)


def histogram(title: str, values: np.ndarray) -> list[str]:
    """Lines with the spread of `values` [N], and how they are distributed."""
    finite = values[np.isfinite(values)]
    if not len(finite):
        return [f"  {title}: not finite"]
    lines = [
        f"  {title}: mean {finite.mean():.6g}, std {finite.std():.6g}, lowest {finite.min():.6g}, median "
        f"{np.median(finite):.6g}, highest {finite.max():.6g}"
    ]
    if finite.min() == finite.max():
        return lines
    counts, edges = np.histogram(finite, BINS)
    labels = [f"{low:.6g} to {high:.6g}" for low, high in zip(edges[:-1], edges[1:], strict=True)]
    width, most = max(map(len, labels)), counts.max()
    for label, count in zip(labels, counts, strict=True):
        bar = "#" * int(np.ceil(40 * count / most)) if count else ""
        lines.append(f"    {label.rjust(width)}  {count:>7,}  {bar}".rstrip())
    return lines


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
