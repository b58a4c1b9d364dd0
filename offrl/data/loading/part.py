"""The part of the episodes that dataset.episodes names."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from offrl.data.dataset import Dataset
from offrl.data.memory import Memory
from offrl.data.transforms.episodes import keep_episodes
from offrl.errors import UserError


def numbers_of(text: str, count: int, where: str) -> np.ndarray:
    """The numbers, int64 and ascending, of the episodes that `text` names among `count`: "29:32" (29 to 31, of which
    either end may be left out) or "3,5,9".

    Raises UserError for another text, and for episodes that are not there.
    """
    text = text.replace(" ", "")
    failure = f"dataset.episodes={text}: {where} has the episodes 0 to {count - 1}"
    if match := re.fullmatch(r"(\d{0,18}):(\d{0,18})", text):
        first, stop = int(match[1] or 0), int(match[2] or count)
        if first >= stop:
            raise UserError(f"{failure}, and none are from {first} up to, without it, {stop}")
        if stop > count:
            raise UserError(f"{failure}, and none is {stop - 1}")
        return np.arange(first, stop)
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", text):
        raise UserError(f"{failure}; a part of them is written 29:32 (29 to 31) or 3,5,9")
    numbers = np.sort(np.array([int(number) for number in text.split(",")], np.int64))
    if numbers[-1] >= count:
        raise UserError(f"{failure}, and none is {numbers[-1]}")
    if (twice := numbers[1:][np.diff(numbers) == 0]).size:
        raise UserError(f"dataset.episodes={text} names episode {twice[0]} twice")
    return numbers


def part_of(dataset: Dataset, text: str, memory: Memory) -> Dataset:
    """The named episodes, in the order of the data, with their images alone. Raises UserError; see `numbers_of`."""
    numbers = torch.from_numpy(numbers_of(text, dataset.num_episodes, dataset.spec.name))
    part = keep_episodes(dataset, numbers, f"episodes {text}", memory)
    stores = {name: store.compact(partial(memory.taken, name)) for name, store in part.stores.items()}
    return replace(part, stores=stores)
