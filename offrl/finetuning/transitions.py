"""From what was played to rows as the offline sampler gives them: normalised, rewards transformed, and what is known
only later; and to windows of several steps, for n-step targets and chunks of actions.

Each window is a row of the ring by itself, from when it is complete: its steps are those of one episode in one
environment, whatever the ring overwrites meanwhile and however many environments write to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import DataSpec
from offrl.data.raw import AMOUNTS
from offrl.data.samplers.chunks import WHOLE, ChunkSampler
from offrl.data.samplers.transitions import AT_END, FOLLOWING, SPAN, VALID, TransitionSampler
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError
from offrl.evaluation import streams
from offrl.evaluation.past import acted, begin, push
from offrl.finetuning.environments import Turn
from offrl.finetuning.replay_buffer import Column
from offrl.tasks.entries import VECTOR

Row = dict[str, Any]
LATE = ("next_actions", "returns_to_go")  # columns that a row gets from the rest of its episode
# (rewards, terminations, first rows, last + 1) -> [R]
Returns = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def returns_of(sampler: Any, discount: float) -> Returns:
    """The function that computes returns_to_go: the algorithm's sampler's (Cal-QL's), or with the discount of the
    data's column.
    """
    return getattr(sampler, "returns", None) or functools.partial(returns_to_go, discount=discount)


def columns_for(spec: DataSpec, sampler: Any, name: str) -> dict[str, Column]:
    """The columns of a row that `sampler`, that of the algorithm `name`, requires; observations of several streams are
    a column for each, such as observations/front. Raises UserError for what playing cannot give.
    """
    if not isinstance(sampler, TransitionSampler | ChunkSampler):
        raise UserError(f"{name} learns from batches of its own kind ({type(sampler).__name__}), which are not made of "
                        "single transitions: offrl finetune cannot go on with it")  # fmt: skip
    if unknown := [column for column in sampler.extra if column not in (*LATE, "costs")]:
        raise UserError(f"{name} learns from the data's column '{unknown[0]}', which an environment does not give")
    action: Column = ((), torch.int64) if spec.discrete else ((spec.action_dim,), torch.float32)
    number: Column = (), torch.float32
    columns = {
        **_observation("observations", spec),
        "actions": action,
        "rewards": number,
        **_observation("next_observations", spec),
        "masks": number,
    }
    columns |= {column: action if column == "next_actions" else number for column in sampler.extra}
    return columns | dict.fromkeys(getattr(sampler, "played", ()), number)


def _observation(name: str, spec: DataSpec) -> dict[str, Column]:
    kind = streams.kind_of(spec, window=True)
    if not spec.streams:
        return {f"{name}/{VECTOR}" * (spec.encoder is not None) or name: (kind.shape, torch.float32)}
    fields = (kind.fields or {}).items()
    kinds = {np.dtype(np.uint8): torch.uint8, np.dtype(np.float32): torch.float32}
    return {f"{name}/{field}": (part.shape, kinds[part.base]) for field, (part, *_) in fields}


def normal(spec: DataSpec, observations: np.ndarray) -> np.ndarray:
    """Observations [K, *O] of the environment as the algorithm sees them: with the data's statistics, which stay as
    they are.
    """
    if (moments := spec.observation_moments) is None:
        return observations
    mean, std = moments
    flat = observations.astype(np.float32).reshape(len(observations), -1)
    return ((flat - mean) / std).reshape(observations.shape)


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


def _head(column: str) -> str:
    return column.partition("/")[0]


def _renamed(column: str) -> str:
    """A column of next observations among those after a window's first step."""
    return FOLLOWING + column.removeprefix("next_observations")


class Rows:
    """Turns into rows. Those of which something is not known yet wait: for one step (next_actions), or for the end of
    the episode.

    The last row of an episode that was cut has no next action, and is left out where one is required, as in the data.
    """

    def __init__(
        self,
        spec: DataSpec,
        columns: Mapping[str, Column],
        replicas: int,
        envs: int,
        returns: Returns,
        sampler: Any = None,
    ) -> None:
        """returns: what returns_to_go of whole episodes are; see `returns_of`. sampler: the algorithm's, where it may
        draw windows; rows are then windows, and `columns` becomes theirs."""
        self.spec, self.returns = spec, returns
        self.windows = (
            RingWindows(sampler, replicas * envs) if sampler is not None and RingWindows.needed(sampler) else None
        )
        self.single = columns  # of one step
        self.columns = columns if self.windows is None else self.windows.columns(columns)
        self.owner = np.repeat(np.arange(replicas), envs)
        self.whole, self.following = "returns_to_go" in columns, "next_actions" in columns
        self.waiting: list[list[dict[str, Any]]] = [[] for _ in self.owner]  # the rows of each running episode
        several = bool(spec.streams) or spec.windowed
        self.past = begin(len(self.owner), spec, None) if several else None  # what they saw so far

    def observed(self, observations: np.ndarray) -> np.ndarray | dict[str, Tensor]:
        """Observations [K, ...] of the environments as the encoder or the algorithm takes them: of several streams by
        name, with the frames before them.
        """
        if self.past is None:
            return normal(self.spec, observations)
        visible = push(self.past, streams.tensors_of(observations, self.spec), self.spec)[0]
        return visible if self.spec.streams or self.spec.encoder is not None else visible[VECTOR].numpy()

    def _observations(self, turn: Turn) -> dict[str, np.ndarray]:
        """The columns of observations and their successors."""
        if self.past is None:
            parts = turn.observations, turn.next_observations
            return dict(zip(("observations", "next_observations"), (normal(self.spec, x) for x in parts), strict=True))
        before, past = push(self.past, streams.tensors_of(turn.observations, self.spec), self.spec)
        past = acted(past, torch.from_numpy(turn.actions), self.spec)
        after = push(past, streams.tensors_of(turn.next_observations, self.spec), self.spec)[0]
        valid, over = torch.from_numpy(turn.valid), torch.from_numpy(turn.over)

        def kept(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(valid.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        frames = {name: kept(x, self.past.frames[name]) for name, x in past.frames.items()}
        actions = kept(past.actions, self.past.actions)
        self.past = past._replace(frames=frames, actions=actions, fresh=self.past.fresh & ~valid | over)
        pairs = {"observations": before, "next_observations": after}.items()
        return {
            name if name in self.single else f"{name}/{stream}": x.numpy()
            for name, parts in pairs
            for stream, x in parts.items()
        }

    def take(self, turn: Turn) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """(whose [R], rows [R, ...]): what is known completely now, in order."""
        ready = {
            **self._observations(turn),
            "actions": turn.actions,
            "rewards": (turn.rewards * self.spec.reward_scale + self.spec.reward_shift).astype(np.float32),
            "masks": (~turn.terminated).astype(np.float32),
        }
        if "costs" in self.single:
            if np.isnan(turn.costs[turn.valid]).any():
                raise UserError(
                    f"the algorithm learns from costs, and the environment of {self.spec.name} gives none: "
                    "info['cost'] is what each step costs"
                )
            ready["costs"] = turn.costs.astype(np.float32)
        # flags of the data's rows alone, such as of demonstrations
        ready |= {
            name: np.zeros(len(turn.rewards), np.float32)
            for name in self.single
            if name not in ready and name not in LATE
        }
        if not (self.whole or self.following or self.windows):
            return self.owner[turn.valid], {name: column[turn.valid] for name, column in ready.items()}
        out: list[tuple[int, dict[str, Any]]] = []
        for k, owner in enumerate(self.owner.tolist()):
            if turn.valid[k]:
                self.waiting[k].append({name: column[k] for name, column in ready.items()})
            over, known = bool(turn.over[k]), []
            if over or not (self.whole or (self.following and len(self.waiting[k]) < 2)):
                known = self._known(k, over)
            if self.windows is not None:
                known = self.windows.take(k, known, over)
            out += [(owner, row) for row in known]
        rows = {name: np.stack([row[name] for _, row in out]) if out else np.zeros(0) for name in self.columns}
        return np.array([owner for owner, _ in out], np.int64), rows

    def drop(self, k: int) -> None:
        """Forget what waits of the episode of environment k."""
        self.waiting[k].clear()
        if self.past is not None:
            self.past.fresh[k] = True
        if self.windows is not None:
            self.windows.drop(k)

    def _known(self, k: int, over: bool) -> list[dict[str, Any]]:
        """The rows of environment k that are complete, which wait no longer."""
        rows = self.waiting[k]
        if not rows:
            return []
        if self.whole:
            rewards, ended = np.array([r["rewards"] for r in rows]), np.array([r["masks"] == 0 for r in rows])
            start, end = np.zeros(1, np.int64), np.full(1, len(rows), np.int64)
            for row, value in zip(rows, self.returns(rewards, ended, start, end), strict=True):
                row["returns_to_go"] = np.float32(value)
        if self.following:
            for row, later in zip(rows, rows[1:], strict=False):
                row["next_actions"] = later["actions"]
            if over and rows[-1]["masks"] == 0:
                rows[-1]["next_actions"] = rows[-1]["actions"]  # never looked at, as the data's
        known = rows[:-1] if self.following and "next_actions" not in rows[-1] else rows
        self.waiting[k] = [] if over else rows[len(known) :]
        return list(known)
