"""Scores over the number of steps between decisions, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from offrl.evaluation.sweeps import FrequencyScores
from offrl.figures.style import COLOURS, new_figure, own_settings, plain_axes, save


@own_settings()
def draw(curves: Mapping[str, FrequencyScores], out: Path, title: str) -> None:
    """Draw a line for each cell of each of `curves`, which have names: the mean over seeds with its interval, and every
    seed as a point.

    Raises UserError where `out` cannot be written.
    """
    figure, axes = new_figure(title)
    lines = [(name, scores, cell) for name, scores in curves.items() for cell in scores.cells.values()]
    for i, (name, scores, cell) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        mean, low, high = (
            np.asarray(column) for column in zip(*(scores.scores(cell) or scores.returns(cell)), strict=True)
        )
        label = ", ".join(part for part in (name, scores.replicas[cell[0]].cell) if part)
        axes.plot(scores.steps, mean, color=colour, linewidth=1.8, marker="o", markersize=4, label=label)
        if np.isfinite(low).all():
            axes.fill_between(scores.steps, low, high, color=colour, alpha=0.12, linewidth=0)
        for n in cell if len(cell) > 1 else []:
            axes.plot(scores.steps, scores.values[:, n], ".", color=colour, alpha=0.5, markersize=5)
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
