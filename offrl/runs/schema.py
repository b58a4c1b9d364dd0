"""The entries of run.json and their types. A stranger may have written the file, so what reads it checks it first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.settings.kinds import misfit
from offrl.settings.replicas import bounded
from offrl.settings.train import seed_list


class Algo(TypedDict, total=False):
    """The algorithm's settings; the others are checked by its own config."""

    name: str


class Identity(TypedDict, total=False):
    """What decides the parameters that come out."""

    algo: Algo
    seeds: list[int]
    dataset: dict[str, Any]
    grid: list[tuple[str, list[float]]]
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
    spec: DataSpec
    env: str
    mode: str
    group: int
    device: str
    kind: str
    online: Online
    packages: dict[str, str | None]
    plugins: list[str]


def check_record(record: Any, needed: Sequence[str]) -> None:
    """Raises UserError for an entry of another type, one of `needed` (dotted names) that is not there, and more
    replicas than a run has.
    """
    if wrong := misfit(record, RunRecord, ""):
        raise UserError(wrong)
    check_entries(record, needed)
    identity = record["identity"]
    # replicas' files are called by them
    if bad := [field for field, _ in identity.get("grid", []) if not field.isidentifier()]:
        raise UserError(f"identity.grid has '{bad[0]}', which is no setting")
    bounded(dict(identity.get("grid", [])), len(seed_list(identity["seeds"])), identity.get("paired") is True)


def check_entries(record: Any, needed: Sequence[str]) -> None:
    """Raises UserError for the first of `needed`, dotted names, that is not in the record."""
    for name in needed:
        node = record
        for key in name.split("."):
            if not isinstance(node, dict) or key not in node:
                raise UserError(f"{name} is missing")
            node = node[key]
