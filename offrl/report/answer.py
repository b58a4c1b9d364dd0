"""The answer that a report begins with: which algorithm is ahead, by how much, and whether that can be chance.

Every number is one of docs/statistics.md; one answer is about one group of datasets, or about one dataset that is in no
group of several."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Collection, Sequence

from offrl.errors import some
from offrl.report.compare import Comparison, chosen, without_searches
from offrl.report.context import count
from offrl.report.rows import RAW, UNSCORED, Entry, Interval, digits, times_100
from offrl.report.whiskers import Answer, Row
from offrl.runs.comparable import FEW_SEEDS, sentence
from offrl.statistics.aggregate import difference, probability_of_improvement

MOST_OTHERS = 4  # algorithms named in a sentence
NO_INTERVAL = "One seed has no interval: nothing says how much of this is chance. seeds=5 trains five."
WIDE = " Two seeds make an interval twelve times as wide as they lie apart: seeds=5 trains five."
TOGETHER = ", by algorithm and settings together"
Behaviour = Callable[[str, bool], float | None]  # (dataset, normalised) -> the mean of the data's own episodes
Conditions = Callable[[Collection[str], Sequence[str]], dict[str, str]]  # see `offrl.runs.comparable.differences`


def answers(
    comparisons: Sequence[Comparison], entries: Sequence[Entry], behaviour: Behaviour, conditions: Conditions, reps: int
) -> list[Answer]:
    """One for each group that is aggregated, then one for each other dataset with a final score; without any, one that
    says why.

    Of an algorithm with many settings (`compare.SEARCH`) only the best is named, and that it was chosen
    with the environment. Settings besides the algorithm in which the first two differ are named. reps: resamples.
    """
    algorithm = {e.label: e.cell.algorithm for e in entries}
    several = len({e.dataset for e in entries}) > 1
    groups = [c.group.name for c in comparisons if c.aggregates]
    result = [_of_group(c, algorithm, conditions, reps, several=len(groups) > 1) for c in comparisons if c.aggregates]
    for name in dict.fromkeys(e.group for e in entries if e.group not in (*groups, UNSCORED)):
        for dataset in dict.fromkeys(e.dataset for e in entries if e.group == name):
            rows = [e for e in entries if e.group == name and e.dataset == dataset]
            if any(e.seeds for e in rows):
                result.append(_of_dataset(dataset, rows, behaviour(dataset, name != RAW), conditions, several))
    # who won, before what stands alone
    result.sort(key=lambda answer: sum(row.estimate is not None for row in answer.rows) < 2)
    return result or [_nothing(entries)]


def _of_group(c: Comparison, algorithm: dict[str, str], conditions: Conditions, reps: int, several: bool) -> Answer:
    labels, searched = without_searches(c.order, algorithm)
    first, *competitors = labels
    n, tasks = c.group.seeds, len(c.group.datasets)
    equal = len({int(n) for x in c.group.scores.values() for n in (x == x).sum(0)}) == 1
    seeds = f"{count(n, 'seed')}{' each' if equal else ' or more'}"
    iqm = {label: times_100(c.aggregates[label]["iqm"]) for label in labels}
    prefix = f"{c.group.name}: " if several else ""
    verdict = f"{prefix}{first} scores {_text(iqm[first])}, the interquartile mean over {tasks} datasets."
    sure, kind = "One algorithm: there is nothing here to compare it with.", "note"
    differences = conditions(c.group.datasets, labels[:2])
    if competitors:
        pair = c.group.scores[first], c.group.scores[competitors[0]]
        gap = times_100(difference(*pair, reps=reps))
        odds = probability_of_improvement(*pair, reps=reps)
        verdict = (
            f"{prefix}{_ahead(first, competitors[0], gap)}; probability of improvement "
            f"{_text(odds, decimals=2)}.{_differ(differences)}"
        )
        together = TOGETHER if differences else ""
        if n == 1 or not math.isfinite(gap[1]):
            sure, kind = NO_INTERVAL, "warning"
        elif gap[1] <= 0 <= gap[2] or odds[1] <= 0.5 <= odds[2]:
            sure, kind = f"With {seeds} this cannot be told from chance.", "warning"
        elif n < FEW_SEEDS:
            few = f"but intervals of {n} seeds are too narrow: {FEW_SEEDS} or more would tell."
            sure, kind = f"More than chance by its interval{together}, {few}", "note"
        else:
            sure = f"More than chance{together}: the interval of the difference leaves out 0."
            kind = "note" if differences else "good"
        level = [
            o for o in competitors[1:] if (p := c.improvement.get((first, o))) is not None and p.low <= 0.5 <= p.high
        ]
        sure += _level(first, level)
    elif n == 1:
        sure, kind = NO_INTERVAL, "warning"
    sure, kind = _doubted(sure, kind, first in searched, [])
    notes = *_values(differences), *(f"{note}." for note in c.group.notes if " left out" in note)
    return Answer(
        verdict,
        sure,
        kind,
        "IQM [95% interval]",
        f"{c.group.name}, {tasks} datasets, {seeds}. Dot: interquartile mean (IQM) of the normalised scores; line: 95% "
        "interval.",
        tuple(Row(label, iqm[label]) for label in labels),
        remarks=(*notes, *chosen(labels[: 1 + MOST_OTHERS], searched, algorithm)),
    )


def _of_dataset(
    dataset: str, entries: Sequence[Entry], behaviour: float | None, conditions: Conditions, several: bool
) -> Answer:
    score = entries[0].group != RAW
    unit = "score" if score else "return"
    of = {e.label: e for e in sorted((e for e in entries if e.seeds), key=lambda e: -e.mean[0])}
    algorithm = {e.label: e.cell.algorithm for e in entries}
    labels, searched = without_searches(list(of), algorithm)
    first, *competitors = labels
    seeds = {of[label].seeds for label in labels}
    each = f"{count(min(seeds), 'seed')}{(' each' if competitors else '') if len(seeds) == 1 else ' or more'}"
    steps = {of[label].step for label in labels}
    length = f", {max(s or 0 for s in steps):,} steps" if None not in steps else ""
    differences = conditions([dataset], labels[:2])
    if competitors:
        verdict, sure, kind = _two(dataset, labels, of, score, differences, several)
    else:
        verdict, sure, kind = _one(dataset, of[first], score, behaviour)
    sure, kind = _doubted(sure, kind, first in searched, [e.label for e in entries if not e.seeds])
    rows = [
        Row(label, e.mean, f"{e.seeds} of {e.planned} seeds" if e.seeds < e.planned else "", e.published)
        for label, e in ((label, of[label]) for label in labels)
    ]
    rows += [Row(e.label, None, e.missing_text or "no final score") for e in entries if not e.seeds]
    if behaviour is not None and competitors and of[first].mean[0] < behaviour:
        sure += f" None reaches the mean of the data's own episodes, {digits(behaviour, score)}."
    dot = (
        "Dot: the last evaluation's mean over seeds; line: 95% interval"
        if max(seeds) > 1
        else "Dot: the last evaluation's mean"
    )
    papers = list(dict.fromkeys(p.source.partition(":")[0] for label in labels if (p := of[label].published)))
    marks = f"; diamond: published ({', '.join(papers)})" if papers else ""
    marks += "; dashed: the mean of the data's own episodes" if behaviour is not None else ""
    return Answer(
        verdict, sure, kind, f"{unit} [95% interval]" if max(seeds) > 1 else unit,
        f"{dataset}, {each}{length}. {dot}{marks}.", tuple(rows), score, behaviour,
        (*_values(differences), *chosen(labels[: 1 + MOST_OTHERS], searched, algorithm)),
    )  # fmt: skip


def _two(
    dataset: str, labels: Sequence[str], of: dict[str, Entry], score: bool, differences: dict[str, str], several: bool
) -> tuple[str, str, str]:
    first, second, *_ = labels
    one, two = of[first].mean, of[second].mean
    gap = one[0] - two[0], math.nan, math.nan
    # one task
    values = [[[s.normalised if score else s.raw for s in of[label].cell.scores]] for label in (first, second)]
    where = f" on {dataset}" if several else ""
    verdict = f"{_ahead(first, second, gap, score)}{where}: {_text(one, score)} against {_text(two, score)}"
    if not all(map(math.isfinite, (*one, *two))):
        return f"{verdict}.{_differ(differences)}", NO_INTERVAL, "warning"
    pairs = len(values[0][0]) * len(values[1][0])
    chance = probability_of_improvement(*values, reps=1).value
    verdict += f"; probability of improvement {chance:.2f} ({pairs} pairs of seeds).{_differ(differences)}"
    level = [o for o in labels[2:] if of[o].mean[2] >= one[1] or not math.isfinite(of[o].mean[2])]
    n = min(of[label].seeds for label in labels)
    if two[2] >= one[1]:
        sure = f"The intervals overlap: with {count(n, 'seed')} this cannot be told from chance.{_level(first, level)}"
        return verdict, sure + WIDE * (n == 2), "warning"
    together, kind = (TOGETHER, "note") if differences else ("", "good")
    return verdict, f"More than chance{together}: the intervals do not overlap.{_level(first, level)}", kind


def _one(dataset: str, e: Entry, score: bool, behaviour: float | None) -> tuple[str, str, str]:
    """The sentences about a single algorithm: beside the data's mean, which it is to exceed."""
    mean, low, high = e.mean
    unit = "scores" if score else "returns"
    verdict = f"{e.label} {unit} {_text(e.mean, score)} on {dataset}"
    if behaviour is not None:
        where = "above" if mean >= behaviour else "below"
        verdict += (
            f", {digits(abs(mean - behaviour), score)} {where} the mean of the data's own episodes, "
            f"{digits(behaviour, score)}"
        )
    if e.published is not None:
        verdict += f"; published: {e.published.text()} ({e.published.source.partition(':')[0]})"
    verdict += "."
    if not math.isfinite(low):
        return verdict, NO_INTERVAL, "warning"
    seeds, wide = count(e.seeds, "seed"), WIDE * (e.seeds == 2)
    if behaviour is None:
        unknown = "the mean of the data's own episodes is not known"
        return verdict, f"95% interval over {seeds}; {unknown}.{wide}", "note"
    above = "The whole interval lies above the data's mean: the policies do better than what they learnt from."
    below = "The whole interval lies below the data's mean: the policies do worse than what they learnt from."
    if low > behaviour or high < behaviour:
        return (verdict, above, "good") if low > behaviour else (verdict, below, "bad")
    holds = f"The interval holds the data's mean: with {seeds} the two cannot be told apart."
    return verdict, holds + wide, "warning"


