"""`offrl train`: train an algorithm on a dataset, all seeds at once, and score it."""

from __future__ import annotations

import os
import sys

from offrl.errors import say, warn

PICTURES = ("learning_curve.png", "grid.png", "goal_map.png", "model.png")
WRITTEN = ("scores.csv", "metrics.jsonl", *PICTURES, "policies", "models", "tensorboard")


def run(arguments: list[str]) -> int:
    if any(a in ("-h", "--help") for a in arguments):
        say(*_settings_help(arguments).splitlines())
        return 0
    arguments = ["quiet=true" if a in ("-q", "--quiet") else a for a in arguments]
    from offrl.settings.compose import parse
    from offrl.settings.presets import algorithm_group

    values = parse(arguments)
    if isinstance(algo := values.get("algo"), str):
        algorithm_group(algo)  # a mistake is told before torch is imported
    from offrl.api import train_from
    from offrl.errors import Interrupted
    from offrl.runs.tables import final_table
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
    for run in runs:
        files = ", ".join(n for n in WRITTEN if (run.dir / n).exists())
        say(f"{run.algorithm}: {run.dir}{os.sep} ({files})")
    if lost:
        warn(f"diverged and frozen: {', '.join(map(str, lost))}")
    return 1 if len(main_run.diverged) == len(main_run.replicas) else 0


def _settings_help(arguments: list[str]) -> str:
    from offrl.settings.field import describe
    from offrl.settings.train import TrainConfig

    lines = ["usage: offrl train [name=value ...] [--quiet]", "", "Settings and their defaults (lists are written [a,b]):", ""]
    lines += describe(TrainConfig())
    algo = next((a.removeprefix("algo=") for a in arguments if a.startswith("algo=")), None)
    if algo is not None:
        from offrl.cli.listing import algorithm_settings

        lines += algorithm_settings(algo)
    return "\n".join([*lines, ""])
