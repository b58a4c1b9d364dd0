"""What an environment of `offrl finetune` holds, and what comes of a step of all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from offrl.errors import UserError
from offrl.evaluation.arrays import finite_rows
from offrl.finetuning.play.snapshots import TASK

TEACHER_ACTIONS = "teacher_actions"  # of a row: what the teacher would have done


@dataclass
class Seat:
    """The running episode of one environment."""

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
    teacher_actions: np.ndarray | None = None  # like `actions`: what the teacher would have done, where there is one


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


def running(seats: Sequence[Seat], empty: np.ndarray) -> dict[str, torch.Tensor]:
    """The running episodes of K environments: each one's number, length and start [K], and the actions and
    interventions of all their steps, one episode after another. empty: no actions, of the kind.
    """
    flags = [flag for seat in seats for flag in seat.interventions]
    return {
        "episode": torch.tensor([seat.episode for seat in seats]),
        "length": torch.tensor([len(seat.actions) for seat in seats]),
        "start": torch.tensor([seat.start for seat in seats]),
        "actions": torch.from_numpy(np.concatenate([empty, *(np.stack(s.actions) for s in seats if s.actions)])),
        "interventions": torch.tensor(flags, dtype=torch.bool),
    }


def first_row(observation: np.ndarray, shape: tuple[int, ...], name: str, where: str) -> np.ndarray:
    """The flattened first observation of an episode. Raises UserError for one of another shape than its space's, or
    that is not finite.
    """
    row = np.asarray(observation)
    if row.shape != shape:
        raise UserError(f"{name} gave an observation of shape {row.shape}, its space says {shape} {where}")
    if not finite_rows(row[None])[0]:
        raise UserError(f"{name} gave an observation that is not finite {where}")
    return row


def start_seed(seed: int, replica_seed: int, env: int, episode: int) -> int:
    """The environment seed, 31 bits, of one episode: a hash, so that neighbours share no start state, nor any with
    evaluation.
    """
    text = f"offrl finetune {seed} {replica_seed} {env} {episode}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF


def check_goal(goal: np.ndarray | None, size: int, name: str, where: str) -> np.ndarray:
    """The goal of an episode, [size]. Raises UserError where there is none that fits."""
    if goal is None or goal.shape != (size,) or not np.isfinite(goal).all():
        fault = "no goal" if goal is None else f"a goal of shape {list(goal.shape)}, or one that is not finite"
        raise UserError(f"{name} gave {fault} {where}; info['goal'] is to be an observation, {size} numbers")
    return goal
