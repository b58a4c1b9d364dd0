"""Differences between runs of one algorithm: flat settings, their hash and difference, labels for readers. Imports
nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ABSENT = "not a setting"  # stands for the value of a setting that one side does not have
SHOWN = 3  # settings that a label names at most


def flatten(settings: Any, name: str = "") -> dict[str, Any]:
    """Nested settings as {"algo.temperature": 3.0, "dataset.fields": {}, ...}; `name` first at each level, lists and
    empty dicts whole.
    """
    if not isinstance(settings, dict) or not settings:
        return {name: settings}
    flat: dict[str, Any] = {}
    for key in [*(k for k in ("name",) if k in settings), *(k for k in settings if k != "name")]:
        flat |= flatten(settings[key], f"{name}.{key}" if name else str(key))
    return flat


def difference(a: Mapping[str, Any], b: Mapping[str, Any], *, everything: bool = False) -> dict[str, tuple[Any, Any]]:
    """{name: (value in a, value in b)} of the settings that differ, in a's order, "name" first.

    a, b: nested or flat settings. Settings that only one side has are left out (another version's, another
    algorithm's), or given with ABSENT for the other side where `everything`. Numbers are compared as numbers: 3 and 3.0
    are the same.
    """
    flat_a, flat_b = flatten(dict(a)), flatten(dict(b))
    names = [*flat_a, *(k for k in flat_b if k not in flat_a)]
    pairs = {
        k: (flat_a.get(k, ABSENT), flat_b.get(k, ABSENT))
        for k in names
        if everything or (_knows(flat_a, k) and _knows(flat_b, k))
    }
    return {k: pair for k, pair in pairs.items() if meaning(pair[0]) != meaning(pair[1])}


def _knows(flat: Mapping[str, Any], name: str) -> bool:
    """True where there is such a setting, or could be: `dataset.fields.actions` where `dataset.fields` is empty."""
    parts = name.split(".")
    return name in flat or any(flat.get(".".join(parts[:n])) == {} for n in range(1, len(parts)))


def canonical(value: Any) -> Any:
    """The same object for values that mean the same: whole floats and integers, tuples and lists."""
    if isinstance(value, (list, tuple)):
        return [canonical(v) for v in value]
    if isinstance(value, dict):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def digest(flat: Mapping[str, Any]) -> str:
    """8 hex digits: a hash of settings, whatever their order."""
    return hashlib.sha256(meaning(dict(flat)).encode()).hexdigest()[:8]


def meaning(value: Any) -> str:
    """The same text for values that mean the same; True is not 1."""
    return json.dumps(canonical(value), sort_keys=True, default=str)


def value_text(value: Any) -> str:
    """A value as one would write it in a command: `3`, `0.7`, `[256,256]`, `true`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return str(value).replace(" ", "").replace("'", "")


@dataclass(frozen=True)
class Variant:
    """One algorithm with one set of settings on one dataset."""

    dataset: str
    algorithm: str
    settings: str  # the hash
    flat: Mapping[str, Any] = field(default_factory=dict, compare=False)  # what decides the result, where it is known
    # the part of `flat` that the user set, in place of defaults
    user_values: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.dataset, self.algorithm, self.settings


def labels(variants: Sequence[Variant]) -> dict[tuple[str, str, str], str]:
    """{(dataset, algorithm, settings hash): a label that no other variant on that dataset has}.

    An algorithm's own name where the user set the same settings for all its runs; else those that differ stand behind
    it:
    `iql` and `iql (temperature=5)`. Settings that differ between datasets because their defaults do
    (configs/experiment) do not show. Where those do not distinguish two runs, all that differ do: `iql (expectile=0.7)`
    and `iql (expectile=0.8)`.
    """
    merged: dict[tuple[str, str, str], Variant] = {}
    for v in variants:  # the same settings may have been given in full once and left to the defaults elsewhere
        if v.key not in merged or len(v.user_values) < len(merged[v.key].user_values):
            merged[v.key] = v
    by_algorithm: dict[str, list[Variant]] = defaultdict(list)
    for v in merged.values():
        by_algorithm[v.algorithm].append(v)
    labels: dict[tuple[str, str, str], str] = {}
    for algorithm, group in by_algorithm.items():
        fields = _differing([v.user_values for v in group])
        user_fields = {v.key: [f for f in fields if f in v.user_values] for v in group}
        for v in group:
            labels[v.key] = _label(algorithm, v.user_values, user_fields[v.key], v.settings)
        same: dict[tuple[str, str], list[Variant]] = defaultdict(list)
        for v in group:
            same[v.dataset, labels[v.key]].append(v)
        for alike in (s for s in same.values() if len(s) > 1):
            differ = [f for f in _differing([v.flat for v in alike]) if f not in user_fields[alike[0].key]]
            texts = {v.key: _label(algorithm, v.flat, [*user_fields[v.key], *differ], v.settings) for v in alike}
            clash = len(set(texts.values())) < len(alike)
            labels |= {k: f"{algorithm} ({k[2]})" if clash else text for k, text in texts.items()}
    return labels


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names whose value is not the same in all, in order of appearance."""
    names = dict.fromkeys(k for s in settings for k in s)
    return [k for k in names if len({meaning(s.get(k, ABSENT)) for s in settings}) > 1]


def _label(algorithm: str, settings: Mapping[str, Any], fields: Sequence[str], tag: str) -> str:
    if not fields:
        return algorithm
    assignments = [f"{f.removeprefix('algo.')}={value_text(settings.get(f, ABSENT))}" for f in fields[:SHOWN]]
    return f"{algorithm} ({', '.join(assignments)}{f', ... {tag}' if len(fields) > SHOWN else ''})"
