"""The rows of a report, one for each algorithm and dataset: the last scores of its seeds, what is missing, what was
published.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from offrl import registry
from offrl.errors import some
from offrl.report.page import Cell as Shown
from offrl.runs.comparable import group
from offrl.runs.score import Cell, Results
from offrl.system.csv_text import text_of

Interval = tuple[float, float, float]
UNSCORED, RAW = "not scored", "raw returns"  # in place of a group's name
BEST = "best (uses the environment)"
TABLE = (
    "group",
    "dataset",
    "algorithm",
    "settings",
    "unit",
    "seeds",
    "seeds_asked",
    "step",
    "mean",
    "low",
    "high",
    "return_mean",
    "return_low",
    "return_high",
    "success_mean",
    "success_low",
    "success_high",
    "published",
    "published_std",
    "published_source",
    "best_uses_the_environment",
    "best_step",
    "missing",
)


@dataclass(frozen=True)
class Published:
    """A score from a paper, or from a benchmark's own file."""

    mean: float
    std: float | None
    source: str

    def text(self, score: bool = True) -> str:
        return digits(self.mean, score) + ("" if self.std is None else f" \u00b1 {digits(self.std, score)}")


@dataclass(frozen=True)
class Entry:
    """One algorithm with its settings on one dataset. Means come with the ends of their 95% interval over seeds
    (Student's t).
    """

    cell: Cell
    group: str  # of datasets whose scores mean the same; RAW or UNSCORED
    mean: Interval  # of the normalised scores, or of the returns where group is RAW; NaN without final scores
    returns: Interval
    success: Interval | None
    seeds: int  # that have a final score
    planned: int  # seeds that the command named; 0 where unknown
    step: int | None  # of the final scores; the largest where they differ
    published: Published | None

    @property
    def dataset(self) -> str:
        return self.cell.dataset

    @property
    def label(self) -> str:
        return self.cell.label

    @property
    def missing_text(self) -> str:
        """The missing seeds and the reasons, in words; empty when none is missing."""
        by_reason: dict[str, list[int]] = {}
        for m in self.cell.missing:
            by_reason.setdefault(m.reason, [])
            if m.seed is not None:
                by_reason[m.reason].append(m.seed)
        parts = []
        for reason, seeds in by_reason.items():
            who = f"seed{'s' if len(seeds) > 1 else ''} {some(map(str, sorted(set(seeds))), 8)}: " if seeds else ""
            parts.append(f"{who}{reason}")
        return "; ".join(parts)


def entries(results: Results) -> list[Entry]:
    """One for each dataset and algorithm, in the order of `Results.cells`."""
    cells = [_of_one_unit(c) for c in results.cells()]
    groups = {id(c): _group(c) for c in cells}
    by_dataset: dict[str, list[str]] = {}
    for c in cells:
        if groups[id(c)]:
            by_dataset.setdefault(c.dataset, []).append(groups[id(c)])
    result = []
    for c in cells:
        name = groups[id(c)] or next(iter(by_dataset.get(c.dataset, ())), UNSCORED)
        run_missing = next((m for m in c.missing if m.seed is None), None)
        seeds = len({s.seed for s in c.scores} | {m.seed for m in c.missing if m.seed is not None})
        success = c.interval("success") if c.scores and all(s.success is not None for s in c.scores) else None
        result.append(
            Entry(
                cell=c,
                group=name,
                mean=c.interval("raw" if name in (RAW, UNSCORED) else "normalised"),
                returns=c.interval("raw"),
                success=success,
                seeds=len(c.scores),
                planned=seeds if run_missing is None or seeds else 0,
                step=max((s.step for s in c.scores), default=None),
                published=_published(results, c, name),
            )
        )
    return result


def _of_one_unit(cell: Cell) -> Cell:
    """Without evaluations that lack a score where the last ones have it (a damaged line): they are no returns in place
    of scores.
    """
    if not cell.normalised:
        return cell
    return dataclasses.replace(cell, history=tuple(s for s in cell.history if s.normalised is not None))


def _group(cell: Cell) -> str:
    """The group of a cell with scores; an empty string for one without any."""
    rows = cell.scores or cell.history
    if not rows:
        return ""
    return group(rows[0]) if cell.normalised and group(rows[0]) else RAW


