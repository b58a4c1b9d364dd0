"""The order in which the entries of Dict observations are joined: one for data, environments, policies and exported
files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offrl.errors import UserError, nearest

Path = tuple[str, ...]
VECTOR = "vector"  # all numbers of an observation, beside its images
PIXELS = "pixels"  # an image that has no name, Gymnasium's
OWN_ORDER = (
    "*",
    # in place of names: all entries in the order of the environment's space, as gymnasium's FlattenObservation joins
    # them
)


def mapping(value: Any) -> Mapping[str, Any] | None:
    """The entries of a dictionary, or of one of Gymnasium's Dict spaces; None for what has none."""
    # a space's own `in` asks for its samples
    return getattr(value, "spaces", value) if isinstance(value, Mapping) else None


def entries(
    tree: Any, keys: Sequence[str] = (), whose: str = "the observations", inside: Callable[[Any], Any] = mapping
) -> list[tuple[Path, Any]]:
    """(path, value) of what a Dict observation, or its space, is joined of: the entries `keys` in that order, without
    them all, sorted.

    What stands inside an entry is sorted, unless a key names it alone, as "outer/inner". inside: the entries of a
    value, None for one without. Raises UserError for a key that is missing. whose: "the observations", for that
    message.
    """
    # sorted, for a Dict keeps the order that it was made in where that was a list, say
    names = keys or sorted(inside(tree), key=str)
    return [
        (path + subpath, leaf)
        for path, value in (_named(tree, k, whose, inside) for k in names)
        for subpath, leaf in _leaves(value, inside)
    ]


def _named(tree: Any, key: str, whose: str, inside: Callable[[Any], Any]) -> tuple[Path, Any]:
    value, path = tree, (key,) if key in inside(tree) else tuple(str(key).split("/"))
    for name in path:
        parts = inside(value)
        if parts is None or name not in parts:
            known = [str(k) for k in inside(tree)]
            raise UserError(
                f"{whose} have no entry '{key}'; they have {', '.join(sorted(known))}.{nearest(str(key), known)}"
            )
        value = parts[name]
    return path, value


def _leaves(value: Any, inside: Callable[[Any], Any]) -> list[tuple[Path, Any]]:
    return [((), value)] if inside(value) is None else entries(value, inside=inside)


def entry(value: Any, path: Path) -> Any:
    """The value at a path."""
    for name in path:
        value = value[name]
    return value


def in_own_order(space: Any) -> list[str]:
    """The names, as `entries` takes them, of all that a Dict space holds, in its own order."""
    return ["/".join(map(str, path)) for path in _paths(space)]


def _paths(space: Any) -> list[tuple[Any, ...]]:
    parts = mapping(space)
    return [()] if parts is None else [(name, *subpath) for name, part in parts.items() for subpath in _paths(part)]


def joined(space: Any, keys: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the entries of an environment's Dict space that data are made of, in their order.

    keys: `Task.observation_keys`. Without them the data are flat, and nobody said how they were joined. Raises
    UserError where that can have been done in two ways, and for a key that is missing.
    """
    if keys and tuple(keys) != OWN_ORDER:
        entries(space, keys, "the environment's observations")
        return tuple(keys)
    native = in_own_order(space)
    if keys or native == (ordered := ["/".join(map(str, path)) for path, _ in entries(space)]):
        return tuple(native)
    raise UserError(
        f"the environment's Dict observation can be joined as {','.join(native)} (its own order, as gymnasium's "
        f"FlattenObservation does) or as {','.join(ordered)} (sorted, as offrl joins dictionaries), and the data do "
        "not say which they are: name the entries in the order that the data have, "
        f"dataset.observation_keys=[{','.join(native)}] or dataset.observation_keys=[{','.join(ordered)}]"
    )
