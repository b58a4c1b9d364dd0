"""Pictures of runs. matplotlib is imported when one is drawn."""

from __future__ import annotations

import contextlib
import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#444444")  # Okabe and Ito: told apart by everybody
GREY = "#666666"
LABEL_GAP = 0.055  # least distance between two labels, in heights of the axes
Curves = dict[int, dict[int, float]]  # seed -> step -> value


def read_curves(path: Path, column: str) -> Curves:
    """One column of a scores.csv; a seed without a value at a step has no entry there."""
    try:
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    curves: Curves = {}
    for row in rows:
        if row.get(column):
            curves.setdefault(int(row["seed"]), {})[int(row["step"])] = float(row[column])
    return curves


def learning_curve(
    scores_csvs: Mapping[str, Path],
    out: Path,
    *,
    behaviour: float | None = None,
    ylabel: str = "",
    title: str = "",
    column: str | None = None,
) -> bool:
    """Draw evaluations over training steps, 900 x 550 pixels: the mean over seeds with its 95% interval, and every seed as a thin line.

    `scores_csvs`: label -> scores.csv. `behaviour`: the data set's own mean, as a dashed line, in the unit of `column`, which is by
    default "score" where every file has scores and "return_mean" otherwise. Returns False, and draws nothing, when there is no value.
    Raises UserError when a file cannot be read or `out` cannot be written.
    """
    if column is None:
        column = "score" if all(read_curves(path, "score") for path in scores_csvs.values()) else "return_mean"
    runs = {label: curves for label, path in scores_csvs.items() if (curves := read_curves(path, column))}
    if not runs:
        return False

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    figure = Figure(figsize=(7.2, 4.4), dpi=125, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    ends = [_draw(axes, curves, COLOURS[i % len(COLOURS)], label) for i, (label, curves) in enumerate(runs.items())]
    if behaviour is not None and math.isfinite(behaviour):
        axes.axhline(behaviour, color=GREY, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1)
        ends.append((behaviour, f"data's mean {_short(behaviour)}", GREY))

    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#aaaaaa")
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, colors="#333333")
    axes.margins(x=0.01, y=0.06)
    # Two seeds have an interval twelve times as wide as themselves: the lines decide the range, and the band may leave it.
    values = [v for curves in runs.values() for curve in curves.values() for v in curve.values()] + [end[0] for end in ends]
    room = 0.5 * (max(values) - min(values)) or 1.0
    bottom, top = axes.get_ylim()
    axes.set_ylim(max(bottom, min(values) - room), min(top, max(values) + room))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _thousands(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,.10g}"))
    axes.set_xlabel("training steps", fontsize=9.5, color="#333333")
    heading = ylabel or {"score": "normalised score", "return_mean": "return"}.get(column, column)
    several = any(len(curves) > 1 for curves in runs.values())
    note = "mean over seeds, 95% interval; thin: each seed" if several else ""
    # The unit stands above the axis, where it is read without turning the head.
    axes.set_title(heading + (f"  ({note})" if note else ""), loc="left", fontsize=9.5, color="#333333")
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    _label_ends(axes, ends)

    part = out.with_name(out.name + ".part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(part, format="png")
        os.replace(part, out)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise UserError(f"cannot write {out}: {error.strerror}") from None
    return True


def _draw(axes: Any, curves: Curves, colour: str, label: str) -> tuple[float, str, str]:
    """One run's lines. Returns where its label belongs, the label and its colour."""
    from offrl.stats import mean_interval

    steps = sorted({step for curve in curves.values() for step in curve})
    marker = "o" if len(steps) == 1 else None
    if len(curves) > 1:
        for curve in curves.values():
            axes.plot(list(curve), list(curve.values()), color=colour, alpha=0.3, linewidth=0.9, marker=marker, markersize=3, zorder=2)
    middle, low, high = zip(*(mean_interval([c[step] for c in curves.values() if step in c]) for step in steps), strict=True)
    if all(map(math.isfinite, low + high)) and low != high:
        if len(steps) == 1:
            axes.errorbar(steps, middle, [[middle[0] - low[0]], [high[0] - middle[0]]], color=colour, capsize=4, zorder=3)
        else:
            axes.fill_between(steps, low, high, color=colour, alpha=0.14, linewidth=0, zorder=2)
    axes.plot(steps, middle, color=colour, linewidth=2.2, marker=marker, solid_capstyle="round", zorder=4)
    at_end = sum(steps[-1] in curve for curve in curves.values())
    lost = f"\n({at_end} of {len(curves)} seeds)" if at_end < len(curves) else ""  # the others diverged: their lines end early
    return float(middle[-1]), f"{label} {_short(middle[-1])}{lost}", colour


def _label_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Names beside the ends of the lines, moved apart where they would lie on one another."""
    low, high = axes.get_ylim()
    ordered = sorted(ends)
    placed: list[float] = []
    for value, _, _ in ordered:
        height = (value - low) / (high - low)
        placed.append(max(height, placed[-1] + LABEL_GAP) if placed else height)
    ceiling = 1.0
    for i in reversed(range(len(placed))):  # back down from the top edge
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - LABEL_GAP
    for (_, text, colour), height in zip(ordered, placed, strict=True):
        axes.annotate(
            text, (1.0, height), xycoords="axes fraction", xytext=(8, 0), textcoords="offset points",
            va="center", color=colour, fontsize=9.5, fontweight="bold" if colour != GREY else "normal", annotation_clip=False,
        )  # fmt: skip


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"


def _thousands(x: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(x) >= size:
            return f"{x / size:,.10g}{unit}"
    return f"{x:.10g}"
