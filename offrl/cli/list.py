"""`offrl list`: what can be chosen by name."""

from __future__ import annotations

from offrl.errors import UserError

USAGE = "usage: offrl list, or offrl list algo=NAME, or offrl list algo=NAME dataset=NAME (the published settings for it)"


def run(arguments: list[str]) -> int:
    from offrl.cli.listing import experiment_text, print_algorithm, print_all

    if not arguments:
        print_all()
        return 0
    asked = dict(a.partition("=")[::2] for a in arguments)
    if not asked.get("algo") or not set(asked) <= {"algo", "dataset"} or not asked.get("dataset", "-"):
        raise UserError(USAGE)
    if "dataset" in asked:
        print(experiment_text(asked["algo"], asked["dataset"]))
    else:
        print_algorithm(asked["algo"])
    return 0
