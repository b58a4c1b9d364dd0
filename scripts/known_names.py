"""Write offrl/settings/known.json: algorithms with their settings, and names of datasets, for what must answer
without torch.

python scripts/known_names.py              # rewrites it
python scripts/known_names.py --check      # only says whether it is out of date, and exits with 1 if it is
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, get_type_hints

from offrl import registry
from offrl.cli.words import listing
from offrl.settings.compose import compose
from offrl.settings.field import own_first, shown_value
from offrl.settings.known import FILE, TYPES
from offrl.settings.presets import base_algorithm, config_names
from offrl.settings.train import TrainConfig

GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"
MARKS = ("low", "high", "choices", "shown", "place", "structural", "shared", "acting", "filled")


def entries(config: Any) -> list[dict[str, Any]]:
    """The settings of an algorithm's Config with the defaults that its file gives, its own before those of its
    relatives.
    """
    hints, words = get_type_hints(type(config)), {v: k for k, v in TYPES.items()}
    result = []
    for f in own_first(type(config)):
        if f.name == "name":
            continue
        about = {
            "name": f.name,
            "type": words[hints[f.name]],
            "default": getattr(config, f.name),
            "help": f.metadata.get("help", ""),
        }
        about |= {
            k: list(v) if isinstance(v, tuple) else v
            for k in MARKS
            if (v := f.metadata.get(k)) is not None and v is not False
        }
        result.append(about)
    return result


def algorithm(name: str, known: dict[str, Any]) -> dict[str, Any]:
    """One algorithm's entry; its settings go into `known`, under a key that those with the same entry share."""
    base = base_algorithm(name)
    kind = registry.get("algo", base)
    text = (sys.modules[kind.__module__].__doc__ or kind.__doc__ or "").strip()
    config, standard = (
        compose({"algo": name, "experiment": "none", "dataset": "-"}),
        dict(listing.settings_values(TrainConfig())),
    )
    keys = []
    for about in entries(config.algo):
        number = 1
        while known.setdefault(key := about["name"] + (f"~{number}" if number > 1 else ""), about) != about:
            number += 1
        keys.append(key)
    changed = [
        f"{k}={shown_value(v)}"
        for k, v in listing.settings_values(config)
        if k not in listing.CHOSEN and v != standard[k]
    ]
    variant = name not in registry.names("algo")
    return {
        "title": listing.first_sentence(text),
        **({"base": base} if variant else {}),
        "vectorized": kind.traits.vectorized,
        "settings": keys,
        "changes": changed,
    }


def symbols() -> dict[str, dict[str, list[str]]]:
    """algorithm -> {symbol of its paper: [its settings]}, from the table of docs/glossary.md."""
    rows = re.findall(
        r"^\| `(\w+)` \| (\S+) \| ((?:`\w+`(?:, )?)+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE
    )
    result: dict[str, dict[str, list[str]]] = {}
    for setting, symbol, names in rows:
        for name in re.findall(r"\w+", names):
            result.setdefault(name, {}).setdefault(symbol, []).append(setting)
    return dict(sorted(result.items()))


def make() -> str:
    known: dict[str, Any] = {}
    algorithms = {name: algorithm(name, known) for name in config_names("algo")}
    families: dict[str, list[str]] = {"ships with offrl": ["builtin"], "registered": list(registry.names("dataset"))}
    registry.names("task")
    for table, listed in registry.names("task_names").items():
        for name in listed():
            families.setdefault(f"{table} {name.partition('-')[0]}", []).append(name)
    parts = {"algorithms": algorithms, "settings": known, "datasets": families, "symbols": symbols()}
    lines = [
        f"{json.dumps(part)}: {{\n"
        + ",\n".join(f"{json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in content.items())
        + "\n}"
        for part, content in parts.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, text = parser.parse_args().check, make()
    if check:
        fresh = FILE.read_text(encoding="utf-8") == text
        print("up to date" if fresh else f"{FILE} is out of date: python scripts/known_names.py")
        return 0 if fresh else 1
    Path(FILE).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
