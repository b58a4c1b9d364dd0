"""`offrl distill`: a small policy that imitates a trained one."""

from __future__ import annotations

import sys

from offrl.errors import UserError, say
from offrl.runs.paths import check_run

USAGE = """\
usage: offrl distill RUN into=tree|trees|sindy|linear|mlp [name=value ...]

Trains a small policy that imitates each of the run's, as a run of its own, and measures it: fidelity, score from the same starts,
size, time of an action. Writes C code and ONNX, each compared with the policy. Any setting of offrl train may follow.

Settings of the student (algo.NAME, or the name alone):

{0}"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    from offrl.cli.words.listing import algorithm_settings

    return USAGE.format("\n".join(algorithm_settings("distill.all")))


def run(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError("usage: offrl distill RUN into=tree|trees|sindy|linear|mlp; offrl distill --help says more")
    check_run(arguments[0])
    from offrl.settings.aliases.arguments import train_values
    from offrl.settings.compose import rehearse

    settings = [f"algo.{a}" if a.startswith("into=") else a for a in arguments[1:]]
    values = rehearse({"algo": "distill", **train_values(settings)})
    from offrl.api import distill_from
    from offrl.distilling.measure import lines
    from offrl.errors import Interrupted
    from offrl.system.signals import terminable

    try:
        with terminable():
            student, result = distill_from(arguments[0], values)
    except Interrupted as stop:
        say(f"offrl: {stop}", file=sys.stderr)
        return 130
    say(f"{student.dir}: a student of {arguments[0]}", *(f"  {line}" for line in lines(result, student.dir)))
    return 0
