"""One setting put into a tree of settings, and the messages where it does not fit. Imports nothing heavy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from offrl.errors import UserError, nearest
from offrl.settings import known
from offrl.settings.groups import GROUPS, grouped_name

# what is below is not known here: dataset.fields' columns, settings of a policy's algorithm
FREE = frozenset({"fields", "acting"})
UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


def assign(config: Any, name: str, value: Any) -> None:
    """Set one value by its dotted name. Raises UserError for an unknown name (with the nearest one) or a value of a
    wrong kind.
    """
    from omegaconf import DictConfig, IntegerNode, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    node: Any = config
    parts = name.split(".")
    for i, part in enumerate(parts):
        free = i > 0 and parts[i - 1] in FREE
        if not isinstance(node, DictConfig) or (part not in node and not free):
            if parts[0] == "algo" and part in GROUPS and i == 1:
                raise UserError(group_mistake(name, value, node))
            prefix = ".".join(parts[:i])
            options = [f"{prefix}.{k!s}" if prefix else str(k) for k in node] if isinstance(node, DictConfig) else []
            names = all_names(config)
            hint = known.elsewhere(name, value) or nearest(".".join(parts[: i + 1]), options) or nearest(name, names)
            raise UserError(f"unknown setting '{name}'.{hint or ' `offrl train --help` shows them all'}")
        node = node._get_node(part) if part in node else None
    if isinstance(node, DictConfig) and not isinstance(value, Mapping):
        raise UserError(
            f"{name}={shown(value)}: {name} has settings of its own, such as "
            f"{name}.{next(map(str, node), 'observations')}=..."
        )
    old = None if node is None or node._is_none() else node._value()
    whole_number = (isinstance(old, int) and not isinstance(old, bool)) or isinstance(node, IntegerNode)
    if whole_number and isinstance(value, str) and (amount := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgGbB])", value)):
        value = float(amount[1]) * UNITS[amount[2].lower()]  # steps=100k
    if isinstance(value, float) and value.is_integer() and whole_number:
        value = int(value)  # steps=1e6
    if isinstance(node, ListConfig) and isinstance(value, str | int | float) and not isinstance(value, bool):
        value = [value]  # one name, or one number
    try:
        OmegaConf.update(config, name, value, force_add=not FREE.isdisjoint(parts))
    except OmegaConfBaseException as error:
        text = str(error).splitlines()[0]
        kind_names = {
            "Float": "a number",
            "Integer": "a whole number",
            "ool": "true or false",
            "ListConfig": f"a list: {name}={shown(value)},",
        }
        kind = next((w for t, w in kind_names.items() if t in text), "set to something" if value is None else "")
        if isinstance(node, ListConfig) and kind in (kind_names["Float"], kind_names["Integer"]):
            kind = f"a list of {kind.removeprefix('a ')}s"
        elif isinstance(value, list):
            varies = not isinstance(old, str | bool)  # a grid has numbers alone
            thousands = bool(value) and all(re.fullmatch(r"0|\d{3}", str(v)) for v in value[1:])  # 100,000
            joined = str(value[0]) + "".join(f"{v:0>3}" for v in value[1:]) if thousands else ""
            kind += (
                f", without commas: {name}={joined}"
                if kind == kind_names["Integer"] and joined
                else f"{'' if kind else 'one value'}, not several values{grid_hint(name) if varies else ''}"
            )
        raise UserError(f"{name}={shown(value)} must be {kind}" if kind else f"{name}={shown(value)}: {text}") from None


def group_mistake(name: str, value: Any, settings: Iterable[Any]) -> str:
    """The message for a group of settings that is set as one, and for a name that it has not; settings: the flat names
    of the algorithm's settings.
    """
    group, _, field = name.removeprefix("algo.").partition(".")
    options = [f"algo.{n}" for n in map(grouped_name, map(str, settings)) if n.startswith(f"{group}.")]
    if not options:
        return f"unknown setting '{name}': the algorithm has no settings of the group {group}"
    if not field:
        return f"{name}={shown(value)}: {group} is a group of settings; write one of them, such as {options[0]}=..."
    return f"unknown setting '{name}'.{nearest(name, options)} Those of the group: {', '.join(options)}"


def grid_hint(name: str) -> str:
    return f"; grid.{name.removeprefix('algo.')}=a,b trains with each value" if name.startswith("algo.") else ""


def shown(value: Any) -> str:
    return (
        "null"
        if value is None
        else ",".join(map(shown, value))
        if isinstance(value, list)
        else str(value).replace("'", "")
    )


def all_names(config: Any, prefix: str = "") -> list[str]:
    names: list[str] = []
    for key in config:
        names.append(f"{prefix}{key}")
        node = config._get_node(key)
        if hasattr(node, "keys") and not node._is_none():
            names += all_names(node, f"{prefix}{key}.")
    return names
