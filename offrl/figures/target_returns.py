"""Achieved returns over target returns, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from offrl.evaluation.sweeps import AchievedReturns
from offrl.figures.style import COLOURS, GREY, new_figure, own_settings, plain_axes, save


@own_settings()
def draw(achieved: AchievedReturns, out: Path, title: str, best: float | None) -> None:
    """Draw achieved returns over target returns: the mean over seeds with its interval, every seed as a point, and,
    where targets are of whole episodes, the line where both are equal. best: the best return in the data. Raises
    UserError where `out` cannot be written."""
    figure, axes = new_figure(title)
    targets = np.asarray(achieved.targets)
    for i, cell in enumerate(achieved.cells.values()):
        colour = COLOURS[i % len(COLOURS)]
        mean, low, high = (np.asarray(column) for column in zip(*achieved.returns(cell), strict=True))
        axes.plot(
            targets,
            mean,
            color=colour,
            linewidth=1.8,
            marker="o",
            markersize=4,
            label=achieved.replicas[cell[0]].cell or "achieved",
        )
        if np.isfinite(low).all():
            axes.fill_between(targets, low, high, color=colour, alpha=0.15, linewidth=0)
        for n in cell if len(cell) > 1 else []:
            axes.plot(
                targets, [e.returns[n].mean() for e in achieved.evaluations], ".", color=colour, alpha=0.5, markersize=5
            )
    if not achieved.ahead:
        axes.plot(targets, targets, color=GREY, linewidth=1.0, linestyle="--", label="achieved = target")
    if best is not None and not achieved.ahead:
        axes.axvline(best, color=GREY, linewidth=1.0, linestyle=":", label="best in the data")
    plain_axes(axes)
    axes.set_xlabel("target return: discounted, of the rest of the episode" if achieved.ahead else "target return")
    axes.set_ylabel("achieved return, mean over seeds, 95% interval")
    values = [e.returns.mean(axis=1) for e in achieved.evaluations]
    low_y, high_y = float(np.min(values)), float(max(np.max(values), -np.inf if achieved.ahead else targets.max()))
    margin = 0.06 * (high_y - min(low_y, 0.0) or 1.0)
    axes.set_ylim(min(low_y, low_y if achieved.ahead else float(targets.min())) - margin, high_y + margin)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    save(figure, out)