def _published(results: Results, cell: Cell, name: str) -> Published | None:
    reference = results.references.get((cell.dataset, cell.algorithm))
    if reference is not None:
        return Published(reference, None, results.reference_source or "the benchmark's own references")
    if name in (RAW, UNSCORED):
        return None
    for lookup in registry.names("published").values():
        published = lookup(cell.dataset, cell.algorithm)
        if published is not None:
            return Published(
                float(published.mean), None if published.std is None else float(published.std), str(published.source)
            )
    return None


def digits(value: float, score: bool = True) -> str:
    """A score with one decimal; a return with one below 1,000 and none above."""
    if not math.isfinite(value):
        return "-"
    text = f"{value:,.1f}" if score or abs(value) < 1000 else f"{value:,.0f}"
    return text.lstrip("-") if not text.strip("-0.") else text


def span(interval: Interval, score: bool = True) -> str:
    """`60.1 to 72.5`; empty for one seed."""
    if not all(map(math.isfinite, interval)):
        return ""
    return f"{digits(interval[1], score)} to {digits(interval[2], score)}"


def times_100(interval: Interval) -> Interval:
    """An interval of scores in units of 1, in those of scores."""
    value, low, high = interval
    return 100 * value, 100 * low, 100 * high


def interval_cell(interval: Interval, score: bool = True, unit: str = "", kind: str = "") -> Shown:
    """A value, with its interval below it where it has one."""
    small = span(interval, score)
    text = digits(interval[0], score) + unit
    return Shown(text, small=(unbroken(small),) if small else (), value=interval[0], kind=kind)


def show(entry: Entry, notes: list[str], *, top: bool = False) -> Shown:
    """The cell of a score table: mean, interval, what is missing, and the published score with the number of its source
    in `notes`.
    """
    score = entry.group != RAW
    small: list[str] = []
    note, published = "", []
    if entry.published is not None:
        if entry.published.source not in notes:
            notes.append(entry.published.source)
        note = f"[{notes.index(entry.published.source) + 1}]"
        published = ["published " + unbroken(f"{entry.published.text(score)} {note}")]
    if not entry.seeds:
        reasons = list(dict.fromkeys(m.reason for m in entry.cell.missing)) or ["no final score"]
        failed = any(r.startswith(("failed", "diverged")) for r in reasons)
        latest = entry.cell.latest()
        if latest:
            values = [s.normalised if score and s.normalised is not None else s.raw for s in latest]
            small.append(f"{digits(math.fsum(values) / len(values), score)} at step {latest[0].step:,}, not counted")
        text = "failed" if failed else "not finished" if entry.cell.history else "missing"
        return Shown(
            text,
            small=(_clip(reasons[0].removeprefix("failed: ")), *small, *published),
            kind="bad" if failed else "warning",
            hint=entry.missing_text,
        )
    if interval := span(entry.mean, score):
        small.append(unbroken(interval))
    else:
        small.append("one seed")
    incomplete = entry.seeds < entry.planned
    if incomplete:
        small.append(f"{entry.seeds} of {entry.planned} seeds")
    return Shown(
        digits(entry.mean[0], score),
        small=(*small, *published),
        kind="warning" if incomplete else "",
        strong=top,
        value=entry.mean[0],
        hint=f"{entry.seeds} seeds at step {entry.step:,}" if entry.step else "",
    )


def table(rows: Sequence[Entry]) -> str:
    """table.csv: one line for each entry; numbers in full."""
    lines: list[Sequence[object]] = [TABLE]
    for e in rows:
        best = e.cell.best() if e.seeds else None
        unit = "return" if e.group in (RAW, UNSCORED) else "score"
        p = e.published
        cells = (
            e.group,
            e.dataset,
            e.label,
            e.cell.settings,
            unit if e.seeds else "",
            e.seeds,
            e.planned or "",
            e.step,
            *e.mean,
            *e.returns,
            *(e.success or (None, None, None)),
            *((p.mean, p.std, p.source) if p else (None, None, None)),
            best[1] if best else None,
            best[0] if best else None,
            e.missing_text,
        )
        lines.append([_plain(v) for v in cells])
    return text_of(lines)


def _plain(value: object) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def unbroken(text: str) -> str:
    """Text that is not broken into lines."""
    return text.replace(" ", "\u00a0")


def _clip(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[:limit].rpartition(" ")[0] + " ..."
