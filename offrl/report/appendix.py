"""Sections of a report about what stands beside and behind the scores: costs, settings, times, environments and
versions, training metrics.
"""

from __future__ import annotations

from typing import Any

from offrl.errors import UserError, first_line
from offrl.figures.costs import limits
from offrl.finetuning.outcome import minutes, outcomes
from offrl.finetuning.summary import MEASURES, budget_text, milestones
from offrl.report import diagnostics as details
from offrl.report import figures
from offrl.report.context import MANY, MANY_RUNS, ReportContext, first, folded
from offrl.report.page import Cell, slug
from offrl.report.rows import interval_cell, span
from offrl.runs.comparable import FEW_SEEDS
from offrl.runs.run import SavedRun
from offrl.runs.score import Missing, Score
from offrl.runs.tables import interval_text
from offrl.statistics.aggregate import aggregates
from offrl.statistics.intervals import mean_interval, share_interval

MOST_DIAGNOSTICS, FEW_DIAGNOSTICS = 60, 20  # pictures of training metrics, at most, and for more than MANY_RUNS runs
SOME = 5  # runs of an algorithm on a dataset whose training metrics are drawn, of more than MANY_RUNS
TIME = (
    "Wall-clock time by the runs' own logs. One update trains all policies of a run side by side, one for each seed. "
    "Evaluation beside training is in it only where training waited for it, which the log says."
)
METRICS = (
    "Training metrics: the mean over seeds, and their lowest and highest as a band. q_overestimation: the critic's "
    "value of the evaluation's first states less the discounted return that followed; far above zero, the critic "
    "believes in actions that do not hold what it promises."
)
FIRST_METRICS = (
    "evaluation: q_overestimation",
    "critic/q",
    "critic/td_error",
    "evaluation: discounted_mean",
    "critic/loss",
)


COSTS = (
    "Undiscounted costs of episodes at the last evaluation, means over seeds with their 95% intervals, beside the "
    "returns of the same episodes: the two are never made one number. cost / limit: 1 or less keeps the limit (DSRL's "
    "normalised cost). Safe seeds: those whose mean cost keeps it, with Wilson's 95% interval."
)


def costs(context: ReportContext) -> None:
    """Return against cost, and the share of seeds that keep their limit."""
    rows = [e for e in context.rows if e.cell.scores and all(s.cost is not None for s in e.cell.scores)]
    if not rows:
        return
    page = context.page
    page.heading("Costs and limits")
    page.text(COSTS, "small")
    body = []
    for e in rows:
        multiples = [s.cost_normalized for s in e.cell.scores if s.cost_normalized is not None]
        limited: list[Cell | None] = [None, None]
        if len(multiples) == len(e.cell.scores):
            safe = sum(multiple <= 1.0 for multiple in multiples)
            share, low, high = (100 * x for x in share_interval(safe, len(multiples)))
            limited = [
                Cell(f"{sum(multiples) / len(multiples):.2f}", value=sum(multiples)),
                Cell(f"{safe} of {len(multiples)}", small=(span((share, low, high)) + "%",), value=float(safe)),
            ]
        returns, costs = (interval_cell(e.cell.interval(scale), False) for scale in ("raw", "cost"))
        body.append([e.dataset, e.label, returns, costs, *limited])
    page.table(["dataset", "algorithm", "return", "cost", "cost / limit", "safe seeds"], body, sortable=True)
    with page.gallery():
        for dataset in dict.fromkeys(e.dataset for e in rows):
            points = {e.label: (e.cell.interval("cost"), e.returns) for e in rows if e.dataset == dataset}
            context.add(limits(points, context.colour), f"costs-{slug(dataset)}", f"Return against cost on {dataset}.")
    page.legend([(label, context.colour[label]) for label in context.labels(rows)])


ONLINE = (
    "Fine-tuning in the environment, means over seeds with their 95% intervals. At the end: the mean of the last three "
    "evaluations; gain: that less the score at step 0, seed by seed; dip: how far the first tenth of the steps fell "
    "below the score at step 0. Regrets are 1 less a mean score / 100: of the evaluations after step 0, of the area "
    "under their curve, and of the episodes that were played, exploration included. Two methods compare at equal "
    "environment steps."
)
POOL = (
    "interquartile means over the seeds of all datasets, 95% intervals by stratified bootstrap over seeds; of fewer "
    f"than {FEW_SEEDS} seeds the single values stand below"
)
POOLED = ("gain", "regret_mean", "regret_area", "regret_play")


