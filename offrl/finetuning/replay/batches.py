"""Batches mixed of what was played and of the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.data.samplers.goals import GoalSampler
from offrl.data.samplers.tables import Experience, Packed, split
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.finetuning.replay import sources
from offrl.finetuning.replay.ring import Ring
from offrl.system.backend import move


class MixedBatches:
    """The batches of `offrl.training.step.Step`: rows of the data and of the ring. Interventions count as data, as
    HIL-SERL's demonstrations do (arXiv 2410.21845).

    Which rows is a pure function of the replica's key, the number of the update and how many rows there are.
    """

    def __init__(
        self,
        ring: Ring,
        sampler: Sampler,
        source: Any,
        keys: Tensor,
        batch_size: int,
        mixing: float | None,
        interventions: Ring | None = None,
        change: Callable[[Batch], Batch] | None = None,
    ) -> None:
        """source: what `sampler` prepared of the data; None where there are none, and mixing is 0. keys [N]: of the
        replicas. mixing: the share of each batch that is the data's; None: both in proportion to their rows.
        interventions: the ring's rows that count as the data's where mixing is a share. change: what all batches go
        through."""
        self.ring, self.sampler, self.source, self.mixing = ring, sampler, source, mixing
        self.interventions, self.change = interventions, change
        self.size, self.from_data = batch_size, batch_size if mixing is None else round(mixing * batch_size)
        self.keys = keys.to(ring.device)
        where = ring.device if source is None else _device(source)
        self.data_keys = keys.to(where)

    @property
    def ready(self) -> bool:
        """Whether every replica has played enough to draw from."""
        return bool((sources.drawable(self.ring, self.sampler, len(self.keys)) > 0).all())

    def get(self, step: int) -> Batch:
        """The batch of update `step` for all replicas, [N, B, ...] on the device: first the data's rows, then the
        ring's.
        """
        batch = self._rows(step)
        return batch if self.change is None else self.change(batch)

    def _rows(self, step: int) -> Batch:
        if self.from_data == 0:
            return self._drawn(step, self.size, self.ring, 0)
        data = self._of_data(step, self.from_data)
        if self.mixing is None:
            return self._union(step, data, self.ring, 0)
        if self.interventions is not None:
            data = self._union(step, data, self.interventions, 3)
        if self.from_data == self.size:
            return data
        played = self._drawn(step, self.size - self.from_data, self.ring, 0)
        return joined(data, played)

    def experience(self) -> Experience:
        """The rows of every replica as they are now, [N, ...]; the data's where batches hold some. Raises UserError for
        data on the disk."""
        ring, count = self.ring, self.ring.replicas
        played = split(ring.packed.table, ring.packed.layout) | ring.apart
        data: Batch = {}
        if self.from_data:
            if not isinstance(self.source.table, Packed):
                raise UserError("a model learns from data in memory alone: raise dataset.memory_limit, or mixing=0")
            data = split(self.source.table.table, self.source.table.layout)
        return Experience(
            {name: column.to(ring.device).expand(count, *column.shape) for name, column in data.items()},
            {name: column.reshape(count, ring.capacity, *column.shape[1:]) for name, column in played.items()},
            ring.counts,
        )

    # ---- of batches that learn from what they draw; others have nothing of it

    def means(self, updates: int) -> dict[str, list[float]]:
        """Metrics of the last `updates` batches, those since the last call: a number for each replica."""
        return {}

    def state(self) -> dict[str, Any]:
        """The state that `load` takes, for a checkpoint."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""

    # ---- rows

    @staticmethod
    def _key(step: int, stream: int, keys: Tensor) -> Tensor:
        return rng.fold_in(rng.split(rng.fold_in(keys, step))[0], stream)

    def _drawn(self, step: int, count: int, ring: Ring, stream: int) -> Batch:
        """Rows of a ring, [N, count, ...]."""
        keys = self._key(step, stream, self.keys)
        if isinstance(self.sampler, GoalSampler):
            return sources.goals(ring, self.sampler, keys, count)
        if sources.is_chain(self.sampler):
            return sources.chains(ring, self.sampler, keys, count)
        return ring.take(vmap(lambda k, n: rng.randint(k, (count,), n))(keys, ring.counts))

    def _union(self, step: int, data: Batch, ring: Ring, stream: int) -> Batch:
        """As many rows as `data` has, of both in proportion to how many rows there are."""
        count = self.from_data
        played = self._drawn(step, count, ring, stream)
        key = self._key(step, stream + 2, self.keys)
        counts = ring.counts
        if sources.is_chain(self.sampler):
            counts = torch.from_numpy(sources.drawable(ring, self.sampler, len(self.keys))).to(ring.device)
        counts = counts + self.source.count  # [N]
        from_data = vmap(lambda k, n: rng.randint(k, (count,), n))(key, counts) < self.source.count  # [N, B]
        return _merged(
            lambda v, w: torch.where(from_data.reshape(*from_data.shape, *[1] * (v.ndim - 2)), v, w), data, played
        )

    def _of_data(self, step: int, count: int) -> Batch:
        batch = vmap(lambda k: self.sampler(self.source, k, count))(self._key(step, 1, self.data_keys))
        return cast(Batch, move(batch, self.ring.device))


def joined(data: Batch, played: Batch) -> Batch:
    """The rows of two batches [N, B, ...], one after the other."""
    return cast(Batch, _merged(lambda v, w: torch.cat([v, w], 1), data, played))


def _merged(function: Callable[[Tensor, Tensor], Tensor], data: Any, played: Any) -> Any:
    """A batch of two, also of the streams in it."""
    if not isinstance(data, dict):
        return function(data, played)
    return {name: _merged(function, data[name], played[name]) for name in data}


def _device(source: Any) -> torch.device:
    """The device of a sampler's prepared columns."""
    table = getattr(source, "table", None)
    return next(iter(source.columns.values())).device if table is None else table.device
