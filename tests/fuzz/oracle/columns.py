"""Columns of rows in time order, episode after episode: which they are, and which episodes they make."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.oracle.verdict import Doubts, Refused, Truth, Unknown

WORDS = {
    "observations": ("observation", "obs"),
    "actions": ("action",),
    "rewards": ("reward",),
    "next_observations": ("next_observation", "next_obs"),
    "terminations": ("terminals", "termination", "terminal"),
    "truncations": ("timeouts", "truncation", "timeout"),
    "episode_ends": ("episode_end", "episode_terminals"),
    "episode_ids": ("episode_id",),
}
COLUMNS = (
    "observations",
    "actions",
    "rewards",
    "terminations",
    "truncations",
    "next_observations",
    "episode_ends",
    "episode_ids",
    "final_observations",
)
OGBENCH = re.compile(r"(visual-)?(pointmaze|antmaze|cube|scene|puzzle)-.*-v\d+(-val)?")
# discrete actions beyond the first may be questioned, beyond the second must be
FEW_ACTIONS, MOST_ACTIONS = (1000, 10**8)
JUMPS = 0.1  # the share of rows from which on stored successors and observations do not belong together


def choose(file: Any, path: Path, fields: dict[str, str], doubts: Doubts) -> dict[str, np.ndarray]:
    """The columns by offrl's names."""
    keys = set(file.keys)
    table: dict[str, np.ndarray] = {}
    compact = {"observations", "actions", "terminals"} <= keys and not {
        "rewards",
        "timeouts",
        "next_observations",
    } & keys
    if file.kind == "npz" and compact and not fields:
        doubts.amounts = True
        if not OGBENCH.fullmatch(path.stem):
            raise Refused("no rewards, and nothing says that it is OGBench's")
        for column, key in (("observations", "observations"), ("actions", "actions"), ("truncations", "terminals")):
            table[column] = file.get(key)
        table["rewards"] = np.zeros(len(table["observations"]))
        return table
    # a column a sensor, with usual names, is a table of its own kind: Parquet whose columns are not all there by
    # offrl's names
    wide = file.kind == "parquet" and not fields and not {"observations", "actions", "rewards"} <= keys
    lower = {key.lower(): key for key in keys}
    for column in COLUMNS:
        names = (
            [fields[column]] if column in fields else [lower[n] for n in (column, *WORDS.get(column, ())) if n in lower]
        )
        if column == "final_observations" and file.kind == "parquet" and names and names[0] in file.series:
            continue  # of as many rows as the others: nothing takes them
        if wide and not names and column[:-1] in keys:
            names = [column[:-1]]
        if len(names) > 1:
            raise Unknown(f"both {names[0]} and {names[1]}")
        if names:
            text = file.kind == "parquet" and column == "episode_ids" and file.is_text(names[0])
            value = file.numbered(names[0]) if text else file.get(names[0])
            if value is None:
                raise Refused(f"there is no '{names[0]}'")
            table[column] = value
    for column in ("observations", "actions", "rewards"):
        if column not in table:
            raise Refused(f"there are no {column}")
    if file.kind == "hdf5" and "metadata/offrl" in file.paths:
        doubts.recorded = True
    return table


