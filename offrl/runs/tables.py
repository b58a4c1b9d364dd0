"""Tables of runs: rows of results, intervals in words, the final table, and what a person may look at next."""

from __future__ import annotations

import html
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, one_line, say
from offrl.settings.replicas import Replica, Values, by_cell, grid_text, number
from offrl.statistics.intervals import mean_interval, share_interval

if TYPE_CHECKING:
    from offrl.runs.run import SavedRun

Interval = tuple[float, float, float]  # mean, low, high
MOST_PLACES = 4  # runs that a command names; of more their folder
LONG = 200_000  # updates from which on their number explains no low score
BUILTIN = "builtin"  # `source` of the dataset that ships with the package
CHOICE = (
    "note: to pick a cell by its score is to use the environment, and the cell's interval does not cover that choice"
)


def interval_text(interval: Interval | None, digits: int = 1) -> str:
    """`62.1 [58.0, 66.2]`; the mean alone when there is no interval (one seed); empty when there is no value."""
    if interval is None or not math.isfinite(interval[0]):
        return ""
    mean, low, high = interval
    bounds = (
        f" [{low:.{digits}f}, {high:.{digits}f}]" if math.isfinite(low) and math.isfinite(high) and low != high else ""
    )
    return f"{mean:.{digits}f}{bounds}"


def score_text(unit: str, values: Sequence[float], replicas: Sequence[Replica]) -> str:
    """`score 62.1 [58.0, 66.2]` from one value per replica; in a grid the range of its points' means:
    `score 12.1 .. 63.0 over 6 cells`.

    No grid point is named: that would suggest the best one, and choosing it by its score uses the environment.
    """
    cells = by_cell(replicas)
    if len(cells) == 1:
        return f"{unit} {interval_text(mean_interval(values))}"
    means = [mean_interval([values[i] for i in where])[0] for where in cells.values()]
    return f"{unit} {min(means):.1f} .. {max(means):.1f} over {len(cells)} cells"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]], title: str = "") -> None:
    """A table on standard output: ruled on a terminal, aligned plain text elsewhere. Columns of numbers stand to the
    right.
    """
    headers, title = [*map(one_line, headers)], one_line(title)
    cells = [["" if c is None else one_line(str(c)) for c in row] for row in rows]
    right = [
        all(not row[i] or row[i][0] in "+-.0123456789" for row in cells) and any(row[i] for row in cells)
        for i in range(len(headers))
    ]
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title=Text(title) if title else None, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold"
        )
        for header, numeric in zip(headers, right, strict=True):
            table.add_column(Text(header), justify="right" if numeric else "left")
        for row in cells:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(len(header), *(len(row[i]) for row in cells), 0) for i, header in enumerate(headers)]

    def line(row: Sequence[str]) -> str:
        parts = [c.rjust(w) if numeric else c.ljust(w) for c, w, numeric in zip(row, widths, right, strict=True)]
        return "  ".join(parts).rstrip()

    text = [title] if title else []
    text += [line(headers), "  ".join("-" * w for w in widths), *map(line, cells)]
    say(*text)


def print_columns(columns: Mapping[str, Sequence[str]], title: str = "") -> None:
    """`print_table` of {header: texts}, without the columns that no row has a text for."""
    filled = {header: column for header, column in columns.items() if any(column)}
    print_table(list(filled), list(zip(*filled.values(), strict=True)), title)


@dataclass(frozen=True)
class Result:
    """One row of the final table. Means come with the ends of their 95% interval over seeds."""

    algorithm: str
    seeds: int
    returns: Interval
    score: Interval | None = None  # normalised, when the task has reference scores
    success: Interval | None = None  # share of episodes, when the task has a notion of success
    behaviour: float | None = None  # mean of the dataset's own episodes: a score when `score` is given, else a return
    values: Values = ()  # the grid point that these seeds were trained at
    cost: Interval | None = None  # of an episode, where the environment gives costs
    safe: Interval | None = None  # share of the seeds whose mean cost keeps the limit, when there is one


def final_table(results: Sequence[Result], title: str = "") -> None:
    """The final table of a run, one line for each grid point. Columns that no row has a value for are left out."""
    unit = "score" if any(r.score for r in results) else "return"
    fields = dict.fromkeys(field for r in results for field, _ in r.values)
    columns: dict[str, list[str]] = {
        "algorithm": [r.algorithm for r in results],
        **{
            field: [number(v) if (v := dict(r.values).get(field)) is not None else "" for r in results]
            for field in fields
        },
        "score [95% interval]": [interval_text(r.score) for r in results],
        "success [95% interval]": [interval_text(r.success, 2) for r in results],
        "return [95% interval]": [interval_text(r.returns) for r in results],
        "cost [95% interval]": [interval_text(r.cost) for r in results],
        "safe seeds [95% interval]": [interval_text(r.safe, 2) for r in results],
        f"data's mean {unit}": ["" if r.behaviour is None else f"{r.behaviour:.1f}" for r in results],
        "seeds": [str(r.seeds) for r in results],
    }
    print_columns(columns, title)
    if sum(bool(r.values) for r in results) > 1:
        say(CHOICE)


