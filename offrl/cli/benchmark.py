"""`offrl benchmark`: a grid of datasets x algorithms x seeds, here, in parallel, or on a cluster."""

from __future__ import annotations

import sys

from offrl.errors import say


def run(arguments: list[str]) -> int:
    from offrl.settings.compose import parse

    values = parse(arguments)
    from offrl.benchmark.run import benchmark
    from offrl.system.signals import terminable

    try:
        with terminable():
            return benchmark(values)
    except KeyboardInterrupt:
        say("offrl: the benchmark was stopped and all is saved: the same command continues it", file=sys.stderr)
        return 130


USAGE = """\
usage: offrl benchmark [name=value ...] [--quiet]

Trains every algorithm on every dataset of a suite, all seeds of a cell in one run. The same command again keeps finished
cells, continues interrupted ones and tries failed ones again.

Settings and their defaults (lists are written a,b):

{0}
  launcher.NAME=VALUE                      sets up the launcher; configs/launcher/*.yaml has its settings
  ALGO.NAME=VALUE                          a setting of one algorithm's cells: iql.temperature=5 iql.dataset.reward_scale=0.1
  any other setting of offrl train         goes to all cells: compile=eager device=cpu eval.episodes=20

Suites: {1}
Launchers: {2}
"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    from offrl.benchmark.config import BenchmarkConfig
    from offrl.settings.field import describe
    from offrl.settings.presets import config_names

    suites, launchers = (", ".join(config_names(group)) for group in ("suite", "launcher"))
    return USAGE.format("\n".join(describe(BenchmarkConfig())), suites, launchers)
