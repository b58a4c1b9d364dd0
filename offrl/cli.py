"""The command line. Nothing heavy is imported before it is known what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from offrl.errors import UserError, nearest

HELP = """\
offrl: offline reinforcement learning from logged data

usage: offrl COMMAND [name=value ...]

  offrl train                        train IQL on the data set that ships with offrl, and score it in MuJoCo
  offrl train algo=td3_bc dataset=hopper-medium-v2 seeds=4 steps=1000000
  offrl train grid.temperature=[1,3,10] grid.expectile=[0.7,0.9] seeds=4     24 policies as one program
  offrl train dataset=my.hdf5 dataset.fields.observations=obs eval.env=Hopper-v5
  offrl train resume=runs/NAME       continue a run (so does the command that began it)
  offrl evaluate runs/NAME           score a run's policies again (episodes=100 seed=1 env=Hopper-v5)
  offrl data inspect DATASET         what is in a data set, and every fault in it
  offrl data list                    data sets that can be named
  offrl list                         algorithms and experiments; `offrl list algo=NAME` shows an algorithm's settings

  offrl train --help                 every setting
  offrl --version
"""


# what the machine refuses, whatever was asked for: a full or failing disk, missing rights
_OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE)
EVALUATE = "usage: offrl evaluate RUN [episodes=10] [seed=0] [env=ID] [max_steps=N] [parallel=64]"
DATA = "usage: offrl data inspect DATASET [dataset.SETTING=value ...], or offrl data list"
LIST = "usage: offrl list, or offrl list algo=NAME"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 faults found or training failed, 2 a mistake in the input, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(arguments)
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if error.errno not in _OUTSIDE:
            raise
        return _fail(f"{error.strerror}{f': {error.filename}' if error.filename else ''}; what was saved before is untouched")
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "out of memory" not in str(error) and "t allocate memory" not in str(error):
            raise
        return _fail("out of memory; a smaller algo.batch_size, fewer replicas at once (group=N), or dataset.memory=mmap needs less")
    except KeyboardInterrupt:
        print("offrl: interrupted", file=sys.stderr)
        return 130


def _fail(message: str) -> int:
    print(f"offrl: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        from importlib.metadata import version

        print(f"offrl {version('offrl')}")
        return 0
    arguments = [a for a in arguments if a]
    commands: dict[str, Callable[[list[str]], int]] = {"train": _train, "evaluate": _evaluate, "data": _data, "list": _list}
    name, rest = arguments[0], arguments[1:]
    if name not in commands:
        raise UserError(f"unknown command '{name}'.{nearest(name, commands)} Commands: {', '.join(commands)}; see offrl --help")
    if name != "train" and any(a in ("-h", "--help") for a in rest):
        print({"evaluate": EVALUATE, "data": DATA, "list": LIST}[name])
        return 0
    return commands[name](rest)


def _train(arguments: list[str]) -> int:
    if any(a in ("-h", "--help") for a in arguments):
        print(_settings_help(arguments), end="")
        return 0
    arguments = ["quiet=true" if a in ("-q", "--quiet") else a for a in arguments]
    from offrl.compose import parse

    values = parse(arguments)
    from offrl.api import train_from
    from offrl.distributed import world
    from offrl.runs import report
    from offrl.train import Interrupted

    try:
        with _terminable():
            runs = train_from(values)
    except Interrupted as stop:
        print(f"offrl: {stop}", file=sys.stderr)
        return 130
    if not world().first:  # the first of torchrun's processes reports for all
        return 0
    main_run = runs[0]
    lost = [r for run in runs for r in run.diverged]
    environment = main_run.final_scores[0]["environment"] if main_run.scores else ""
    report(runs, environment)
    for run in runs:
        written = ("scores.csv", "metrics.jsonl", "learning_curve.png", "grid.png", "policies", "tensorboard")
        files = ", ".join(n for n in written if (run.dir / n).exists())
        print(f"{run.algorithm}: {run.dir}{os.sep} ({files})")
    if lost:
        print(f"offrl: warning: diverged and frozen: {', '.join(map(str, lost))}", file=sys.stderr)
    return 1 if len(main_run.diverged) == len(main_run.replicas) else 0


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM before training has begun, or after it, ends the command as Ctrl-C does."""

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    try:
        old = signal.signal(signal.SIGTERM, handler)
    except ValueError:  # not in the main thread, where Python handles no signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, old)


def _evaluate(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError(EVALUATE)
    from offrl.compose import parse
    from offrl.logging import interval_text, print_table
    from offrl.replicas import by_cell, number
    from offrl.runs import Run
    from offrl.stats import mean_interval

    given = parse([f"eval.{a}" if a.startswith("env=") else a for a in arguments[1:]])
    values = {k.removeprefix("eval."): v for k, v in given.items()}
    allowed: dict[str, type] = {"episodes": int, "seed": int, "env": str, "parallel": int, "max_steps": int}
    for key, value in values.items():
        if key not in allowed:
            raise UserError(f"offrl evaluate has no setting '{key}'.{nearest(key, allowed)} Settings: {', '.join(allowed)}")
        wrong = type(value) is not allowed[key]
        if wrong or (key in ("episodes", "parallel", "max_steps") and value < 1):
            raise UserError(f"{key}={value} must be {'a whole number' + (' of at least 1' if key != 'seed' else '')}")
    run = Run(arguments[0])
    result = run.evaluate(**values)
    headers = [*run.grid, "seed", "score", "return", "std over episodes", "length", "success"]
    keys = ["score", "return", "return_std", "length", "success"]
    rows = [
        [*(number(v) for _, v in replica.values), str(replica.seed), *("" if row[k] is None else f"{row[k]:.2f}" for k in keys)]
        for replica, row in zip(run.replicas, result.rows(), strict=True)
    ]
    keep = [i for i in range(len(headers)) if any(row[i] != "" for row in rows)]
    print_table([headers[i] for i in keep], [[row[i] for i in keep] for row in rows], f"{run.algorithm}: {result.label}")
    means, unit = result.per_seed(), "score" if result.scores is not None else "return"
    for where in by_cell(run.replicas).values():
        cell = run.replicas[where[0]].cell
        print(f"{unit} over seeds{cell and f', {cell}'}: {interval_text(mean_interval(means[where]))}")
    return 0


def _data(arguments: list[str]) -> int:
    actions = ("inspect", "list")
    if not arguments or arguments[0] not in actions:
        given = arguments[0] if arguments else ""
        raise UserError(f"{DATA}.{nearest(given, actions)}")
    if arguments[0] == "list":
        from offrl.catalogue import print_data_sets

        print_data_sets()
        return 0
    if len(arguments) < 2:
        raise UserError(DATA)
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
        raise UserError(LIST)
    print_algorithm(name)
    return 0


def _settings_help(arguments: list[str]) -> str:
    from offrl.config import TrainConfig
    from offrl.settings import describe

    lines = ["usage: offrl train [name=value ...] [--quiet]", "", "Settings and their defaults (lists are written [a,b]):", ""]
    lines += describe(TrainConfig())
    algo = next((a.removeprefix("algo=") for a in arguments if a.startswith("algo=")), None)
    if algo is not None:
        from offrl.catalogue import algorithm_settings

        lines += algorithm_settings(algo)
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
