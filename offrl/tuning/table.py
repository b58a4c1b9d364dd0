"""trials.csv: a row for each setting at each judgement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from offrl.system import files
from offrl.system.csv_text import text_of
from offrl.tuning.judging import summarise

if TYPE_CHECKING:
    from offrl.tuning.engine import TuningSearch

FILE = "trials.csv"
FINAL = "final"  # what the rung of the last judgement is called


def write_trials(search: TuningSearch, fates: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Write the table of what is known by now, and return its rows. fates: of the settings in the last judgement."""
    rows: list[dict[str, Any]] = []
    work = search.work
    for number, size in enumerate(work.brackets):
        asked = search.state(f"bracket-{number}")
        if asked is None:
            break
        names = list(asked["settings"])
        for i, rung in enumerate(work.rungs(size * len(work.spaces))):
            record, kept = search.state(f"judged-{number}-{i}"), search.state(f"kept-{number}-{i}")
            if record is None:
                break
            fate = dict.fromkeys(names, "dropped") | (kept["settings"] if kept else dict.fromkeys(names, "finalist"))
            rows += _rows(search, record, names, str(i + 1), rung.updates, fate, number + 1)
            names = list(kept["settings"]) if kept else names
    record = search.state("judged")
    if record is not None:
        _, steps = work.config.configs_and_steps()
        rows += _rows(search, record, search.finalists, FINAL, steps, fates or {}, None)
    files.write_text(work.folder / FILE, text_of(_cells(rows)))
    return rows


def _rows(
    search: TuningSearch,
    record: Mapping[str, Any],
    names: Sequence[str],
    rung: str,
    updates: int,
    fates: Mapping[str, str],
    bracket: int | None,
) -> list[dict[str, Any]]:
    summary = summarise(record, names)
    rows = []
    for k, name in enumerate(names):
        algo, values = search.trials[name]
        row: dict[str, Any] = {"bracket": bracket, "rung": rung, "setting": name, "algo": algo}
        row |= {f"algo.{field}": value for field, value in values.items()}
        row |= {"updates": updates, "seeds": int(summary.alive[k])}
        row |= {record["methods"][0]: summary.value[k], "error": summary.error[k], "worst": summary.worst[k]}
        row |= {method: values_[k] for method, values_ in summary.others.items()}
        row |= {"distance": summary.distance[k], "exploded": summary.exploded[k], "fate": fates.get(name, "")}
        rows.append({key: _plain(value) for key, value in row.items()})
    return rows


def _plain(value: Any) -> Any:
    if isinstance(value, float) or hasattr(value, "dtype"):
        number = float(value)
        return None if number != number else number
    return value


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """With the columns of all rows, in the order in which they come first; the settings' beside each other."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    searched = [n for n in names if n.startswith("algo.")]
    front = ["bracket", "rung", "setting", "algo", *searched]
    columns = [*(c for c in front if c in names), *(n for n in names if n not in front)]
    return [columns, *([_text(row.get(c)) for c in columns] for row in rows)]


def _text(value: Any) -> Any:
    return str(value).replace(" ", "") if isinstance(value, (list, tuple)) else value
