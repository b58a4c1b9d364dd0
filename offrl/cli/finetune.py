"""`offrl finetune`: trained policies, or fresh ones, go on learning in an environment."""

from __future__ import annotations

import os
import sys

from offrl.errors import UserError, say, warn


def run(arguments: list[str]) -> int:
    paths = [a for a in arguments if "=" not in a]
    if len(paths) > 1:
        raise UserError(f"offrl finetune takes one run, and {len(paths)} are given ({' '.join(paths)})")
    if not arguments:
        raise UserError("usage: offrl finetune RUN env=ID steps=N; offrl finetune --help says more")
    from offrl.runs.paths import check_run
    from offrl.settings.compose import parse

    values = parse([a for a in arguments if "=" in a])
    for path in paths:
        check_run(path)
    from offrl.api import finetune_from

    if values.get("robust"):
        from offrl.benchmark.variant_runs import run as learn_on_variants

        return learn_on_variants(paths[0] if paths else None, values, finetune_from)
    if alone := [name for name in ("points", "budget", "choose") if name in values]:
        raise UserError(f"{alone[0]}= is of variants of the environment, which robust= names: offrl finetune --help")
    from offrl.errors import Interrupted
    from offrl.finetuning.episodes import FILE as PLAYED
    from offrl.finetuning.outcome import outcomes
    from offrl.finetuning.summary import FILE, PICTURE, report
    from offrl.system.signals import terminable

    try:
        with terminable():
            saved_run = finetune_from(paths[0] if paths else None, values)
    except Interrupted as stop:
        say(f"offrl: {stop}", file=sys.stderr)
        return 130
    report(saved_run, outcomes(saved_run))
    files = ("scores.csv", "metrics.jsonl", PLAYED, PICTURE, FILE, "policies", "tensorboard")
    say(
        f"{saved_run.algorithm}: {saved_run.dir}{os.sep} "
        f"({', '.join(n for n in files if (saved_run.dir / n).exists())})"
    )
    diverged_replicas = saved_run.diverged
    if diverged_replicas:
        warn(f"diverged and frozen: {', '.join(map(str, diverged_replicas))}")
    return 1 if len(diverged_replicas) == len(saved_run.replicas) else 0


USAGE = """\
usage: offrl finetune RUN [env=ID] [steps=N] [name=value ...] [--quiet]
       offrl finetune algo=sac_n dataset=NAME env=ID [seeds=4] [algo.SETTING=value ...]     fresh parameters
       offrl finetune algo=sac_n env=ID mixing=0                                            without data
       offrl finetune algo=ppo env=ID                                                       on-policy, without data
       offrl finetune RUN mode=on_policy                                                    PPO from the policies of a run of bc
       offrl finetune RUN mode=residual [algo.scale=0.5 ...]                                a small policy on top of the run's
       offrl finetune RUN mode=expansion [algo.inverse_temperature=10 ...]                  a new policy beside the run's
       offrl finetune algo=ppo env=ID robust=my.yaml budget=3                               one run on each of three variants
       offrl finetune RUN mode=distill ["student.observation_keys=[0,1]" ...]                students that see less
       offrl finetune resume=RUN                                                            what was stopped

All replicas of a run go on learning side by side, each in environments of its own, from what they play and from the run's
data. algo.SETTING=value changes a setting of the algorithm. The same command continues what was stopped.

Settings and their defaults:

{0}

Settings of learning on variants of the environment:

{2}

Settings of mode=residual, published values in brackets where they differ:

{1}
"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    from offrl.benchmark.config import VariantsConfig
    from offrl.cli.words.listing import algorithm_settings
    from offrl.finetuning.config import FinetuneConfig
    from offrl.settings.field import describe

    lines = (line for line in describe(FinetuneConfig()) if "eval.env=" not in line)
    return USAGE.format(
        "\n".join(lines), "\n".join(algorithm_settings("residual.all")), "\n".join(describe(VariantsConfig()))
    )
