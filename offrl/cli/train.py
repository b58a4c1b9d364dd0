"""`offrl train`: train an algorithm on a dataset, all seeds at once, and score it."""

from __future__ import annotations

import os
import sys

from offrl.errors import say, warn
from offrl.runs.paths import check_run

PICTURES = ("learning_curve.png", "grid.png", "goal_map.png", "model.png")
WRITTEN = ("scores.csv", "metrics.jsonl", *PICTURES, "policies", "models", "tensorboard")


def usage(words: list[str]) -> str:
    from offrl.cli.words.train_help import text

    return text(words)


def run(arguments: list[str]) -> int:
    from offrl.settings.compose import parse, rehearse
    from offrl.settings.habits.arguments import placed

    values = rehearse(parse(placed(arguments)))  # mistakes are told before torch is imported
    if values.get("resume") is not None:
        check_run(str(values["resume"]))
    from offrl.api import train_from
    from offrl.errors import Interrupted
    from offrl.runs.comparable import difference_lines
    from offrl.runs.results import collect
    from offrl.runs.tables import explain, final_table, next_commands
    from offrl.system.signals import terminable
    from offrl.training.distributed import world

    try:
        with terminable():
            runs = train_from(values)
    except Interrupted as stop:
        say(f"offrl: {stop}", file=sys.stderr)
        return 130
    if not world().first:  # the first of torchrun's processes reports for all
        return 0
    main_run = runs[0]
    lost = [r for run in runs for r in run.diverged]
    if results := [result for run in runs for result in run.results()]:
        final_table(results, main_run.scored_in)
    quiet = bool(values.get("quiet"))
    if len(runs) > 1:
        say(*difference_lines(collect([run.dir for run in runs])))
    if not quiet:
        explain(main_run)
    for run in runs:
        files = ", ".join(n for n in WRITTEN if (run.dir / n).exists())
        say(f"{run.algorithm}: {run.dir}{os.sep} ({files})")
    if not quiet:
        say(*next_commands(runs))
    if lost:
        warn(f"diverged and frozen: {', '.join(map(str, lost))}")
    return 1 if len(main_run.diverged) == len(main_run.replicas) else 0
