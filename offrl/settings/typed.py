"""Values of JSON files against the types of a dataclass's fields."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any

from offrl.errors import UserError

MOST = 100_000_000  # no whole number in a file of settings is larger; lists of that many layers still fit in memory
LONGEST = 10_000  # entries of a list of whole numbers, such as layers


@functools.cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields by name."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)}


def check_types(kind: type, values: Mapping[str, Any], where: str) -> None:
    """Raise UserError for the first of `values`, by names of fields of the dataclass `kind`, that is of another type than its field, or a
    whole number beyond `MOST`. Lists stand for tuples, as in JSON. where: the file, for messages."""
    for name, expected in field_types(kind).items():
        if name in values and not fits(values[name], expected):
            shown = " ".join(str(values[name]).split())
            raise UserError(
                f"{where} is damaged: {name} is {shown[:60]}{'...' if len(shown) > 60 else ''}, where {_words(expected)} is due"
            )


def fits(value: Any, expected: Any) -> bool:
    """Whether a value of JSON is of the type `expected`."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, a) for a in arguments)
    if origin in (list, tuple):
        items = arguments[0] if arguments else Any
        listed = isinstance(value, list | tuple) and all(fits(item, items) for item in value)
        return listed and not (items is int and len(value) > LONGEST)
    if dataclasses.is_dataclass(expected) or origin is dict or expected is dict:
        return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if expected in (int, float) and isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= MOST
    return isinstance(value, expected) if isinstance(expected, type) else value is None or not callable(expected)


def _words(expected: Any) -> str:
    return str(getattr(expected, "__name__", expected) if typing.get_origin(expected) is None else expected).replace("typing.", "")
