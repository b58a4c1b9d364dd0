"""The part of the episodes that dataset.episodes names."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import torch

from offrl.data.dataset import Dataset
from offrl.data.memory import Memory
from offrl.data.raw.ranges import numbers_of
from offrl.data.transforms.episodes import keep_episodes


def part_of(dataset: Dataset, text: str, memory: Memory) -> Dataset:
    """The episodes that `text` names, in the order of the data, with their images alone. Raises UserError."""
    numbers = np.sort(numbers_of(text, dataset.num_episodes, "dataset.episodes", dataset.spec.name))
    part = keep_episodes(dataset, torch.from_numpy(numbers), f"episodes {text}", memory)
    stores = {name: store.compact(partial(memory.taken, name)) for name, store in part.stores.items()}
    return replace(part, stores=stores)
