"""What policies earn when they are asked for other returns: no training, only more replicas to score."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offrl.evaluation.evaluator import Evaluation
from offrl.figures import curves as plots
from offrl.settings.replicas import Replica, Values, by_cell
from offrl.statistics.intervals import mean_interval
from offrl.system.files import write_text

TABLE, PICTURE = "target_returns.csv", "target_returns.png"
BEYOND = 0.2  # asked for above the data's best return, as a share of their range
LEVELS = 6


@dataclass(frozen=True)
class Achieved:
    """Scores of R replicas, each asked for M returns."""

    targets: tuple[float, ...]  # in the units of the recorded rewards
    replicas: tuple[Replica, ...]
    evaluations: tuple[Evaluation, ...]  # one for each target

    def means(self, where: Sequence[int]) -> list[tuple[float, float, float]]:
        """For each target the mean return over the seeds of these replicas, with its interval."""
        return [mean_interval(e.returns.mean(axis=1)[list(where)]) for e in self.evaluations]

    def scores(self, where: Sequence[int]) -> list[tuple[float, float, float]] | None:
        """As `means`, of normalised scores; None without reference scores."""
        if any(e.scores is None for e in self.evaluations):
            return None
        return [mean_interval(e.per_seed()[list(where)]) for e in self.evaluations]

    @property
    def cells(self) -> dict[Values, list[int]]:
        """Replicas that differ in nothing but the seed."""
        return by_cell(self.replicas)


def spread_targets(low: float, high: float) -> list[float]:
    """Returns worth asking for where the data's lie between `low` and `high`: evenly spaced over them, and one beyond."""
    values = [*np.linspace(low, high, LEVELS).tolist(), high + BEYOND * (high - low)]
    return list(dict.fromkeys(float(f"{v:.4g}") for v in values))


def write(achieved: Achieved, folder: Path, title: str, best: float | None) -> list[Path]:
    """The table and the picture; `best` is the data's best return. Raises UserError where they cannot be written."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    fields = [field for field, _ in achieved.replicas[0].values]
    table.writerow([*fields, "seed", "target_return", "return_mean", "return_std", "score", "length_mean"])
    for target, evaluation in zip(achieved.targets, achieved.evaluations, strict=True):
        for replica, row in zip(achieved.replicas, evaluation.rows(), strict=True):
            values = [v for _, v in replica.values]
            score = "" if row["score"] is None else row["score"]
            table.writerow([*values, replica.seed, target, row["return"], row["return_std"], score, row["length"]])
    write_text(folder / TABLE, text.getvalue())
    draw(achieved, folder / PICTURE, title, best)
    return [folder / TABLE, folder / PICTURE]


def draw(achieved: Achieved, out: Path, title: str, best: float | None) -> None:
    """Achieved against asked: the mean over seeds with its interval, every seed as a point, and the line where both are equal."""
    figure, axes = plots.new_figure(title)
    asked = np.asarray(achieved.targets)
    for i, where in enumerate(achieved.cells.values()):
        colour = plots.COLOURS[i % len(plots.COLOURS)]
        mean, low, high = (np.asarray(column) for column in zip(*achieved.means(where), strict=True))
        axes.plot(asked, mean, color=colour, linewidth=1.8, marker="o", markersize=4, label=achieved.replicas[where[0]].cell or "achieved")
        if np.isfinite(low).all():
            axes.fill_between(asked, low, high, color=colour, alpha=0.15, linewidth=0)
        for n in where if len(where) > 1 else []:
            axes.plot(asked, [e.returns[n].mean() for e in achieved.evaluations], ".", color=colour, alpha=0.5, markersize=5)
    axes.plot(asked, asked, color=plots.GREY, linewidth=1.0, linestyle="--", label="as asked")
    if best is not None:
        axes.axvline(best, color=plots.GREY, linewidth=1.0, linestyle=":", label="best in the data")
    plots.plain_axes(axes)
    axes.set_xlabel("return asked for")
    axes.set_ylabel("return achieved, mean over seeds, 95% interval")
    values = [e.returns.mean(axis=1) for e in achieved.evaluations]
    low_y, high_y = float(np.min(values)), float(max(np.max(values), asked.max()))
    margin = 0.06 * (high_y - min(low_y, 0.0) or 1.0)
    axes.set_ylim(min(low_y, float(asked.min())) - margin, high_y + margin)
    axes.legend(frameon=False, fontsize=9, loc="upper left")
    plots.save(figure, out)
