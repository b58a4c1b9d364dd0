"""The table that a benchmark ends with: datasets x algorithms, and what is not in it and why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl.benchmark import plan
from offrl.errors import UserError, say
from offrl.runs.run import SavedRun
from offrl.runs.tables import Result, interval_text, print_table
from offrl.settings.replicas import cell_name

RAW = "r"  # marks a raw return


def words(run_dir: Path) -> str:
    """The last evaluation of a run in a few words: `score 62.1 [58.0, 66.2]`."""
    try:
        results = SavedRun(run_dir).results()
    except UserError as error:
        return f"not readable ({error})"
    if not results:
        return "trained, not scored"
    unit = "score" if results[0].score else "return"
    values = [(r.score or r.returns) for r in results]
    if len(values) == 1:
        return f"{unit} {interval_text(values[0])}"
    return (
        f"{unit} {min(v[0] for v in values):.1f} .. {max(v[0] for v in values):.1f} over {len(values)} cells of "
        "its grid"
    )


def show(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Print the table of all cells of a benchmark, and its footnotes; returns {run: why it is not done}."""
    datasets = list(dict.fromkeys(c["dataset"] for c in record["cells"]))
    columns: dict[str, dict[str, str]] = {}  # heading -> dataset -> text
    notes: dict[str, list[str]] = {}  # why a number is raw or missing -> datasets
    bad: dict[str, str] = {}
    for algorithm in dict.fromkeys(c["algorithm"] for c in record["cells"]):
        for c in (c for c in record["cells"] if c["algorithm"] == algorithm):
            status = plan.read_status(folder, c["run"])
            if not plan.finished(folder, c["run"], 0):
                bad[c["run"]] = _why(folder, c["run"], status)
                columns.setdefault(algorithm, {})[c["dataset"]] = (
                    "failed" if status.get("status") == "failed" else "not done"
                )
                continue
            try:
                run = SavedRun(folder / c["run"])
                results = run.results()
            except UserError as error:
                bad[c["run"]] = str(error)
                columns.setdefault(algorithm, {})[c["dataset"]] = "not readable"
                continue
            if why := _note(run, results):
                notes.setdefault(why, [])
                notes[why] += [c["dataset"]] * (c["dataset"] not in notes[why])
            if status.get("steps", 0) < record["steps"]:
                notes.setdefault(f"after {status.get('steps', 0):,} updates", []).append(c["run"])
            if not results:
                columns.setdefault(algorithm, {})[c["dataset"]] = "-"
            for result in results:
                heading = f"{algorithm} {cell_name(result.values)}" if result.values else algorithm
                columns.setdefault(heading, {})[c["dataset"]] = _text(result)
    seeds = len(record["seeds"])
    mean = f"mean over {seeds} seeds [95% interval]" if seeds > 1 else "one seed"
    title = f"{record['suite']}: last evaluation, {mean}, after {record['steps']:,} updates"
    rows = [[d, *(column.get(d, "") for column in columns.values())] for d in datasets]
    print_table(["dataset", *columns], rows, title)
    for why, which in notes.items():
        say(f"{why}: {', '.join(which)}")
    return bad


def _text(result: Result) -> str:
    return interval_text(result.score) if result.score else f"{interval_text(result.returns)} {RAW}"


def _note(run: SavedRun, results: list[Result]) -> str:
    """Why a cell has no normalised score, or an empty string."""
    if results and results[0].score:
        return ""
    task = run.record["spec"].get("task")
    if not results:
        about = (task or {}).get("note") or "no environment is known for it; eval.env=ID names one"
        off = "eval.env=none" if run.record.get("env") == "none" else about
        return f"- trained, not scored ({off})"
    return f"{RAW} raw return: no reference scores are known that would normalise it"


def _why(folder: Path, run: str, status: Mapping[str, Any]) -> str:
    """Why a cell is not done, in one line."""
    if plan.at_work(folder, run):
        return f"still at work in process {status.get('pid')} on {status.get('host')}"
    if status.get("status") == "failed":
        return f"failed: {status.get('error') or 'no reason given'}"
    if status.get("status") == "done":
        return "its run directory is gone; the same command trains it again"
    return f"{status.get('error') or 'interrupted'}; the same command continues it" if status else "not begun"
