"""`offrl tune`: settings and algorithms chosen from the data alone, or with n real episodes."""

from __future__ import annotations

import sys

from offrl.errors import UserError, say


def run(arguments: list[str]) -> int:
    from offrl.settings.compose import parse

    values = parse(arguments)
    if not values:
        raise UserError("usage: offrl tune dataset=NAME algos=[iql,td3_bc] budget=32x40000; --help shows all settings")
    from offrl.errors import Interrupted
    from offrl.system.signals import terminable
    from offrl.tuning.tune import tune

    try:
        with terminable():
            tune(values)
    except (Interrupted, KeyboardInterrupt):
        say("offrl: the tune was stopped and all is saved: the same command continues it", file=sys.stderr)
        return 130
    return 0


USAGE = """\
usage: offrl tune dataset=NAME [algos=[iql,td3_bc]] [budget=32x40000] [name=value ...] [--quiet]

Trains many settings of algorithms side by side on a part of the data, judges them on the rest, thins them out, chooses: by
the data alone, or with episodes=n real episodes. The winner is trained anew on all data with new seeds, and that is what is
reported. The same command, or resume=FOLDER, continues a tune.

Settings and their defaults (lists are written a,b):

  dataset=NAME                             the data; also dataset.SETTING=value
{0}
  space.NAME=[low,high,log]                what is searched of a setting: a range (log or linear), or a list of values; also
                                           space.ALGO.NAME=, for one of the algorithms
  algo.NAME=value, ALGO.NAME=value         a setting that is not searched, of all algorithms that have it, or of one
  compile, workers, group, precision, experiment, log_every    as in offrl train
  resume=FOLDER                            go on with the tune in that folder

Published ranges are known for: {1}
"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    from offrl.settings.field import describe
    from offrl.settings.presets import config_names
    from offrl.tuning.config import TuneConfig

    return USAGE.format("\n".join(describe(TuneConfig())), ", ".join(config_names("space")))
