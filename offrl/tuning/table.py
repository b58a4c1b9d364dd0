"""trials.csv: a row for each setting at each judgement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.system import files
from offrl.system.csv_text import text_of
from offrl.tuning.judging import Summary

FILE = "trials.csv"
FINAL = "final"  # what the rung of the last judgement is called
Row = dict[str, Any]


def judged_rows(
    trials: Mapping[str, tuple[str, Mapping[str, Any]]],
    summary: Summary,
    method: str,
    rung: str,
    updates: int,
    fates: Mapping[str, str],
    bracket: int | None,
) -> list[Row]:
    """A row for each setting of a judgement, of plain values. trials: {setting: (algorithm, values)}; method: the one
    that decides; fates: of the settings."""
    rows = []
    for k, name in enumerate(summary.names):
        algo, values = trials[name]
        row: Row = {"bracket": bracket, "rung": rung, "setting": name, "algo": algo}
        row |= {f"algo.{field}": value for field, value in values.items()}
        row |= {"updates": updates, "seeds": int(summary.alive[k])}
        row |= {method: summary.value[k], "error": summary.error[k], "worst": summary.worst[k]}
        row |= {other: column[k] for other, column in summary.other_values.items()}
        row |= {"distance": summary.distance[k], "exploded": summary.exploded[k], "fate": fates.get(name, "")}
        rows.append({key: _plain(value) for key, value in row.items()})
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return None if value != value else float(value)
    return value


def write_trials(folder: Path, rows: Sequence[Row]) -> None:
    """With the columns of all rows, in the order in which they come first; the settings' beside each other."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    searched = [n for n in names if n.startswith("algo.")]
    front = ["bracket", "rung", "setting", "algo", *searched]
    columns = [*(c for c in front if c in names), *(n for n in names if n not in front)]
    cells = [columns, *([_text(row.get(c)) for c in columns] for row in rows)]
    files.write_text(folder / FILE, text_of(cells))


def _text(value: Any) -> Any:
    return str(value).replace(" ", "") if isinstance(value, (list, tuple)) else value
