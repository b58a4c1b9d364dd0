"""Evaluations as pictures: over the steps between decisions, the target return, and the steps or episodes of tasks
that are in no data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl.evaluation.in_context import Played
from offrl.evaluation.robust import NEAR, RobustScores, RobustSummary
from offrl.evaluation.sweeps import AchievedReturns, FrequencyScores
from offrl.figures.curves import draw_lines, heat_map
from offrl.figures.style import (
    COLOURS,
    GREY,
    INK,
    colour_bar,
    label_ends,
    new_figure,
    new_grid,
    own_settings,
    plain_axes,
    save,
)
from offrl.statistics.intervals import mean_interval

STUDY = (
    "Over pairs of parameters as heat maps, with the worst of all other parameters (as points where no two share a "
    "value); over one parameter as a line with its interval. A star, or a dotted line, is the environment as it is, a "
    "ring the worst point, a white or a dashed line 80% of the nominal score."
)


@own_settings()
def draw_frequencies(curves: Mapping[str, FrequencyScores], out: Path, title: str) -> None:
    """Draw a line for each cell of each of `curves`, which have names: the mean over seeds with its interval, and every
    seed as a point.

    Raises UserError where `out` cannot be written.
    """
    figure, axes = new_figure(title)
    lines = [(name, scores, cell) for name, scores in curves.items() for cell in scores.cells.values()]
    for i, (name, scores, cell) in enumerate(lines):
        label = ", ".join(part for part in (name, scores.replicas[cell[0]].cell) if part)
        _draw_cell(axes, scores.steps, scores.values[:, cell], i, label, 0.12)
    plain_axes(axes)
    tick_steps = sorted({d for _, scores, _ in lines for d in scores.steps})
    axes.set_xscale("log", base=2)
    axes.set_xticks(tick_steps, [str(d) for d in tick_steps])
    axes.minorticks_off()
    axes.set_xlabel("steps of the environment between decisions")
    axes.set_ylabel(f"{lines[0][1].unit}, mean over seeds, 95% interval")
    values = np.concatenate([scores.values.ravel() for _, scores, _ in lines])
    margin = 0.06 * (float(values.max() - values.min()) or 1.0)
    axes.set_ylim(float(values.min()) - margin, float(values.max()) + margin)  # intervals of few seeds may leave it
    axes.legend(frameon=False, fontsize=9, loc="best")
    save(figure, out)


@own_settings()
def draw_target_returns(achieved: AchievedReturns, out: Path, title: str, best: float | None) -> None:
    """Draw achieved returns over target returns: the mean over seeds with its interval, every seed as a point, and,
    where targets are of whole episodes, the line where both are equal. best: the best return in the data. Raises
    UserError where `out` cannot be written."""
    figure, axes = new_figure(title)
    targets = np.asarray(achieved.targets)
    values = np.stack([e.returns.mean(axis=1) for e in achieved.evaluations])
    for i, cell in enumerate(achieved.cells.values()):
        _draw_cell(axes, targets, values[:, cell], i, achieved.replicas[cell[0]].cell or "achieved", 0.15)
    low, high = float(values.min()), float(values.max())
    bottom = min(low, 0.0)
    if not achieved.ahead:
        axes.plot(targets, targets, color=GREY, linewidth=1.0, linestyle="--", label="achieved = target")
        if best is not None:
            axes.axvline(best, color=GREY, linewidth=1.0, linestyle=":", label="best in the data")
        low, high = min(low, float(targets.min())), max(high, float(targets.max()))
    plain_axes(axes)
    axes.set_xlabel("target return: discounted, of the rest of the episode" if achieved.ahead else "target return")
    axes.set_ylabel("achieved return, mean over seeds, 95% interval")
    margin = 0.06 * (high - bottom or 1.0)
    axes.set_ylim(low - margin, high + margin)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, out)


@own_settings()
def draw_prompts(achieved: AchievedReturns, out: Path, title: str) -> None:
    """Draw the achieved return over the achieved cost of each pair of a target return and a limit: the mean over seeds
    with both intervals, every seed as a point, and the limit as a line of its colour. Raises UserError where `out`
    cannot be written."""
    figure, axes = new_figure(title)
    conditions = list(zip(achieved.targets, achieved.limits, achieved.evaluations, strict=True))
    for cell in achieved.cells.values():
        name = achieved.replicas[cell[0]].cell
        for i, (target, limit, evaluation) in enumerate(conditions):
            colour = COLOURS[i % len(COLOURS)]
            assert evaluation.costs is not None
            x, y = (values.mean(axis=1)[cell] for values in (evaluation.costs, evaluation.returns))
            (cost, *ends), (earned, *span) = mean_interval(x), mean_interval(y)
            bars = [[[abs(end - mean)] for end in e] for mean, e in ((cost, ends), (earned, span))]
            label = ", ".join(part for part in (name, f"{target:g}, limit {limit:g}") if part)
            axes.errorbar([cost], [earned], bars[1], bars[0], color=colour, marker="o", markersize=5, label=label)
            axes.plot(x, y, ".", color=colour, alpha=0.5, markersize=5)
            axes.axvline(limit, color=colour, linewidth=1.0, linestyle="--")
    plain_axes(axes)
    axes.set_xlabel("achieved cost of an episode, mean over seeds, 95% interval; dashed: the limits")
    axes.set_ylabel("achieved return")
    axes.legend(frameon=False, fontsize=9, loc="best")
    save(figure, out)


@own_settings()
def draw_in_context(played: Mapping[str, Sequence[Played]], out: Path, title: str = "") -> None:
    """The curves as a picture: the mean over tasks with its 95% interval; of several policies of a learner their
    mean.
    """
    figure, axes = new_figure(title)
    lines, axis_label, single = {}, "", True
    for i, (name, policies) in enumerate(played.items()):
        x, _, axis_label = policies[0].curve()
        single = single and len(policies[0].ends) == 1
        values = np.mean([one.curve()[1] for one in policies], axis=0)  # [N, X]
        keep = np.unique(np.linspace(0, len(x) - 1, 60).round().astype(int))
        curves = {n: dict(zip(x[keep].tolist(), row[keep].tolist(), strict=True)) for n, row in enumerate(values)}
        lines[name] = (curves, COLOURS[i % len(COLOURS)])
    xlabel = "steps in the task" if single else "episodes of the task"
    n_tasks = len(next(iter(played.values()))[0].tasks)
    heading = f"{axis_label}  (mean over {n_tasks} unseen tasks, 95% interval)"
    ends = draw_lines(axes, lines, spread=True, thin=False, xlabel=xlabel, heading=heading)
    label_ends(axes, ends)
    save(figure, out)


@own_settings()
def robust_figure(scores: RobustScores, title: str = "") -> Any:
    """The scores of a study, a row of panels for each cell; see STUDY."""
    names = list(scores.study.ranges)
    alone = len(names) == 1 or len(scores.points[0]) < len(names)
    panels = [(name,) for name in names] if alone else list(itertools.combinations(names, 2))
    cells = list(scores.cells.values())
    size = {"height": 3.4 * (1 if alone else len(cells)) + 0.4, "width": max(7.2, 5.2 * len(panels))}
    figure, grid = new_grid(title, 1 if alone else len(cells), len(panels), **size)
    summaries = scores.summaries()
    for column, panel in enumerate(panels):
        for row, (where, summary) in enumerate(zip(cells, summaries, strict=True)):
            if alone:
                _line_of_points(grid[0, column], scores, panel[0], row, where, summary)
            else:
                _map_of_points(grid[row, column], scores, panel, where, summary)
    if alone and len(cells) > 1:
        grid[0, 0].legend(frameon=False, fontsize=9, loc="best")
    return figure


def _line_of_points(
    axes: Any, scores: RobustScores, name: str, row: int, where: list[int], summary: RobustSummary
) -> None:
    at = sorted((i for i, p in enumerate(scores.points) if name in p), key=lambda i: scores.points[i][name])
    x = [scores.points[i][name] for i in at]
    _draw_cell(axes, x, scores.values[1:][at][:, where].mean(2), row, summary.cell or scores.unit, 0.15)
    axes.axvline(scores.study.nominal[name], color=GREY, linewidth=1.0, linestyle=":")
    axes.axhline(NEAR * summary.nominal[0], color=COLOURS[row % len(COLOURS)], linewidth=1.0, linestyle="--")
    plain_axes(axes, name, f"{scores.unit}, mean over seeds, 95% interval")


def _map_of_points(
    axes: Any, scores: RobustScores, names: Sequence[str], where: list[int], summary: RobustSummary
) -> None:
    means = scores.means(where)
    xs, ys = (np.array([point[name] for point in scores.points]) for name in names)
    columns, rows = np.unique(xs), np.unique(ys)
    is_grid = len(columns) * len(rows) <= len(means)
    several = is_grid and len(scores.study.ranges) > 2
    heading = f"{scores.unit}{', the worst of all other parameters' if several else ''}"
    plain_axes(axes, names[0], f"{heading}{summary.cell and f'; {summary.cell}'}", grid="")
    nominal = [scores.study.nominal[name] for name in names]
    if not is_grid:
        image = axes.scatter(xs, ys, c=means, cmap="viridis", s=42)
        colour_bar(axes, image, fraction=0.04, pad=0.02)
        worst = xs[summary.point], ys[summary.point]
    else:
        table = np.full((len(rows), len(columns)), np.inf)
        np.minimum.at(table, (np.searchsorted(rows, ys), np.searchsorted(columns, xs)), means)
        heat_map(axes, table.tolist(), [f"{v:.3g}" for v in columns], [f"{v:.3g}" for v in rows], numbers=True)
        axes.invert_yaxis()
        low = table < NEAR * summary.nominal[0]
        for lines, border in ((axes.hlines, low[:-1] != low[1:]), (axes.vlines, (low[:, :-1] != low[:, 1:]).T)):
            across, along = np.nonzero(border)
            lines(across + 0.5, along - 0.5, along + 0.5, colors="w", linewidths=2.2)
        worst = np.searchsorted(columns, xs[summary.point]), np.searchsorted(rows, ys[summary.point])
        inside = all(v[0] <= x <= v[-1] for v, x in zip((columns, rows), nominal, strict=True))
        nominal = (
            [np.interp(x, v, range(len(v))) for v, x in zip((columns, rows), nominal, strict=True)] if inside else []
        )
    axes.set_ylabel(names[1], fontsize=9.5, color=INK)
    axes.plot(*worst, "o", markersize=19, markerfacecolor="none", markeredgecolor=COLOURS[1], markeredgewidth=1.8)
    if nominal:
        axes.plot(*nominal, "*", markersize=13, color="w", markeredgecolor=INK)


def _draw_cell(axes: Any, x: Any, values: np.ndarray, number: int, label: str, shade: float) -> None:
    """The mean of `values` [X, S] over seeds with its interval, and of several seeds each as points."""
    colour = COLOURS[number % len(COLOURS)]
    mean, low, high = np.transpose([mean_interval(row) for row in values])
    axes.plot(x, mean, color=colour, linewidth=1.8, marker="o", markersize=4, label=label)
    if np.isfinite(low).all():
        axes.fill_between(x, low, high, color=colour, alpha=shade, linewidth=0)
    for seed in values.T if values.shape[1] > 1 else ():
        axes.plot(x, seed, ".", color=colour, alpha=0.5, markersize=5)
