"""Fields of typed settings that document themselves and know their range. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, TypeVar

from offrl.errors import UserError, nearest, out_of_memory

Kind = TypeVar("Kind")
# how the help of a setting begins that is read with this value of another alone, with one of several, or above a number
READER = re.compile(r"(\w+)(=|>)(\w+(?:\|\w+)*): ")


def setting(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    choices: Sequence[str] | None = None,
    shown: str | None = None,
    place: bool = False,
    structural: bool = False,
    shared: bool = False,
    acting: bool = False,
    filled: bool = False,
) -> Any:
    """A dataclass field with its documentation and, if given, its range (`low` and `high` belong to it) or
    its allowed values.

    `shown`: what help gives as the default where that is not the field's own. Marks, for `marked`:

    - place: it says where something lies, which is no part of what a run is
    - structural: a number that decides shapes, modules or branches of Python, so that no grid can vary it
    - shared: a number of what the replicas of a run have in common (batches, a model, a run trained first): no grid can
      vary it either
    - acting: only acting looks at it, so that a trained policy can act with another value
    - filled: the library fills it in, with what identifies a model or a run that came first, say; help leaves it out

    A grid varies real numbers alone, so that settings of other types need neither of the two.
    """
    metadata: dict[str, Any] = {"help": help, "low": low, "high": high, "above": above, "shown": shown}
    metadata |= {"choices": tuple(choices) if choices else None, "place": place, "structural": structural}
    metadata |= {"shared": shared, "acting": acting, "filled": filled}
    return _field(default, metadata)


def defaults(**values: Any) -> Callable[[type[Kind]], type[Kind]]:
    """A dataclass with other defaults for settings of its parents: stands between `@dataclass` and the class.

    Raises TypeError for a setting that no parent has.
    """

    def changed(kind: type[Kind]) -> type[Kind]:
        parents = [parent for parent in kind.__mro__[:0:-1] if dataclasses.is_dataclass(parent)]
        inherited = {known.name: known for parent in parents for known in dataclasses.fields(parent)}
        for name, value in values.items():
            if name not in inherited:
                raise TypeError(f"{kind.__name__} inherits no setting '{name}'")
            kind.__annotations__[name] = inherited[name].type
            setattr(kind, name, _field(value, inherited[name].metadata))
        return kind

    return changed


def _field(default: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def plain_name(text: str) -> bool:
    """Whether `text` may be the name of a file or folder: one that stays in its folder."""
    return text not in ("", ".", "..") and not any(c in text for c in "/\\\0")


def file_name(text: str) -> str:
    """`text` as a plain name, with - for what names of files may not have everywhere."""
    return re.sub(r"[^\w.-]", "-", text)


def dataset_stem(name: str) -> str:
    """The part of an output's name that says which dataset it is of. name: the dataset's, or its path."""
    path = Path(name)
    label = path.stem if path.is_file() else path.name if path.exists() else name
    return file_name(label).strip("-") or "data"


def marked(kind: Any, *marks: str) -> list[str]:
    """Names of the settings of a dataclass that have one of the marks; see `setting`."""
    return [f.name for f in dataclasses.fields(kind) if any(f.metadata.get(mark) for mark in marks)]


def without_places(config: Any) -> dict[str, Any]:
    """A dataclass as a dictionary, less the settings that are a `place`."""
    left_out = marked(config, "place")
    return {k: v for k, v in dataclasses.asdict(config).items() if k not in left_out}


def check(config: Any, prefix: str = "") -> None:
    """Raise UserError for the first field outside its range or choices, naming the field, its value and what is
    allowed.
    """
    for spec in dataclasses.fields(config):
        value, name, meta = getattr(config, spec.name), prefix + spec.name, spec.metadata
        if dataclasses.is_dataclass(value):
            check(value, name + ".")
            continue
        for item in value if isinstance(value, list) else [value]:
            if meta.get("choices") and item not in meta["choices"]:
                allowed = ", ".join(meta["choices"])
                raise UserError(
                    f"{name}={item} is not allowed; choose one of {allowed}.{nearest(str(item), meta['choices'])}"
                )
            if isinstance(item, (int, float)) and not isinstance(item, bool):
                if item != item:
                    raise UserError(f"{name} is NaN")
                if isinstance(item, int) and item.bit_length() > 63:
                    raise UserError(f"{name}={item} is out of range: no whole number is that large here")
                if meta.get("low") is not None and item < meta["low"]:
                    raise UserError(f"{name}={item} is out of range: the smallest allowed value is {meta['low']}")
                if meta.get("above") is not None and not item > meta["above"]:
                    raise UserError(f"{name}={item} must be above {meta['above']:g}")
                if meta.get("high") is not None and item > meta["high"]:
                    raise UserError(f"{name}={item} is out of range: the largest allowed value is {meta['high']}")


def check_read(config: Any, names: Collection[str], varied: Mapping[str, Sequence[Any]]) -> None:
    """Raise UserError for the first setting of an algorithm that was changed and does nothing, for another one has not
    the value with which it is read: NAME=VALUE, NAME=VALUE|VALUE or NAME>NUMBER at the beginning of its help.

    names: of the settings that a user gave. varied: values of a grid.
    """
    default = type(config)()
    for spec in dataclasses.fields(config):
        reader, value = READER.match(spec.metadata.get("help") or ""), getattr(config, spec.name)
        changed = spec.name in varied or (spec.name in names and value != getattr(default, spec.name))
        if reader is None or not changed or not hasattr(config, reader[1]):
            continue
        name, other, values = reader[1], getattr(config, reader[1]), reader[3].split("|")
        if reader[2] == ">":
            reads, cure = max(varied.get(name, [other])) > int(values[0]), f" above {values[0]}"
        else:
            reads, cure = shown_value(other) in values, f"={' or '.join(values)}"
        if not reads:
            raise UserError(
                f"algo.{spec.name}={shown_value(varied.get(spec.name, value))} does nothing with "
                f"algo.{name}={shown_value(other)}; leave it out, or set algo.{name}{cure}"
            )


@contextlib.contextmanager
def that_fit(config: Any) -> Iterator[None]:
    """Within it, networks are made by the settings `config`. Raises UserError where the memory does not suffice, with
    the largest of these settings.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        numbers = {name: value for name, value in vars(config).items() if name != "batch_size"}
        sizes = {
            name: max((n for n in (value if isinstance(value, list) else [value]) if type(n) is int), default=0)
            for name, value in numbers.items()
        }
        name = max(sizes, key=lambda name: sizes[name])
        raise UserError(
            f"the networks of {config.name} do not fit into memory: its largest setting is "
            f"algo.{name}={shown_value(numbers[name])}, and a smaller one may do"
        ) from None


