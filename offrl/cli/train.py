"""`offrl train`: train an algorithm on a dataset, all seeds at once, and score it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from offrl.errors import UserError, nearest, say, warn
from offrl.runs.paths import check_run
from offrl.settings.field import describe
from offrl.settings.train import TrainConfig

PICTURES = ("learning_curve.png", "grid.png", "goal_map.png", "model.png", "open_loop.png", "goals.png")
WRITTEN = ("scores.csv", "metrics.jsonl", *PICTURES, "policies", "models", "tensorboard")


def run(arguments: list[str]) -> int:
    from offrl.settings.aliases.arguments import train_values
    from offrl.settings.compose import rehearse

    values = rehearse(train_values(arguments))  # mistakes are told before torch is imported
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
    diverged_replicas = [r for run in runs for r in run.diverged]
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
    if diverged_replicas:
        warn(f"diverged and frozen: {', '.join(map(str, diverged_replicas))}")
    return 1 if len(main_run.diverged) == len(main_run.replicas) else 0


HEAD = """\
usage: offrl train [ALGORITHM] [DATASET] [name=value ...] [--quiet]

  offrl train                                              IQL on the dataset that ships with offrl
  offrl train td3_bc hopper-medium-v2 seeds=4 steps=1e6    the same as algo=td3_bc dataset=hopper-medium-v2 ...
  offrl train my.hdf5 steps=50k device=cpu name=first      a file of your own
  offrl train my.hdf5 dataset.fields.observations=obs eval.env=Hopper-v5
  offrl train algo=iql temperature=5 lr=1e-4               settings of the algorithm, with algo. before them or not
  offrl train algo.critic.hidden=512,512                   a setting of a group, as `offrl list algo=iql.critic` shows
  offrl train grid.temperature=1,3,10 seeds=3,7            a grid, and seeds 3 and 7 instead of how many
  offrl train resume=runs/NAME                             goes on where a run was stopped

--name value and --name=value are understood as well; lists are written a,b or [a,b], a list of one a, or [a].
"""
SECTIONS = {
    "What is trained": ("algo", "dataset", "steps", "seeds", "grid", "compare", "experiment"),
    "Where, and how fast": ("device", "precision", "compile", "threads", "workers", "group"),
    "The run": ("name", "label", "runs_dir", "resume", "config", "log_every", "quiet"),
    "When it ends": ("stop", "stop_patience", "stop_updates"),
}
DATASET = "a file, a D4RL, OGBench or registered name, or a Minari id; `offrl data list` shows names"
GROUPS = {
    "dataset": "how the data are read and prepared: fields, rewards, subsets, normalisation, memory",
    "eval": "how policies are scored: environment, episodes, how often",
    "checkpoint": "how often training is saved",
    "encoder": "what makes a vector of images",
}


def usage(arguments: Sequence[str]) -> str:
    """The help for `arguments`: none, groups of `GROUPS`, `all`, `algo=NAME`. Raises UserError for another word."""
    config = TrainConfig()
    train_lines = {line.split("=", 1)[0].strip(): line for line in describe(config) if "." not in line.split("=", 1)[0]}
    train_lines["dataset"] = f"  {'dataset=builtin':<40} {DATASET}"
    algo = next((w.removeprefix("algo=") for w in arguments if w.startswith("algo=")), None)
    groups = [w.strip(".").removesuffix(".*") for w in arguments if "=" not in w]
    for word in groups:
        if word not in (*GROUPS, "all", "algo"):
            raise UserError(
                f"offrl train --help {word}: no group of settings.{nearest(word, GROUPS)} Groups: {', '.join(GROUPS)}, "
                "all; algo=NAME"
            )
    lines: list[str] = []
    if not groups or "all" in groups:
        lines += HEAD.splitlines()
        remaining = [n for n in train_lines if not any(n in names for names in SECTIONS.values())]
        for title, names in SECTIONS.items():
            lines += [
                "",
                f"{title}:",
                "",
                *(train_lines[n] for n in (*names, *(remaining if title == "The run" else ()))),
            ]
    if not groups and algo is None:
        lines += ["", "More:", ""]
        lines += [f"  {'offrl train --help ' + group:<40} {help_text}" for group, help_text in GROUPS.items()]
        lines += [f"  {'offrl train --help algo=iql':<40} an algorithm's own settings; offrl list names the algorithms"]
        lines += [f"  {'offrl train --help all':<40} everything"]
    for group in GROUPS:
        if group in groups or "all" in groups:
            lines += ["", f"{group}.*, {GROUPS[group]}:", "", *describe(getattr(config, group), f"{group}.")]
    if algo is None and "algo" in groups:
        algo = "iql"
    if algo is not None:
        from offrl.cli.words.listing import algorithm_settings

        lines += ["", f"algo={algo}:", "", *algorithm_settings(algo)]
    return "\n".join(lines)
