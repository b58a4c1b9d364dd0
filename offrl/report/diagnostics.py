"""Diagnostics of the runs behind the scores: times, versions, settings that differ, training metrics."""

from __future__ import annotations

import csv
import functools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offrl.figures.curves import Curves
from offrl.report.page import Cell
from offrl.report.rows import unbroken
from offrl.runs.log import SCORE_COLUMNS
from offrl.runs.parse import objects, times
from offrl.runs.reader import METRICS
from offrl.runs.record import SCORES, complete
from offrl.runs.run import SavedRun
from offrl.runs.tables import behaviour as own_behaviour
from offrl.settings.diff import ABSENT, difference, flatten, meaning, value_text
from offrl.system.csv_text import read
from offrl.system.progress import duration

POINTS = 150  # of a line in a picture; longer logs are thinned evenly
# columns of scores.csv that say something of the critic, not of the score
EXTRA = {"discounted_mean", "q_overestimation"}
LONGEST = 50_000_000  # bytes of a metrics.jsonl or scores.csv that are read for diagnostics


def time_rows(runs: Sequence[SavedRun]) -> list[list[Any]]:
    """Rows of the table of times: run, dataset, algorithm, seeds, device, step's mode, updates/s, training,
    evaluation.
    """
    rows: list[list[Any]] = []
    for run in runs:
        speed, trained, evaluated = times(run)
        rows.append([
            run.dir.name, str(run.dataset), str(run.algorithm), len(run.replicas), str(run.record.get("device", "")),
            str(run.record.get("mode", "")), Cell(f"{speed:,.0f}", value=speed) if math.isfinite(speed) else None,
            *(Cell(unbroken(duration(s)), value=s) if math.isfinite(s) else None for s in (trained, evaluated)),
        ])  # fmt: skip
    return rows


def version_rows(runs: Sequence[SavedRun]) -> tuple[list[list[str]], list[str]]:
    """([name, value, in how many runs] of packages, Python, machine and device; the names that have several values)."""
    values: dict[str, Counter[str]] = defaultdict(Counter)
    for run in runs:
        packages = run.record.get("packages")
        known = {**packages} if isinstance(packages, dict) else {}
        known |= {name: run.record.get(name) for name in ("python", "machine", "device")}
        for name, value in known.items():
            if value:
                values[str(name)][str(value)] += 1
    rows = []
    for name, counts in values.items():
        total = counts.total()
        shown = [f"{value} ({n} of {total})" if len(counts) > 1 else value for value, n in counts.items()]
        rows.append([name, ", ".join(shown), str(total)])
    return rows, [name for name, counts in values.items() if len(counts) > 1]


def settings_of(run: SavedRun) -> dict[str, Any]:
    """The settings that decide a run's parameters, flat, without the seeds; only to be read: runs that agree in all
    share them.
    """
    return _settings(json.dumps({k: v for k, v in run.record["identity"].items() if k != "seeds"}))


@functools.lru_cache(1024)
def _settings(identity: str) -> dict[str, Any]:
    return {k: v for k, v in flatten(complete(json.loads(identity))).items() if isinstance(k, str)}


