"""The part of the episodes that dataset.episodes names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from offrl.data.dataset import Dataset
from offrl.data.memory import Memory
from offrl.data.raw.ranges import episode_numbers
from offrl.data.transforms.episodes import keep_episodes


def part_of(dataset: Dataset, text: str, memory: Memory) -> Dataset:
    """The episodes that `text` names, in the order of the data, with their images alone. Raises UserError."""
    numbers = torch.from_numpy(episode_numbers(text, dataset.num_episodes, dataset.spec.name))
    part = keep_episodes(dataset, numbers, f"episodes {text}", memory)
    stores = {name: store.compact(partial(memory.taken, name)) for name, store in part.stores.items()}
    return replace(part, stores=stores)
