"""Imagined rollouts as a second source beside the real data (ImagineBench, arXiv 2505.10010)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from offrl.data.dataset import Dataset
from offrl.data.loading.read import load_one
from offrl.data.loading.resolve import resolve
from offrl.data.memory import IN_MEMORY, Memory
from offrl.data.transforms.episodes import concatenate
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

IMAGINED = "imagined"  # the column that marks imagined rows


def add_imagined(dataset: Dataset, config: DatasetConfig, memory: Memory) -> Dataset:
    """`dataset` with the datasets of `config.imagined` appended, and a bool column "imagined" that is true for their
    rows.

    Raises UserError where one cannot be read, or does not fit.
    """
    additions = []
    for name in config.imagined:
        settings = config.of_any_layout()
        if not dataset.spec.text and not dataset.spec.discrete:  # their actions mean what the real ones do
            settings = replace(
                settings, action_low=list(dataset.spec.action_low), action_high=list(dataset.spec.action_high)
            )
        additions.append(load_one(resolve(name, settings), settings, memory))
    return append_imagined(dataset, additions, memory)


def append_imagined(dataset: Dataset, imagined: Dataset | Sequence[Dataset], memory: Memory = IN_MEMORY) -> Dataset:
    """`dataset`, then the episodes of `imagined`, and a bool column "imagined" that says which rows are whose.

    Columns that not all of them have are left out, with a note. Algorithms see one dataset. Raises UserError for spaces
    that differ."""
    additions = [imagined] if isinstance(imagined, Dataset) else list(imagined)
    if IMAGINED in dataset.columns:
        raise UserError(
            f"{dataset.spec.name} has a column '{IMAGINED}' of its own, that marks imagined rows: leave out "
            "dataset.imagined"
        )
    shared = set(dataset.columns).intersection(*(set(d.columns) - {IMAGINED} for d in additions))
    lacking = sorted(set().union(*(d.columns for d in (dataset, *additions))) - shared - {IMAGINED})
    parts = []
    for i, part in enumerate((dataset, *additions)):
        marks = torch.full((len(part),), i > 0)
        columns = {name: column for name, column in part.columns.items() if name in shared}
        goal_dim = part.spec.goal_dim if "achieved_goals" in shared else 0
        parts.append(replace(part, columns={**columns, IMAGINED: marks}, spec=replace(part.spec, goal_dim=goal_dim)))
    joined = concatenate(parts, memory)
    rows, episodes = sum(len(d) for d in additions), sum(d.num_episodes for d in additions)
    names = ", ".join(d.spec.name for d in additions)
    return replace(
        joined,
        transforms=(
            *dataset.transforms,
            f"imagined {' '.join(f'{d.spec.name} {d.fingerprint[:12]}' for d in additions)}",
        ),
        notes=(
            *joined.notes,
            f"imagined: {episodes:,} rollouts ({rows:,} rows, {rows / len(joined):.3g} of all) of {names}",
            *(f"left out: the column '{name}', which not all of the real and imagined data have" for name in lacking),
        ),
    )
