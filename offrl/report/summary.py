"""The summary of a report, in sentences: which algorithm scores highest, by how much, and with what certainty."""

from __future__ import annotations

import math
from collections.abc import Sequence

from offrl.report.compare import Comparison
from offrl.report.rows import RAW, UNSCORED, Entry, digits, span

MOST = 8  # sentences
MOST_OTHERS = 4  # algorithms named after the first
SEARCH = 3  # settings of one algorithm from which on the best of them counts as chosen


def headline(comparisons: Sequence[Comparison], entries: Sequence[Entry]) -> list[str]:
    """One sentence or two for each group that is aggregated, and for each dataset of the others.

    Of an algorithm with SEARCH settings or more only the best is named, and that it was chosen with the environment.
    """
    algorithm = {e.label: e.cell.algorithm for e in entries}
    lines = [_group_line(c, algorithm) for c in comparisons if c.aggregates]
    groups = {c.group.name for c in comparisons if c.aggregates}
    for name in dict.fromkeys(e.group for e in entries if e.group not in (*groups, UNSCORED)):
        for dataset in dict.fromkeys(e.dataset for e in entries if e.group == name):
            rows = [e for e in entries if e.group == name and e.dataset == dataset and e.seeds]
            if rows:
                lines.append(_dataset_line(dataset, rows))
    if not lines:
        return ["No run has a final score."]
    return [*lines[:MOST], f"... and {len(lines) - MOST} more datasets, in the tables below."] if len(lines) > MOST else lines


def _without_searches(ordered: Sequence[str], algorithm: dict[str, str]) -> tuple[list[str], dict[str, int]]:
    """(labels, the best first, of a searched algorithm only its best, {label of a searched algorithm's best: its number of settings})."""
    count: dict[str, int] = {}
    for label in ordered:
        count[algorithm[label]] = count.get(algorithm[label], 0) + 1
    labels: list[str] = []
    searched: dict[str, int] = {}
    names = set()
    for label in ordered:
        name = algorithm[label]
        if count[name] >= SEARCH:
            if name in names:
                continue
            searched[label] = count[name]
        names.add(name)
        labels.append(label)
    return labels, searched


def _chosen(labels: Sequence[str], searched: dict[str, int], algorithm: dict[str, str]) -> str:
    """` iql (temperature=3) is the best of 16 settings of iql, chosen with the environment.`, for those that are."""
    return "".join(
        f" {label} is the best of {searched[label]} settings of {algorithm[label]}, chosen with the environment: its score is too high "
        "an estimate."
        for label in labels
        if label in searched
    )


def _group_line(c: Comparison, algorithm: dict[str, str]) -> str:
    labels, searched = _without_searches(c.order, algorithm)
    first, *others = labels
    n, tasks = c.group.seeds, len(c.group.datasets)
    equal = len({int(n) for x in c.group.scores.values() for n in (x == x).sum(0)}) == 1
    seeds = f"{n} seed{'s' if n != 1 else ''} each" if equal else f"{n} seed{'s' if n != 1 else ''} or more"
    place = f"{c.group.name}, {tasks} datasets, {seeds}"

    def text(label: str) -> str:
        iqm = c.aggregates[label]["iqm"]
        interval = f" ({100 * iqm.low:.1f} to {100 * iqm.high:.1f})" if math.isfinite(iqm.low) else ""
        return f"{100 * iqm.value:.1f}{interval}"

    chosen = _chosen(labels[: 1 + MOST_OTHERS], searched, algorithm)
    if not others:
        return f"{place}: {first} has an interquartile mean of {text(first)}.{chosen}"
    line = f"{place}: {first} has the highest interquartile mean, {text(first)}; {_others([(o, text(o)) for o in others])}."
    rival = others[0]
    forth, back = c.improvement.get((first, rival)), c.improvement.get((rival, first))
    chance = (forth.value, forth.low, forth.high) if forth else (1 - back.value, 1 - back.high, 1 - back.low) if back else None
    if chance is not None and math.isfinite(chance[1]):
        line += f" A run of {first} beats one of {rival} with probability {chance[0]:.2f} ({chance[1]:.2f} to {chance[2]:.2f})"
        line += ": these seeds do not tell the two apart." if chance[1] <= 0.5 <= chance[2] else "."
    return line + chosen


def _dataset_line(dataset: str, rows: Sequence[Entry]) -> str:
    score = rows[0].group != RAW
    of = {e.label: e for e in sorted(rows, key=lambda e: -e.mean[0])}
    algorithm = {e.label: e.cell.algorithm for e in rows}
    labels, searched = _without_searches(list(of), algorithm)

    def text(label: str) -> str:
        interval = span(of[label].mean, score)
        return f"{digits(of[label].mean[0], score)}{f' ({interval})' if interval else ' (one seed)'}"

    first, *others = labels
    unit = "score" if score else "return"
    chosen = _chosen(labels[: 1 + MOST_OTHERS], searched, algorithm)
    if not others:
        return f"{dataset}: {first} has a mean {unit} of {text(first)}.{chosen}"
    line = f"{dataset}: {first} has the highest mean {unit}, {text(first)}; {_others([(o, text(o)) for o in others])}."
    one, two = of[first].mean, of[others[0]].mean
    if all(map(math.isfinite, (*one, *two))) and two[2] >= one[1]:
        line += f" The intervals of {first} and {others[0]} overlap."
    return line + chosen


def _others(pairs: Sequence[tuple[str, str]]) -> str:
    more = f" and {len(pairs) - MOST_OTHERS} more" if len(pairs) > MOST_OTHERS else ""
    return ", ".join(f"{label} {text}" for label, text in pairs[:MOST_OTHERS]) + more
