"""Search spaces: what of an algorithm's settings is searched, between which values.

Imports no torch. A setting that a grid can vary is a number of its own for each replica of one program; another one
(the widths of layers, a number of critics) decides a program, so that settings which differ in it are trained in
different runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offrl.errors import UserError, nearest
from offrl.settings.field import check
from offrl.settings.groups import grouped_name
from offrl.settings.presets import base_algorithm, config_folder, config_names, read_yaml
from offrl.settings.replicas import varied

SCALES = ("linear", "log")
WIDER = 2.0  # a wide range goes on so many times beyond the published values
KEYS = ("published", "values", "range", "scale", "safe")


@dataclass(frozen=True)
class Dimension:
    """One searched setting: a range, or a list of values."""

    name: str
    tensor: bool  # a number for each replica of one program; False: a program for each value
    low: float = math.nan
    high: float = math.nan
    log: bool = False
    values: tuple[Any, ...] = ()  # not empty: one of these, in this order
    safe: str = ""  # "low" or "high": the end that keeps a policy nearer to the data; "": neither

    def at(self, share: float) -> Any:
        """The value at a share in [0, 1) of the range, or of the list."""
        if self.values:
            return self.values[min(int(share * len(self.values)), len(self.values) - 1)]
        if self.log:
            return rounded(math.exp(math.log(self.low) + share * (math.log(self.high) - math.log(self.low))))
        return rounded(self.low + share * (self.high - self.low))

    def text(self) -> str:
        """As it is written in a command: `space.temperature=[0.25,20,log]`."""
        if self.values:
            return f"[{','.join(str(v).replace(' ', '') for v in self.values)}]"
        return f"[{self.low:g},{self.high:g},{'log' if self.log else 'linear'}]"


def rounded(value: float) -> float:
    """To four significant digits: commands and tables then show what was trained."""
    return float(f"{value:.4g}")


@dataclass(frozen=True)
class Space:
    """What is searched of one algorithm."""

    algo: str
    dimensions: tuple[Dimension, ...]
    default: Mapping[str, Any]  # the values that these settings have without a search: the first candidate

    @property
    def tensors(self) -> tuple[str, ...]:
        """The settings that replicas of one program can differ in."""
        return tuple(d.name for d in self.dimensions if d.tensor)

    def program(self, values: Mapping[str, Any]) -> tuple[Any, ...]:
        """What decides the program of a setting: its values of the others."""
        structural = (values[d.name] for d in self.dimensions if not d.tensor)
        return tuple(tuple(v) if isinstance(v, list) else v for v in structural)

    def caution(self, values: Mapping[str, Any]) -> tuple[float, ...]:
        """Orders settings by how near they stay to the data, larger is nearer: in the order of the dimensions that have
        a safe end.
        """
        result = []
        for d in self.dimensions:
            if d.safe:
                value = values[d.name]
                size = float(d.values.index(value)) if d.values and value in d.values else float(value)
                result.append(size if d.safe == "high" else -size)
        return tuple(result)


def space_of(algo: str, settings: Any, kind: str, ranges: Mapping[str, Any], vectorized: bool = True) -> Space:
    """The search space of an algorithm.

    settings: its Config as it would be trained without a search. kind: "wide", "published" or "none", of the values in
    configs/space. ranges: {name: what a command gave as space.NAME}. Raises UserError for names that it has not, ranges
    that are none, and where nothing is left to search.
    """
    file = base_algorithm(algo)
    has_file = file in config_names("space")
    known = read_yaml(config_folder() / "space" / f"{file}.yaml") if has_file and kind != "none" else {}
    names = [f.name for f in dataclasses.fields(settings)]
    for name in ranges:
        if name not in names:
            raise UserError(
                f"space.{name}: {algo} has no setting algo.{name}.{nearest(name, map(grouped_name, names))} "
                f"`offrl list algo={algo}` shows them"
            )
    if not known and not ranges:
        have = ", ".join(sorted(config_names("space")))
        raise UserError(
            f"nothing of {algo} is searched: no published ranges are known for it (they are for {have}); name settings "
            "yourself, such as space.learning_rate=[1e-4,1e-3,log]"
        )
    can = varied(type(settings)) if vectorized else []
    dimensions = []
    for name in dict.fromkeys((*known, *ranges)):
        entry = known.get(name, {})
        if bad := next((k for k in entry if k not in KEYS), ""):
            raise UserError(f"configs/space/{file}.yaml: {name} has an unknown entry '{bad}'.{nearest(bad, KEYS)}")
        dimension = (
            _from_command(name, ranges[name], name in can)
            if name in ranges
            else _published(name, entry, kind, name in can, settings)
        )
        dimensions.append(dataclasses.replace(dimension, safe=str(entry.get("safe", ""))))
    for d in dimensions:
        for value in d.values or (d.low, d.high):
            check(dataclasses.replace(settings, **{d.name: value}), "space.")
    default = {d.name: getattr(settings, d.name) for d in dimensions}
    # of a number that is null without a search, such as a limit, the middle
    default |= {d.name: d.at(0.5) for d in dimensions if d.tensor and default[d.name] is None}
    return Space(algo, tuple(dimensions), default)


def _published(name: str, entry: Mapping[str, Any], kind: str, tensor: bool, settings: Any) -> Dimension:
    """From configs/space: the values, or the range around them."""
    values = list(entry["published"])
    if kind == "published" or not tensor:
        return Dimension(name, tensor, values=tuple(entry.get("values", values)))
    log = entry.get("scale", "linear") == "log"
    if "range" in entry:
        low, high = map(float, entry["range"])
    else:
        positive = [float(v) for v in values if v > 0.0]
        low, high = min(positive) / WIDER, max(positive) * WIDER
    limits = next(f.metadata for f in dataclasses.fields(settings) if f.name == name)
    low = low if limits.get("low") is None else max(low, limits["low"])
    high = high if limits.get("high") is None else min(high, limits["high"])
    return Dimension(name, tensor, low, high, log)


def _from_command(name: str, entry: Any, tensor: bool) -> Dimension:
    """From a command: [low,high,log], [low,high,linear], or a list of values. Raises UserError."""
    values = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    values = [_number(v) for v in values]
    if values and values[-1] in SCALES:
        ends = values[:-1]
        if len(ends) != 2 or not all(map(_is_number, ends)):
            raise UserError(f"space.{name}: a range is written space.{name}=[low,high,{values[-1]}]")
        low, high = map(float, ends)
        if not low < high or not math.isfinite(high - low):
            raise UserError(
                f"space.{name}=[{low:g},{high:g},{values[-1]}]: the low end must be below the high one, and both finite"
            )
        if values[-1] == "log" and not low > 0.0:
            raise UserError(f"space.{name}=[{low:g},{high:g},log]: a logarithmic range begins above 0")
        if not tensor:
            raise UserError(
                f"space.{name}: algo.{name} decides how a program is built, and each value is one: name values, "
                f"space.{name}=[a,b]"
            )
        return Dimension(name, tensor, low, high, values[-1] == "log")
    if not values:
        raise UserError(
            f"space.{name}=[] has no values; write values, space.{name}=[a,b], or a range, space.{name}=[low,high,log]"
        )
    if any(values.count(v) > 1 for v in values):
        raise UserError(f"space.{name} has a value twice")
    wrong = [v for v in values if not _is_number(v)]
    if tensor and wrong:
        raise UserError(
            f"space.{name}: {wrong[0]} is no number; a range is [low,high,log] or [low,high,linear], values are [a,b,c]"
        )
    return Dimension(name, tensor, values=tuple(float(v) if tensor else v for v in values))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(value: Any) -> Any:
    """A number that YAML or Hydra took for a text (1e-4), as a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