def explain(run: SavedRun) -> None:
    """Why the scores of the dataset that ships with the package are low, which a newcomer asks; nothing about other
    data.
    """
    results, data = run.results(), run.record["data"]
    if data.get("source") != BUILTIN or not results or results[0].behaviour is None or results[0].score is None:
        return
    steps = run.final_scores[0]["step"]
    if steps >= LONG:
        return
    say(
        f"why so low: {steps:,} updates (papers: 1,000,000) on {data['rows']:,} rows (papers: about 1,000,000), whose "
        f"own episodes score {results[0].behaviour:.1f} on average"
    )


def next_commands(runs: Sequence[SavedRun]) -> list[str]:
    """Lines, `what it gives: COMMAND`, three at most, for the runs of one `offrl train`, the main one first; a shell
    takes the commands as they stand."""
    main, scored = runs[0], bool(runs[0].results())
    folder = _place(main.dir)
    if not main.acts:
        return []
    if not scored:
        return _aligned(
            [
                ("estimated from the data", f"offrl select {folder}"),
                ("in an environment", f"offrl evaluate {folder} env=ID"),
            ]
        )
    folders = [_place(run.dir) for run in runs] if len(runs) <= MOST_PLACES else [_place(main.dir.parent)]
    lines = [("all of it on a page", f"offrl report {' '.join(folders)}")]
    if not main.spec.text and not (main.spec.task and main.spec.task.parts):  # several tasks do not draw
        lines.append(("a film of the policies", f"offrl evaluate {folder} video=true"))
    steps, algo = main.final_scores[0]["step"], main.record["identity"]["algo"]
    # the actor's learning rate is 0
    schedule_over = algo.get("actor_schedule") == "cosine" and algo["decay_steps"] <= steps
    if len(main.diverged) < len(main.replicas) and not schedule_over:
        lines.append(("training on", f"offrl train resume={folder} steps={2 * steps}"))
    return _aligned(lines)


def report_command(folder: str | os.PathLike[str]) -> list[str]:
    """The line that a benchmark ends with."""
    return _aligned([("all of it on a page", f"offrl report {_place(folder)}")])


def _place(folder: str | os.PathLike[str]) -> str:
    return shlex.quote(os.fspath(folder))


def _aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(label) for label, _ in lines) + 1
    return [f"{label + ':':{width}} {command}" for label, command in lines]


def summarise(algorithm: str, rows: Sequence[dict[str, Any]], record: dict[str, Any], values: Values = ()) -> Result:
    """One row of the final table from the rows of one evaluation. `values`: the grid point that all of them belong
    to.
    """

    def interval(key: str) -> tuple[float, float, float] | None:
        values = [r.get(key) for r in rows]
        return None if None in values else mean_interval(values)

    returns, score = interval("return_mean"), interval("score")
    assert returns is not None
    normalized = [c for r in rows if (c := r.get("cost_normalized")) is not None]
    safe = None if len(normalized) < len(rows) else share_interval(sum(c <= 1.0 for c in normalized), len(rows))
    return Result(
        algorithm,
        len(rows),
        returns,
        score,
        interval("success"),
        behaviour(record, score is not None),
        values,
        interval("cost"),
        safe,
    )


def behaviour(record: dict[str, Any], normalised: bool) -> float | None:
    """The mean return, or score, of a run's dataset as it was recorded; None where that is not known."""
    mean, task = record["data"].get("return_mean"), (record.get("spec") or {}).get("task") or {}
    if not isinstance(mean, (int, float)) or (
        normalised and (task.get("ref_min") is None or task.get("ref_max") is None)
    ):
        return None
    return 100.0 * (mean - task["ref_min"]) / (task["ref_max"] - task["ref_min"]) if normalised else float(mean)


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
    from offrl.system import files  # imports torch

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
        score = score_text(name, column, run.replicas).removeprefix(f"{name} ")
        values[name] = f"{score}{intervals} (step {rows[0]['step']:,}{beside})"
        values["scored in"] = run.scored_in
    else:
        values["scores"] = "none: no environment, or not evaluated yet"
    values["folder"] = str(run.dir)
    return {name: one_line(text) for name, text in values.items()}
