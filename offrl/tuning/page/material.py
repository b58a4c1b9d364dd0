"""A tune's result as the sections of its page need it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.figures.tuning import number
from offrl.report.page import Cell, Page
from offrl.report.rows import whole
from offrl.settings.field import shown_value
from offrl.system import trust
from offrl.tuning.config import PLAY
from offrl.tuning.search.space import Dimension, Space
from offrl.tuning.table import FINAL

NONE = "\u2013"  # in place of a number that is not known
ERROR95 = 1.959964  # standard errors on either side of a 95% interval
JUDGES = {
    "fqe": "fitted Q evaluation: the discounted return that it expects",
    "model": "the discounted return in a learned model",
    "wis": "weighted importance sampling of the discounted return",
    "dr": "the doubly robust estimate of the discounted return",
    "td": "the TD error of the policy's own Q, negative, so that larger is better",
    "q": "what the policy's own Q expects",
    "lstd": "the LSTD tournament of the policies' own Qs",
    "bvft": "the BVFT tournament of the policies' own Qs",
}


@dataclass(frozen=True)
class Judgement:
    """One setting as one rung judged it; NaN where it could not."""

    setting: str
    algo: str
    rung: str
    bracket: int | None
    updates: int
    seeds: int  # that did not diverge
    value: float  # of the judge that decides
    error: float  # its standard error
    worst: float  # of the seeds
    distance: float  # of its actions from the data's
    others: Mapping[str, float]  # by the judges beside it
    exploded: str
    fate: str


class TunePage:
    """The page, and what it is about."""

    def __init__(self, folder: Path, result: Mapping[str, Any]) -> None:
        self.folder, self.result = folder, result
        self.algos: list[str] = list(result["algos"])
        self.settings: Mapping[str, Mapping[str, Any]] = result["settings"]
        self.chosen: str = str(result["chosen"]["setting"])
        judges = [j for j in result["judge"] if j != PLAY]
        self.judge = judges[0] if judges else ""  # the one that decides; "" where nothing but episodes did
        self.others = judges[1:]
        self.judgements = [_judgement(row, self.judge, self.others) for row in result["rows"]]
        self.spaces = {algo: _space(algo, entries, self._default(algo)) for algo, entries in result["spaces"].items()}
        data = str(result["data"]["name"])
        self.page = Page(f"Tune: {', '.join(self.algos)} on {data}", self._subtitle())

    @property
    def finals(self) -> list[Judgement]:
        """Of the last judgement, which chose."""
        return [j for j in self.judgements if j.rung == FINAL]

    @property
    def comparable(self) -> list[Judgement]:
        """Of the first rung, which judged every setting after as many updates."""
        first = next((j.rung for j in self.judgements), FINAL)
        return [j for j in self.judgements if j.rung == first]

    @property
    def defaults(self) -> list[str]:
        """The settings that would be trained without a search."""
        return [name for name in (f"{algo}-00" for algo in self.algos) if name in self.settings]

    def final(self, name: str) -> Judgement | None:
        """How the last judgement saw a setting."""
        return next((j for j in self.finals if j.setting == name), None)

    def kind(self, name: str) -> str:
        """How a setting is marked in pictures: chosen, default or neither."""
        return "chosen" if name == self.chosen else "default" if name in self.defaults else ""

    def label(self, name: str) -> str:
        """A setting's name with what makes it: `iql-04 (iql, temperature 3)`."""
        if name not in self.settings:
            return name
        inside = ", ".join(f"{k} {text(v)}" for k, v in self.settings[name]["values"].items())
        algo = [str(self.settings[name]["algo"])] if len(self.algos) > 1 else []
        return f"{name} ({', '.join([*algo, inside] if inside else algo)})" if inside or algo else name

    def estimate_of(self) -> str:
        """What the estimates are, in words."""
        return f"{self.judge} ({JUDGES[self.judge]})" if self.judge in JUDGES else self.judge

    def stage(self, name: str) -> dict[str, Any] | None:
        """A file of the tune's state; None where it is missing, damaged, or no object."""
        try:
            content = json.loads(trust.read_text(self.folder / "state" / f"{name}.json"))
        except (OSError, ValueError, RecursionError, UserError):
            return None
        return content if isinstance(content, dict) else None

    def _default(self, algo: str) -> Mapping[str, Any]:
        return self.result["settings"].get(f"{algo}-00", {}).get("values", {})

    def _subtitle(self) -> str:
        made, full = self.result["updates"]["made"], self.result["updates"]["full"]
        by = ", ".join(map(str, self.result["judge"]))
        share = f" ({made / full:.0%} of training all in full)" if full else ""
        return " \u00b7 ".join([plural(len(self.settings), "setting"), f"judged by {by}", f"{made:,} updates{share}"])


def _judgement(row: Mapping[str, Any], judge: str, others: Sequence[str]) -> Judgement:
    return Judgement(
        setting=str(row["setting"]),
        algo=str(row["algo"]),
        rung=str(row["rung"]),
        bracket=row.get("bracket"),
        updates=int(row.get("updates") or 0),
        seeds=int(row.get("seeds") or 0),
        value=real(row.get(judge)),
        error=real(row.get("error")),
        worst=real(row.get("worst")),
        distance=real(row.get("distance")),
        others={o: real(row.get(o)) for o in others},
        exploded=str(row.get("exploded") or ""),
        fate=str(row.get("fate") or ""),
    )


def _space(algo: str, entries: Sequence[Mapping[str, Any]], default: Mapping[str, Any]) -> Space:
    dimensions = tuple(
        Dimension(str(e["name"]), True, values=tuple(e["values"]))
        if e["values"]
        else Dimension(str(e["name"]), True, real(e["low"]), real(e["high"]), bool(e["log"]))
        for e in entries
    )
    return Space(algo, dimensions, default)


def real(x: Any) -> float:
    """A finite number; NaN for anything else."""
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) else math.nan


def text(value: Any) -> str:
    """A setting's value in few letters."""
    return number(value) if isinstance(value, float) else shown_value(value)


def cell(x: float, error: float = math.nan, **more: Any) -> Cell:
    """A number of a table, sorted by what it is, with its 95% interval below it where a standard error is known."""
    if not math.isfinite(x):
        return Cell(NONE, **more)
    small = (whole(f"\u00b1 {number(ERROR95 * error)}"),) if math.isfinite(error) else ()
    return Cell(number(x), small=small, value=float(x), **more)


def value_cell(value: Any) -> Cell | None:
    """A setting's value as a cell; an empty one where the algorithm has no such setting."""
    if value is None:
        return None
    plain = real(value)
    return Cell(text(value), value=plain if math.isfinite(plain) else None)


def plural(count: int, word: str) -> str:
    """`3 settings`, `1 setting`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def some(names: Sequence[str], most: int = 6) -> str:
    """The first few of many names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
