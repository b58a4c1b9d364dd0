"""Values of JSON and YAML held against type annotations, and settings as files of runs and policies hold them: a
stranger's files may hold anything. Imports nothing heavy.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints, is_typeddict

from offrl.errors import UserError, nearest
from offrl.settings.field import check

MOST = 100_000_000  # whole numbers in files of settings; lists of that many layers still fit in memory
LONGEST = 10_000  # entries of a list of whole numbers, such as the widths of layers
WORDS = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def misfit(value: Any, hint: Any, name: str, most: int = 2**63 - 1, complete: bool = False) -> str:
    """Why `value`, called `name`, is not of the type `hint`, in words; "" where it is.

    hint: numbers, str, bool, None, lists, tuples (of JSON: lists), mappings, unions, typed dictionaries and dataclasses
    of these. Keys that a typed dictionary or a dataclass does not know are passed over, and so are annotations of other
    kinds; none need be there, unless `complete`: then those that a typed dictionary requires. most: the largest whole
    number.
    """
    origin, arguments = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        faults = [misfit(value, option, name, most, complete) for option in arguments if option is not type(None)]
        return "" if "" in faults or (value is None and type(None) in arguments) else faults[0]
    if is_typeddict(origin) or dataclasses.is_dataclass(origin):
        if not isinstance(value, Mapping):
            return _words(name, value, "entries by name are due")
        known = _known(origin)
        for key, kind in known.items():
            full = f"{name}.{key}".strip(".")
            if key in value:
                if text := misfit(value[key], kind, full, most, complete):
                    return text
            elif complete and key in origin.__required_keys__:
                null = ", or null where it is not known" if type(None) in get_args(kind) else ""
                unknown = [k for k in value if k not in known and isinstance(k, str)]
                hint = nearest(key, unknown)
                return f"'{full}' is missing: add it{null}{hint and f'.{hint}'}"
        return ""
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return _words(name, value, "a list is due")
        if arguments[:1] == (int,) and len(value) > LONGEST:
            return f"{name} has {len(value):,} entries, where {LONGEST:,} at most are due"
        if origin is tuple and arguments and arguments[-1] is not Ellipsis:
            if len(value) != len(arguments):
                return f"{name} has {len(value)} entries, where {len(arguments)} are due"
            kinds = arguments
        else:
            kinds = (arguments[0] if arguments else Any,) * len(value)
        return next(
            (
                text
                for i, (v, k) in enumerate(zip(value, kinds, strict=True))
                if (text := misfit(v, k, f"{name}[{i}]", most, complete))
            ),
            "",
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return _words(name, value, "entries by name are due")
        kind = arguments[1] if len(arguments) > 1 else Any
        return next((text for k, v in value.items() if (text := misfit(v, kind, f"{name}.{k}", most, complete))), "")
    number = isinstance(value, (int, float) if hint is float else int) and not isinstance(value, bool)
    if number and not isinstance(value, float) and abs(value) > most:
        return _words(name, value, f"{most:,} at most is due")
    fits = number if hint in (float, int) else isinstance(value, hint) if hint in (str, bool) else True
    return "" if fits else _words(name, value, f"{WORDS[hint]} is due")


def check_types(kind: Any, values: Mapping[str, Any], where: str) -> None:
    """Raises UserError for the first of `values`, by names of fields of the dataclass `kind`, that is of another type
    than its field, or a whole number beyond `MOST` and 10,000 times its default. where: the file, for that message."""
    hints = _known(kind)
    for field in dataclasses.fields(kind):
        if field.name in values:
            usual = field.default if isinstance(field.default, int) else 0  # lengths in updates may be long
            if wrong := misfit(values[field.name], hints[field.name], field.name, max(MOST, 10_000 * usual)):
                raise UserError(f"{where} is damaged: {wrong}")


def _words(name: str, value: Any, due: str) -> str:
    shown = repr(value)
    return f"{name or 'it'} is {shown if len(shown) <= 40 else shown[:37] + '...'}, where {due}"


@functools.cache
def _known(kind: Any) -> dict[str, Any]:
    """The annotations of a typed dictionary or dataclass."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else hints


def restored(kind: type, settings: Mapping[str, Any], where: str) -> Any:
    """The config of class `kind` that was saved as `settings`; what they lack is at its default.

    Raises UserError for a setting that `kind` does not have, and for values of another type or out of range. where: the
    file, for messages.
    """
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(settings.keys() - known):
        raise UserError(
            f"{where} was written by another version of offrl: it has the setting {unknown[0]}, which this one does "
            "not know"
        )
    check_types(kind, settings, where)
    config = kind(**settings)
    check(config, f"{where}: ")
    return config
