"""Several criteria, the table of all settings, and the files beside the page."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from offrl.figures import tuning as figures
from offrl.figures.tuning import number
from offrl.report.context import folded
from offrl.report.page import Cell, escape
from offrl.report.rows import whole
from offrl.tuning.choice import hypervolume, on_unit_axes, pareto_front
from offrl.tuning.page.material import TunePage, cell, plural, value_cell

MANY = 12  # rows, above which the table is folded
AXES = {
    "return": "estimate",
    "worst": "worst seed's estimate",
    "distance": "closeness: minus the distance from the data",
}
FRONT = (
    "Blue: finalists that no other one equals in every criterion and beats in one; steps join those of the two "
    "criteria shown. Nothing "
    "weighs one criterion against another. Green: the chosen one; orange: the default."
)
FILES = {
    "trials.csv": "every setting at every judgement, in full",
    "results.json": "the winner's scores, episode by episode, to exchange (offrl report reads it)",
    "result.json": "all that this page says, as one document",
    "winner": "the run of the chosen setting, trained anew: offrl evaluate, export and report work on it",
    "default": "the run of the default settings, trained anew",
    "runs": "the runs of the rungs",
    "journal.log": "Optuna's store",
    "episodes.jsonl": "the real episodes that chose",
}


def criteria(made: TunePage) -> None:
    """The Pareto front of the finalists, where several criteria were named."""
    names = [str(c) for c in made.result["criteria"]]
    known = [j for j in made.finals if not math.isnan(j.value)]
    if len(names) < 2 or not known:
        return
    page = made.page
    page.heading("Several criteria")
    columns = {
        "return": [j.value for j in known],
        "worst": [j.worst for j in known],
        "distance": [-j.distance for j in known],
    }
    points = np.array([columns[n] for n in names]).T
    on = set(pareto_front(points))
    page.text(f"{FRONT} {plural(len(on), 'finalist')} of {len(known)} on the front.")
    kinds = [made.kind(j.setting) for j in known]
    with page.gallery():
        for a, b in itertools.combinations(range(len(names)), 2):
            keep = [i for i in range(len(known)) if np.isfinite(points[i, [a, b]]).all()]
            if not keep:
                continue
            x, y = points[keep, a].tolist(), points[keep, b].tolist()
            edge = pareto_front(points[keep][:, [a, b]])
            figure = figures.front(
                x, y, [i in on for i in keep], edge, [kinds[i] for i in keep], (AXES[names[a]], AXES[names[b]])
            )
            page.figure(figure, _area(points[keep][:, [a, b]]), alt=f"Pareto front of {names[a]} and {names[b]}")
    rows: list[list[Any]] = []
    for j in sorted((known[i] for i in on), key=lambda j: -j.value):
        rows.append(
            [
                Cell(made.label(j.setting), strong=j.setting == made.chosen),
                cell(j.value, j.error),
                cell(j.worst),
                cell(j.distance),
            ]
        )
    page.table(["on the front", f"{made.judge}, 95%", "worst seed", "distance"], rows, sortable=True)


def _area(points: np.ndarray) -> str:
    """The hypervolume of two criteria [K, 2], in words."""
    low, high = points.min(0), points.max(0)
    if not (low < high).all():
        return "All finalists are alike in one of the two."
    area = hypervolume(on_unit_axes(points, low.tolist(), high.tolist()))
    return (
        f"Hypervolume {area:.3f}, on axes from the worst to the best finalist: not to be compared with another page's."
    )


def all_settings(made: TunePage) -> None:
    """The table of trials: every setting at every judgement."""
    page = made.page
    page.heading("All settings")
    names = list(dict.fromkeys(d.name for space in made.spaces.values() for d in space.dimensions))
    vetoed: Mapping[str, str] = made.result["by_data"].get("vetoed") or {}
    several = len(made.algos) > 1
    if not made.judgements:
        plain = [[n, s["algo"], *(value_cell(s["values"].get(k)) for k in names)] for n, s in made.settings.items()]
        with folded(page, len(plain) > MANY, f"{plural(len(plain), 'setting')}, none of which the data judged"):
            page.table(["setting", "algorithm", *names], plain, sortable=True)
        return
    rows: list[list[Any]] = []
    for j in made.judgements:
        values = made.settings.get(j.setting, {"values": {}})["values"]
        rows.append(
            [
                Cell(j.setting, strong=j.setting == made.chosen),
                *([j.algo] if several else []),
                j.rung,
                j.bracket,
                Cell(whole(j.fate), kind="good" if j.fate == "chosen" else ""),
                cell(j.value),
                cell(j.error),
                *(value_cell(values.get(k)) for k in names),
                *(cell(j.others[o]) for o in made.others),
                cell(j.worst),
                cell(j.distance),
                j.updates,
                j.seeds,
                _reason(j.exploded or (vetoed.get(j.setting, "") if j.bracket is None else "")),
            ]
        )
    headers = [
        "setting",
        *(["algorithm"] if several else []),
        "rung",
        "bracket",
        "fate",
        made.judge,
        "standard error",
        *names,
        *made.others,
        "worst seed",
        "distance",
        "updates",
        "seeds",
        "vetoed",
    ]
    keep = [
        i
        for i in range(len(headers))
        if any(not (r[i] is None or (isinstance(r[i], Cell) and not (r[i].text or r[i].small))) for r in rows)
    ]
    with folded(page, len(rows) > MANY, f"{plural(len(made.settings), 'setting')}, {plural(len(rows), 'judgement')}"):
        page.table([headers[i] for i in keep], [[r[i] for i in keep] for r in rows], sortable=True)
    if reference := made.result["by_data"].get("reference"):
        page.text(
            "Distance: root mean square between the policy's actions and the data's (discrete actions: the share that "
            "differ); that of a "
            f"linear clone of the data is {number(float(reference))}.", "small",
        )  # fmt: skip


def _reason(why: str) -> Cell:
    """Why a setting was vetoed, in short lines."""
    return Cell("", small=tuple(map(whole, textwrap.wrap(why, 44))), kind="bad" if why else "")


def files(made: TunePage) -> None:
    """Links to what stands beside the page."""
    made.page.heading("Files")
    there = [(name, what) for name, what in FILES.items() if (made.folder / name).exists()]
    ends = {n: "/" if (made.folder / n).is_dir() else "" for n, _ in there}
    links = [f'<li><a href="{escape(n)}{ends[n]}">{escape(n)}</a>: {escape(what)}</li>' for n, what in there]
    if links:
        made.page.markup(f"<ul>{''.join(links)}</ul>")
    else:
        made.page.text("There are no files beside this page.")
