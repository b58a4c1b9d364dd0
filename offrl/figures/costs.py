"""Returns against costs as pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from offrl.data.tools.inspect import Report
from offrl.figures.style import COLOURS, new_figure, plain_axes

MOST_POINTS = 2000
Interval = tuple[float, float, float]  # value, low, high


def episode_costs(findings: Report) -> list[tuple[Any, str, str]]:
    """Return against cost of episodes, (figure, file name, caption): every one a point, and the best of each cost or
    less as a line. Nothing where there are no costs.
    """
    costs, returns = findings.costs, findings.returns
    if costs is None or returns is None:
        return []
    figure, axes = new_figure("", height=2.7, width=4.4)
    order = np.lexsort((-returns, costs))
    best = np.maximum.accumulate(returns[order])
    front = order[np.concatenate([[True], best[1:] > best[:-1]])]
    shown = np.unique(np.linspace(0, len(costs) - 1, min(len(costs), MOST_POINTS)).astype(np.int64))
    axes.scatter(costs[shown], returns[shown], s=7, color=COLOURS[0], alpha=0.4, linewidths=0)
    axes.step(costs[front], returns[front], color=COLOURS[1], linewidth=1.6, where="post")
    plain_axes(axes, "cost of an episode", "return of an episode", size=9)
    caption = "Return against cost. The line is the best return that an episode of so much cost or less has."
    return [(figure, "costs", caption)]


def limits(points: Mapping[str, tuple[Interval, Interval]], colour: Mapping[str, str]) -> Any:
    """(cost, return) of algorithms {label: each (mean, low, high)} as points, their intervals as lines where they are
    known.
    """
    figure, axes = new_figure("", height=3.1, width=5.0)
    for label, ends in points.items():
        widths = [[[mean - low], [high - mean]] if math.isfinite(low) else None for mean, low, high in ends]
        (cost, *_), (returns, *_) = ends
        axes.errorbar([cost], [returns], widths[1], widths[0], "o", color=colour[label], markersize=5, elinewidth=1.3)
    plain_axes(axes, "cost of an episode", "return of an episode")
    return figure
