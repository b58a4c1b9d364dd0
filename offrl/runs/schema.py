"""The entries of run.json and their types. A stranger may have written the file, so what reads it checks it first."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, get_origin, get_type_hints, is_typeddict

from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.settings.replicas import bounded
from offrl.settings.train import seed_list
from offrl.settings.typed import check_types, fits
from offrl.tasks.task import Task


class Algo(TypedDict, total=False):
    """The algorithm's settings; the others are checked by its own config."""

    name: str


class Identity(TypedDict, total=False):
    """What decides the parameters that come out."""

    algo: Algo
    seeds: Any  # `seed_list` checks them
    dataset: dict[str, Any]
    grid: list[list[Any]]  # [field, values] each
    finetune: dict[str, Any]
    parent: dict[str, Any] | None


class Data(TypedDict, total=False):
    """What `Dataset.describe` says of the data, less what is only shown."""

    name: str
    fingerprint: str
    source: str
    transforms: list[str]
    return_mean: float
    return_min: float
    return_max: float


class Online(TypedDict, total=False):
    """What a fine-tuning run says besides."""

    label: str
    parent: dict[str, Any] | None
    fixed: dict[str, float]
    anneal: dict[str, list[float]]


class RunRecord(TypedDict, total=False):
    """run.json, as far as anything reads it."""

    identity: Identity
    label: str
    data: Data
    spec: dict[str, Any]
    env: str
    mode: str
    group: int
    device: str
    kind: str
    online: Online
    packages: dict[str, str | None]


def check_record(record: Any, needed: Sequence[str]) -> None:
    """Raises UserError for an entry of another type, one of `needed` (dotted names) that is not there, and more replicas than a run has."""
    _check(record, RunRecord, "it")
    check_entries(record, needed)
    own = record["identity"]
    grid = own.get("grid", [])
    for entry in grid:
        if not (len(entry) == 2 and isinstance(entry[0], str) and entry[0].isidentifier() and fits(entry[1], list[float])):
            raise UserError(f"identity.grid has {_shown(entry)}, where a field and its values are due")
    bounded(dict(grid), len(seed_list(own["seeds"])))


def spec_of(record: Mapping[str, Any], where: str) -> DataSpec:
    """The specification of the data in a run's record. Raises UserError where it lacks something, or it is of another type."""
    spec = record.get("spec")
    task = (spec or {}).get("task")
    check_entries(record, ("spec.observation_shape", "spec.action_dim", *(("spec.task.name",) if task is not None else ())))
    check_types(DataSpec, spec or {}, where)
    check_types(Task, task or {}, where)
    return DataSpec.from_json(spec or {})


def _check(value: Any, kind: Any, name: str) -> None:
    """Raises UserError where `value`, called `name`, is no typed dictionary `kind`: an entry is of another type. None need be there."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} is {_shown(value)}, where entries by name are due")
    for key, expected in _annotations(kind).items():
        if key in value:
            called = key if name == "it" else f"{name}.{key}"
            if is_typeddict(expected):
                _check(value[key], expected, called)
            elif not fits(value[key], expected):
                raise UserError(f"{called} is {_shown(value[key])}, where {expected if get_origin(expected) else expected.__name__} is due")


_annotations = functools.cache(get_type_hints)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def check_entries(record: Any, needed: Sequence[str]) -> None:
    """Raises UserError for the first of `needed`, dotted names, that is not in the record."""
    for name in needed:
        node = record
        for key in name.split("."):
            if not isinstance(node, dict) or key not in node:
                raise UserError(f"{name} is missing")
            node = node[key]
