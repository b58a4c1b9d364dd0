"""The outcome of fine-tuning: the score before and after, the regret, and an initial collapse of the score."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from offrl.figures import curves as plots
from offrl.figures import style
from offrl.runs.record import SCORES
from offrl.runs.run import SavedRun
from offrl.runs.tables import interval_text, print_columns
from offrl.settings.replicas import by_cell, cell_name
from offrl.statistics.intervals import mean_interval
from offrl.system import files as checkpoint

PICTURE, FILE = "finetune.png", "finetune.json"
EARLY = 0.1  # share of the steps in which a collapse is looked for


@dataclass(frozen=True)
class Outcome:
    """The results of one grid point (or of a run without a grid): numbers for each seed, in scores where there are
    reference returns.
    """

    cell: str
    seeds: list[int]
    unit: str  # score or return
    offline: list[float]  # at step 0
    final: list[float]
    online: list[float]  # mean over the evaluations after step 0
    lowest: list[float] | None  # over the evaluations of the first tenth; None where there was none
    regret: list[float] | None  # 1 - online / 100; None without reference returns


def outcomes(run: SavedRun, steps: int) -> list[Outcome]:
    """The outcomes of a fine-tuning run of `steps` steps, from its scores.csv; none where it was not scored after step
    0.

    Regret is that of Cal-QL (arXiv 2303.05479, section 7): 1 less the mean normalised score, here over the evaluations
    after step 0."""
    rows = run.score_rows
    unit = "score" if rows and all(r["score"] is not None for r in rows) else "return"
    key = "score" if unit == "score" else "return_mean"
    result = []
    for values, where in by_cell(run.replicas).items():
        curves = [
            {
                r["step"]: float(r[key])
                for r in rows
                if r["seed"] == run.replicas[i].seed and all(r[k] == v for k, v in values)
            }
            for i in where
        ]
        if any(0 not in curve or len(curve) < 2 for curve in curves):
            continue
        online = [math.fsum(v for t, v in c.items() if t > 0) / (len(c) - 1) for c in curves]
        early = [[v for t, v in c.items() if 0 < t <= EARLY * steps] for c in curves]
        result.append(
            Outcome(
                cell_name(values),
                [run.replicas[i].seed for i in where],
                unit,
                [c[0] for c in curves],
                [c[max(c)] for c in curves],
                online,
                [min(e) for e in early] if all(early) else None,
                [1.0 - m / 100.0 for m in online] if unit == "score" else None,
            )
        )
    return result


def write(run: SavedRun, steps: int) -> list[Outcome]:
    """Write finetune.json and finetune.png; returns what is in them."""
    result = outcomes(run, steps)
    if result:
        checkpoint.write_text(run.dir / FILE, json.dumps([asdict(o) for o in result], indent=1) + "\n")
        picture(
            {run.algorithm: run.dir / SCORES},
            run.dir / PICTURE,
            title=f"{run.record['online']['label']} in {run.record['env']}",
        )
    return result


def report(run: SavedRun, results: Sequence[Outcome]) -> None:
    """Print the final table."""
    if not results:
        return
    unit = results[0].unit

    def cells(values: list[float] | None, digits: int = 1) -> str:
        return "" if values is None else interval_text(mean_interval(values), digits)

    columns: dict[str, list[str]] = {
        "algorithm": [run.record["online"]["label"]] * len(results),
        "cell": [o.cell for o in results],
        f"offline {unit} [95% interval]": [cells(o.offline) for o in results],
        "at the end": [cells(o.final) for o in results],
        "mean online": [cells(o.online) for o in results],
        "lowest in the first tenth": [cells(o.lowest) for o in results],
        "regret": [cells(o.regret, 2) for o in results],
        "seeds": [str(len(o.seeds)) for o in results],
    }
    print_columns(columns, run.scored_in)


@style.own_settings()
def picture(files: dict[str, Path], out: Path, *, title: str = "", column: str | None = None) -> bool:
    """Draw scores over environment steps: mean over seeds and 95% interval, a dashed line at the score of step 0
    ("offline").

    files: label -> scores.csv. Returns False, and draws nothing, where there is no value. Raises UserError.
    """
    if column is None:
        column = plots.common_column(files.values())
    lines: dict[str, Any] = {}
    for label, path in files.items():
        for values, curves in plots.read_curves(path, column).items():
            cell = cell_name(values)
            lines[f"{label} {cell}".strip() if len(files) > 1 or not cell else cell] = curves
    if not lines:
        return False
    figure, axes = style.new_figure(title)
    several = any(len(curves) > 1 for curves in lines.values())
    note = ("mean over seeds, 95% interval; " if several else "") + "dashed: before fine-tuning"
    ends = plots.draw_lines(
        axes,
        coloured := style.with_colours(lines),
        spread=True,
        thin=len(lines) <= plots.MOST_SPREADS,
        xlabel="environment steps",
        heading=f"{plots.unit(column)}  ({note})",
    )
    for curves, colour in coloured.values():
        if before := [curve[0] for curve in curves.values() if 0 in curve]:
            mean = math.fsum(before) / len(before)
            axes.axhline(mean, color=colour, linestyle=(0, (5, 4)), linewidth=1.1, zorder=1)
            if len(lines) == 1:
                ends.append((mean, f"offline {style.short(mean)}", style.GREY))
    style.label_ends(axes, ends)
    style.save(figure, out)
    return True
