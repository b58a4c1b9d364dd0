"""Sections of a report: score tables, aggregates over datasets, learning curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from offrl.figures.curves import Curves
from offrl.report import diagnostics as details
from offrl.report import figures
from offrl.report.compare import SEARCH, Comparison
from offrl.report.context import MANY, ReportContext, count, folded
from offrl.report.page import Cell, slug
from offrl.report.rows import BEST, RAW, UNSCORED, Entry, digits, interval_cell, show, times_100
from offrl.runs.comparable import settings_matrix
from offrl.runs.tables import CHOICE
from offrl.statistics.aggregate import DRAWS, expected_online_performance

WIDE = 6  # algorithms side by side
MOST_POINTS = 1000  # evaluations of a learning curve that are drawn
NONE = "\u2013"  # in place of a number that is not applicable
LAST = (
    "Mean over seeds of the last evaluation, when training had reached its planned number of steps (updates; of "
    "fine-tuning those of the environment); below it the 95% interval (Student's t over seeds). Bold: the highest mean "
    "of the line, which need not be a difference that other seeds would show. The published score, where there is one, "
    "stands below."
)
NOT_NORMALISED = (
    "These scores have no reference to be normalised by, so they are returns as the environment gives them. Returns of "
    "different tasks have different scales: they are averaged with no other dataset."
)
CHOSEN = (
    "The best evaluation was chosen with the environment, which offline learning does not have: it is no result, and "
    "says only what a perfect choice of the checkpoint would have given."
)
TOGETHER = (
    "Only datasets whose scores mean the same are taken together. IQM: mean of the middle half of all runs' scores; it "
    "is steadier than the median and less moved by single runs than the mean. Optimality gap: how far runs stay below "
    "100 on average. Intervals: 95%, stratified bootstrap over runs (arXiv 2108.13264); the datasets themselves are "
    "not resampled."
)
ONLINE = (
    "The expected score of the best of k settings, drawn at random from those that were tried and compared in the "
    "environment (arXiv 2305.09836). The first column is what a setting gives that nobody chose; how fast the rest "
    "rises says what the search is worth."
)
PROFILE = (
    "Performance profile: the share of runs, over all datasets, that score more than a threshold; higher is better. "
    "Bands: 95%, pointwise."
)
IMPROVEMENT = (
    "Probability of improvement: the chance that a run of the first algorithm beats one of the second on the same "
    "dataset, averaged over datasets. An interval that reaches the dashed line (1/2) decides nothing."
)


def scores(context: ReportContext) -> None:
    page = context.page
    page.heading("Scores")
    page.text(LAST, "small")
    if any(s.cell for s in context.results.final):
        page.text(f"{CHOICE}.", "small")
    for name in context.groups():
        page.heading(name, level=3)
        rows = [e for e in context.rows if e.group == name]
        comparison = next((c for c in context.comparisons if c.group.name == name), None)
        _matrix(context, rows, comparison)
    raw = [e for e in context.rows if e.group == RAW]
    if raw:
        page.heading("Raw returns", level=3)
        page.text(NOT_NORMALISED, "small")
        _matrix(context, raw, None)
    unscored = [e for e in context.rows if e.group == UNSCORED]
    if unscored:
        page.heading("Without scores", level=3)
        page.table(
            ["dataset", "algorithm", "why"],
            [[e.dataset, e.label, e.missing_text or "no evaluation was written"] for e in unscored],
        )
    _success(context)
    _every_cell(context)


def _matrix(context: ReportContext, rows: Sequence[Entry], comparison: Comparison | None) -> None:
    """Datasets down, algorithms across; the other way round where the algorithms are many more."""
    labels = context.labels(rows)
    notes: list[str] = []
    body: list[list[Any]] = []
    for dataset in dict.fromkeys(e.dataset for e in rows):
        by_label = {e.label: e for e in rows if e.dataset == dataset}
        means = {label: e.mean[0] for label, e in by_label.items() if e.seeds}
        top = max(means.values(), default=math.nan)
        best = {label for label, mean in means.items() if len(means) > 1 and mean == top}
        body.append(
            [
                dataset,
                *(
                    show(by_label[label], notes, top=label in best) if label in by_label else Cell(NONE)
                    for label in labels
                ),
            ]
        )
    if comparison is not None and comparison.aggregates:
        aggregates = comparison.aggregates
        cells = [
            interval_cell(times_100(aggregates[x]["mean"]), kind="note") if x in aggregates else Cell(NONE)
            for x in labels
        ]
        used = len(comparison.group.datasets)
        body.append(
            [f"mean of {count(used, 'dataset')}{', those with scores of all' if used < len(body) else ''}", *cells]
        )
    if len(labels) > WIDE and len(body) <= len(labels) // 2:
        turned = [[label, *(row[i + 1] for row in body)] for i, label in enumerate(labels)]
        context.page.table(["algorithm", *(str(row[0]) for row in body)], turned, notes=notes, sortable=True)
        return
    context.page.table(["dataset", *labels], body, notes=notes)


def _success(context: ReportContext) -> None:
    rows = [e for e in context.rows if e.success is not None]
    if not rows:
        return
    context.page.heading("Success rates", level=3)
    labels = context.labels(rows)
    body: list[list[Any]] = []
    for dataset in dict.fromkeys(e.dataset for e in rows):
        successes = {e.label: e.success for e in rows if e.dataset == dataset}
        cells: list[Any] = []
        for label in labels:
            success = successes.get(label)
            if success is None:
                cells.append(Cell(NONE))
                continue
            percent = (100 * success[0], 100 * max(0.0, success[1]), 100 * min(1.0, success[2]))
            cells.append(interval_cell(percent, unit="%"))
        body.append([dataset, *cells])
    context.page.table(
        ["dataset", *labels],
        body,
        caption="Share of episodes, in percent, at the last evaluation; 95% interval over seeds.",
    )


def _every_cell(context: ReportContext) -> None:
    """One line for each cell, with the best evaluation beside the last."""
    rows = [e for e in context.rows if e.seeds]
    if not rows:
        return
    title = "Every dataset and algorithm, with the best evaluation beside the last"
    with folded(context.page, len(rows) > MANY, title):
        body = []
        for e in rows:
            score, best = e.group != RAW, e.cell.best()
            body.append(
                [
                    e.dataset,
                    e.label,
                    Cell(f"{e.seeds} of {e.planned}" if e.planned > e.seeds else str(e.seeds), value=float(e.seeds)),
                    e.step,
                    *(Cell(digits(v, score), value=v if math.isfinite(v) else None) for v in e.mean),
                    Cell(digits(e.published.mean, score), value=e.published.mean) if e.published else None,
                    Cell(digits(best[1], score), small=(f"at {best[0]:,}",), value=best[1]) if best else None,
                ]
            )
        headers = ["dataset", "algorithm", "seeds", "steps", "last", "95% low", "high", "published", BEST]
        keep = [i for i, name in enumerate(headers) if name != "published" or any(row[i] is not None for row in body)]
        context.page.table([headers[i] for i in keep], [[row[i] for i in keep] for row in body], sortable=True)
        context.page.text(CHOSEN, "small")


# ----------------------------------------------------------------------------------------------------------- aggregates


def together(context: ReportContext) -> None:
    if (not context.comparisons and not context.ungrouped) or len(context.results.datasets) < 2:
        return
    page = context.page
    page.heading("Datasets taken together")
    if any(c.aggregates for c in context.comparisons):
        page.text(TOGETHER, "small")
    page.items(context.ungrouped)
    for c in context.comparisons:
        page.heading(f"{c.group.name}: aggregates", level=3)
        if c.why_not:
            page.text(f"Not taken together: {c.why_not}.")
            continue
        for note in c.group.notes:
            page.text(f"{note}.", "small")
        name = slug(c.group.name)
        headers = ["algorithm", *figures.METRICS.values(), "runs"]
        body: list[list[Any]] = []
        for label in c.order:
            cells = [interval_cell(times_100(c.aggregates[label][metric])) for metric in figures.METRICS]
            body.append([label, *cells, int((~np.isnan(c.group.scores[label])).sum())])
        page.table(headers, body, caption=f"{count(len(c.group.datasets), 'dataset')}: {', '.join(c.group.datasets)}")
        context.add(figures.intervals(c.aggregates, context.colour), f"aggregates-{name}", "The same as a picture.")
        with page.gallery():
            context.add(figures.profiles(c.profiles, context.colour), f"profile-{name}", PROFILE)
            if c.improvement:
                context.add(figures.improvement(c.improvement, context.colour), f"improvement-{name}", IMPROVEMENT)
        page.legend([(label, context.colour[label]) for label in c.order])
        if c.improvement:
            with page.details("Probabilities of improvement in numbers"):
                body = [[f"{x} over {y}", *map(_chance, i)] for (x, y), i in c.improvement.items()]
                page.table(["comparison", "probability", "95% low", "high"], body)


def _chance(x: float) -> Cell:
    return Cell(f"{x:.2f}" if math.isfinite(x) else NONE, value=x)


def searches(context: ReportContext) -> None:
    """The expected best score of a search over settings, as a function of the number of settings tried in the
    environment.
    """
    tried: dict[tuple[str, str], int] = {}
    for e in context.rows:
        if e.seeds:
            tried[e.dataset, e.cell.algorithm] = tried.get((e.dataset, e.cell.algorithm), 0) + 1
    tried = {key: n for key, n in tried.items() if n >= SEARCH}
    if not tried:
        return
    page = context.page
    page.heading("Settings tried online")
    page.text(ONLINE, "small")
    ks = [k for k in DRAWS if k <= max(tried.values())]
    body: list[list[Any]] = []
    for (dataset, algorithm), n in tried.items():
        _, matrix = settings_matrix(context.results, dataset, algorithm)
        score = all(
            e.group != RAW for e in context.rows if (e.dataset, e.cell.algorithm) == (dataset, algorithm) and e.seeds
        )
        scale = 100.0 if score else 1.0
        curve = expected_online_performance(matrix, ks)
        ends = ((scale * end).tolist() for end in (curve.value, curve.low, curve.high))
        cells: list[Any] = [interval_cell((v, low, high), score) for v, low, high in zip(*ends, strict=True)]
        cells += [None] * (len(ks) - len(cells))
        body.append([dataset, algorithm, n, *cells])
    page.table(["dataset", "algorithm", "settings", *(f"best of {k}" for k in ks)], body)


# --------------------------------------------------------------------------------------------------------------- curves


def curves(context: ReportContext) -> None:
    """A picture of learning curves for each dataset."""
    cells = [e for e in context.rows if e.cell.history]
    if not cells:
        return
    page = context.page
    page.heading("Learning curves")
    page.text(
        "Mean over seeds with its 95% interval; thin: single seeds. Dashed: the mean of the dataset's own episodes.",
        "small",
    )
    page.legend([(label, context.colour[label]) for label in context.labels(cells)])
    thinned = False
    with page.gallery():
        for dataset in dict.fromkeys(e.dataset for e in cells):
            group = [e for e in cells if e.dataset == dataset]
            score = all(e.cell.normalised for e in group)
            lines: dict[str, Curves] = {}
            for e in group:
                curves: Curves = {}
                steps = list(dict.fromkeys(s.step for s in e.cell.history))
                shown_steps = {*steps[:: -(-len(steps) // MOST_POINTS)], *steps[-1:]}
                thinned = thinned or len(shown_steps) < len(steps)
                for s in e.cell.history:
                    if s.step in shown_steps:
                        curves.setdefault(s.seed, {})[s.step] = (
                            s.normalised if score and s.normalised is not None else s.raw
                        )
                lines[e.label] = curves
            mean = details.behaviour(context.results.runs, dataset, score)
            figure = figures.learning(dataset, lines, context.colour, "normalised score" if score else "return", mean)
            context.add(figure, f"curve-{slug(dataset)}", "", f"Learning curves on {dataset}: {', '.join(lines)}")
    if thinned:
        page.text(f"Of curves of more than {MOST_POINTS} evaluations only about so many are drawn, evenly.", "small")
