"""Windows of several steps of what is played, as the offline samplers draw them: for n-step targets, chunks of actions
and world models of latent states.

Each window is a row of the ring by itself, from when it is complete: its steps are those of one episode in one
environment, whatever the ring overwrites meanwhile and however many environments write to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from offrl.data.raw import AMOUNTS
from offrl.data.samplers.chunks import WHOLE, ChunkSampler
from offrl.data.samplers.decisions import DECISION, POSITION, SKILLS, DecisionSampler
from offrl.data.samplers.goals import GoalSampler
from offrl.data.samplers.states import (
    ARRIVAL_REWARDS,
    FLAGS,
    IS_FIRST,
    IS_LAST,
    IS_TERMINAL,
    PREVIOUS_ACTIONS,
    StateSampler,
)
from offrl.data.samplers.transitions import AT_END, FOLLOWING, SPAN, VALID
from offrl.finetuning.replay.ring import Column

Row = dict[str, Any]
OBSERVED = "observations"
INTERVENTION = "intervention"  # of a row: whether a person took its action


def windows_of(sampler: Any, environments: int) -> RingWindows | RingStates | RingDecisions | None:
    """What makes windows of the rows of K environments, as the algorithm's sampler draws them; None where it draws
    single rows; a sampler of goals makes its windows of the ring's rows.
    """
    if isinstance(sampler, GoalSampler):
        return None
    if isinstance(sampler, StateSampler):
        return RingStates(sampler, environments)
    if isinstance(sampler, DecisionSampler):
        return RingDecisions(sampler, environments)
    if isinstance(sampler, ChunkSampler) or getattr(sampler, "n_step", 1) > 1:
        return RingWindows(sampler, environments)
    return None


class RingWindows:
    """The windows of K environments: rows go in, in order, and come out with the steps after them."""

    def __init__(self, sampler: Any, environments: int) -> None:
        """sampler: the algorithm's, whose batches are to be met."""
        self.chunks = isinstance(sampler, ChunkSampler)
        self.length = int(sampler.length if self.chunks else sampler.n_step)
        self.waiting: list[list[Row]] = [[] for _ in range(environments)]

    def columns(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """The columns of a window, of those of a row."""
        length = (self.length,)
        more: dict[str, Column] = {
            **{f"step_{name}": (length, torch.float32) for name in AMOUNTS if name in columns},
            VALID: (length, torch.bool),
            SPAN: ((), torch.int64),
        }
        more |= {_renamed(name): column for name, column in columns.items() if _head(name) == "next_observations"}
        if self.chunks:
            shape, kind = columns["actions"]
            more |= {"actions": ((*length, *shape), kind), WHOLE: ((), torch.float32)}
        return {**columns, **more}

    def take(self, k: int, rows: list[Row], over: bool) -> list[Row]:
        """The windows of environment k that are complete with these rows; with `over` the episode ends, and with it all
        of its windows.
        """
        waiting = self.waiting[k]
        waiting += rows
        count = len(waiting) if over else max(0, len(waiting) - self.length + 1)
        windows = [self._window(waiting[i : i + self.length]) for i in range(count)]
        self.waiting[k] = waiting[count:]
        return windows

    def drop(self, k: int) -> None:
        """Forget the running windows of environment k."""
        self.waiting[k] = []

    def _window(self, rows: list[Row]) -> Row:
        first, last, span = rows[0], rows[-1], len(rows)
        amounts = {f"step_{name}": np.zeros(self.length, np.float32) for name in AMOUNTS if name in first}
        for name, values in amounts.items():
            values[:span] = [row[name.removeprefix("step_")] for row in rows]
        valid = np.arange(self.length) < span
        window = {**first, **{name: value for name, value in last.items() if _head(name) in AT_END}}
        window |= {**amounts, VALID: valid, SPAN: np.int64(span)}
        window |= {_renamed(name): value for name, value in first.items() if _head(name) == "next_observations"}
        if self.chunks:
            window["actions"] = np.stack([row["actions"] for row in rows] + [last["actions"]] * (self.length - span))
            window[WHOLE] = np.float32(span == self.length or last["masks"] == 0.0)
        return window


class RingStates:
    """The states of K environments for a StateSampler: rows go in, in order, and come out as "strict" windows that
    begin at each state, or for "chain" as single states, of which `offrl.finetuning.replay.sources.chains` makes
    windows.
    """

    def __init__(self, sampler: StateSampler, environments: int) -> None:
        self.windows = sampler.kind == "strict"
        self.length, self.past_end = sampler.length if self.windows else 1, sampler.past_end
        self.waiting: list[list[Row]] = [[] for _ in range(environments)]  # states, of which a window is not complete
        self.last: list[Row | None] = [None] * environments  # the row before, of the same episode

    def columns(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """The columns of a window or a state, of those of a row."""
        action, choice = columns["actions"]
        length = (self.length,) if self.windows else ()
        return {
            **{name: ((*length, *shape), kind) for name, (shape, kind) in columns.items() if _head(name) == OBSERVED},
            **dict.fromkeys(("actions", PREVIOUS_ACTIONS), ((*length, *action), choice)),
            **dict.fromkeys(("rewards", ARRIVAL_REWARDS), (length, torch.float32)),
            **dict.fromkeys(FLAGS, (length, torch.bool)),
        }

    def take(self, k: int, rows: list[Row], over: bool) -> list[Row]:
        """The windows or states of environment k that are complete with these rows; with `over` the episode ends."""
        states = self.waiting[k]
        for row in rows:
            states.append(_state(row, row, self.last[k]))
            self.last[k] = row
        last = self.last[k]
        if over and last is not None:
            after = {name.removeprefix("next_"): x for name, x in last.items() if _head(name) == "next_observations"}
            terminal = last["masks"] == 0.0
            states.append(_state(after, last, last) | {IS_LAST: True, IS_TERMINAL: terminal})
            if self.past_end and terminal:  # windows that begin at its last rows, too
                states += states[-1:] * (self.length - 2)
        count = max(0, len(states) - self.length + 1)
        windows = states[:count]
        if self.windows:
            windows = [
                {name: np.stack([state[name] for state in states[i : i + self.length]]) for name in states[i]}
                | {INTERVENTION: states[i][INTERVENTION]}
                for i in range(count)
            ]
        if over:
            self.drop(k)
        else:
            self.waiting[k] = states[count:]
        return windows

    def drop(self, k: int) -> None:
        """Forget the running windows of environment k."""
        self.waiting[k], self.last[k] = [], None


class RingDecisions:
    """The steps of K environments for a DecisionSampler: rows go in, in order, and come out when their decision is
    over, each with that.
    """

    def __init__(self, sampler: DecisionSampler, environments: int) -> None:
        self.length = sampler.length
        self.skills = np.zeros((environments, sampler.width), np.float32)  # in which the last steps were made
        self.waiting: list[list[Row]] = [[] for _ in range(environments)]  # the steps of the running decisions

    def columns(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """The columns of a step with its decision, of those of a row."""
        of_decision = {f"{DECISION}{name}": columns[name] for name in (OBSERVED, "next_observations", "masks")}
        number: Column = (), torch.int64
        more: dict[str, Column] = {SKILLS: (self.skills.shape[1:], torch.float32), POSITION: number, SPAN: number}
        return {**columns, **of_decision, **more, "step_rewards": ((self.length,), torch.float32)}

    def take(self, k: int, rows: list[Row], over: bool) -> list[Row]:
        """The steps of environment k whose decision is over with these rows; with `over` the episode ends."""
        steps = self.waiting[k]
        steps += rows
        if not steps or not (over or len(steps) == self.length):
            return []
        self.drop(k)
        rewards = np.zeros(self.length, np.float32)
        rewards[: len(steps)] = [row["rewards"] for row in steps]
        decision = {f"{DECISION}{OBSERVED}": steps[0][OBSERVED], SKILLS: self.skills[k].copy(), "step_rewards": rewards}
        decision |= {f"{DECISION}{name}": steps[-1][name] for name in ("next_observations", "masks")}
        return [{**row, **decision, POSITION: i, SPAN: len(steps)} for i, row in enumerate(steps)]

    def drop(self, k: int) -> None:
        """Forget the running decision of environment k."""
        self.waiting[k] = []


def _state(observed: Row, row: Row, before: Row | None) -> Row:
    """The state with these observations, the step from it on and the one that led to it (zeros where there is none)."""
    return {
        **{name: x for name, x in observed.items() if _head(name) == OBSERVED},
        "actions": row["actions"],
        "rewards": row["rewards"],
        INTERVENTION: row[INTERVENTION],
        PREVIOUS_ACTIONS: np.zeros_like(row["actions"]) if before is None else before["actions"],
        ARRIVAL_REWARDS: np.zeros_like(row["rewards"]) if before is None else before["rewards"],
        IS_FIRST: before is None,
        IS_LAST: False,
        IS_TERMINAL: False,
        VALID: True,
    }


def _head(column: str) -> str:
    return column.partition("/")[0]


def _renamed(column: str) -> str:
    """A column of next observations among those after a window's first step."""
    return FOLLOWING + column.removeprefix("next_observations")
