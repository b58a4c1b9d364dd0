"""`offrl list`: what can be chosen by name."""

from __future__ import annotations

from offrl.errors import UserError

USAGE = "usage: offrl list, or offrl list algo=NAME"


def run(arguments: list[str]) -> int:
    from offrl.catalogue import print_algorithm, print_all

    if not arguments:
        print_all()
        return 0
    key, _, name = arguments[0].partition("=")
    if key != "algo" or not name:
        raise UserError(USAGE)
    print_algorithm(name)
    return 0