def _doubted(sure: str, kind: str, searched: bool, missing: Sequence[str]) -> tuple[str, str]:
    """How sure it is, less what the interval does not cover."""
    if searched:
        sure += " No interval covers that its settings were chosen with the environment."
    if missing:
        sure += f" No final score of {some(missing, MOST_OTHERS)}."
    if kind == "good" and (searched or missing):
        kind = "note"
    return sure, kind


def _nothing(entries: Sequence[Entry]) -> Answer:
    """Why there is no final score, and what to do."""
    reasons = list(dict.fromkeys(m.reason for e in entries for m in e.cell.missing))
    labels, datasets = list(dict.fromkeys(e.label for e in entries)), list(dict.fromkeys(e.dataset for e in entries))
    who = f"{some(labels, MOST_OTHERS)} on {some(datasets, MOST_OTHERS)}"
    rows = tuple(Row(e.label if len(datasets) == 1 else f"{e.label} on {e.dataset}", None, _so_far(e)) for e in entries)
    caption = "What is there so far; only what reached its planned number of steps counts." if rows else ""
    run = next((e.cell.missing[0].run for e in entries if e.cell.missing and e.cell.missing[0].run), "RUN")
    command = f"offrl evaluate {shlex.quote(run)}"
    if reasons and all("no environment" in r for r in reasons):
        return Answer(
            f"{who}: trained, but not scored.",
            "No environment is known for these data, so nothing says how good the policies are. The first command "
            "scores them in one that you name, the second estimates their returns from the data alone.",
            "note", "", caption, rows, commands=(f"{command} env=ID", f"offrl select {shlex.quote(run)}"),
        )  # fmt: skip
    if reasons and all(r.startswith(("failed", "diverged")) for r in reasons):
        return Answer(f"{who}: failed.", reasons[0], "bad", "", caption, rows)
    if reasons and all(r.startswith("no score at") for r in reasons):
        todo = "Training reached its end and scores.csv does not have its last evaluation. This scores the policies:"
        return Answer(f"{who}: not scored.", todo, "note", "", caption, rows, commands=(command,))
    waiting = any(r.startswith(("unfinished", "not started", "begun")) for r in reasons)
    todo = "The same command as before continues what has not finished." if waiting else "The reasons stand below."
    return Answer(f"{who}: no final score yet.", todo, "note", "", caption, rows)


