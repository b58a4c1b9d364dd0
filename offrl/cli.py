"""The command line. Nothing heavy is imported before it is known what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

from offrl.errors import UserError, nearest

HELP = """\
offrl: offline reinforcement learning from logged data

usage: offrl COMMAND [name=value ...]

  offrl train                        train IQL on the data set that ships with offrl, and score it in MuJoCo
  offrl train algo=td3_bc dataset=hopper-medium-v2 seeds=4 steps=1000000
  offrl train dataset=my.hdf5 dataset.fields.observations=obs eval.env=Hopper-v5
  offrl train resume=runs/NAME       continue a run (so does the command that began it)
  offrl evaluate runs/NAME           score a run's policies again (episodes=100 seed=1 env=Hopper-v5)
  offrl data inspect DATASET         what is in a data set, and every fault in it
  offrl data list                    data sets that can be named
  offrl list                         algorithms and experiments; `offrl list algo=NAME` shows an algorithm's settings

  offrl train --help                 every setting
  offrl --version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 faults found or training failed, 2 a mistake in the input, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except UserError as error:
        print(f"offrl: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("offrl: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        from importlib.metadata import version

        print(f"offrl {version('offrl')}")
        return 0
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "evaluate": _evaluate, "data": _data, "list": _list}
    name, rest = arguments[0], arguments[1:]
    if name not in commands:
        raise UserError(f"unknown command '{name}'.{nearest(name, commands)} Commands: {', '.join(commands)}; see offrl --help")
    return commands[name](rest)


def _train(arguments: list[str]) -> int:
    if any(a in ("-h", "--help") for a in arguments):
        print(_settings_help(), end="")
        return 0
    arguments = ["quiet=true" if a in ("-q", "--quiet") else a for a in arguments]
    from offrl.compose import parse

    values = parse(arguments)
    from offrl.api import train_from
    from offrl.runs import report
    from offrl.train import Interrupted

    try:
        runs = train_from(values)
    except Interrupted as stop:
        print(f"offrl: {stop}", file=sys.stderr)
        return 130
    main_run = runs[0]
    lost = [s for run in runs for s in run.diverged]
    environment = main_run.final_scores[0]["environment"] if main_run.scores else ""
    report(runs, f"{main_run.dataset}: {environment}" if environment else "")
    for run in runs:
        files = ", ".join(n for n in ("scores.csv", "metrics.jsonl", "learning_curve.png", "policies", "tensorboard") if (run.dir / n).exists())
        print(f"{run.algorithm}: {run.dir}{os.sep} ({files})")
    if lost:
        print(f"offrl: warning: diverged and frozen: seed {', '.join(map(str, lost))}", file=sys.stderr)
    return 1 if len(main_run.diverged) == len(main_run.seeds) else 0


def _evaluate(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        raise UserError("usage: offrl evaluate RUN [episodes=10] [seed=0] [env=ID] [parallel=64]")
    from offrl.compose import parse
    from offrl.logging import interval_text, print_table
    from offrl.runs import Run

    run_dir, values = arguments[0], parse([f"eval.{a}" if a.startswith("env=") else a for a in arguments[1:]])
    values = {k.removeprefix("eval."): v for k, v in values.items()}
    allowed = {"episodes": int, "seed": int, "env": str, "parallel": int}
    for key, value in values.items():
        if key not in allowed:
            raise UserError(f"offrl evaluate has no setting '{key}'.{nearest(key, allowed)} Settings: {', '.join(allowed)}")
        if not isinstance(value, allowed[key]) or (key in ("episodes", "parallel") and value < 1):
            raise UserError(f"{key}={value}: must be {'a whole number of at least 1' if allowed[key] is int else 'a name'}")
    run = Run(run_dir)
    result = run.evaluate(**values)
    headers = ["seed", "score", "return", "std over episodes", "length", "success"]
    keys = ["seed", "score", "return", "return_std", "length", "success"]
    rows = [["" if row[k] is None else row[k] if k == "seed" else f"{row[k]:.2f}" for k in keys] for row in result.rows()]
    keep = [i for i in range(len(headers)) if any(row[i] != "" for row in rows)]
    print_table([headers[i] for i in keep], [[row[i] for i in keep] for row in rows], f"{run.algorithm}: {result.label}")
    print(f"{'score' if result.scores is not None else 'return'} over seeds: {interval_text(result.interval())}")
    return 0


def _data(arguments: list[str]) -> int:
    actions = ("inspect", "list")
    if not arguments or arguments[0] not in actions:
        given = arguments[0] if arguments else ""
        raise UserError(f"usage: offrl data inspect DATASET [dataset.SETTING=value ...], or offrl data list.{nearest(given, actions)}")
    if arguments[0] == "list":
        from offrl.catalogue import print_data_sets

        print_data_sets()
        return 0
    if len(arguments) < 2:
        raise UserError("usage: offrl data inspect DATASET [dataset.SETTING=value ...]")
    from offrl.compose import compose, parse
    from offrl.data.inspect import inspect_dataset

    values = parse([f"dataset={arguments[1]}", *(a if a.startswith("dataset.") else f"dataset.{a}" for a in arguments[2:])])
    report = inspect_dataset(compose({**values, "algo": "bc", "dataset.normalize_observations": False}).dataset)
    print(report.render())
    return 1 if report.corrupting else 0


def _list(arguments: list[str]) -> int:
    from offrl.catalogue import print_algorithm, print_all

    if not arguments:
        print_all()
        return 0
    key, _, name = arguments[0].partition("=")
    if key != "algo" or not name:
        raise UserError("usage: offrl list, or offrl list algo=NAME")
    print_algorithm(name)
    return 0


def _settings_help() -> str:
    from offrl.config import TrainConfig
    from offrl.settings import describe

    lines = ["usage: offrl train [name=value ...] [--quiet]", "", "A file of settings: config=my.yaml. Settings and their defaults:", ""]
    return "\n".join([*lines, *describe(TrainConfig()), ""])


if __name__ == "__main__":
    sys.exit(main())
