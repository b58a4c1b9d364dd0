"""`offrl list`: what can be chosen by name."""

from __future__ import annotations

from offrl.errors import UserError, say

USAGE = (
    "usage: offrl list, or offrl list algo=NAME, or offrl list algo=NAME dataset=NAME (the published settings for it)"
)


def usage(words: list[str]) -> str:
    return USAGE


def run(arguments: list[str]) -> int:
    from offrl.cli.words.listing import experiment_text, print_algorithm, print_all

    if not arguments:
        print_all()
        return 0
    requests = dict(a.partition("=")[::2] for a in arguments)
    if not requests.get("algo") or not set(requests) <= {"algo", "dataset"} or not requests.get("dataset", "-"):
        raise UserError(USAGE)
    if "dataset" in requests:
        say(experiment_text(requests["algo"], requests["dataset"]))
    else:
        print_algorithm(requests["algo"])
    return 0
