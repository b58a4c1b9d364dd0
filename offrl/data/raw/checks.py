"""Faults of recorded data, each with where it is. Loading refuses the corrupting ones; `offrl data inspect` shows them
all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from offrl.data.memory import chunks
from offrl.data.raw import AMOUNTS, FLAGS, MOST_VALUES, RawData
from offrl.data.raw.infer import MANY_JUMPS, action_range, find_ends, step_limit
from offrl.data.raw.rows import not_finite_rows, outside, outside_rows
from offrl.data.tables.values import sentinels
from offrl.errors import UserError

_NUMBERING = (
    "number discrete actions from 0, without large gaps (numpy.unique(actions, return_inverse=True)), or write others "
    "as floats"
)
MOST_CHOICES = 1000  # beyond it whole numbers are amounts, not choices
FEWEST, MANY = 8, 128  # choices, up to which whole numbers are surely some, and beyond which they may be amounts
# episodes of one length, their share of all, and the length from which chance does not explain them
FEW, SHARE, LONG = (3, 0.05, 50)


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with the data, at its first occurrence."""

    kind: str  # missing | empty | length | shape | nan | actions | costs | overlap | jump | ends | limit
    severity: str  # "corrupting": training on it would go wrong; "warning": most likely not
    message: str  # what is wrong, how often; without the file's name
    episode: int | None = None
    row: int | None = None
    cure: str = ""

    @property
    def place(self) -> str:
        parts = [f"{k} {v}" for k, v in (("episode", self.episode), ("row", self.row)) if v is not None]
        return f" (first at {', '.join(parts)})" if parts else ""

    def __str__(self) -> str:
        return f"{self.message}{self.place}{'; ' + self.cure if self.cure else ''}"


def refuse(raw: RawData, faults: list[Fault], check: bool = True) -> None:
    """Raise UserError for the first corrupting fault. With `check` off only for those without which nothing can be
    built.
    """
    for fault in faults:
        if fault.severity == "corrupting" and (check or fault.kind in ("missing", "empty", "length", "shape")):
            more = sum(f.severity == "corrupting" for f in faults) - 1
            raise UserError(f"{raw.where}: {fault}" + (f" [and {more} more: offrl data inspect]" if more else ""))
        raw.warn(str(fault))


def find_faults(raw: RawData, clip_actions: bool = False) -> list[Fault]:
    """All faults of the columns, the corrupting ones first. Never raises for faulty data."""
    faults = form_faults(raw)
    if any(f.severity == "corrupting" for f in faults):
        return faults + _not_finite(raw, None)
    ends = find_ends(raw, split_jumps=False)
    faults += _not_finite(raw, ends) + _actions(raw, ends, clip_actions) + _costs(raw, ends) + _ends(raw, ends)
    if raw.source in ("file", "arrays"):  # a person's own
        faults += [Fault("nan", "warning", text, _episode(ends, row), row, cure) for text, row, cure in sentinels(raw)]
    return sorted(faults, key=lambda f: f.severity != "corrupting")


def form_faults(raw: RawData) -> list[Fault]:
    """Columns that are missing or do not fit together. With a corrupting fault among these nothing can be built,
    whatever `check` says.
    """
    missing = [k for k in ("observations", "actions", "rewards") if k not in raw.columns]
    faults = [
        Fault("missing", "corrupting", f"there are no {k}", cure=f"set dataset.fields.{k} to their key in the file")
        for k in missing
    ]
    if not missing and raw.rows == 0:
        faults.append(Fault("empty", "corrupting", "the dataset has no rows"))
    return faults + _shapes(raw)


def _episode(ends: np.ndarray | None, row: int) -> int | None:
    """The episode that holds `row`."""
    return int(ends[:row].sum()) if ends is not None and row < len(ends) else None


