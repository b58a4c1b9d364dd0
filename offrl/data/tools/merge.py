"""Several datasets of the same spaces as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offrl.data.formats.provenance import INFOS
from offrl.data.memory import Memory
from offrl.data.raw import CORE, FLAGS, RawData
from offrl.data.raw.infer import action_range, find_ends, starts_elsewhere
from offrl.data.raw.labels import joined_labels, listed_labels, refuse_other_columns
from offrl.data.tools.subset import point_elsewhere
from offrl.errors import UserError
from offrl.tasks.task import Task

SOURCE = INFOS + "source"  # the number of the dataset that each row comes from


def join(parts: Sequence[RawData], memory: Memory) -> tuple[RawData, list[str]]:
    """The datasets `parts` (after `settle`) one after the other, and notes about what a person should know."""
    first, notes = parts[0], []
    for other in parts[1:]:
        _agree(first, other)
    ends = [find_ends(p) for p in parts]
    offsets = np.cumsum([0, *(p.rows for p in parts)])[:-1]
    names = [n for n in first.columns if all(n in p.columns for p in parts)]
    for part in parts:
        for name in part.columns:
            if name in names or name in CORE:
                continue
            if not name.startswith(INFOS):
                other = next(p for p in parts if name not in p.columns)
                raise UserError(
                    f"cannot merge {other.where} with {part.where}: the column '{name}' is in one of them only"
                )
            notes.append(f"left out: {name}, which not all of them have")
    labels, numbers = joined_labels([(p.where, p.labels) for p in parts])
    if any(p.labels != labels for p in parts):
        notes.append(f"actions: the choices of all of them are numbered {listed_labels(labels)}")
    columns: dict[str, np.ndarray] = {}
    for name in dict.fromkeys([*names, *(n for n in FLAGS if any(n in p.columns for p in parts))]):
        values = [p.columns[name] if name in p.columns else np.zeros(p.rows, bool) for p in parts]
        if labels and name == "actions":
            values = [number[v] for number, v in zip(numbers, values, strict=True)]
        columns[name] = memory.joined(name, values)
    columns[SOURCE], sources = _sources(parts, offsets)
    raw = replace(first, columns=columns, name="merged", path="", notes=[], warnings=[], jump_rows=None)
    raw.episode_ends = np.concatenate(ends)
    raw.episode_ends[-1] = bool(parts[-1].last_complete)
    notes += [
        f"the last episode of {p.where} has no end there; merged, it counts as whole"
        for p in parts[:-1]
        if not p.last_complete
    ]
    raw.num_actions, raw.labels = len(labels) or max(p.num_actions for p in parts), labels
    lasts = [np.flatnonzero(e) for e in ends]
    if "next_observations" in columns:
        unknown = np.concatenate([starts_elsewhere(p, last) for p, last in zip(parts, lasts, strict=True)])
        if forgotten := point_elsewhere(raw, np.flatnonzero(np.concatenate(ends)), unknown):
            notes.append(
                f"{forgotten:,} terminals lead to the next episode's start, in some of the files only: merged, that "
                "counts as known"
            )
    else:
        finals = [_finals(p, end) for p, end in zip(parts, ends, strict=True)]
        known = np.concatenate([k for _, k in finals])
        raw.final_observations = np.concatenate([f for f, _ in finals]) if known.any() else None
        raw.final_known = known if known.any() and not known.all() else None
    raw.final_columns = {
        k: np.concatenate([p.final_columns[k] for p in parts])
        for k in first.final_columns
        if all(k in p.final_columns for p in parts)
    }
    same = {k: v for k, v in first.metadata.items() if all(k in p.metadata and _equal(p.metadata[k], v) for p in parts)}
    for key in ("author", "author_email"):  # as Minari does when it combines datasets
        people = [p.metadata[key] for p in parts if p.metadata.get(key)]
        if people:
            same[key] = sorted({name for entry in people for name in ([entry] if isinstance(entry, str) else entry)})
    raw.metadata = {**same, "combined_datasets": sources}
    raw.task, more = joined_task([p.task for p in parts])
    return raw, [*notes, *more]


def _agree(first: RawData, other: RawData) -> None:
    """Raises UserError unless rows of the two mean the same."""
    other_form = _form(other)
    for aspect, x in _form(first).items():
        if (y := other_form.get(aspect, x)) != x:
            raise UserError(
                f"cannot merge {other.where} with {first.where}: {aspect} {y} instead of {x}".replace("  ", " ")
            )
    for column in ("observations", "actions"):
        failure = f"cannot merge {other.where} with {first.where}"
        refuse_other_columns(first.column_specs(column), other.column_specs(column), failure)
    if not first.discrete:
        ranges = [action_range(p) for p in (first, other)]
        if not all(np.array_equal(x, y) for x, y in zip(*ranges, strict=True)):
            shown = [f"{_short(low)} to {_short(high)}" for low, high in ranges]
            raise UserError(
                f"cannot merge {other.where} with {first.where}: the actions range from {shown[1]} instead of "
                f"{shown[0]}, so that a number would be two actions; if both mean the same, give the range of all: "
                "dataset.action_low=... dataset.action_high=..."
            )
    names = [str(p.task.env_id).rpartition("-v")[0] if p.task and p.task.env_id else "" for p in (first, other)]
    if all(names) and names[0] != names[1]:
        raise UserError(
            f"cannot merge {other.where} with {first.where}: one was recorded in {other.task and other.task.env_id}, "
            f"the other in {first.task and first.task.env_id}"
        )


def _form(raw: RawData) -> dict[str, Any]:
    """What must be the same in data that are merged, as far as both have it."""
    columns, observations = raw.columns, raw.columns["observations"]
    return {
        "observations of shape": list(observations.shape[1:]),
        "observations of type": observations.dtype,
        # the number of discrete actions may differ: a file that does not record it may not show all of them
        "": "discrete actions" if raw.discrete else f"{columns['actions'].shape[1]} continuous actions",
        **{f"'{k}' of shape": list(c.shape[1:]) for k, c in columns.items() if k not in CORE},
    }


def _short(values: np.ndarray) -> str:
    if len(np.unique(values)) == 1:
        return f"{values[0]:g}"
    return "[" + ", ".join(f"{v:g}" for v in values[:4]) + (", ...]" if len(values) > 4 else "]")


def _equal(a: Any, b: Any) -> bool:
    return np.array_equal(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else bool(a == b)


def _finals(raw: RawData, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The observation after each episode's last row, [E, *O], and whether it is known, bool [E]; elsewhere the last one
    stands again.
    """
    last = np.flatnonzero(ends)
    known = np.ones(len(last), bool)
    if "next_observations" in raw.columns:
        finals, known = raw.columns["next_observations"][last], ~starts_elsewhere(raw, last)
    elif raw.final_observations is not None:
        finals, known = raw.final_observations.copy(), known if raw.final_known is None else raw.final_known
    else:
        finals, known = raw.columns["observations"][last], np.zeros(len(last), bool)
    finals[~known] = raw.columns["observations"][last[~known]]
    return finals, known