def describe(config: Any, prefix: str = "") -> list[str]:
    """One line for each setting of a dataclass and the dataclasses in it that a user may give: name=default, and what
    it means.
    """
    lines: list[str] = []
    for spec in own_first(type(config)):
        value, name = getattr(config, spec.name), prefix + spec.name
        if dataclasses.is_dataclass(value):
            lines += describe(value, name + ".")
        elif is_shown(spec):
            lines.append(setting_line(name, value, spec))
    return lines


def own_first(kind: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass, its own before those that it shares with its relatives."""
    classes = [vars(parent).get("__annotations__", {}) for parent in kind.__mro__]
    return sorted(dataclasses.fields(kind), key=lambda f: max(i for i, names in enumerate(classes) if f.name in names))


def is_shown(spec: dataclasses.Field[Any]) -> bool:
    """Whether a field is a setting that a user may give."""
    return bool(spec.metadata.get("help")) and not spec.metadata.get("filled")


def setting_line(name: str, value: Any, spec: dataclasses.Field[Any]) -> str:
    """The line of help for a setting: its name, its default `value` and its meaning."""
    return f"  {name + '=' + (spec.metadata.get('shown') or shown_value(value)):<40} {spec.metadata['help']}"


def shown_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value).replace(" ", "").replace("'", "")
