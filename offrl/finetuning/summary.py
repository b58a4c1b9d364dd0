"""The outcome of fine-tuning for people: finetune.json, finetune.png, and the table at the end."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offrl.errors import say
from offrl.figures import curves as plots
from offrl.figures import style
from offrl.finetuning.outcome import Outcome, minutes, outcomes
from offrl.runs.record import SCORES
from offrl.runs.run import SavedRun
from offrl.runs.tables import interval_text, print_columns
from offrl.settings.diff import value_text
from offrl.settings.replicas import cell_name
from offrl.statistics.intervals import mean_interval
from offrl.system import files as checkpoint

SETTINGS = ("envs", "utd", "mixing")  # of a budget
PICTURE, FILE = "finetune.png", "finetune.json"
# numbers of an outcome, as tables call them, and their digits
MEASURES = {
    "offline": ("start {unit} [95% interval]", 1),
    "final": ("at the end", 1),
    "gain": ("gain", 1),
    "dip": ("dip", 1),
    "regret_mean": ("regret, mean", 2),
    "regret_area": ("regret, area", 2),
    "regret_play": ("regret of play", 2),
}


def write(run: SavedRun) -> list[Outcome]:
    """Write finetune.json and finetune.png; returns what is in them."""
    result = outcomes(run)
    if result:
        checkpoint.write_text(run.dir / FILE, json.dumps([asdict(o) for o in result], indent=1) + "\n")
        picture(
            {run.algorithm: run.dir / SCORES},
            run.dir / PICTURE,
            title=f"{run.record['online']['label']} in {run.score_rows[-1]['env_id']}",
        )
    return result


def report(run: SavedRun, results: Sequence[Outcome]) -> None:
    """Print the final table and what it took."""
    if not results:
        return
    columns: dict[str, list[str]] = {
        "algorithm": [run.record["online"]["label"]] * len(results),
        "cell": [o.cell for o in results],
    }
    for name, (title, digits) in MEASURES.items():
        values = [getattr(o, name) for o in results]
        columns[title.format(unit=results[0].unit)] = [
            "" if v is None else interval_text(mean_interval(v), digits) for v in values
        ]
    columns["seeds"] = [str(len(o.seeds)) for o in results]
    print_columns(columns, run.scored_in)
    for one in results:
        say(*(f"{one.cell}: {line}" if one.cell else line for line in milestones(one)))
    say(budget_text(results[0].budget, minutes(run)))


def milestones(outcome: Outcome) -> list[str]:
    """When the score of step 0 was back, and when some scores were reached, in words."""
    steps = [f"{level}: {_reached(values)}" for level, values in outcome.steps_to.items()]
    lines = [f"back at the start score: {_reached(outcome.recovery)}"]
    return lines + ([f"steps to a score of {'; '.join(steps)}"] if steps else [])


def _reached(steps: Sequence[int | None]) -> str:
    """`2 of 4 seeds, median step 3,000`."""
    reached = [step for step in steps if step is not None]
    median = f", median step {statistics.median(reached):,.0f}" if reached else ""
    return f"{len(reached)} of {len(steps)} seeds{median}"


def budget_text(budget: Mapping[str, Any], time: float | None) -> str:
    """What a run was given, in a line. time: in minutes."""
    parts = [f"{budget['steps']:,} environment steps of each seed"]
    if budget["updates"] is not None:
        parts.append(f"{budget['updates']:,} updates")
    parts += [f"{name}={value_text(budget[name])}" for name in SETTINGS if name in budget]
    parts.append(f"after {budget['offline_updates']:,} offline updates")
    if budget["rows"] is not None:
        parts.append(f"{budget['rows']:,} rows of data")
    return f"budget: {', '.join(parts)}" + ("" if time is None else f"; {time:.1f} minutes")


@style.own_settings()
def picture(files: dict[str, Path], out: Path, *, title: str = "", column: str | None = None) -> bool:
    """Draw scores over environment steps: mean over seeds and 95% interval, a dashed line at the score of step 0
    ("start").

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
    note = ("mean over seeds, 95% interval; " if several else "") + "dashed: at the start"
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
                ends.append((mean, f"start {style.short(mean)}", style.GREY))
    style.label_ends(axes, ends)
    style.save(figure, out)
    return True
