"""From results to the page and the files beside it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from offrl.errors import UserError, nearest, some
from offrl.figures.style import own_settings
from offrl.report import ReportConfig, answer, figures, scores, whiskers
from offrl.report import appendix as behind
from offrl.report import diagnostics as details
from offrl.report.compare import compare
from offrl.report.context import MANY, ReportContext, count
from offrl.report.films import films
from offrl.report.page import Page
from offrl.report.rows import Entry, entries, table
from offrl.runs.comparable import differences, groups
from offrl.runs.exchange.files import write as write_documents
from offrl.runs.exchange.merge import documents_of
from offrl.runs.record import SCORES
from offrl.runs.results import collect, write
from offrl.runs.score import Results

MOST_ANSWERS = 4  # with a picture, after the first
MOST_SCORES = 25_000_000  # bytes of scores.csv, and of tables given by name, from which on evaluations are left out
THINNED = (
    "of the evaluations of each seed only one in {} is read, besides the last one and the final one, for the tables of "
    "scores have more than {:.0f} MB: the learning curves, the best evaluation and scores.csv leave the others out. "
    "Final scores and all that is made of them are complete"
)


@own_settings()
def report(
    paths: Sequence[str | Path], config: ReportConfig | None = None, say: Callable[[str], None] = lambda _: None
) -> Path:
    """Write the report on run directories, benchmark directories, folders above them, tables and documents of results;
    return its path.

    `say` is called with a line before each longer step. Raises UserError where nothing is found, the baseline is
    unknown, or `config.out` cannot be written. The page lists everything damaged, missing or doubtful.
    """
    collecting = gc.isenabled()
    gc.disable()  # it would look at hundreds of thousands of scores, which stay until the end, again and again
    try:
        return _report(paths, config or ReportConfig(), say)
    finally:
        gc.unfreeze()
        (gc.enable if collecting else gc.disable)()


def _report(paths: Sequence[str | Path], config: ReportConfig, say: Callable[[str], None]) -> Path:
    from offrl.system.files import write_text

    say("reading")
    results = collect(paths, thinning(paths))
    if config.results:
        write_documents(config.results, documents_of(results, config.license or None))
    rows = entries(results)
    labels = list(dict.fromkeys(e.label for e in rows))
    if config.baseline and config.baseline not in labels:
        known = f"{nearest(config.baseline, labels)} They are: {', '.join(labels)}"
        raise UserError(f"baseline={config.baseline} is none of the algorithms.{known}")
    out = Path(config.out)
    compared, ungrouped = groups(results)
    algorithms = {e.cell.algorithm for e in rows}
    say(
        f"{count(len(results.runs), 'run')}, {count(len(algorithms), 'algorithm')}, "
        f"{count(len(results.datasets), 'dataset')}: comparing"
    )
    comparisons = [compare(group, config.bootstrap, config.baseline) for group in compared]
    page = Page(config.title or _title(results, rows), _subtitle(results, rows))
    context = ReportContext(page, out, results, rows, comparisons, ungrouped, figures.colours(labels))
    write(results, out / "scores.csv")
    write_text(out / "table.csv", table(rows))
    _answers(context, config.bootstrap)
    _problems(context)
    page.contents()
    gc.freeze()
    gc.enable()  # for the figures
    say("drawing")
    films(context)
    scores.scores(context)
    behind.costs(context)
    behind.finetuning(context, config.bootstrap)
    scores.together(context)
    scores.searches(context)
    scores.curves(context)
    behind.settings(context)
    behind.times(context)
    behind.environments(context)
    behind.diagnostics(context)
    page.heading("Files")
    coverage = "every evaluation" if results.every == 1 else f"one evaluation in {results.every}, and the last,"
    page.text(
        f"Beside this page: scores.csv ({coverage} of every seed, one line each), table.csv (the score tables in "
        "full), and the pictures as PNG."
    )
    return page.save(out / "index.html")


def _answers(context: ReportContext, reps: int) -> None:
    """The first screen: who is ahead, by how much, how sure; of many datasets the first few with their pictures."""
    page = context.page
    first, *further = answer.answers(
        context.comparisons,
        context.rows,
        lambda dataset, score: details.behaviour(context.results.runs, dataset, score),
        functools.partial(differences, context.results),
        reps,
    )
    whiskers.show(page, first, context.colour, first=True)
    with page.gallery() if len(further) > 1 else contextlib.nullcontext():
        for one in further[:MOST_ANSWERS]:
            whiskers.show(page, one, context.colour, first=False)
    if unshown := further[MOST_ANSWERS:]:
        with page.details(f"{count(len(unshown), 'more dataset')}"):
            page.items([f"{one.verdict} {one.sure}" for one in unshown])


def thinning(paths: Sequence[str | Path]) -> int:
    """The number k: of tables of scores with more than MOST_SCORES bytes in all only each k-th evaluation of a seed is
    read.
    """
    size = 0
    for path in map(str, paths):
        tables = [path, *(os.path.join(folder, SCORES) for folder, _, names in os.walk(path) if SCORES in names)]
        for file in tables:
            with contextlib.suppress(OSError):
                size += os.path.getsize(file) if os.path.isfile(file) else 0
    return max(1, -(-size // MOST_SCORES))


def _title(results: Results, rows: Sequence[Entry]) -> str:
    suites = {s.suite for s in results.scores}
    suite = f"{suites.pop()}: " if len(suites) == 1 and "" not in suites else ""
    algorithms = list(dict.fromkeys(e.cell.algorithm for e in rows))
    who = ", ".join(algorithms) if len(algorithms) <= 5 else count(len(algorithms), "algorithm")
    return f"{suite}{who} on {results.datasets[0] if len(results.datasets) == 1 else count(len(results.datasets), 'dataset')}"  # noqa: E501


def _subtitle(results: Results, rows: Sequence[Entry]) -> str:
    from datetime import date
    from importlib.metadata import version

    parts = [count(len(results.runs), "run")] if results.runs else ["from tables of results"]
    algorithms, labels = {e.cell.algorithm for e in rows}, {e.label for e in rows}
    settings = f" ({len(labels)} with different settings)" if len(labels) > len(algorithms) else ""
    parts += [count(len(algorithms), "algorithm") + settings, count(len(results.datasets), "dataset")]
    parts += [count(len(results.final), "final score"), f"offrl {version('offrl')}, {date.today().isoformat()}"]
    return " \u00b7 ".join(parts)


def _problems(context: ReportContext) -> None:
    """Warnings to read before the numbers, and a list of everything that is missing."""
    where: dict[str, list[Entry]] = {}
    for e in context.rows:
        if e.missing_text:
            where.setdefault(e.missing_text, []).append(e)
    failed: list[str] = []
    remaining: list[str] = []
    for reason, group in where.items():
        cells = some([f"{e.label} on {e.dataset}" for e in group], 3)
        (failed if "failed" in reason or "diverged" in reason else remaining).append(f"{cells}: {reason}")
    lines = [*context.results.problems, *failed, *remaining]
    if not context.results.final and len(context.rows) <= whiskers.MOST_ROWS:
        lines = list(context.results.problems)  # the first screen names each
    if (stride := context.results.every) > 1:
        lines.insert(0, THINNED.format(stride, MOST_SCORES / 1e6))
    _, several = details.version_rows(context.results.runs)
    for name in ("mujoco", "gymnasium"):
        if name in several and not any(name in line for line in context.results.problems):
            lines.append(f"runs were made with different versions of {name}; see Environments and versions")
    if not lines:
        return
    page = context.page
    page.box(
        f"{count(len(lines), 'thing')} to know before reading the numbers", lines[:MANY], "bad" if failed else "warning"
    )
    if len(lines) > MANY:
        with page.details(f"{len(lines) - MANY} more"):
            page.items(lines[MANY:])
    if any(len(group) > 3 for group in where.values()):
        with page.details("Every score that is missing, and why"):
            body = [[e.dataset, e.label, e.missing_text] for e in context.rows if e.missing_text]
            page.table(["dataset", "algorithm", "missing"], body)
