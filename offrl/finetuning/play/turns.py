"""What an environment of `offrl finetune` holds, and what comes of a step of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from offrl.finetuning.play.snapshots import TASK


@dataclass
class Seat:
    """One environment and its running episode."""

    env: Any
    replica: int
    seed: int  # of the replica
    number: int  # of the environment among the replica's
    episode: int = -1  # of this environment, from 0
    total: float = 0.0  # of the rewards so far, as the environment gave them
    actions: list[np.ndarray] = field(default_factory=list)  # in [-1, 1], or choices: of the steps so far
    interventions: list[bool] = field(default_factory=list)  # of the steps so far: whether the action was a person's
    start: int = TASK  # the row of the data in whose state the episode began
    success: float = np.nan  # the best of the steps so far, in [0, 1]; NaN: the environment said nothing

    def where(self, step: int | None = None) -> str:
        at = "" if step is None else f", step {step}"
        return f"(seed {self.seed}, environment {self.number}, episode {self.episode}{at})"


class Ended(NamedTuple):
    """An episode that ended."""

    replica: int
    total: float  # of the rewards, as the environment gave them
    length: int
    start: int  # see `Seat`
    success: float | None  # the best of its steps, in [0, 1]; None: the environment said nothing


@dataclass
class Turn:
    """One step of every environment: K = replicas x envs rows, replica after replica."""

    observations: np.ndarray  # [K, *O] before the action, as the environment gave them
    actions: np.ndarray  # [K, A] in [-1, 1], or [K] int64: those that were taken
    rewards: np.ndarray  # [K] float64, as the environment gave them
    # [K, *O]: after the last step of an episode the true one, not the next episode's first
    next_observations: np.ndarray
    terminated: np.ndarray  # [K] bool
    over: np.ndarray  # [K] bool: terminated or truncated
    valid: np.ndarray  # [K] bool: False where the physics blew up, after which there is no transition
    ended: list[Ended]
    successes: np.ndarray  # [K] float64 in [0, 1] of this step; NaN where the environment said nothing
    costs: np.ndarray  # [K] float64 of this step; likewise
    interventions: np.ndarray  # [K] bool: whether the action is that of `interventions=`, not the policy's


def blank(rows: np.ndarray, actions: np.ndarray) -> Turn:
    """A turn of as many environments as there are observations `rows`, none of which is valid. actions: any of the
    kind.
    """
    count = len(rows)
    flags, unknown, nothing = np.zeros(count, bool), np.full(count, np.nan), np.zeros_like(rows)
    return Turn(
        nothing,
        np.zeros((count, *actions.shape[1:]), actions.dtype),
        np.zeros(count),
        nothing.copy(),
        flags,
        flags.copy(),
        flags.copy(),
        [],
        unknown,
        unknown.copy(),
        flags.copy(),
    )
