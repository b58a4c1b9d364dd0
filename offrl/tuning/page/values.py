"""Settings and estimates: parallel coordinates and slices of each algorithm."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from offrl.figures import tuning as figures
from offrl.figures.tuning import SettingAxis
from offrl.report.page import Cell
from offrl.tuning.page.material import Judgement, TunePage, cell, text, value_cell
from offrl.tuning.search.space import Dimension

ABOUT = (
    "Every setting is a line: orange for small estimates, blue for large ones, by rank; dotted grey where all seeds "
    "diverged; green, the "
    "chosen one. Estimates are of the first rung, after {:,} updates, which all settings reached; one beyond the last "
    "axis stands at its "
    "end."
)
SLICES = (
    "Estimates of the same rung with 95% intervals (seeds and bootstrapped fits) over each setting by itself; green, "
    "the chosen one; "
    "orange, the default."
)
REACH = 3.0  # interquartile ranges beyond the quartiles, from where on an estimate is off its axis
MOST_ROWS = 40  # of the table below the pictures


def show(made: TunePage) -> None:
    """Pictures and a table for each algorithm."""
    if not made.judgements:
        return
    page = made.page
    page.heading("Settings and estimates")
    page.text(ABOUT.format(made.comparable[0].updates), "small")
    for algo, space in made.spaces.items():
        judged = [j for j in made.comparable if j.algo == algo and j.setting in made.settings]
        if not judged:
            continue
        if len(made.spaces) > 1:
            page.heading(algo, level=3)
        own = [axis_of(d, [made.settings[j.setting]["values"].get(d.name) for j in judged]) for d in space.dimensions]
        level = _shares(judged)
        estimate = _estimate_axis(made.judge, judged)
        lines = []
        for j, share in zip(judged, level, strict=True):
            places = [
                place(a, d, made.settings[j.setting]["values"].get(d.name))
                for a, d in zip(own, space.dimensions, strict=True)
            ]
            lines.append(([*places, estimate.place(j.value)], share, j.setting == made.chosen))
        names = ", ".join(d.name for d in space.dimensions)
        page.figure(
            figures.parallel([*own, estimate], lines), "", alt=f"Parallel coordinates of {algo}: {names}, estimate"
        )
        page.text(SLICES, "small")
        with page.gallery():
            for k, axis in enumerate(own):
                points = [
                    (line[0][k], j.value, j.error, made.kind(j.setting)) for line, j in zip(lines, judged, strict=True)
                ]
                page.figure(figures.slices(axis, points, made.judge), "", alt=f"Estimates over {axis.name} of {algo}")
        _table(made, algo, judged)


def axis_of(dimension: Dimension, seen: list[Any]) -> SettingAxis:
    """The axis of a searched setting; it reaches to a default outside the range."""
    if dimension.values:
        others = [v for v in seen if v is not None and v not in dimension.values]
        return SettingAxis(dimension.name, values=tuple(dict.fromkeys(text(v) for v in (*dimension.values, *others))))
    numbers = [
        float(v) for v in seen if isinstance(v, (int, float)) and math.isfinite(v) and (v > 0.0 or not dimension.log)
    ]
    return SettingAxis(dimension.name, min([dimension.low, *numbers]), max([dimension.high, *numbers]), dimension.log)


def place(axis: SettingAxis, dimension: Dimension, value: Any) -> float:
    """Where a setting's value stands on its axis; NaN where it has none."""
    return axis.place(text(value) if dimension.values and value is not None else value)


def _estimate_axis(judge: str, judged: list[Judgement]) -> SettingAxis:
    known = [j.value for j in judged if not math.isnan(j.value)]
    if not known:
        return SettingAxis(judge)
    low, high = np.percentile(known, [25, 75])
    reach = REACH * (high - low) or math.inf
    return SettingAxis(judge, float(max(min(known), low - reach)), float(min(max(known), high + reach)))


def _shares(judged: list[Judgement]) -> list[float]:
    """Share of the others whose estimate is smaller; NaN for one without."""
    known = np.sort([j.value for j in judged if not math.isnan(j.value)])
    return [
        math.nan if math.isnan(j.value) else float(np.searchsorted(known, j.value)) / max(1, len(known) - 1)
        for j in judged
    ]


def _table(made: TunePage, algo: str, judged: list[Judgement]) -> None:
    order = sorted(judged, key=lambda j: (math.isnan(j.value), -j.value if not math.isnan(j.value) else 0.0))
    names = [d.name for d in made.spaces[algo].dimensions]
    rows: list[list[Any]] = []
    for j in order[:MOST_ROWS]:
        own = made.settings[j.setting]["values"]
        rows.append(
            [
                Cell(j.setting, strong=j.setting == made.chosen),
                *(value_cell(own.get(n)) for n in names),
                cell(j.value, j.error),
            ]
        )
    more = f"; the first {MOST_ROWS} of {len(order)}, All settings has the rest" if len(order) > MOST_ROWS else ""
    with made.page.details(f"{algo} in numbers{more}"):
        made.page.table(["setting", *names, f"{made.judge}, 95%"], rows, sortable=True)
