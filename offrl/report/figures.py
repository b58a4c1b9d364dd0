"""The pictures of a report. Each function returns a matplotlib Figure; `colours` gives every algorithm the same colour
in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offrl.figures.curves import Curves, draw_lines
from offrl.figures.style import (
    COLOURS,
    INK,
    MORE_COLOURS,
    clip_height,
    count_ticks,
    label_ends,
    new_figure,
    new_grid,
    ordered_colours,
    plain_axes,
    thousands,
)
from offrl.report.rows import times_100

if TYPE_CHECKING:
    from offrl.statistics.bootstrap import Curve, Interval

METRICS = {"iqm": "IQM", "median": "median", "mean": "mean", "optimality_gap": "optimality gap"}
MOST_SEED_LINES = 24  # of a learning-curve picture; with more only means and bands are drawn
MOST_LABELS = 6  # lines that are named at their ends; more are distinguished by the legend above

LONGEST_LABEL = 16  # letters of a name that may stand at the end of its line


def colours(algorithms: Sequence[str]) -> dict[str, str]:
    """A colour for each algorithm, in their order."""
    palette = list(MORE_COLOURS) if len(algorithms) <= len(MORE_COLOURS) else ordered_colours(len(algorithms))
    return dict(zip(algorithms, palette, strict=False))


def intervals(estimates: Mapping[str, Mapping[str, Interval]], colour: Mapping[str, str]) -> Any:
    """Aggregates {algorithm: {"iqm" | "median" | "mean" | "optimality_gap": interval, in units of 1}} side by side,
    drawn in units of 100.

    A bar is the interval, the line in it the estimate, as in rliable's plots (arXiv 2108.13264, figure 9).
    """
    names = list(estimates)
    figure, (grid,) = new_grid("", 1, len(METRICS), 0.95 + 0.36 * len(names), 8.8, sharey=True)
    for axes, (metric, title) in zip(grid, METRICS.items(), strict=True):
        for row, name in enumerate(names):
            _estimate(axes, row, times_100(estimates[name][metric]), colour[name], 0.62)
        heading = title + (" (less is better)" if metric == "optimality_gap" else "")
        plain_axes(axes, heading=heading, grid="x")
        axes.use_sticky_edges = False
        axes.margins(x=0.08)
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.locator_params(axis="x", nbins=4)
    grid[0].set_yticks(range(len(names)), names, parse_math=False)
    figure.get_layout_engine().set(wspace=0.07)
    return figure


def profiles(curves: Mapping[str, Curve], colour: Mapping[str, str]) -> Any:
    """Performance profiles {algorithm: share of runs above each score, scores in units of 1} with their bands."""
    figure, axes = new_figure("", height=3.1, width=5.0)
    for name, curve in curves.items():
        x = 100 * curve.x
        axes.plot(x, curve.value, color=colour[name], linewidth=2, label=name, zorder=3)
        if all(map(math.isfinite, curve.low)):
            axes.fill_between(x, curve.low, curve.high, color=colour[name], alpha=0.16, linewidth=0, zorder=2)
    plain_axes(axes, "normalised score", "share of runs that score more")
    axes.margins(x=0.01)
    axes.set_ylim(-0.02, 1.02)
    return figure


def improvement(estimates: Mapping[tuple[str, str], Interval], colour: Mapping[str, str]) -> Any:
    """Probabilities of improvement {(x, y): P(x > y)}, one line each; the dashed line is chance."""
    figure, axes = new_figure("", height=0.9 + 0.34 * len(estimates), width=5.0)
    for row, ((x, _), item) in enumerate(estimates.items()):
        _estimate(axes, row, item, colour[x], 0.58)
    plain_axes(axes, "probability of improvement", grid="x")
    axes.axvline(0.5, color="#666666", linewidth=1.2, linestyle=(0, (5, 4)), zorder=1)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(len(estimates) - 0.5, -0.5)
    axes.set_yticks(range(len(estimates)), [f"{x} over {y}" for x, y in estimates], parse_math=False)
    return figure


def _estimate(axes: Any, row: int, interval: tuple[float, float, float], colour: str, height: float) -> None:
    """A bar from the low to the high end of (value, low, high), where they are known, and the value as a line in it."""
    value, low, high = interval
    if math.isfinite(low) and math.isfinite(high):
        axes.barh(row, high - low, height, low, color=colour, alpha=0.55, linewidth=0)
    ends = [row - 0.5 * height, row + 0.5 * height]
    axes.plot([value] * 2, ends, color=INK, linewidth=1.8, solid_capstyle="butt")


def learning(
    title: str, lines: Mapping[str, Curves], colour: Mapping[str, str], unit: str, behaviour: float | None
) -> Any:
    """Learning curves {algorithm: seed -> step -> value} on one dataset; `behaviour`: its own mean, as a dashed
    line.
    """
    figure, axes = new_figure(title, height=3.1, width=5.0)
    crowded = sum(map(len, lines.values())) > MOST_SEED_LINES
    ends = draw_lines(
        axes,
        {name: (curves, colour[name]) for name, curves in lines.items()},
        spread=len(lines) <= len(COLOURS),
        behaviour=behaviour,
        thin=not crowded,
        xlabel="steps",  # of the environment where they are of fine-tuning
        heading=unit,
    )
    if len(ends) <= MOST_LABELS + 1 and max(len(name) for name in lines) <= LONGEST_LABEL:
        label_ends(axes, ends, gap=0.085)
    return figure


def diagnostic(title: str, lines: Mapping[str, Curves], colour: Mapping[str, str]) -> Any:
    """A metric over training steps, {algorithm: seed -> step -> value}: the mean over seeds, and their range as a
    band.
    """
    figure, axes = new_figure(title, height=2.3, width=4.0, fitted=False)  # there are many of these
    figure.subplots_adjust(left=0.13, right=0.97, bottom=0.13, top=0.85)
    all_means: list[float] = []
    for name, curves in lines.items():
        steps = sorted({step for curve in curves.values() for step in curve})
        rows = [[curve[step] for curve in curves.values() if step in curve] for step in steps]
        means = [math.fsum(row) / len(row) for row in rows]
        axes.fill_between(
            steps, [min(r) for r in rows], [max(r) for r in rows], color=colour[name], alpha=0.16, linewidth=0
        )
        axes.plot(steps, means, color=colour[name], linewidth=1.7, marker="o" if len(steps) == 1 else None)
        all_means += means
    plain_axes(axes)
    axes.margins(x=0.01)
    if all_means:
        clip_height(axes, all_means)
    count_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda y, _: thousands(y) if abs(y) >= 1e3 else f"{y:.6g}")
    axes.locator_params(nbins=5)
    return figure