def differing(runs: Sequence[SavedRun]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """For each algorithm of several runs that do not have the same settings: (names of those that differ, [run,
    dataset, values ...]).
    """
    by_algorithm: dict[str, list[SavedRun]] = defaultdict(list)
    for run in runs:
        by_algorithm[str(run.algorithm)].append(run)
    result = {}
    for algorithm, group in by_algorithm.items():
        settings = [settings_of(run) for run in group]
        unlike = list({id(s): s for s in settings}.values())
        names = [
            n
            for n in dict.fromkeys(k for s in unlike for k in s)
            if len({meaning(s.get(n, ABSENT)) for s in unlike}) > 1
        ]
        if names:
            rows = [
                [run.dir.name, str(run.dataset), *(_text(s.get(n, ABSENT)) for n in names)]
                for run, s in zip(group, settings, strict=True)
            ]
            result[algorithm] = (names, rows)
    return result


def two_runs(a: SavedRun, b: SavedRun) -> list[list[str]]:
    """[setting, value in a, value in b] of all that differs between two runs: data, seeds, settings, versions,
    machine.
    """
    sides = []
    for run in (a, b):
        record = run.record
        sides.append(
            {
                "algorithm": run.algorithm,
                "dataset": run.dataset,
                "data's fingerprint": str(record["data"].get("fingerprint", ""))[:12],
                "seeds": record["identity"].get("seeds"),
                **settings_of(run),
                "evaluated in": record.get("env"),
                "mode of the step": record.get("mode"),
                "replicas in one program": record.get("group"),
                "device": record.get("device"),
                "python": record.get("python"),
                "machine": record.get("machine"),
                **{f"package {k}": v for k, v in (record.get("packages") or {}).items()},
            }
        )
    return [[name, _text(x), _text(y)] for name, (x, y) in difference(*sides, everything=True).items()]


def _text(value: Any) -> str:
    return "-" if value == ABSENT else value_text(value)


def behaviour(runs: Sequence[SavedRun], dataset: str, normalised: bool) -> float | None:
    """The mean return, or score, of a dataset's own episodes; None where runs saw different parts of it, or it is not
    known.
    """
    values = {own_behaviour(run.record, normalised) for run in runs if run.dataset == dataset}
    return values.pop() if len(values) == 1 else None


def metrics(runs: Sequence[tuple[str, SavedRun]]) -> dict[str, dict[str, dict[str, Curves]]]:
    """{metric: {dataset: {label: {replica's number: {step: value}}}}} of training and of the extra columns of
    scores.csv.

    `runs`: (label, run). Values that are not finite are left out. Logs longer than POINTS lines are thinned evenly.
    """
    result: dict[str, dict[str, dict[str, Curves]]] = defaultdict(lambda: defaultdict(dict))
    for label, run in runs:
        for name, curves in {**_training(run.dir / METRICS), **_extra(run)}.items():
            target = result[name][str(run.dataset)].setdefault(label, {})
            for replica, curve in curves.items():
                target[len(target) + replica if replica in target else replica] = curve
    return result


def logs(run: SavedRun) -> tuple[Path, Path]:
    """The files that the diagnostics are read from."""
    return run.dir / METRICS, run.dir / SCORES


def too_long(path: Path) -> bool:
    """True for a file that is left out of the diagnostics."""
    try:
        return path.stat().st_size > LONGEST
    except OSError:
        return False


def _training(path: Path) -> dict[str, Curves]:
    if too_long(path):
        return {}
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.readlines()
    except OSError:
        return {}
    stride = max(1, -(-len(lines) // POINTS))
    curves: dict[str, Curves] = defaultdict(lambda: defaultdict(dict))
    for row in objects(line for i, line in enumerate(lines, start=1) if i % stride == 0 or i == len(lines)):
        for name, values in row.items():
            if isinstance(values, list):
                for replica, value in enumerate(values):
                    if isinstance(value, (int, float)) and math.isfinite(value):
                        curves[name][replica][row["step"]] = float(value)
    return curves


def _extra(run: SavedRun) -> dict[str, Curves]:
    """Columns of scores.csv that are no score: estimates of the critic at the evaluation, discounted returns."""
    if too_long(run.dir / SCORES):
        return {}
    try:
        rows = read(run.dir / SCORES)
    except (OSError, ValueError, csv.Error):
        return {}
    usual = {*SCORE_COLUMNS, *run.grid} - EXTRA
    curves: dict[str, Curves] = defaultdict(lambda: defaultdict(dict))
    order: dict[tuple[str, ...], int] = {}
    for row in rows:
        try:
            replica = order.setdefault(tuple(str(row[k]) for k in ("seed", *run.grid)), len(order))
            step = int(row["step"])
        except (KeyError, TypeError, ValueError):
            continue
        for name, text in row.items():
            if name and name not in usual and text:
                try:
                    value = float(text)
                except (TypeError, ValueError):
                    continue
                if math.isfinite(value):
                    curves[f"evaluation: {name}"][replica][step] = value
    return curves
