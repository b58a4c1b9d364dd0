"""What the reports on data of numbers and of texts have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from offrl.data.costs import within_limits
from offrl.data.raw.checks import Fault
from offrl.errors import one_line
from offrl.tasks.task import Task

BINS = 10


@dataclass(frozen=True, kw_only=True)
class Findings(ABC):
    """A report, of which `str` is the text that `offrl data inspect` prints."""

    name: str
    source: str
    path: str
    faults: list[Fault]
    notes: list[str]
    environment: str = ""
    actions: str = ""
    returns: np.ndarray | None = (
        None  # [episodes] float64, of the rewards as recorded; None where the faults leave no episodes
    )
    lengths: np.ndarray | None = None  # [episodes] int64
    costs: np.ndarray | None = None  # [episodes] float64, where the data have costs
    scores: np.ndarray | None = None  # [episodes] normalised returns, where there are reference scores
    reference: str = ""
    example: list[str] = field(default_factory=list)

    kind: ClassVar[str] = ""  # of data, beside their source
    refusal: ClassVar[str]  # what follows from corrupting faults

    @property
    def corrupting(self) -> list[Fault]:
        """Faults for which the dataset is refused."""
        return [f for f in self.faults if f.severity == "corrupting"]

    @abstractmethod
    def counts(self) -> str:
        """The numbers of rows and episodes."""

    @abstractmethod
    def tables(self) -> list[str]:
        """Lines on what the columns hold."""

    def render(self) -> str:
        """The report as plain text."""
        lines = [f"{self.name} ({self.source}{self.kind})"]
        if self.path and self.path != self.name:
            lines[0] += f"  {self.path}"
        lines.append(self.counts())
        facts = [("environment", self.environment), ("actions", self.actions), *(("note", n) for n in self.notes)]
        lines += [f"  {word}: {text}" for word, text in facts if text]
        lines += ["", *self.tables()]
        if self.returns is not None and self.lengths is not None and len(self.returns):
            lines += ["", *histogram("episode returns", self.returns)]
            if (scores := self.scores) is not None:
                lowest, highest = scores.min(), scores.max()
                lines.append(
                    f"  normalised ({self.reference}): mean {scores.mean():.1f}, lowest {lowest:.1f}, highest "
                    f"{highest:.1f}"
                )
            if self.costs is not None:
                lines += ["", *histogram("episode costs", self.costs)]
                lines += [f"  {limit}: {share}" for limit, share in within_limits(self.costs, self.returns)]
            lines += ["", *histogram("episode lengths", self.lengths.astype(np.float64))]
        if self.example:
            lines += ["", *self.example]
        labels = {"corrupting": "FAULT", "warning": "warning"}
        lines += ["", *([f"  {labels[f.severity]} [{f.kind}] {f}" for f in self.faults] or ["  no faults found"])]
        if corrupting := len(self.corrupting):
            lines.append(f"  {corrupting} {self.refusal}: offrl refuses this dataset as it is")
        return "\n".join(map(one_line, lines))

    __str__ = render


def scores_of(task: Task | None, returns: np.ndarray | None) -> dict[str, Any]:
    """The fields `scores` and `reference` of episodes with these returns [E]."""
    if task is None:
        return {}
    scores = None if returns is None else task.normalise(returns)
    return {"scores": scores, "reference": task.ref_label or "reference scores of the dataset"}


def aligned(rows: Sequence[Sequence[str]], left_columns: int) -> list[str]:
    """Lines of a table, of whose columns the first `left_columns` are flush left and the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    cells = [
        [v.ljust(n) if k < left_columns else v.rjust(n) for k, (v, n) in enumerate(zip(r, widths, strict=True))]
        for r in rows
    ]
    return ["  " + "  ".join(row).rstrip() for row in cells]


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