def episodes(table: dict[str, np.ndarray], doubts: Doubts) -> list[Truth]:
    """The episodes that the columns make."""
    observations = finite("observations", table["observations"])
    if observations.dtype != np.uint8 or observations.ndim < 4:
        observations = observations.astype(np.float32)
    if observations.ndim == 1:
        observations = observations[:, None]
    rows = len(observations)
    if rows == 0:
        raise Refused("no rows")
    if observations[0].size == 0:
        doubts.add("observations of no numbers")
    rewards = vector("rewards", finite("rewards", table["rewards"]), rows)
    acts = actions(table["actions"], rows, doubts)
    marks = {name: flags(name, table[name], rows) for name in ("terminations", "truncations") if name in table}
    successors = table.get("next_observations")
    if successors is not None:
        successors = finite("next_observations", successors)
        successors = successors[:, None] if successors.ndim == 1 else successors
        if successors.shape != observations.shape:
            raise Refused("next_observations and observations differ in shape")
        if (successors.dtype == np.uint8) != (observations.dtype == np.uint8):
            doubts.lose("next_observations and observations differ in type")
        if observations.dtype != np.uint8:
            successors = successors.astype(np.float32)
    ends = _marked_ends(table, marks, rows, doubts)
    marked = any(name in table for name in ("terminations", "truncations", "episode_ends", "episode_ids"))
    jumps = [] if successors is None else [i for i in range(rows - 1) if _jump(successors[i], observations[i + 1])]
    stray = [i for i in jumps if not ends[i]]
    says_cuts = any(name in table for name in ("truncations", "episode_ends", "episode_ids"))
    if stray and says_cuts and len(stray) > JUMPS * rows:
        raise Refused("next_observations are not those of the next rows")
    if stray:  # an end that nothing marks
        if says_cuts or len(stray) > JUMPS * rows:
            doubts.add("jumps that no end marks")
        for i in stray:
            ends[i] = True
    if not marked and sum(ends[:-1]) == 0:
        raise Refused("nothing marks where episodes end")
    complete, ends[-1] = ends[-1], True
    finals = table.get("final_observations")
    if finals is not None and successors is not None:
        doubts.add("both next_observations and final_observations")
        finals = None
    if finals is not None:
        finals = finite("final_observations", finals)
        finals = finals[:, None] if finals.ndim == 1 else finals
        finals = finals.astype(observations.dtype)
        if finals.shape[1:] != observations.shape[1:]:
            raise Refused("final_observations have another shape")
        if len(finals) != sum(ends):
            raise Refused("final_observations are not one for each episode")
    return _cut(observations, acts, rewards, marks.get("terminations"), ends, successors, finals, complete)


def _cut(
    observations: np.ndarray,
    acts: np.ndarray,
    rewards: np.ndarray,
    terminations: Any,
    ends: list[bool],
    successors: Any,
    finals: Any,
    complete: bool,
) -> list[Truth]:
    truths: list[Truth] = []
    start = 0
    lasts = [i for i, end in enumerate(ends) if end]
    hidden = _hidden(observations, successors, terminations, lasts) if successors is not None else set()
    for number, last in enumerate(lasts):
        after: list[Any] = []
        for i in range(start, last + 1):
            if successors is not None:
                after.append(None if i in hidden else successors[i])
            elif i < last:
                after.append(observations[i + 1])
            else:
                after.append(None if finals is None else finals[number])
        stop = last + 1
        ended = bool(terminations is not None and terminations[last])
        truths.append(Truth(observations[start:stop], acts[start:stop], rewards[start:stop].tolist(), ended, after))
        start = stop
    truths[-1].complete = bool(complete)
    return truths


def _hidden(observations: np.ndarray, successors: np.ndarray, terminations: Any, lasts: list[int]) -> set[int]:
    """Last rows whose stored successor is the next episode's first observation: single time-outs, terminations only
    where all are.
    """
    rows = len(observations)
    same = [bool((successors[i] == observations[(i + 1) % rows]).all()) for i in lasts]
    ended = [bool(terminations is not None and terminations[i]) for i in lasts]
    judged = [s for s, e in zip(same[:-1], ended[:-1], strict=True) if e]
    every = len(judged) >= 2 and all(judged)
    return {i for i, s, e in zip(lasts, same, ended, strict=True) if s and (every or not e)}


def finite(name: str, values: np.ndarray) -> np.ndarray:
    if values.dtype.kind == "f":
        with np.errstate(all="ignore"):
            values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise Refused(f"'{name}' has NaN or what no float32 can hold")
    return values


def vector(name: str, values: np.ndarray, rows: int) -> np.ndarray:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (rows,):
        raise Refused(f"'{name}' has shape {values.shape} for {rows} rows")
    return values.astype(np.float32)


def flags(name: str, values: np.ndarray, rows: int) -> list[bool]:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.shape != (rows,):
        raise Refused(f"'{name}' has shape {values.shape} for {rows} rows")
    for value in values.tolist():
        if value not in (0, 1):
            raise Refused(f"'{name}' holds {value}, which is no flag")
    return [bool(value) for value in values.tolist()]