def _so_far(e: Entry) -> str:
    latest = e.cell.latest()
    text = e.missing_text or "no final score"
    if not latest:
        return text
    return (
        f"{text}; {digits(math.fsum(s.value for s in latest) / len(latest), e.cell.normalised)} at step "
        f"{latest[0].step:,}, not counted"
    )


def _ahead(first: str, second: str, gap: Interval, score: bool = True) -> str:
    """`iql is ahead of bc by 7.1 [3.2, 11.0] points`."""
    if digits(gap[0], score) == "0.0":
        return f"{first} and {second} are level"
    return f"{first} is ahead of {second} by {_text(gap, score)}{' points' if score else ''}"


def _differ(differences: dict[str, str]) -> str:
    return f" They differ in more than the algorithm: {some(differences, MOST_OTHERS)}." if differences else ""


def _values(differences: dict[str, str]) -> list[str]:
    return [f"Besides the algorithm: {sentence(differences)}."] if differences else []


def _level(first: str, labels: Sequence[str]) -> str:
    return f" Not told apart from {first} either: {some(labels, MOST_OTHERS)}." if labels else ""


def _text(estimate: Interval, score: bool = True, decimals: int | None = None) -> str:
    """`7.1 [3.2, 11.0]`; the value alone without an interval."""
    shown = [digits(x, score) if decimals is None else f"{x:.{decimals}f}" for x in estimate]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]" if all(map(math.isfinite, estimate)) else shown[0]