def finetuning(context: ReportContext, reps: int) -> None:
    """What fine-tuning gained and lost on the way, for each dataset and over all of a group. reps: resamples."""
    by_seed: dict[tuple[str, str, int], dict[str, float | None]] = {}
    lines = []
    for run in (r for r in context.results.runs if r.record.get("kind") == "finetune"):
        try:
            results = outcomes(run)
            texts = [(o.cell, line) for o in results for line in milestones(o)]
            texts += [("", budget_text(o.budget, minutes(run))) for o in results[:1]]
        except (UserError, OSError, ValueError, KeyError, TypeError) as error:
            lines.append(f"{run.dir}: what fine-tuning gained cannot be read ({first_line(error)})")
            continue
        lines += [f"{f'{run.dir.name} {cell}'.strip()}: {line}" for cell, line in texts]
        for o in results:
            numbers = {name: getattr(o, name) or [None] * len(o.seeds) for name in MEASURES}
            for i, seed in enumerate(o.seeds):
                by_seed[str(run.dir), o.cell, seed] = {name: values[i] for name, values in numbers.items()}
    cells: dict[tuple[str, str], dict[str, list[Any]]] = {}
    for e in context.rows:
        seeds = [by_seed[key] for s in e.cell.scores if (key := (s.run, s.cell, s.seed)) in by_seed]
        columns = {name: [values[name] for values in seeds] for name in MEASURES}
        if seeds:
            cells[e.dataset, e.label] = {name: column for name, column in columns.items() if None not in column}
    if not cells and not lines:
        return
    page = context.page
    page.heading("Fine-tuning")
    page.text(ONLINE, "small")
    rows = [[*key, *(_measured(name, [columns.get(name, [])]) for name in MEASURES)] for key, columns in cells.items()]
    page.table(["dataset", "algorithm", *(title.partition(" {")[0] for title, _ in MEASURES.values())], rows)
    page.items(lines)
    for c in context.comparisons:
        tasks = {label: [cells.get((dataset, label), {}) for dataset in c.group.datasets] for label in c.group.scores}
        rows = [
            [label, *(_measured(name, [columns.get(name, []) for columns in parts], reps) for name in POOLED)]
            for label, parts in tasks.items()
            if all(parts)
        ]
        if rows:
            page.table(["algorithm", *(MEASURES[name][0] for name in POOLED)], rows, caption=f"{c.group.name}: {POOL}")


def _measured(name: str, tasks: list[list[float]], reps: int = 0) -> Cell | None:
    """A measure of fine-tuning: the mean of a task's seeds, or with `reps` resamples the IQM over several tasks. The
    values of few seeds stand below it.
    """
    if not all(tasks):
        return None
    digits = MEASURES[name][1]
    interval = aggregates(tasks, reps=reps)["iqm"] if reps else mean_interval(tasks[0])
    points = [f"{value:.{digits}f}" for values in tasks for value in values]
    few = 1 < max(map(len, tasks)) < FEW_SEEDS
    return Cell(interval_text(interval, digits), small=(", ".join(points),) if few else (), value=interval[0])


def settings(context: ReportContext) -> None:
    runs, page = context.results.runs, context.page
    if len(runs) == 2:
        rows = details.two_runs(*runs)
        page.heading("What differs between the two runs")
        if rows:
            with folded(page, len(rows) > MANY, f"{len(rows)} settings, versions and machines"):
                page.table(["setting", *(r.dir.name for r in runs)], rows)
        else:
            page.text("Nothing: their settings, data and versions are the same.")
        return
    differences = details.differing(runs)
    if not differences:
        return
    page.heading("Settings that differ")
    page.text("Within an algorithm, between its runs; what is the same in all of them is left out.", "small")
    for algorithm, (names, rows) in differences.items():
        with folded(page, len(rows) > MANY, algorithm):
            page.table(["run", "dataset", *names], first(context, rows, "run.json"), sortable=True)


def times(context: ReportContext) -> None:
    if not context.results.runs:
        return
    context.page.heading("Time")
    context.page.text(TIME, "small")
    rows = details.time_rows(first(context, context.results.runs, "timing.jsonl"))
    with folded(context.page, len(rows) > MANY, "Each run"):
        context.page.table(
            ["run", "dataset", "algorithm", "policies", "device", "mode", "updates/s", "training", "evaluation"],
            rows,
            sortable=True,
        )


