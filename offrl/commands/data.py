"""`offrl data`: look at data sets."""

from __future__ import annotations

from offrl.errors import UserError, nearest

USAGE = "usage: offrl data inspect DATASET [dataset.SETTING=value ...], or offrl data list"


def run(arguments: list[str]) -> int:
    actions = ("inspect", "list")
    if not arguments or arguments[0] not in actions:
        given = arguments[0] if arguments else ""
        raise UserError(f"{USAGE}.{nearest(given, actions)}")
    if arguments[0] == "list":
        from offrl.catalogue import print_data_sets

        print_data_sets()
        return 0
    if len(arguments) < 2:
        raise UserError(USAGE)
    from offrl.compose import compose, parse
    from offrl.data.inspect import inspect_dataset

    values = parse([f"dataset={arguments[1]}", *(a if a.startswith("dataset.") else f"dataset.{a}" for a in arguments[2:])])
    report = inspect_dataset(compose({**values, "algo": "bc", "dataset.normalize_observations": False}).dataset)
    print(report.render())
    return 1 if report.corrupting else 0
