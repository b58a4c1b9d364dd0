"""Pictures of a search over settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from offrl.errors import one_line
from offrl.figures.style import clip_height, new_figure, plain_axes

MARKS = {"": ("o", "#0072b2", 5.0), "default": ("D", "#d55e00", 5.0), "chosen": ("o", "#009e73", 7.0)}
MANY = 60  # points, from which on they are drawn faintly
LONGEST = 22  # letters of a name in a picture


def number(x: float) -> str:
    """A number of a table or an axis: four digits, and never more than five letters of zeros before them."""
    if not math.isfinite(x):
        return "\u2013"
    if x and (abs(x) < 1e-3 or abs(x) >= 1e6):
        mantissa, exponent = f"{x:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"


def slices(
    name: str, points: Sequence[tuple[Any, float, float, str]], unit: str, values: Sequence[str] = (), log: bool = False
) -> Any:
    """Estimates over one setting.

    points: (its value, estimate, half the 95% interval of that, NaN where unknown, "chosen", "default" or ""). values:
    not empty: the setting's values are these texts, side by side. unit: of the estimates.
    """
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    figure, axes = new_figure("", height=2.7, width=4.4)
    x = np.array([values.index(p[0]) if values else p[0] for p in points], float)
    for listed in range(len(values)):  # those of one value stand beside each other
        rows = np.flatnonzero(x == listed)
        x[rows] += 0.6 * (np.arange(len(rows)) / max(1, len(rows) - 1) - 0.5) if len(rows) > 1 else 0.0
    for kind, (marker, colour, size) in MARKS.items():
        marked = [i for i, p in enumerate(points) if p[3] == kind]
        faint = not kind and len(points) > MANY
        axes.errorbar(
            x[marked],
            [points[i][1] for i in marked],
            [points[i][2] if math.isfinite(points[i][2]) else 0.0 for i in marked],
            fmt=marker,
            color=colour,
            alpha=0.55 if faint else 1.0,
            markersize=3.2 if faint else size,
            elinewidth=0.6 if faint else 1.1,
            zorder=4 if kind else 2,
        )
    plain_axes(axes, clipped(name) + (" (log)" if log else ""), unit)
    clip_height(axes, [p[1] for p in points])
    if values:
        slanted = 30 if sum(map(len, values)) > 42 else 0
        axes.set_xticks(range(len(values)), map(clipped, values), parse_math=False, rotation=slanted)
    elif log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if x.max() < 200.0 * x.min() else (1.0,)))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.yaxis, *([] if values else [axes.xaxis])):
        axis.set_major_formatter(lambda v, _: number(v))
    return figure


def clipped(name: str) -> str:
    """A name as short as a picture needs it."""
    name = one_line(name)
    return name if len(name) <= LONGEST else name[: LONGEST - 2] + "\u2026"
