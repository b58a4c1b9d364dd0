"""Demonstrations: which rows of a dataset are an expert's, and batches of them beside batches of everything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.loading.read import load_one
from offrl.data.loading.resolve import resolve
from offrl.data.memory import IN_MEMORY, Memory
from offrl.data.samplers.tables import table_of
from offrl.data.samplers.transitions import Batch, Transitions, TransitionSampler
from offrl.data.transforms.episodes import concatenate, keep_episodes
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

EXPERT = "expert"  # the column that marks an expert's rows
PREFIX = "expert_"  # of their keys in a batch
PARTS = ("observations", "actions", "next_observations")


def add_expert(dataset: Dataset, config: DatasetConfig, memory: Memory) -> Dataset:
    """`dataset` with the episodes of `config.expert` appended, and a bool column "expert" that is true for the
    demonstrations.

    Raises UserError where there are too few episodes, or where the two do not fit together.
    """
    config = replace(config, name=str(config.expert), episodes="")
    expert = load_one(resolve(config.name, config), config, memory)
    return append_expert(dataset, expert, config.expert_episodes, config.expert_choice, config.expert_unmarked, memory)


def append_expert(
    dataset: Dataset,
    expert: Dataset,
    episodes: int = 1,
    choice: str = "first",
    unmarked: int = 0,
    memory: Memory = IN_MEMORY,
) -> Dataset:
    """`dataset` with `episodes` episodes of `expert` appended as demonstrations, and then `unmarked` more that nothing
    marks as such.

    choice: "first" takes episodes in their order, "best" by recorded return (of equals the earlier one). episodes=0:
    all of them. Algorithms that know nothing of experts see one dataset with all of it. Raises UserError.
    """
    if EXPERT in dataset.columns:
        raise UserError(
            f"{dataset.spec.name} has a column '{EXPERT}' of its own, that marks demonstrations: leave out "
            "dataset.expert"
        )
    episodes = episodes or expert.num_episodes - unmarked
    if episodes < 1 or episodes + unmarked > expert.num_episodes:
        raise UserError(
            f"dataset.expert={expert.spec.name} has {expert.num_episodes} episodes; dataset.expert_episodes and "
            f"dataset.expert_unmarked ask for {episodes} + {unmarked}"
        )
    order = torch.arange(expert.num_episodes)
    if choice == "best":
        order = torch.argsort(expert.raw_returns, descending=True, stable=True)
    demonstrations = keep_episodes(expert, order[: episodes + unmarked], "")
    rows = int(demonstrations.episode_end[episodes - 1])
    marks = torch.arange(len(demonstrations)) < rows
    shared = {name: column for name, column in demonstrations.columns.items() if name in dataset.columns}
    recorded = {**dataset.columns, EXPERT: torch.zeros(len(dataset), dtype=torch.bool)}
    parts = [replace(dataset, columns=recorded), replace(demonstrations, columns={**shared, EXPERT: marks})]
    joined = replace(concatenate(parts, memory), transforms=dataset.transforms)
    description = f"{choice} {episodes}" + (f", then {unmarked} unmarked" if unmarked else "")
    note = (
        f"demonstrations: {rows:,} rows, the {choice} of {expert.num_episodes:,} episodes of {expert.spec.name} "
        f"({episodes})"
    )
    return joined.changed(f"expert {expert.spec.name} {expert.fingerprint[:12]} {description}", note)


@dataclass(frozen=True)
class Demonstrations:
    """The source of ExpertSampler: all transitions, and those of the expert."""

    transitions: Transitions
    expert: Transitions


@dataclass(frozen=True)
class ExpertSampler:
    """Transitions of the whole dataset, without rewards, and as many of the expert: expert_observations,
    expert_actions, expert_next_observations and expert_masks. Both uniform, with replacement; `Dataset.weights` weigh
    the former."""

    def prepare(self, dataset: Dataset) -> Demonstrations:
        """Raises UserError where no transition is marked as the expert's."""
        transitions = TransitionSampler().prepare(dataset)
        name = dataset.spec.name
        if EXPERT not in dataset.columns:
            raise UserError(
                f"{name}: the algorithm imitates an expert and the data do not say which rows are one's: name a "
                f"dataset with dataset.expert=PATH, or a column that marks them with dataset.fields.{EXPERT}=KEY"
            )
        marks = dataset.columns[EXPERT].reshape(len(dataset), -1).ne(0).any(-1)
        rows = dataset.transition_rows()
        rows = rows[marks[rows]]
        if not len(rows):
            raise UserError(
                f"{name}: no transition is the expert's: its rows have no successor, or dataset.top_fraction left none "
                "of them"
            )
        columns = {k: dataset.columns[k][rows] for k in PARTS}
        columns["masks"] = (~dataset.columns["terminations"][rows]).to(torch.float32)
        return Demonstrations(transitions, Transitions(len(rows), table_of(replace(dataset, mapped=False), columns)))

    def __call__(self, source: Demonstrations, key: Tensor, batch_size: int) -> Batch:
        data_key, expert_key = rng.split(key)
        draw = TransitionSampler()
        batch = {k: v for k, v in draw(source.transitions, data_key, batch_size).items() if k != "rewards"}
        return batch | {PREFIX + k: v for k, v in draw(source.expert, expert_key, batch_size).items()}
