"""Learning curves of runs and the results of their grids. matplotlib is imported when one is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError
from offrl.figures.style import (
    COLOURS,
    GREY,
    INK,
    clip_height,
    count_ticks,
    label_ends,
    new_figure,
    own_settings,
    plain_axes,
    save,
    short,
    thousands,
    with_colours,
)
from offrl.runs.log import OWN_COLUMNS
from offrl.runs.record import CURVE, GRID, SCORES
from offrl.runs.run import SavedRun
from offrl.runs.tables import Result
from offrl.settings.replicas import Values, number
from offrl.system.csv_text import read

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_LINES = 12  # with more grid points than this a grid is drawn as a heat map of grid points and steps
MOST_SPREADS = 3  # with more lines than this the seeds and the intervals are left out
Curves = dict[int, dict[int, float]]  # seed -> step -> value


def read_curves(path: Path, column: str) -> dict[Values, Curves]:
    """One column of a scores.csv by grid point, in the grid's order; without a grid the one key is ().

    A seed without a value at a step has no entry there, and a grid point without any value none at all.
    """
    try:
        rows = read(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    fields = [name for name in rows[0] if name not in OWN_COLUMNS] if rows else []
    points: dict[Values, Curves] = {}
    for row in rows:
        if row.get(column):
            curves = points.setdefault(tuple((field, float(row[field])) for field in fields), {})
            curves.setdefault(int(row["seed"]), {})[int(row["step"])] = float(row[column])
    return points


def common_column(scores_csvs: Iterable[Path]) -> str:
    """ "score" where every file has scores, "return_mean" otherwise."""
    return "score" if all(read_curves(path, "score") for path in scores_csvs) else "return_mean"


@own_settings()
def learning_curve(
    scores_csvs: Mapping[str, Path],
    out: Path,
    *,
    behaviour: float | None = None,
    title: str = "",
) -> Figure | None:
    """Draw evaluations over training steps, 900 x 550 pixels: the mean over seeds with its 95% interval, and every seed
    as a thin line.

    A grid has a line for each point, the means only where these are more than MOST_SPREADS, and more than MOST_LINES
    become a heat map. `scores_csvs`: label -> scores.csv. `behaviour`: the dataset's own mean, as a dashed line, in the
    unit of `common_column`. Returns the figure; None, and draws nothing, when there is no value. Raises UserError when
    a file cannot be read or `out` cannot be written.
    """
    column = common_column(scores_csvs.values())
    files = {label: points for label, path in scores_csvs.items() if (points := read_curves(path, column))}
    if not files:
        return None
    runs = {
        _line_name(label, values, len(files) > 1): curves
        for label, points in files.items()
        for values, curves in points.items()
    }
    fields = [field for field, _ in next(iter(next(iter(files.values()))))]
    heading = unit(column)
    if len(runs) > MOST_LINES:
        return _heat_map_of_steps(runs, out, heading=f"{heading}, mean over seeds", fields=fields, title=title)

    figure, axes = new_figure(title)
    spread = len(runs) <= MOST_SPREADS or not fields
    lines = with_colours({label + (":" if fields else ""): curves for label, curves in runs.items()})
    several = any(len(curves) > 1 for curves in runs.values())
    note = ("mean over seeds, 95% interval; thin: each seed" if spread else "mean over seeds") if several else ""
    if fields:
        note += f"{'; ' if note else ''}lines: {', '.join(fields)}"
    heading += f"  ({note})" if note else ""
    ends = draw_lines(axes, lines, spread=spread, behaviour=behaviour, heading=heading)
    label_ends(axes, ends)
    save(figure, out)
    return figure


def plot_run(run: SavedRun, siblings: Sequence[SavedRun] = ()) -> Figure | None:
    """Draw learning_curve.png of a run, beside the curves of its siblings, and grid.png for a grid over one or two
    fields.

    Returns the figure of the learning curve; None when there is nothing to draw.
    """
    files = {one.algorithm: one.dir / SCORES for one in (run, *siblings) if (one.dir / SCORES).exists()}
    results = run.results()
    title = f"{', '.join(dict.fromkeys(r.algorithm for r in (run, *siblings)))} on {run.dataset}"
    grid_picture(results, run.dir / GRID, title=title)
    behaviour = results[0].behaviour if results else None
    return learning_curve(files, run.dir / CURVE, behaviour=behaviour, title=title) if files else None


def draw_lines(
    axes: Any,
    lines: Mapping[str, tuple[Curves, str]],
    *,
    spread: bool,
    behaviour: float | None = None,
    thin: bool = True,
    xlabel: str = "updates",
    heading: str = "",
) -> list[tuple[float, str, str]]:
    """Learning curves {label: (values, colour)} and their axes; the data's own mean, `behaviour`, as a dashed line.

    `spread`: with the 95% interval over seeds, and with `thin` every seed as a thin line. Returns what `label_ends`
    writes beside the ends."""
    from matplotlib.ticker import MaxNLocator

    ends = [_draw_curves(axes, curves, colour, label, spread, thin) for label, (curves, colour) in lines.items()]
    if behaviour is not None and math.isfinite(behaviour):
        axes.axhline(behaviour, color=GREY, linestyle=(0, (5, 4)), linewidth=1.2, zorder=1)
        ends.append((behaviour, f"data's mean {short(behaviour)}", GREY))
    plain_axes(axes, xlabel, heading)
    axes.margins(x=0.01, y=0.06)
    # Two seeds have an interval twelve times as wide as themselves: the lines decide the range, and the band may leave
    # it.
    values = [v for curves, _ in lines.values() for curve in curves.values() for v in curve.values()]
    clip_height(axes, [*values, *(end[0] for end in ends)])
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    count_ticks(axes.xaxis)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}")
    return ends


@own_settings()
def grid_picture(results: Sequence[Result], out: Path, *, title: str = "") -> bool:
    """Draw the final means of a grid's points, 900 x 550: over the values of its one field with their 95% intervals, or
    as a heat map of its two fields with the numbers in the cells.

    `results`: one row for each grid point. Fields with a single value do not count. Draws nothing and returns False for
    fewer or more. Raises UserError when `out` cannot be written.
    """
    points = [dict(r.values) for r in results]
    varied = {
        field: levels
        for field in (points[0] if points else {})
        if len(levels := list(dict.fromkeys(g[field] for g in points))) > 1
    }
    # values that were paired fill no table
    if len(varied) not in (1, 2) or math.prod(map(len, varied.values())) != len(points):
        return False
    heading = "normalised score" if all(r.score for r in results) else "return"
    means = [(r.score if heading != "return" and r.score else r.returns) for r in results]
    figure, axes = new_figure(title)
    seeds = f"mean over {results[0].seeds} seeds" if results[0].seeds > 1 else "one seed"
    if len(varied) == 1:
        ((field, levels),) = varied.items()
        interval = ", 95% interval" if results[0].seeds > 1 else ""
        _draw_values(axes, field, levels, means, f"{heading} at the end  ({seeds}{interval})")
    else:
        (row, rows), (column, columns) = varied.items()
        table = [
            [next(m[0] for g, m in zip(points, means, strict=True) if (g[row], g[column]) == (r, c)) for c in columns]
            for r in rows
        ]
        plain_axes(axes, column, f"{heading} at the end  ({seeds})", grid="")
        heat_map(axes, table, [number(c) for c in columns], [number(r) for r in rows], numbers=True)
        axes.set_ylabel(row, fontsize=9.5, color=INK)
    save(figure, out)
    return True


def _draw_values(
    axes: Any, field: str, levels: Sequence[float], means: Sequence[tuple[float, float, float]], heading: str
) -> None:
    """Means with their intervals over the values of one field."""
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    points = sorted(zip(levels, means, strict=True))
    positions, middle = [level for level, _ in points], [m[0] for _, m in points]
    if not all(map(math.isfinite, positions)):  # an infinite value has no place on a line
        positions = [float(i) for i in range(len(points))]
    elif positions[0] > 0.0 and positions[-1] / positions[0] >= 10.0:
        axes.set_xscale("log")
    bars = [[m[0] - m[1] for _, m in points], [m[2] - m[0] for _, m in points]]
    if all(map(math.isfinite, bars[0] + bars[1])):
        axes.errorbar(positions, middle, bars, color=COLOURS[0], capsize=4, linewidth=1.2, zorder=3)
    axes.plot(positions, middle, color=COLOURS[0], linewidth=2.2, marker="o", zorder=4)
    plain_axes(axes, field, heading)
    axes.margins(x=0.04, y=0.08)
    clip_height(axes, middle)
    axes.xaxis.set_major_locator(FixedLocator(positions))
    axes.xaxis.set_minor_locator(NullLocator())
    texts = dict(zip(positions, (number(level) for level, _ in points), strict=True))
    axes.xaxis.set_major_formatter(lambda x, _: texts.get(x, ""))
    axes.yaxis.set_major_locator(MaxNLocator(6))


def _heat_map_of_steps(
    runs: Mapping[str, Curves], out: Path, *, heading: str, fields: Sequence[str], title: str
) -> Figure:
    """The mean over seeds of each line (top to bottom) at each evaluation (left to right)."""
    from offrl.statistics.intervals import mean_interval

    steps = sorted({step for curves in runs.values() for curve in curves.values() for step in curve})
    table = [[mean_interval([c[s] for c in curves.values() if s in c])[0] for s in steps] for curves in runs.values()]
    figure, axes = new_figure(title, height=max(4.4, min(24.0, 1.2 + 0.2 * len(runs))))
    plain_axes(axes, "updates", f"{heading}; rows: {', '.join(fields)}", grid="")
    heat_map(axes, table, [thousands(s) for s in steps], list(runs), numbers=len(steps) <= 12 and len(runs) <= 110)
    save(figure, out)
    return figure


def heat_map(
    axes: Any, table: Sequence[Sequence[float]], columns: Sequence[str], rows: Sequence[str], *, numbers: bool
) -> None:
    """Colours, and the numbers themselves if `numbers`. A cell without a value stays white."""
    image = axes.imshow(table, aspect="auto", cmap="viridis", interpolation="nearest")
    axes.spines["bottom"].set_visible(False)
    size = 9 if len(rows) <= 20 else 7
    axes.tick_params(labelsize=size)
    for axis, texts, limit in ((axes.xaxis, columns, 12), (axes.yaxis, rows, 110)):
        ticks = range(0, len(texts), math.ceil(len(texts) / limit))
        axis.set_ticks(list(ticks), [texts[i] for i in ticks])
    if not numbers:
        axes.figure.colorbar(image, ax=axes, fraction=0.04, pad=0.02).outline.set_visible(False)
        return
    for i, row in enumerate(table):
        for j, value in enumerate(row):
            if math.isfinite(value):
                ink = "w" if image.norm(value) < 0.6 else "k"
                axes.text(j, i, short(value), ha="center", va="center", fontsize=size, color=ink)


def unit(column: str) -> str:
    return {"score": "normalised score", "return_mean": "return"}.get(column, column)


def _line_name(label: str, values: Values, several: bool) -> str:
    """`3, 0.7` for a grid point of the only run, `iql 3, 0.7` beside other runs; without a grid the run's own label."""
    point = ", ".join(number(value) for _, value in values)
    return f"{label} {point}" if point and several else point or label


