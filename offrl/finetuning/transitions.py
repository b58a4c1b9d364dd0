"""From what was played to rows as the offline sampler gives them: normalised, rewards transformed, and what is known
only later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import DataSpec
from offrl.data.samplers.chunks import ChunkSampler
from offrl.data.samplers.decisions import SKILLS, DecisionSampler
from offrl.data.samplers.demonstrations import DEMONSTRATION
from offrl.data.samplers.goals import GoalSampler
from offrl.data.samplers.states import StateSampler
from offrl.data.samplers.transitions import TransitionSampler
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError
from offrl.evaluation import streams
from offrl.evaluation.past import acted, begin, push
from offrl.finetuning.moving import MovingReturns
from offrl.finetuning.play.turns import TEACHER_ACTIONS, Turn
from offrl.finetuning.replay.ring import Column
from offrl.finetuning.replay.sources import LAST, is_chain
from offrl.finetuning.windows import INTERVENTION, RingDecisions, windows_of
from offrl.tasks.entries import VECTOR

LATE = ("next_actions", "returns_to_go", LAST)  # columns that a row gets from the rest of its episode
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
    extra = getattr(sampler, "extra", ())
    goals = isinstance(sampler, GoalSampler)
    if goals and (spec.streams or spec.windowed or spec.encoder is not None or spec.goal_dim):
        kind = "parts of a state (achieved_goals)" if spec.goal_dim else "images or windows"
        raise UserError(f"{name} learns online towards goals that are whole observations of one vector, and those of "
                        f"{spec.name} are {kind}")  # fmt: skip
    if not isinstance(sampler, TransitionSampler | ChunkSampler | StateSampler | GoalSampler | DecisionSampler):
        raise UserError(f"{name} learns from batches of its own kind ({type(sampler).__name__}), which are not made of "
                        "single transitions: offrl finetune cannot go on with it")  # fmt: skip
    if unknown := [column for column in extra if column not in (*LATE, "costs")]:
        raise UserError(f"{name} learns from the data's column '{unknown[0]}', which an environment does not give")
    action: Column = ((), torch.int64) if spec.discrete else ((spec.action_dim,), torch.float32)
    number: Column = (), torch.float32
    columns = {**_observation("observations", spec), "actions": action, **_observation("next_observations", spec)}
    columns |= {LAST: ((), torch.int32)} if goals else {"rewards": number, "masks": number}
    columns |= {column: action if column == "next_actions" else number for column in extra}
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
        moving: MovingReturns | None = None,
    ) -> None:
        """returns: what returns_to_go of whole episodes are; see `returns_of`. sampler: the algorithm's, where it may
        draw windows; rows are then windows, and `columns` becomes theirs. moving: what looks at the rewards too."""
        self.spec, self.returns, self.moving = spec, returns, moving
        self.windows = windows_of(sampler, replicas * envs)
        self.single = columns  # of one step
        self.columns = columns if self.windows is None else self.windows.columns(columns)
        # whose rows of each environment are: its replica's, or its own, where windows need them in a row
        self.owner = np.arange(replicas * envs) // (1 if is_chain(sampler) else envs)
        self.following = "next_actions" in columns
        self.whole = "returns_to_go" in columns or LAST in columns
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

    def take(self, turn: Turn, memory: Mapping[str, np.ndarray] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """(whose [R], as `owner`; rows [R, ...]): what is known completely now, in order. Besides `columns` a row says
        whether its (first) action was an intervention, bool.

        memory: columns [K, ...] that the policies' memory says of the turn; None: it is played again.
        """
        if isinstance(self.windows, RingDecisions) and memory is not None:
            self.windows.skills = memory[SKILLS]
        ready = {
            **self._observations(turn),
            "actions": turn.actions,
            "rewards": (turn.rewards * self.spec.reward_scale + self.spec.reward_shift).astype(np.float32),
            "masks": (~turn.terminated).astype(np.float32),
        }
        if self.moving is not None:
            self.moving.add(turn, ready["rewards"])
        if "costs" in self.single:
            if np.isnan(turn.costs[turn.valid]).any():
                raise UserError(
                    f"the algorithm learns from costs, and the environment of {self.spec.name} gives none: "
                    "info['cost'] is what each step costs"
                )
            ready["costs"] = turn.costs.astype(np.float32)
        if turn.teacher_actions is not None:
            ready[TEACHER_ACTIONS] = turn.teacher_actions
        # flags of the data's rows alone; a person's actions are demonstrations too
        ready |= {
            name: (turn.interventions & (name == DEMONSTRATION)).astype(np.float32)
            for name in self.single
            if name not in ready and name not in LATE
        }
        ready[INTERVENTION] = turn.interventions
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
        names = (*self.columns, INTERVENTION)
        rows = {name: np.stack([row[name] for _, row in out]) if out else np.zeros(0) for name in names}
        return np.array([owner for owner, _ in out], np.int64), rows

    def drop(self, k: int) -> None:
        """Forget what waits of the episode of environment k."""
        self.waiting[k].clear()
        if self.moving is not None:
            self.moving.rewards[k].clear()
        if self.past is not None:
            self.past.fresh[k] = True
        if self.windows is not None:
            self.windows.drop(k)

    def _known(self, k: int, over: bool) -> list[dict[str, Any]]:
        """The rows of environment k that are complete, which wait no longer."""
        rows = self.waiting[k]
        if not rows:
            return []
        if LAST in self.single:
            for i, row in enumerate(rows):
                row[LAST] = np.int32(len(rows) - 1 - i)
        if "returns_to_go" in self.single:
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
        return known
