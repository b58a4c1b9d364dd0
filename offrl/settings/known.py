"""What can be chosen by name, read from `known.json` and not from the algorithms, whose import takes torch and seconds:
for mistakes, lists, `--help` and the completion of commands. `python scripts/known_names.py` writes the file; what
plugins add is not in it."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from offrl.settings.field import setting
from offrl.settings.groups import flat_name

FILE = Path(__file__).with_name("known.json")
TYPES = {
    "float": float,
    "int": int,
    "bool": bool,
    "str": str,
    "list[float]": list[float],
    "list[int]": list[int],
    "list[str]": list[str],
    "float | None": float | None,
    "int | None": int | None,
    "bool | None": bool | None,
    "str | None": str | None,
    "dict[str, Any]": dict[str, Any],
}


@functools.cache
def index() -> dict[str, Any]:
    """`algorithms`: name -> {title, vectorized, settings: [key], changes: [name=value]}; `settings`: key -> {name,
    type, default, help, ...}; `datasets`: family -> names; `symbols`: algorithm -> {symbol of its paper: settings}."""
    return dict(json.loads(FILE.read_text(encoding="utf-8")))


def is_known(algo: str) -> bool:
    """Whether the index has this algorithm; a plugin's it has not."""
    return algo in index()["algorithms"]


@functools.cache
def schema(algo: str) -> Any:
    """An object with the settings of an algorithm of the index, as its Config composed with its file has them: types,
    defaults, marks.

    It trains nothing: `offrl.settings.field.describe`, `check` and `offrl.settings.replicas` read it as they would read
    the Config."""
    entries = index()["settings"]
    fields: list[tuple[str, Any, Any]] = [
        ("name", str, dataclasses.field(default=index()["algorithms"][algo].get("base", algo)))
    ]
    for key in index()["algorithms"][algo]["settings"]:
        entry = dict(entries[key])
        fields.append(
            (entry.pop("name"), TYPES[entry.pop("type")], setting(entry.pop("default"), entry.pop("help"), **entry))
        )
    return dataclasses.make_dataclass("Known", fields)()


def settings_of(algo: str) -> dict[str, dict[str, Any]]:
    """name -> its entry in the index, of the settings of an algorithm that a user may give."""
    entries = index()["settings"]
    return {
        entries[key]["name"]: entries[key]
        for key in index()["algorithms"][algo]["settings"]
        if not entries[key].get("filled")
    }


def elsewhere(name: str, value: Any = None) -> str:
    """A sentence that names algorithms with the setting algo.NAME or grid.NAME; "" where there is none. value: a text
    is for algorithms that have texts there, where some do."""
    field = flat_name(name.removeprefix("algo.").removeprefix("grid."))
    kinds = {algo: s[field]["type"] for algo in index()["algorithms"] if field in (s := settings_of(algo))}
    texts = [algo for algo, kind in kinds.items() if "str" in kind] if isinstance(value, str) else []
    having = (texts or list(kinds)) if name != field else []
    cure = ' or keep cheap episodes, dataset.keep="cost <= LIMIT"' if field == "cost_limit" else ""
    listed = ", ".join(having[:15]) + (" and others" if len(having) > 15 else "")
    return f" It is a setting of {listed}: choose one of them{cure}." if having else ""


def datasets() -> list[str]:
    """Names that dataset= takes without a path: offrl's own, D4RL's, OGBench's. Minari's are those that are
    installed.
    """
    return [name for names in index()["datasets"].values() for name in names]