def _draw_curves(
    axes: Any, curves: Curves, colour: str, label: str, spread: bool, thin: bool = True
) -> tuple[float, str, str]:
    """One line, with its interval if `spread`, and its seeds if also `thin`. Returns where its label belongs, the label
    and its colour.
    """
    from offrl.statistics.intervals import mean_interval

    steps = sorted({step for curve in curves.values() for step in curve})
    marker = "o" if len(steps) == 1 else None
    if len(curves) > 1 and spread and thin:
        for curve in curves.values():
            x, y = list(curve), list(curve.values())
            axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.9, marker=marker, markersize=3, zorder=2)
    middle, low, high = zip(
        *(mean_interval([c[step] for c in curves.values() if step in c]) for step in steps), strict=True
    )
    if spread and all(map(math.isfinite, low + high)) and low != high:
        if len(steps) == 1:
            ends = [[middle[0] - low[0]], [high[0] - middle[0]]]
            axes.errorbar(steps, middle, ends, color=colour, capsize=4, zorder=3)
        else:
            axes.fill_between(steps, low, high, color=colour, alpha=0.14, linewidth=0, zorder=2)
    axes.plot(steps, middle, color=colour, linewidth=2.2, marker=marker, solid_capstyle="round", zorder=4)
    at_end = sum(steps[-1] in curve for curve in curves.values())
    # lines of seeds that diverged end early
    remark = f"\n({at_end} of {len(curves)} seeds)" if at_end < len(curves) else ""
    return float(middle[-1]), f"{label} {short(middle[-1])}{remark}", colour
