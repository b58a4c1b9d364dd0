"""Observations that are no numbers of the flat vector: images, and rows of a table, named by row numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class StreamSpec:
    """One of several observations: an image [H, W, C] of uint8, or a row [L] of float32 of a table, such as an
    instruction's encoding.
    """

    name: str
    shape: tuple[int, ...]
    recorded: tuple[int, ...] = ()  # height and width before dataset.image_size changed them

    @property
    def image(self) -> bool:
        return len(self.shape) == 3


def stream_of(values: Mapping[str, Any]) -> StreamSpec:
    """A stream from a JSON file's values."""
    return StreamSpec(values["name"], tuple(values["shape"]), tuple(values.get("recorded", ())))


def window(newest: Tensor, first: Tensor, count: int, stride: int = 1) -> Tensor:
    """The numbers of the last `count` entries, `stride` apart and oldest first, up to `newest` [...]: [..., count]. In
    place of those before `first` [...], where the episode begins, the first itself."""
    back = stride * torch.arange(count - 1, -1, -1, device=newest.device)
    return torch.maximum(newest.unsqueeze(-1) - back, first.unsqueeze(-1))


@dataclass(frozen=True)
class Store:
    """A stream's entries, each held once, and which of them the R rows of a dataset show.

    The entries of an episode stand one after another, so that stacks of frames are ranges of entries.
    """

    values: Tensor  # [F, *shape]: images uint8, rows of a table float32
    entries: Tensor  # [R] int64: the entry of each row's observation
    following: Tensor  # [R] int64: of its successor; the row's own where that is not known
    first: Tensor  # [R] int64: the first entry of the row's episode, before which no stack of frames reaches

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.values, self.entries, self.following, self.first))

    def take(self, rows: Tensor) -> Store:
        """The store of some rows of the dataset, with the same entries."""
        return replace(self, entries=self.entries[rows], following=self.following[rows], first=self.first[rows])

    def compact(self, taken: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Store:
        """The same with the entries alone that rows show. taken: gives entries of `values` by their numbers."""
        # stacks of frames reach from `first` on
        used = torch.unique(torch.cat([self.first, self.entries, self.following]))
        numbers = (torch.searchsorted(used, x) for x in (self.entries, self.following, self.first))
        return Store(torch.from_numpy(taken(self.values.numpy(), used.numpy())), *numbers)

    def to(self, device: torch.device) -> Store:
        """The same on another device."""
        return Store(*(x.to(device) for x in (self.values, self.entries, self.following, self.first)))

    def frames(self, rows: Tensor, count: int, following: bool = False) -> Tensor:
        """What rows [...] show, or with `following` their successors: [..., *shape]; of images stacks of the last
        `count` frames, oldest first, [..., H, W, count * C]. Before an episode's first frame that one is repeated.
        """
        entries = (self.following if following else self.entries)[rows]
        if self.values.ndim != 4 or count == 1:
            return self.values[entries]
        stack = self.values[window(entries, self.first[rows], count)]
        return stack.movedim(-4, -2).flatten(-2)  # [..., H, W, count, C]
