"""Runs that an algorithm builds on: the form in which it declares them, and in which it receives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offrl.data.dataset import DataSpec

if TYPE_CHECKING:
    from offrl.algorithm import Algorithm, TrainState


@dataclass(frozen=True)
class Pretrained:
    """A trained run that another one builds on, with the whole state of its training: critics and targets too."""

    # without a replica axis, optimiser states and `buffers`; on the CPU
    replicas: tuple[tuple[Algorithm, TrainState], ...]
    settings: dict[str, Any]  # of the algorithm: with them it can be built again
    identity: str  # the same for the same tensors
    fingerprint: str = ""  # of the data that it was trained on

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the first replica."""
        return self.replicas[0][0]

    @property
    def state(self) -> TrainState:
        """The state of the first replica."""
        return self.replicas[0][1]


@dataclass(frozen=True)
class Requirement:
    """A run that an algorithm builds on: the one that the setting of the requirement's name names, or one that is
    trained first.
    """

    algo: str = ""  # which algorithm is trained where no run is named; empty: one has to be named
    settings: Mapping[str, Any] = field(default_factory=dict)  # of that algorithm
    steps: int | None = None  # updates of that run; None: until it leaves `artifact`
    label: str = ""  # the name of its directory
    seed: int | None = None  # None: the first one of the run that requires it
    artifact: str = ""  # glob of a file that the run leaves when it is finished
    load: Callable[[str, DataSpec], Any] | None = None  # reads an artifact: `identity`, `fingerprint`; raises UserError
    check: Callable[[Any], None] = lambda run: None  # raises UserError for an unsuitable run
    select: Callable[[Any], Any] = lambda run: run  # the part of it that the algorithm is handed
    every_replica: bool = False  # all replicas count, those of a grid too, not the first one alone
    allow_other_normalisation: bool = False  # of observations and rewards, in its training
    of_rewards: bool = False  # it depends on rewards, which have to be in the same units
