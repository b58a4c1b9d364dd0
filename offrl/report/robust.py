"""The page of a study of perturbations: how a run's policies do where the environment is another one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from offrl.evaluation.robust import NEAR, RobustScores, seed_interval, worst_points
from offrl.figures.evaluations import STUDY, robust_figure
from offrl.figures.style import own_settings, save
from offrl.report.page import Content, Page
from offrl.report.rows import interval_cell
from offrl.runs.tables import interval_text

NAME = "robust"  # of the files: .html, .png, .csv, .json
HEADERS = ("nominal", "mean over points", "CVaR 10%", "worst point", f"% of points at {NEAR:.0%} of nominal or more")
ABOUT = (
    "Each point is the environment with the values of the axes, and plays the same start states. The worst point and "
    "the CVaR (the mean over the worst tenth of the points) were chosen among noisy means, so what is shown of them "
    "was played again in other episodes. Intervals: 95%, over seeds, or over the episodes of a single seed."
)
LARGER = ": MuJoCo lets two geoms slide by the larger of their two frictions, and a smaller one changes nothing"


def point_text(point: Mapping[str, float]) -> str:
    """`friction.floor 0.1, mass.torso 0.39`."""
    return ", ".join(f"{name} {value:.3g}" for name, value in point.items())


def rows(scores: RobustScores) -> list[list[str]]:
    """A row for each cell: its name, the columns HEADERS, and where the worst point is."""
    digits = 1 if scores.unit == "score" else 2
    return [
        [
            one.cell,
            *(interval_text(v, digits) for v in (one.nominal, one.mean, one.cvar, one.worst)),
            "" if one.share is None else interval_text((100 * one.share[0], 100 * one.share[1], 100 * one.share[2]), 0),
            point_text(scores.points[one.point]),
        ]
        for one in scores.summaries()
    ]


def unchanged_lines(scores: RobustScores) -> list[str]:
    """A line for each row of values that change nothing."""
    return [
        f"{name} {', '.join(f'{value:.3g}' for value in values)}: the same episodes, bit for bit, with all else equal"
        f"{LARGER if name.startswith('friction.') else ''}"
        for name, runs in scores.unchanged().items()
        for values in runs
    ]


@own_settings()
def write_robust(scores: RobustScores, folder: Path, title: str) -> Path:
    """Write robust.html, .png, .csv and .json into `folder`; returns the page. Raises UserError."""
    scores.write(folder / f"{NAME}.csv")
    scores.write_record(folder / f"{NAME}.json")
    figure = robust_figure(scores, title)
    save(figure, folder / f"{NAME}.png")
    page = Page(f"{title}: robustness", f"{scores.evaluations[0].label}; robust={scores.study.name}")
    for one in scores.summaries():
        page.text(
            f"{one.cell and one.cell + ': '}worst {scores.unit} {interval_text(one.worst)} at "
            f"{point_text(scores.points[one.point])}, nominal {interval_text(one.nominal)}.",
            "lead",
        )
    page.table(["", *HEADERS, "where the worst is"], rows(scores), caption=f"The {scores.unit} of episodes. {ABOUT}")
    figure.suptitle("")
    page.figure(figure, STUDY)
    if lines := unchanged_lines(scores):
        page.box("Values that change nothing", lines, "note")
    for where in scores.cells.values():
        _points(page, scores, where)
    page.text("Beside this page: robust.csv (every point and seed), robust.json, robust.png.", "small")
    return page.save(folder / f"{NAME}.html")


def _points(page: Page, scores: RobustScores, where: list[int]) -> None:
    """The worst points of a cell as a table, and all of them in a folded one."""
    names, count = list(scores.study.ranges), len(scores.points)
    values = scores.values[1:, where]
    order = np.argsort(values[:count].mean((1, 2)), kind="stable").tolist()

    def row(index: int, *evaluations: int) -> list[Content]:
        point = {**scores.study.nominal, **scores.points[index]}
        return [*(point[name] for name in names), *(interval_cell(seed_interval(values[e])) for e in evaluations)]

    worst = [
        row(index, index, count + scores.again.index(index)) for index in worst_points(values[:count].mean((1, 2)))
    ]
    page.heading(" ".join(filter(None, ("The worst tenth of the points", scores.replicas[where[0]].cell))))
    page.table([*names, scores.unit, "played again"], worst)
    with page.details(f"all {count} points"):
        page.table([*names, scores.unit], [row(index, index) for index in order], sortable=True)