def actions(values: np.ndarray, rows: int, doubts: Doubts) -> np.ndarray:
    """Actions [R, A], or [R] integers."""
    if len(values) != rows:
        raise Refused(f"{len(values)} actions for {rows} rows")
    if values.dtype.kind in "biu" and (values.ndim == 1 or values.shape[1:] == (1,)):
        whole = [int(v) for v in values.reshape(-1).tolist()]
        if min(whole) < 0 or max(whole) > MOST_ACTIONS:
            raise Refused("discrete actions below 0 or far too many")
        if max(whole) > FEW_ACTIONS:
            doubts.add("thousands of discrete actions")
        return np.array(whole, np.int64)
    if values.ndim > 2:
        raise Refused(f"actions have shape {values.shape}")
    values = finite("actions", values)
    values = (values[:, None] if values.ndim == 1 else values).astype(np.float32)
    if values.shape[1] == 0:
        doubts.add("actions of no numbers")
    elif (
        not doubts.amounts
        and values.shape[1] > 1
        and ((values == 0) | (values == 1)).all()
        and (values.sum(1) == 1).all()
    ):
        return values.argmax(1).astype(np.int64)
    elif (values == np.round(values)).all():
        doubts.add("continuous actions that are whole numbers")
    if values.size and np.abs(values).max() > 1.0:
        doubts.add("actions outside [-1, 1], which may be the range")
    return values


def _marked_ends(table: dict[str, np.ndarray], marks: dict[str, list[bool]], rows: int, doubts: Doubts) -> list[bool]:
    ends = [any(f[i] for f in marks.values()) for i in range(rows)]
    if "episode_ends" in table:
        for i in _end_rows(table["episode_ends"], rows, doubts):
            ends[i] = True
    if "episode_ids" in table:
        ids = table["episode_ids"]
        if len(ids) != rows:
            raise Refused("episode_ids has another length")
        if ids.dtype.kind == "f" and not np.isfinite(ids).all():
            raise Refused("episode_ids has NaN")
        if ids.size != rows:
            doubts.lose("episode_ids of several numbers")
        seen: list[Any] = []
        for i in range(rows):
            value = ids.reshape(rows, -1)[i, 0] if ids.size else 0
            if i and value != seen[-1]:
                ends[i - 1] = True
            if not i or value != seen[-1]:
                if value in seen:
                    doubts.add("episode_ids that come again")
                seen.append(value)
        ends[-1] = True
    return ends


def _end_rows(values: np.ndarray, rows: int, doubts: Doubts) -> list[int]:
    """The last rows that `episode_ends` names, as flags or as row numbers."""
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise Refused("episode_ends has NaN")
    if values.ndim == 2 and 1 in values.shape:
        doubts.add("episode_ends in two dimensions")
        values = values.reshape(-1)
    if values.ndim != 1:
        raise Refused(f"episode_ends has shape {values.shape}")
    numbers = values.tolist()
    if values.dtype.kind == "b" or (len(numbers) == rows and all(v in (0, 1) for v in numbers)):
        if len(numbers) != rows:
            raise Refused("episode_ends has another length")
        if rows <= 2 and values.dtype.kind != "b":
            doubts.lose("flags or rows")
        return [i for i, v in enumerate(numbers) if v]
    if any(v != int(v) or v < 0 or v >= rows for v in numbers):
        raise Refused("episode_ends is neither flags nor row numbers")
    lasts = [int(v) for v in numbers]
    if lasts != sorted(set(lasts)):
        doubts.add("episode_ends that do not ascend")
    if not lasts:
        doubts.add("no ends in episode_ends")
    elif rows - 1 not in lasts:  # the last episode goes on, or they are the rows after the last ones, or first ones
        ordered = sorted(set(lasts))
        as_last = [b - a for a, b in zip([-1, *ordered], ordered, strict=False)]
        as_next = [b - a for a, b in zip([0, *ordered], [*ordered, rows], strict=False)]
        if 0 in ordered or (len(set(as_next)) == 1 and len(set(as_last)) > 1):
            raise Refused("episode_ends counts the rows after the last ones, or the first ones")
        doubts.add("episode_ends without the last row")
    return lasts


def _jump(successor: np.ndarray, following: np.ndarray) -> bool:
    a, b = successor.astype(np.float32).reshape(-1), following.astype(np.float32).reshape(-1)
    return any(abs(x - y) > 1e-6 * max(1.0, abs(y)) for x, y in zip(a, b, strict=True))
