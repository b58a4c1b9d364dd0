"""Windows of several steps of what is played, as the offline samplers make them of the data: for n-step targets and
chunks of actions.

Each window is a row of the ring by itself, from when it is complete: its steps are those of one episode in one
environment, whatever the ring overwrites meanwhile and however many environments write to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from offrl.data.samplers.chunks import WHOLE, ChunkSampler
from offrl.data.samplers.transitions import AT_END, FOLLOWING, SPAN, STEP_REWARDS, VALID
from offrl.finetuning.replay_buffer import Column

Row = dict[str, Any]


class RingWindows:
    """The windows of K environments: rows go in, in order, and come out with the steps after them."""

    def __init__(self, sampler: Any, environments: int) -> None:
        """sampler: the algorithm's, whose batches are to be met."""
        self.chunks = isinstance(sampler, ChunkSampler)
        self.length = int(sampler.length if self.chunks else sampler.n_step)
        self.waiting: list[list[Row]] = [[] for _ in range(environments)]

    @staticmethod
    def needed(sampler: Any) -> bool:
        """True for a sampler of windows."""
        return isinstance(sampler, ChunkSampler) or sampler.n_step > 1

    def columns(self, columns: Mapping[str, Column]) -> dict[str, Column]:
        """The columns of a window, of those of a row."""
        length = (self.length,)
        more: dict[str, Column] = {
            STEP_REWARDS: (length, torch.float32),
            VALID: (length, torch.bool),
            SPAN: ((), torch.int64),
        }
        more[FOLLOWING] = columns["next_observations"]
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
        rewards = np.zeros(self.length, np.float32)
        rewards[:span] = [row["rewards"] for row in rows]
        valid = np.arange(self.length) < span
        window = {**first, **{name: last[name] for name in AT_END if name in last}}
        window |= {STEP_REWARDS: rewards, VALID: valid, SPAN: np.int64(span), FOLLOWING: first["next_observations"]}
        if self.chunks:
            window["actions"] = np.stack([row["actions"] for row in rows] + [last["actions"]] * (self.length - span))
            window[WHOLE] = np.float32(span == self.length or last["masks"] == 0.0)
        return window
