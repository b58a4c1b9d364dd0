"""The material that the sections of a report share: the page, the results and the comparisons made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from offrl.report.compare import Comparison
from offrl.report.page import Page
from offrl.report.rows import RAW, UNSCORED, Entry
from offrl.runs.score import Results

MANY = 12  # lines of a box, rows of a table, above which the rest is folded away
LONGEST_NAME = 100  # letters of a PNG file's name, which comes from a dataset's
MANY_RUNS = 1000  # above which a report leaves out what only fills its page, and says so

Row = TypeVar("Row")


@dataclass
class ReportContext:
    """The page and the results, as every section needs them."""

    page: Page
    out: Path
    results: Results
    rows: list[Entry]
    comparisons: list[Comparison]
    ungrouped: list[str]  # why datasets are in no group
    colour: dict[str, str]
    pictures: set[str] = field(default_factory=set)  # names of PNG files

    def groups(self) -> list[str]:
        """Names of groups of normalised scores, those that are aggregated first."""
        aggregated = [c.group.name for c in self.comparisons]
        return list(dict.fromkeys([*aggregated, *(e.group for e in self.rows if e.group not in (RAW, UNSCORED))]))

    def labels(self, rows: Sequence[Entry]) -> list[str]:
        present = {e.label for e in rows}
        return [label for label in self.colour if label in present]

    def add(self, figure: Any, name: str, caption: str, alt: str = "") -> None:
        """Show a figure, and write it as NAME.png. alt: what it shows, in words, where the caption does not say it."""
        from offrl.figures.style import save

        short, number = name[:LONGEST_NAME], 1
        name = short
        while name in self.pictures:  # "a b" and "a-b" have the same plain word
            number += 1
            name = f"{short}-{number}"
        self.pictures.add(name)
        save(figure, self.out / f"{name}.png")
        figure.set_layout_engine("none")  # settled; the drawing in the page need not do it again
        self.page.figure(figure, caption, alt=alt)


def count(number: int, word: str) -> str:
    """`3 runs`, `1 run`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def first(context: ReportContext, rows: Sequence[Row], where: str) -> Sequence[Row]:
    """The rows of a table with a line for each run, or the first MANY_RUNS, which the page then says. where: the file
    with the rest.
    """
    if len(rows) > MANY_RUNS:
        context.page.text(f"The first {MANY_RUNS:,} of {len(rows):,} runs; {where} of each run has the rest.", "small")
    return rows[:MANY_RUNS]


@contextlib.contextmanager
def folded(page: Page, fold: bool, title: str) -> Iterator[None]:
    """A part of the page, written inside the `with`: folded away under `title` if `fold`, else under a heading."""
    if fold:
        with page.details(title):
            yield
    else:
        page.heading(title, level=3)
        yield
