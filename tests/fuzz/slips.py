"""What a person's own script gets wrong: changes of a draft's columns, metadata and JSON values, before they are
written.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.drafts import Draft, Rng, Table
from tests.fuzz.json_slips import JUNK, json_slip

Slip = Callable[[Rng, Table, str], str]
NAMES = (
    "timeouts",
    "truncations",
    "terminals",
    "episode_ends",
    "episode_ids",
    "next_observations",
    "final_observations",
    "masks",
    "x/y",
)


def drop(rng: Rng, table: Table, name: str) -> str:
    del table[name]
    return "dropped"


def rename(rng: Rng, table: Table, name: str) -> str:
    new = str(rng.choice(NAMES)) if rng.random() < 0.6 else name[:-1] or "x"
    table[new] = table.pop(name)
    return f"renamed to {new}"


def swap(rng: Rng, table: Table, name: str) -> str:
    other = str(rng.choice(sorted(table)))
    table[name], table[other] = table[other], table[name]
    return f"exchanged with {other}"


def retype(rng: Rng, table: Table, name: str) -> str:
    kind = str(rng.choice(["i1", "u1", "i8", "u8", "f2", "f4", "f8", ">f4", ">i2", "?", "S4", "U4", "c8", "g"]))
    with np.errstate(all="ignore"):
        table[name] = np.asarray(table[name]).astype(kind)
    return f"as {kind}"


def reshape(rng: Rng, table: Table, name: str) -> str:
    values = np.asarray(table[name])
    forms = {
        "a column": lambda: values.reshape(len(values), -1, 1),
        "one row": lambda: values[None],
        "flat": lambda: values.reshape(-1),
        "transposed": lambda: values.T,
        "pairs": lambda: np.stack([values, values], -1),
        "one wide": lambda: values.reshape(-1, 1),
        "no width": lambda: values.reshape(len(values), -1)[:, :0],
    }
    form = str(rng.choice(sorted(forms)))
    table[name] = forms[form]() if values.ndim else values.reshape(1)
    return f"reshaped: {form}"


def lengths(rng: Rng, table: Table, name: str) -> str:
    values = np.atleast_1d(np.asarray(table[name]))
    cut = int(rng.integers(-3, 4)) or 1
    table[name] = values[:cut] if cut < 0 else np.concatenate([values, values[:cut]])
    return f"{cut} rows more"


def empty(rng: Rng, table: Table, name: str) -> str:
    if rng.random() < 0.3:
        for key, values in table.items():
            table[key] = np.asarray(values)[:0] if np.ndim(values) else values
        return "all columns empty"
    table[name] = np.asarray(table[name]).reshape(-1)[:0]
    return "empty"


def scalar(rng: Rng, table: Table, name: str) -> str:
    values = np.asarray(table[name]).reshape(-1)
    table[name] = values[0] if len(values) else np.float32(0)
    return "a single value"


def not_finite(rng: Rng, table: Table, name: str) -> str:
    values = np.array(table[name])
    if values.dtype.kind not in "fiub" or not values.size:
        return "as it was"
    values = values.astype(np.float64)
    value = float(rng.choice([np.nan, np.inf, -np.inf, 1e300, 1e30]))
    values.reshape(-1)[int(rng.integers(values.size))] = value
    table[name] = values
    return f"with a {value}"


def flags(rng: Rng, table: Table, name: str) -> str:
    """Flags in other numbers, some of which are none."""
    key = (
        _one_of(
            rng, table, ("terminations", "terminals", "truncations", "timeouts", "masks", "episode_terminals", "done")
        )
        or name
    )
    values = np.asarray(table[key])
    form = str(rng.choice(["float", "int", "half", "two", "255", "negative", "text", "nan", "moved", "all", "none"]))
    if values.dtype.kind not in "fiub":
        return "as it was"
    plain = values.astype(np.float64)
    if form in ("half", "two", "255", "negative"):
        plain = plain * {"half": 0.5, "two": 2.0, "255": 255.0, "negative": -1.0}[form]
        table[key] = plain if form == "half" else plain.astype(np.int64)
    elif form == "text":
        table[key] = np.where(plain != 0, "True", "False")
    elif form == "nan":
        table[key] = np.where(plain != 0, 1.0, np.nan)
    elif form == "moved":
        table[key] = np.roll(values, 1)
    elif form in ("all", "none"):
        table[key] = np.full_like(values, form == "all")
    else:
        table[key] = plain.astype(np.float32 if form == "float" else np.int32)
    return f"{key}: flags as {form}"


def rows_of_ends(rng: Rng, table: Table, name: str) -> str:
    """`episode_ends` as row numbers, in one of the ways to count."""
    count = _rows(table)
    key = next((k for k in ("episode_ends",) if k in table), None)
    ends = np.asarray(table[key]) if key else np.zeros(0)
    last = (
        np.flatnonzero(ends)
        if ends.dtype == bool
        else ends.astype(np.int64).reshape(-1)
        if ends.size
        else np.arange(9, count, 10)
    )
    if not len(last):
        return "as it was"
    form = str(
        rng.choice(
            [
                "last",
                "one-based",
                "exclusive",
                "starts",
                "open",
                "twice",
                "unsorted",
                "float",
                "half",
                "negative",
                "beyond",
            ]
        )
    )
    forms = {
        "last": last,
        "one-based": last + 1,
        "exclusive": (last + 1)[:-1],
        "starts": np.concatenate([[0], (last + 1)[:-1]]),
        "open": last[:-1],
        "twice": np.concatenate([last, last[:1]]),
        "unsorted": last[::-1],
        "float": last.astype(np.float64),
        "half": last + 0.5,
        "negative": np.concatenate([last[:-1], [-1]]),
        "beyond": np.concatenate([last, [count + 5]]),
    }
    table["episode_ends"] = forms[form]
    for other in ("episode_ids", "truncations", "timeouts"):
        table.pop(other, None)
    return f"episode_ends as {form} rows"


def ids(rng: Rng, table: Table, name: str) -> str:
    count = _rows(table)
    form = str(rng.choice(["interleaved", "float", "nan", "text", "random", "column"]))
    values = np.arange(count) * 3 // max(count, 1)
    table["episode_ids"] = {
        "interleaved": np.arange(count) % 3,
        "float": values / 2,
        "nan": np.where(values == 1, np.nan, values),
        "text": values.astype(str),
        "random": rng.integers(0, 3, count),
        "column": values[:, None],
    }[form]
    return f"episode_ids: {form}"


def successors(rng: Rng, table: Table, name: str) -> str:
    key = _one_of(rng, table, ("observations", "obs"))
    if key is None:
        return "as it was"
    observations = np.asarray(table[key])
    if not observations.ndim or not len(observations):
        return "as it was"
    form = str(rng.choice(["next rows", "same", "shifted", "random", "flat", "one jump"]))
    if form == "random":
        values = rng.normal(size=observations.shape).astype(np.float32)
    elif form == "flat":
        values = observations.reshape(-1)
    else:
        values = np.roll(observations, {"same": 0, "shifted": -2}.get(form, -1), 0)
        if form == "one jump":
            values = np.asarray(table.get("next_observations", values)).copy()
            values[int(rng.integers(len(values)))] = 7
    table["next_observations"] = values
    return f"next_observations: {form}"


def actions(rng: Rng, table: Table, name: str) -> str:
    key = _one_of(rng, table, ("actions", "act", "train/act"))
    if key is None or not np.ndim(table[key]):
        return "as it was"
    values = np.asarray(table[key])
    count = len(values)
    form = str(rng.choice(["whole", "one-hot", "pairs", "far", "huge", "negative", "constant", "bool", "single far"]))
    if form == "single far":
        values = values.astype(np.float64)
        values.reshape(-1)[:1] = 50.0
    table[key] = {
        "whole": np.arange(count).astype(np.float32) % 3,
        "one-hot": np.eye(3, dtype=np.float32)[np.arange(count) % 3],
        "pairs": rng.integers(0, 4, (count, 2)),
        "far": rng.normal(size=(count, 2)) * 100,
        "huge": np.where(np.arange(count) == 0, 10**9, 1),
        "negative": np.arange(count) - 1,
        "constant": np.ones((count, 2), np.float32),
        "bool": np.arange(count) % 2 == 1,
        "single far": values,
    }[form]
    return f"actions: {form}"


def finals(rng: Rng, table: Table, name: str) -> str:
    table["final_observations"] = rng.normal(size=(int(rng.integers(0, 4)), 2))
    return "final_observations of too few"


def _one_of(rng: Rng, table: Table, names: tuple[str, ...]) -> str | None:
    here = [n for n in table if n in names or n.rsplit("_", 1)[0] in names]
    return str(rng.choice(here)) if here else None


def _rows(table: Table) -> int:
    return max((len(v) for v in table.values() if np.ndim(v)), default=0)


ANY: tuple[Slip, ...] = (
    drop,
    drop,
    rename,
    swap,
    retype,
    retype,
    reshape,
    lengths,
    empty,
    scalar,
    not_finite,
    flags,
    flags,
    successors,
    actions,
)
ROWS: tuple[Slip, ...] = (rows_of_ends, rows_of_ends, ids, finals)


def slip(draft: Draft, rng: Rng) -> str:
    """Change something in `draft`; what."""
    if draft.container == "json":
        return json_slip(draft.lines, rng)
    if draft.meta and rng.random() < 0.4:
        return f"metadata: {_of_metadata(draft.meta, rng)}"
    prefix = str(rng.choice(sorted(draft.tables)))
    if draft.meta and rng.random() < 0.08:
        if rng.random() < 0.5:
            del draft.tables[prefix]
        else:
            draft.tables[f"episode_{int(rng.integers(0, 40))}"] = draft.tables.pop(prefix)
        return f"{prefix} dropped or renumbered"
    table = draft.tables[prefix]
    if not table:
        return "as it was"
    plain = not draft.meta and "rewards_0" not in table
    change = ANY[int(rng.integers(len(ANY)))]
    if plain and rng.random() < 0.25:
        change = ROWS[int(rng.integers(len(ROWS)))]
    name = str(rng.choice(sorted(table)))
    if any(isinstance(table[n], list) for n in table):  # rows of a padded Parquet file
        change = (drop, rename, swap)[int(rng.integers(3))]
    return f"{prefix}/{name} ({change.__name__}) {change(rng, table, name)}"


def _of_metadata(meta: dict[str, Any], rng: Rng) -> str:
    """Something in metadata.json, or in one of the JSON texts in it."""
    key = str(rng.choice(sorted(meta)))
    if key in ("observation_space", "action_space", "env_spec") and rng.random() < 0.8:
        inside = [json.loads(meta[key])]
        what = json_slip(inside, rng)
        meta[key] = json.dumps(inside[0] if inside else None)
        return f"{key}: {what}"
    if rng.random() < 0.3:
        del meta[key]
        return f"no {key}"
    meta[key] = copy.deepcopy(JUNK[int(rng.integers(len(JUNK)))])
    return f"{key} = {meta[key]!r}"