def _shapes(raw: RawData) -> list[Fault]:
    faults, rows = [], raw.rows

    def add(kind: str, message: str, row: int | None = None, cure: str = "") -> None:
        faults.append(Fault(kind, "corrupting", message, row=row, cure=cure))

    ends = {} if raw.episode_ends is None else {"episode_ends": raw.episode_ends}
    for name, column in (raw.columns | ends).items():
        if len(column) != rows:
            message = f"'{name}' has {len(column)} rows but 'observations' has {rows}"
            add("length", message, min(rows, len(column)), "one row per step is needed in every column")
        single = name in (*FLAGS, *AMOUNTS, "episode_ends") or (name == "actions" and raw.discrete)
        rank = 1 if single else 2 if name == "actions" and raw.discrete is not None else None
        if rank is not None and column.ndim != rank:
            add("shape", f"'{name}' has shape {list(column.shape)}; {rank} dimension(s) are expected")
        elif name == "actions" and not math.prod(column.shape[1:]):
            add("shape", f"'{name}' has shape {list(column.shape)}; it holds no numbers")
    observations, finals = raw.columns.get("observations"), raw.final_observations
    successors, name, cure = raw.columns.get("next_observations"), "next_observations", ""
    if successors is None:
        successors, name, cure = finals, "final_observations", "one row like an observation is needed for each episode"
    if successors is not None and observations is not None and successors.shape[1:] != observations.shape[1:]:
        message = f"'{name}' has shape {list(successors.shape)}, 'observations' {list(observations.shape)}"
        add("shape", message, cure=cure)
    if not faults and rows and finals is not None and len(finals) != (episodes := int(find_ends(raw).sum())):
        add("length", f"'final_observations' has {len(finals)} rows but there are {episodes} episodes")
    return faults


def _not_finite(raw: RawData, ends: np.ndarray | None) -> list[Fault]:
    faults = []
    columns = dict(raw.columns)
    if raw.final_observations is not None and "next_observations" not in columns:
        columns["final_observations"] = raw.final_observations
    for name, column in columns.items():
        if len(rows := not_finite_rows(column)):
            first, count = int(rows[0]), len(rows)
            value = column[first].reshape(-1)
            problem = "NaN" if np.isnan(value).any() else "infinite values"
            message = f"'{name}' has {problem} in {count} row{'s' if count > 1 else ''}"
            cure = "remove those episodes, or set dataset.check=false to load them all the same"
            if name in raw.columns and (specs := raw.column_specs(name)):
                message += f", the first in column '{specs[int(np.argmin(np.isfinite(value)))].name}'"
                if name == "observations":
                    cure += ", or dataset.missing=forward to take the last value before"
            final = name == "final_observations"  # a row for each episode
            episode, row = (first, None) if final else (_episode(ends, first), first)
            faults.append(Fault("nan", "corrupting", message, episode, row, cure))
    return faults


def _actions(raw: RawData, ends: np.ndarray, clip_actions: bool) -> list[Fault]:
    actions = raw.columns["actions"]
    if actions.dtype.kind in "iu" and actions.ndim == 1:
        if raw.num_actions > MOST_VALUES:
            message = f"{raw.num_actions:,} discrete actions are declared; at most {MOST_VALUES:,} are possible"
            return [Fault("actions", "corrupting", message, cure=_NUMBERING)]
        limit = raw.num_actions or MOST_VALUES
        bad = np.flatnonzero((actions < 0) | (actions >= limit))
        if not len(bad):
            return [] if raw.num_actions else _amounts(actions)
        row = int(bad[0])
        message = f"'actions' holds {int(actions[row])}, which is no number from 0 to {limit - 1} ({len(bad)} rows)"
        return [Fault("actions", "corrupting", message, _episode(ends, row), row, _NUMBERING)]
    low, high = action_range(raw)
    faults = [] if raw.range_known else _choices(actions)
    if clip_actions or not (count := len(rows := outside_rows(actions, low, high))):
        return faults
    first = int(rows[0])
    dimension = int(outside(actions[first], low, high).argmax())
    message = (
        f"'actions' leaves the environment's range in {count} row{'s' if count > 1 else ''}: dimension {dimension} is "
        f"{float(actions[first, dimension]):.6g}, outside [{low[dimension]:.6g}, {high[dimension]:.6g}]"
    )
    cure = "set dataset.clip_actions=true to clip them, or the right dataset.action_low and dataset.action_high"
    return [*faults, Fault("actions", "corrupting", message, _episode(ends, first), first, cure)]