def _sources(parts: Sequence[RawData], offsets: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """For each row the number of its dataset, int64 [R], and their names; those of a dataset that was merged before are
    kept.
    """
    numbers, names = np.zeros(sum(p.rows for p in parts), np.int64), list[str]()
    for part, at in zip(parts, offsets, strict=True):
        before = part.metadata.get("combined_datasets")
        inner = part.columns.get(SOURCE)
        if isinstance(before, list) and inner is not None:
            numbers[at : at + part.rows] = inner + len(names)
            names += [str(n) for n in before]
        else:
            numbers[at : at + part.rows] = len(names)
            names.append(part.name or part.where)
    return numbers, names


def joined_task(tasks: Sequence[Task | None]) -> tuple[Task | None, list[str]]:
    """The task of merged data, the first one with reference scores or else the first known; notes where environments
    or reference scores differ."""
    known = [task for task in tasks if task is not None]
    task = next((t for t in known if t.ref_min is not None), known[0] if known else None)
    notes = []
    environments = sorted({str(t.env_id) for t in known if t.env_id})
    if task is not None and len(environments) > 1:
        notes.append(f"recorded in {' and '.join(environments)}; scores will be measured in {task.env_id}")
    if task is not None and len({(t.ref_min, t.ref_max) for t in known if t.ref_min is not None}) > 1:
        notes.append(f"reference scores differ; those of {task.name} are kept")
    return task, notes
