"""The outcome of fine-tuning in numbers: scores before and after, what was lost on the way, and what it took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offrl.finetuning import episodes
from offrl.runs.log import TIMING
from offrl.runs.parse import lines_of
from offrl.runs.record import CONFIG
from offrl.runs.run import SavedRun
from offrl.settings.presets import read_yaml
from offrl.settings.replicas import by_cell, cell_name
from offrl.tasks.task import Task

EARLY = 0.1  # share of the steps in which a dip is looked for
LAST = 3  # evaluations whose mean is the final score: a single one is noise
LEVELS = (50, 75, 90)  # scores whose steps are counted
Curve = Mapping[int, float]  # environment step -> score or return, from step 0 on


@dataclass(frozen=True)
class Outcome:
    """The results of one grid point (or of a run without a grid): a number for each seed, in scores where there are
    reference returns. Regrets are of scores / 100: 0 is the reference expert's, and below 0 better.
    """

    cell: str
    seeds: list[int]
    unit: str  # score or return
    offline: list[float]  # at step 0
    final: list[float]  # mean of the last three evaluations
    final_last: list[float]  # the last one, as papers have it
    gain: list[float]  # final - offline
    online: list[float]  # mean over the evaluations after step 0
    dip: list[float] | None  # offline, less the lowest evaluation of the first tenth; None where there was none
    recovery: list[int | None]  # see `recovery`
    steps_to: dict[str, list[int | None]] = field(default_factory=dict)  # level -> see `steps_to`; of scores alone
    regret_mean: list[float] | None = None  # of evaluations; this and the rest None without reference returns
    regret_area: list[float] | None = None  # of evaluations
    regret_play: list[float] | None = None  # of the episodes that were played; None where a seed ended none
    regret_play_steps: list[float] | None = None  # of the same, weighted by their steps
    budget: dict[str, Any] = field(default_factory=dict)  # see `budget`


def regret_mean(curve: Curve) -> float:
    """1 less the mean score / 100 of the evaluations after step 0 (Cal-QL, arXiv 2303.05479, section 7)."""
    return 1.0 - math.fsum(v for t, v in curve.items() if t > 0) / (len(curve) - 1) / 100.0


def regret_area(curve: Curve) -> float:
    """1 less the mean over environment steps of the score / 100, by the trapezoid rule: also of unequal gaps, and of a
    run that was stopped early.
    """
    steps = sorted(curve)
    pairs = list(zip(steps, steps[1:], strict=False))
    return 1.0 - math.fsum((b - a) * (curve[a] + curve[b]) / 2.0 for a, b in pairs) / steps[-1] / 100.0


def recovery(curve: Curve, error: float) -> int | None:
    """The first step with a score of at least that of step 0, below which less one standard `error` no later one falls;
    None: never. 0: there was no fall.
    """
    back: int | None = None
    for step in sorted(curve, reverse=True):
        if curve[step] < curve[0] - error:
            break
        back = step if curve[step] >= curve[0] else back
    return back


def steps_to(curve: Curve, level: float) -> int | None:
    """The first step at which the mean of two evaluations in a row reaches `level`; None: never."""
    steps = sorted(curve)
    pairs = zip(steps, steps[1:], strict=False)
    return next((b for a, b in pairs if (curve[a] + curve[b]) / 2.0 >= level), None)


def play_regrets(task: Task | None, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float] | None:
    """1 less the mean score / 100 of the episodes that were played from the task's starts, exploration included
    (CORL, tinkoff-ai/CORL), each counted once, or as often as it has steps; None where there are none, or no scores, or
    several tasks, which episodes do not tell apart.
    """
    if task is not None and task.parts:
        return None
    task_episodes = [row for row in rows if row["start"] == episodes.STARTS[0] and row["length"]]
    scores = [None if task is None else task.score(row["return"], row["success"]) for row in task_episodes]
    values = [float(score) for score in scores if score is not None]
    if not values or len(values) < len(task_episodes):
        return None
    lengths = [row["length"] for row in task_episodes]
    weighted = math.fsum(n * v for n, v in zip(lengths, values, strict=True)) / math.fsum(lengths)
    return 1.0 - math.fsum(values) / len(values) / 100.0, 1.0 - weighted / 100.0


def outcomes(run: SavedRun) -> list[Outcome]:
    """The outcomes of a fine-tuning run, from its files; none where it was not scored after step 0."""
    rows, played, task = run.score_rows, episodes.read(run.dir), run.spec.task
    unit = "score" if rows and all(r["score"] is not None for r in rows) else "return"
    key = "score" if unit == "score" else "return_mean"
    spent = budget(run)
    result = []
    for values, where in by_cell(run.replicas).items():
        seeds = [run.replicas[i].seed for i in where]

        def of(seed: int, table: Sequence[Mapping[str, Any]], values: Any = values) -> list[Mapping[str, Any]]:
            return [r for r in table if r["seed"] == seed and all(r[k] == v for k, v in values)]

        tables = [of(seed, rows) for seed in seeds]
        curves = [{int(r["step"]): float(r[key]) for r in table} for table in tables]
        if any(0 not in curve or len(curve) < 2 for curve in curves):
            continue
        errors = [_standard_error(table[0], task if unit == "score" else None) for table in tables]
        last = [[c[t] for t in sorted(c) if t > 0][-LAST:] for c in curves]
        final = [math.fsum(v) / len(v) for v in last]
        early = [[v for t, v in c.items() if 0 < t <= EARLY * spent["steps"]] for c in curves]
        regrets = [play_regrets(task, of(seed, played)) for seed in seeds] if unit == "score" else []
        complete = [pair for pair in regrets if pair is not None]
        of_play = list(zip(*complete, strict=True)) if len(complete) == len(seeds) else []
        result.append(
            Outcome(
                cell_name(values),
                seeds,
                unit,
                [c[0] for c in curves],
                final,
                [v[-1] for v in last],
                [after - c[0] for after, c in zip(final, curves, strict=True)],
                [math.fsum(v for t, v in c.items() if t > 0) / (len(c) - 1) for c in curves],
                [c[0] - min(e) for c, e in zip(curves, early, strict=True)] if all(early) else None,
                [recovery(c, error) for c, error in zip(curves, errors, strict=True)],
                {str(n): [steps_to(c, n) for c in curves] for n in LEVELS} if unit == "score" else {},
                [*map(regret_mean, curves)] if unit == "score" else None,
                [*map(regret_area, curves)] if unit == "score" else None,
                regret_play=[*of_play[0]] if of_play else None,
                regret_play_steps=[*of_play[1]] if of_play else None,
                budget=spent,
            )
        )
    return result


def _standard_error(row: Mapping[str, Any], task: Task | None) -> float:
    """Of the mean of an evaluation's episodes; in scores where there is a `task`. 0 of several tasks, for the spread of
    their returns together says nothing."""
    if task is not None and task.parts:
        return 0.0
    n, spread = max(1, int(row["episodes"]) - 1), float(row["return_std"] or 0.0)
    if task is not None and task.scored_by == "success":
        spread = 100.0 * math.sqrt(row["success"] * (1.0 - row["success"]))
    elif task is not None:
        spread = task.normalise(spread) - task.normalise(0.0)
    return spread / math.sqrt(n)


def budget(run: SavedRun) -> dict[str, Any]:
    """What a run was given: steps and updates of each seed (None: unknown), environments, utd and mixing where they
    are its settings, updates before it, rows of data (None: unknown, or none).
    """
    saved, parent = read_yaml(run.dir / CONFIG), run.record["online"]["parent"]
    last = [line for line in lines_of(run.dir / TIMING) if "updates" in line][-1:]
    names = ("envs",) if saved.get("mode") in ("residual", "on_policy") else ("envs", "utd", "mixing")
    return {
        # those that were played, in whole rounds of all environments
        "steps": int(last[0]["step"] if last else saved["steps"]),
        "updates": int(last[0]["updates"]) if last else None,
        **{name: saved[name] for name in names if name in saved},
        "offline_updates": 0 if parent is None or saved.get("mode") == "distill" else int(parent["step"]),
        "rows": run.record["data"].get("rows"),
    }


def minutes(run: SavedRun) -> float | None:
    """The time that play and updates took, scores in between included; None for runs of older versions."""
    seconds = [line["online"] for line in lines_of(run.dir / TIMING) if "online" in line]
    return math.fsum(seconds) / 60.0 if seconds else None