def _costs(raw: RawData, ends: np.ndarray) -> list[Fault]:
    """Costs below 0, and warnings where none is above, or where episodes terminate with one."""
    costs = raw.columns.get("costs")
    if costs is None:
        return []
    if len(rows := np.flatnonzero(costs < 0.0)):
        row = int(rows[0])
        message = f"'costs' holds {float(costs[row]):.6g}, which is below 0 ({len(rows):,} rows)"
        cure = (
            "a cost is 0 or what a step adds to the sum that a limit bounds: write it so, or give a column that is "
            "something else another name, such as dataset.fields.bill=COLUMN"
        )
        return [Fault("costs", "corrupting", message, _episode(ends, row), row, cure)]
    if not (costs > 0.0).any():
        return [Fault("costs", "warning", "'costs' are all 0: every limit holds, and nothing is learnt from them")]
    rows = np.flatnonzero(raw.columns.get("terminations", np.zeros(raw.rows, bool)) & (costs > 0.0))
    if not len(rows):
        return []
    message = f"{len(rows):,} episode(s) terminate in a step with a cost: what it would have gone on to cost is unknown"
    cure = "algo.cost_after_end=hold lets such a step's cost go on for ever"
    return [Fault("costs", "warning", message, _episode(ends, int(rows[0])), int(rows[0]), cure)]


def _amounts(actions: np.ndarray) -> list[Fault]:
    """A warning where whole numbers [R] from 0, taken for choices, look like amounts: few of the numbers up to the
    largest occur, the smallest is far from 0, or they are very many."""
    counts = np.bincount(actions)
    taken = np.flatnonzero(counts)
    if len(counts) <= FEWEST or (2 * len(taken) >= len(counts) and 10 * taken[0] < len(counts) <= MANY):
        return []
    message = (
        f"'actions' are whole numbers from {taken[0]:,} to {taken[-1]:,}, of which {len(taken):,} occur, and are taken "
        f"for {len(counts):,} choices"
    )
    cure = (
        "state their range if they are amounts (dataset.action_low and action_high, or action_low= and action_high=), "
        "else " + _NUMBERING
    )
    return [Fault("actions", "warning", message, cure=cure)]


def _choices(actions: np.ndarray) -> list[Fault]:
    """A warning where continuous actions [R, A], whose range nobody states, look like choices: whole numbers, or
    one-hot rows.
    """
    low, high, single = np.inf, -np.inf, actions.shape[1] > 1
    for part in chunks(len(actions)):
        block = actions[part]
        with np.errstate(invalid="ignore"):
            if not (block == np.rint(block)).all():
                return []
        low, high = min(low, float(block.min())), max(high, float(block.max()))
        single = single and low == 0.0 and high == 1.0 and bool((block.sum(1) == 1.0).all())
    # full thrust either way is no choice
    if not low < high or high - low > MOST_CHOICES or (low < 0.0 and low >= -1.0 and high <= 1.0):
        return []
    span = f"whole numbers from {low:g} to {high:g}"
    stated = (
        "or state their range (dataset.action_low and action_high, or action_low= and action_high=) if they are "
        "continuous"
    )
    if single:
        message = (
            f"every row of 'actions' has a single 1 among {actions.shape[1]} numbers: it looks like a one-hot discrete "
            "action"
        )
        cure = "store the choice, actions.argmax(1), as integers"
    elif actions.shape[1] == 1:
        message = f"'actions' are floats, but all of them are {span}: it looks like a discrete action"
        cure = "store them as integers"
    else:
        message = f"'actions' are {actions.shape[1]} {span} a row: they look like several discrete choices at once"
        cure = "number their combinations, numpy.ravel_multi_index, and store these as integers [R]"
    return [Fault("actions", "warning", f"{message}, and is taken as continuous", cure=f"{cure}, {stated}")]


