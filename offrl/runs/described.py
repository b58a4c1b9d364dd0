"""A run in a few lines, for a prompt and for a notebook: what it is, how far it came, how well it does, where it
lies.
"""

from __future__ import annotations

import html
import math
from typing import TYPE_CHECKING

from offrl.errors import UserError, one_line
from offrl.runs.tables import behaviour, score_text
from offrl.settings.replicas import grid_text
from offrl.system import files

if TYPE_CHECKING:
    from offrl.runs.run import SavedRun

MOST_SEEDS = 8  # that are listed one by one


def text_of(run: SavedRun) -> str:
    """The run in aligned lines."""
    parts = facts(run)
    width = max(map(len, parts))
    return "\n".join(
        [f"{type(run).__name__}: {title(run)}", *(f"  {name:<{width}}  {text}" for name, text in parts.items())]
    )


def html_of(run: SavedRun) -> str:
    """The run as a small table."""
    style = 'style="text-align:left"'
    rows = "".join(
        f"<tr><th {style}>{html.escape(name)}</th><td {style}>{html.escape(text)}</td></tr>"
        for name, text in facts(run).items()
    )
    return f"<b>{html.escape(title(run))}</b><table>{rows}</table>"


def title(run: SavedRun) -> str:
    """`iql on hopper-medium-v2`."""
    return one_line(f"{run.algorithm} on {run.dataset}")


def facts(run: SavedRun) -> dict[str, str]:
    """{name: text} of what a person would ask first. Raises nothing for what is damaged or missing: it is left out."""
    seeds = f"{len(run.seeds)}: {', '.join(map(str, run.seeds))}" if 1 < len(run.seeds) <= MOST_SEEDS else ""
    values = {"seeds": seeds or (f"seed {run.seeds[0]}" if len(run.seeds) == 1 else f"{len(run.seeds)}")}
    if run.grid:
        values["grid"] = grid_text(run.grid)
    steps = max(files.steps(run.dir), default=0)
    ended = any((run.dir / name).is_dir() for name in ("policies", "models"))
    values["steps"] = f"{steps:,}{'' if ended else ', not finished'}"
    try:
        rows = run.final_scores
    except (OSError, UserError, KeyError, ValueError):
        rows = []
    numbers = [[row.get(name) for row in rows] for name in ("score", "return_mean")]
    known = [[float(v) for v in column if isinstance(v, (int, float)) and math.isfinite(v)] for column in numbers]
    normalised = bool(rows) and len(known[0]) == len(rows)
    if rows and len(column := known[0 if normalised else 1]) == len(run.replicas):
        name = "score" if normalised else "return"
        of_data = behaviour(run.record, normalised)
        beside = "" if of_data is None else f"; the data's mean {of_data:.1f}"
        intervals = ", 95% interval over seeds" if len(run.seeds) > 1 and not run.grid else ""
        words = score_text(name, column, run.replicas).removeprefix(f"{name} ")
        values[name] = f"{words}{intervals} (step {rows[0]['step']:,}{beside})"
        values["scored in"] = run.scored_in
    else:
        values["scores"] = "none: no environment, or not evaluated yet"
    values["folder"] = str(run.dir)
    return {name: one_line(text) for name, text in values.items()}
