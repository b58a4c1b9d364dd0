"""`offrl collect`: record datasets in an environment, from policies trained here, from any policy, or from OGBench's
oracles.
"""

from __future__ import annotations

import sys
from pathlib import Path

from offrl.errors import UserError, nearest, say


def run(arguments: list[str]) -> int:
    if not arguments:
        say(*usage([]).splitlines())
        return 0
    from offrl.collect.config import FORMATS, RECIPES, CollectConfig
    from offrl.settings.compose import fill, parse

    values = parse(arguments)
    if values.get("format") is not None and values["format"] not in FORMATS:
        raise UserError(
            f"format={values['format']} is not allowed; choose one of "
            f"{', '.join(FORMATS)}.{nearest(str(values['format']), FORMATS)}"
        )
    config = fill(CollectConfig(), values, "collect")
    if bool(config.recipe) == bool(config.policy):
        both = "are both given; leave one of them out" if config.recipe else "is missing"
        raise UserError(f"recipe= or policy= {both}: offrl collect env=Hopper-v5 recipe=d4rl, or policy=mine.py:act")
    if config.recipe and config.recipe not in RECIPES:
        raise UserError(
            f"unknown recipe '{config.recipe}'.{nearest(config.recipe, RECIPES)} Recipes: {', '.join(RECIPES)}"
        )
    from offrl.collect import d4rl
    from offrl.collect import from_policy as policies
    from offrl.collect import ogbench as goals
    from offrl.collect.config import SETS
    from offrl.collect.near_real import near_real
    from offrl.collect.publish import Collection, table
    from offrl.collect.record import Stopped, claim, stoppable
    from offrl.runs.tables import print_columns

    stem = config.env.rpartition("/")[2].rpartition(":")[2].lower()
    folder = Path(config.out or Path("collected") / f"{stem}-{config.recipe or 'policy'}-s{config.seed}")
    config = near_real(config) if config.recipe == "near-real" else config
    way = {"d4rl": d4rl, "ogbench": goals}.get(config.recipe, policies)
    world, facts = way.prepare(config)
    collection = Collection(folder, config, world, claim(folder, config, facts))
    try:
        with stoppable() as stop:
            if way is not goals:
                collection.check_free(config.datasets or list(SETS) if way is d4rl else [policies.SET])
            way.collect(config, folder, collection, stop)
    except Stopped:
        say(f"offrl: stopped; everything recorded so far is in {folder}: the same command continues", file=sys.stderr)
        return 130
    if columns := table(collection):
        print_columns(columns, f"{world.label}, {folder}")
    for forms in collection.record["written"].values():
        for form, target in forms.items():
            say(f"{form}: {target}")
    say(f"card: {folder / 'card.md'}")
    return 0


USAGE = """\
usage: offrl collect env=ID recipe=d4rl|ogbench|near-real [name=value ...]
       offrl collect env=ID policy=PATH [name=value ...]

The same command continues what was stopped. Settings and their defaults:

{0}
"""


def usage(arguments: list[str]) -> str:
    from offrl.collect.config import CollectConfig
    from offrl.settings.field import describe

    return USAGE.format("\n".join(describe(CollectConfig())))