def _time_limits(raw: RawData, ends: np.ndarray) -> list[Fault]:
    """A warning where terminations seem to be those of a time limit: episodes that end by one, at the environment's
    limit or at a length that none exceeds and many share."""
    if "terminations" not in raw.columns:
        return []
    last = np.flatnonzero(ends)
    lengths = np.diff(last, prepend=-1)
    ended = raw.columns["terminations"][last]
    limit = step_limit(raw.task)
    longest = limit if limit and (lengths == limit).any() else int(lengths.max())
    at = np.flatnonzero(ended & (lengths == longest))
    alike = len(at) == int(ended.sum()) and len(ended) - len(at) <= (not raw.last_complete)
    many = longest >= LONG and len(at) >= max(FEW, SHARE * len(ended))
    cut = "truncations" in raw.columns and bool(raw.columns["truncations"].any())
    if len(at) < (2 if longest == limit else FEW) or not (
        longest == limit or (not cut and longest > 1 and (alike or many))
    ):
        return []
    quantity = f"all {len(at):,}" if alike else f"{len(at):,} of {len(ended):,}"
    message = f"{quantity} episodes end by a termination after exactly {longest:,} steps" + (
        ", the environment's time limit" if longest == limit else ", which none exceeds"
    )
    message += ": a time limit stored as a termination teaches values of 0 there"
    cure = "mark those rows as truncations, unless the task does end there"
    return [Fault("limit", "warning", message, int(at[0]), int(last[at[0]]), cure)]


def _ends(raw: RawData, ends: np.ndarray) -> list[Fault]:
    faults, columns = [], raw.columns
    marked = [k for k in FLAGS if k in columns] + (["episode_ends"] if raw.episode_ends is not None else [])
    episodes = int(ends.sum())
    if episodes == 1 and not raw.last_complete:
        if not marked and raw.source == "arrays":
            message = (
                f"nothing marks where episodes end: all {raw.rows:,} rows are taken for one episode, cut off at its end"
            )
            cure = "give terminations=, truncations= or episode_ends=, if only its last row"
            faults.append(Fault("ends", "warning", message, cure=cure))
        elif not marked:
            message = "nothing marks where episodes end, so that successors and returns would run across them"
            cure = (
                "set dataset.fields.terminations, truncations, episode_ends or episode_ids (or dataset.check=false for "
                "one endless episode)"
            )
            faults.append(Fault("ends", "corrupting", message, cure=cure))
        else:
            message = f"no row of {' or '.join(marked)} is set: all {raw.rows} rows are taken for one episode"
            faults.append(Fault("ends", "warning", message, 0, 0))
    elif not raw.last_complete and (marked or episodes > 1):
        message = f"the last of {episodes} episodes has no end mark; it is closed as a time-out"
        faults.append(Fault("ends", "warning", message, episodes - 1, raw.rows - 1))
    if all(k in columns for k in FLAGS):
        both = np.flatnonzero(columns["terminations"] & columns["truncations"])
        if len(both):
            message = f"{len(both)} row(s) are marked both as termination and as time-out; they count as terminations"
            faults.append(Fault("overlap", "warning", message, _episode(ends, int(both[0])), int(both[0])))
    faults += _time_limits(raw, ends)
    if raw.jump_rows is not None and len(raw.jump_rows):
        row, count = int(raw.jump_rows[0]), len(raw.jump_rows)
        frequent = count > MANY_JUMPS * raw.rows
        message = f"{count} stored successor(s) differ from the next row's observation inside an episode: " + (
            "next_observations and observations do not belong together"
            if frequent
            else "an end mark is missing, and the episode is split there"
        )
        cure = (
            "set dataset.fields.next_observations to the right key, or leave them out of the file" if frequent else ""
        )
        faults.append(Fault("jump", "corrupting" if frequent else "warning", message, _episode(ends, row), row, cure))
    return faults
