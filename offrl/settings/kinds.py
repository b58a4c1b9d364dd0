"""The values of a file held against the kinds that a dataclass declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def unfitting(kind: type, values: Mapping[str, Any]) -> str | None:
    """The first of `values` that is not what the field of its name in the dataclass `kind` declares, in a module whose annotations are
    texts; None where all are. A field may declare bool, int, float, str, lists, tuples and dictionaries of them, and None."""
    declared = {f.name: str(f.type) for f in fields(kind)}
    return next((name for name, value in values.items() if name in declared and not _fits(declared[name], value)), None)


def _fits(declared: str, value: Any) -> bool:
    if declared.endswith(" | None"):
        return value is None or _fits(declared.removesuffix(" | None"), value)
    outer, _, inner = declared.removesuffix("]").partition("[")
    if outer in ("list", "tuple"):
        return isinstance(value, list | tuple) and all(_fits(inner.removesuffix(", ..."), item) for item in value)
    if outer == "dict":
        return isinstance(value, dict)
    if outer == "int":
        return type(value) is int and -(2**63) <= value < 2**63
    if outer == "float":
        return type(value) is float or (type(value) is int and abs(value) < 2**63)
    return (outer == "bool" and isinstance(value, bool)) or (outer == "str" and isinstance(value, str))
