"""What the oracle says of a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LARGE = 48 << 20  # bytes of an array beyond which the oracle does not read


class Refused(Exception):
    """The file must not load."""


class Unknown(Exception):
    """The oracle cannot say what the file holds, or does not read so much: either is fine, and the watch over memory
    decides.
    """


@dataclass
class Doubts:
    """Why a file may be refused though it can be read. `blind`: what it would load as is not known either."""

    all: list[str] = field(default_factory=list)
    blind: bool = False
    amounts: bool = False  # the layout says that arrays of actions are amounts
    recorded: bool = (
        False  # the file has a record of offrl's, which says which ends and last successors were really there
    )

    def add(self, text: str) -> None:
        self.all.append(text)

    def lose(self, text: str) -> None:
        self.all.insert(0, text)
        self.blind = True

    @property
    def first(self) -> str:
        return self.all[0] if self.all else ""


@dataclass
class Truth:
    """An episode of T rows. Texts are lists of str in place of arrays."""

    observations: Any  # [T, ...]
    actions: Any  # [T, A], or [T] integers
    rewards: list[float]
    terminated: bool
    successors: list[Any]  # [T], None where nobody knows it; ... where the oracle does not say
    complete: bool | None = True  # False: the data stop inside the episode; None: the oracle does not say
    streams: dict[str, Any] = field(default_factory=dict)  # images of the rows [T, H, W, C]
    last: dict[str, Any] = field(default_factory=dict)  # and after the last row, where that is known


@dataclass
class Verdict:
    kind: str  # valid | refuse | either
    reason: str
    episodes: list[Truth] | None  # that it must have if it loads; None: no word on it