def environments(context: ReportContext) -> None:
    page = context.page
    used_by: dict[tuple[str, str], set[str]] = {}
    unlike: dict[tuple[str, ...], Score] = {}
    for s in context.results.scores:
        unlike.setdefault((s.dataset, s.algorithm, s.settings, s.env_id, s.packages, s.reference, s.scored_by), s)
    for s in unlike.values():
        used_by.setdefault((s.dataset, str(s.provenance)), set()).add(context.results.label(s))
    rows, several = details.version_rows(context.results.runs)
    if not used_by and not rows:
        return
    page.heading("Environments and versions")
    if used_by:
        labels = {
            dataset: {e.label for e in context.rows if e.dataset == dataset and e.cell.history}
            for dataset, _ in used_by
        }
        body = [
            [
                dataset,
                text or "not written down",
                "all" if len(who) > 1 and who == labels[dataset] else ", ".join(sorted(who)),
            ]
            for (dataset, text), who in used_by.items()
        ]
        with folded(page, len(body) > MANY, "Where the scores were measured"):
            page.table(["dataset", "scored in", "algorithms"], body)
    if rows:
        marked = [[name, Cell(text, kind="warning") if name in several else text, count] for name, text, count in rows]
        with folded(page, not several, "Software and machine"):
            page.table(
                ["name", "version", "runs"], marked, caption="As each run wrote it down; several values are marked."
            )


def diagnostics(context: ReportContext) -> None:
    """Training metrics, folded away: the critic's first."""
    labels: dict[str, set[str]] = {}
    rows: list[Score | Missing] = [*context.results.scores, *context.results.missing]
    for row in {(row.run, row.dataset, row.algorithm, row.settings): row for row in rows}.values():
        labels.setdefault(row.run, set()).add(context.results.label(row))
    runs: list[tuple[str, SavedRun]] = []
    for run in context.results.runs:
        names = labels.get(str(run.dir), set())
        runs.append((names.pop() if len(names) == 1 else str(run.algorithm), run))
    shown = _some(runs) if len(runs) > MANY_RUNS else runs
    metrics = details.metrics(shown)
    lacking = [str(p) for _, run in shown for p in details.logs(run) if details.too_long(p)]
    if not metrics and not lacking:
        return
    colour = {**figures.colours(list(dict.fromkeys(label for label, _ in runs))), **context.colour}
    page = context.page
    page.heading("Diagnostics")
    page.text(METRICS, "small")
    if len(shown) < len(runs):
        page.text(
            f"Of {len(shown):,} of the {len(runs):,} runs: the first {SOME} of each algorithm and dataset.", "small"
        )
    if lacking:
        page.text(f"Left out, for they are longer than {details.LONGEST / 1e6:.0f} MB: {', '.join(lacking)}.", "small")
    most = MOST_DIAGNOSTICS if len(shown) == len(runs) else FEW_DIAGNOSTICS
    order = [*(m for m in FIRST_METRICS if m in metrics), *sorted(m for m in metrics if m not in FIRST_METRICS)]
    num_drawn, left_out = 0, []
    for metric in order:
        if num_drawn + len(metrics[metric]) > most:
            left_out.append(metric)
            continue
        num_drawn += len(metrics[metric])
        with page.details(metric):
            present = {label for lines in metrics[metric].values() for label in lines}
            page.legend([(label, c) for label, c in colour.items() if label in present])
            with page.gallery(small=True):
                for dataset, lines in metrics[metric].items():
                    page.figure(
                        figures.diagnostic(dataset, lines, colour), "", alt=f"{metric} on {dataset}: {', '.join(lines)}"
                    )
    if left_out:
        page.text(
            f"Not drawn, to keep the page small: {', '.join(left_out)} (metrics.jsonl of each run has them).", "small"
        )


def _some(runs: list[tuple[str, SavedRun]]) -> list[tuple[str, SavedRun]]:
    """The first SOME of each label and dataset."""
    counts: dict[tuple[str, str], int] = {}
    result = []
    for label, run in runs:
        key = label, str(run.dataset)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= SOME:
            result.append((label, run))
    return result
