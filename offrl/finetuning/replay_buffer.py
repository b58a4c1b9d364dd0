"""Replay buffers: a ring of played transitions for each replica, on the device, and batches mixed of those and the
data's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.data.memory import free_bytes
from offrl.data.samplers.goals import GoalSampler
from offrl.data.samplers.tables import Experience, Packed, nested, split
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.finetuning import sources
from offrl.system import files as checkpoint
from offrl.system.backend import move

# of a run directory: the rows in the order in which they came, a file for each checkpoint
FOLDER, INTERVENTIONS = "replay", "interventions"
Column = tuple[tuple[int, ...], torch.dtype]  # shape of a row, type


class Ring:
    """The newest `capacity` rows of each of N replicas: columns [N, capacity, ...].

    Float32 and int64 columns lie side by side in one table, as the offline sampler's do (a discrete action is exact in
    float32); others, such as images, for themselves.
    """

    def __init__(self, columns: Mapping[str, Column], replicas: int, capacity: int, device: torch.device) -> None:
        """columns: name -> what a row holds. Raises UserError where the memory does not suffice."""
        self.columns, self.replicas, self.capacity, self.device = dict(columns), replicas, capacity, device
        self.total = np.zeros(replicas, np.int64)  # rows that ever came
        self.counts = torch.zeros(replicas, dtype=torch.int64, device=device)  # rows that are there
        layout: dict[str, tuple[int, int, tuple[int, ...], torch.dtype]] = {}
        width = 0
        for name, (shape, kind) in self.columns.items():
            if kind in (torch.float32, torch.int64):
                layout[name] = (width, width + math.prod(shape), shape, kind)
                width += math.prod(shape)
        apart = {name: column for name, column in self.columns.items() if name not in layout}
        size = replicas * capacity * (4 * width + sum(math.prod(s) * kind.itemsize for s, kind in apart.values()))
        try:
            if device.type == "cpu" and size > free_bytes():
                raise MemoryError
            table = torch.zeros(replicas * capacity, width, dtype=torch.float32, device=device)
            self.apart = {
                name: torch.zeros(replicas * capacity, *shape, dtype=kind, device=device)
                for name, (shape, kind) in apart.items()
            }
        except (MemoryError, RuntimeError):
            raise UserError(
                f"{capacity:,} transitions of {replicas} replicas need {size / 1e9:.1f} GB; set a smaller capacity=, "
                "or fewer steps="
            ) from None
        self.packed = Packed(table, layout)
        self._first = torch.arange(replicas, device=device).unsqueeze(-1) * capacity  # [N, 1]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.packed.table, *self.apart.values()))

    def add(self, replica: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """Rows in the order in which they came: `replica` [K] says whose they are, `rows` name -> [K, ...]."""
        keep, slots = np.ones(len(replica), bool), np.zeros(len(replica), np.int64)
        for n in np.unique(replica).tolist():
            indices = np.flatnonzero(replica == n)
            slots[indices] = n * self.capacity + (self.total[n] + np.arange(len(indices))) % self.capacity
            keep[indices[: -self.capacity]] = False  # overwritten at once
            self.total[n] += len(indices)
        if not keep.any():
            return
        index = torch.from_numpy(slots[keep]).to(self.device)
        flat = [np.asarray(rows[name])[keep].reshape(len(index), -1).astype(np.float32) for name in self.packed.layout]
        self.packed.table[index] = torch.from_numpy(np.concatenate(flat, 1)).to(self.device)
        for name, column in self.apart.items():
            values = np.asarray(rows[name])[keep]
            if name == sources.LAST:
                values = (values + slots[keep] % self.capacity).astype(np.int32)
            column[index] = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        self.counts.copy_(torch.from_numpy(np.minimum(self.total, self.capacity)))

    def take(self, slots: Tensor) -> Batch:
        """The rows in slots [N, B] of each replica: [N, B, ...]."""
        return self.rows(slots + self._first)

    def rows(self, slots: Tensor) -> Batch:
        """The rows in slots [...] of the whole ring: [..., ...]."""
        index = slots.reshape(-1)
        columns = self.packed.take(index) | {name: column[index] for name, column in self.apart.items()}
        return nested({name: columns[name].reshape(*slots.shape, *shape) for name, (shape, _) in self.columns.items()})


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
        data = self._of_data(step)
        if self.mixing is None:
            return self._union(step, data, self.ring, 0)
        if self.interventions is not None:
            data = self._union(step, data, self.interventions, 3)
        if self.from_data == self.size:
            return data
        played = self._drawn(step, self.size - self.from_data, self.ring, 0)
        return _merged(lambda v, w: torch.cat([v, w], 1), data, played)

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

    def _of_data(self, step: int) -> Batch:
        batch = vmap(lambda k: self.sampler(self.source, k, self.from_data))(self._key(step, 1, self.data_keys))
        return cast(Batch, move(batch, self.ring.device))


def _merged(function: Callable[[Tensor, Tensor], Tensor], data: Any, played: Any) -> Any:
    """A batch of two, also of the streams in it."""
    if not isinstance(data, dict):
        return function(data, played)
    return {name: _merged(function, data[name], played[name]) for name in data}


def _device(source: Any) -> torch.device:
    """The device of a sampler's prepared columns."""
    table = getattr(source, "table", None)
    return next(iter(source.columns.values())).device if table is None else table.device


class Replay:
    """The rows of the ring on the disk, so that a checkpoint writes only those that came since the last one."""

    def __init__(self, run_dir: Path, ring: Ring, folder: str = FOLDER) -> None:
        self.folder, self.ring = run_dir / folder, ring
        self.new: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self.files = 0

    def add(self, replica: np.ndarray, rows: Mapping[str, np.ndarray]) -> None:
        """See `Ring.add`."""
        if len(replica):
            self.ring.add(replica, rows)
            self.new.append((replica, dict(rows)))

    def save(self) -> int:
        """Write what came since the last call; returns how many files there are. Raises UserError (a full disk)."""
        if self.new:
            tensors = {
                name: torch.from_numpy(np.concatenate([rows[name] for _, rows in self.new]))
                for name in self.ring.columns
            }
            tensors["replica"] = torch.from_numpy(np.concatenate([replica for replica, _ in self.new]))
            checkpoint.write(self._path(self.files), tensors, {"kind": "replay"}, " The last checkpoint survives.")
            self.new.clear()
            self.files += 1
        return self.files

    def load(self, files: int, total: Sequence[int]) -> None:
        """Fill the ring from the first `files` files, in which each replica has `total` rows; later ones are played
        anew, and removed.

        Raises UserError where one is missing or damaged.
        """
        self.files = files
        for i in range(files):
            try:
                tensors, _ = checkpoint.read(self._path(i))
            except UserError as error:
                raise UserError(
                    f"{error}; without it what was played is incomplete: begin anew with another name="
                ) from None
            replica = tensors.pop("replica").numpy()
            self.ring.add(replica, {name: tensors[name].numpy() for name in self.ring.columns})
        if self.ring.total.tolist() != list(total):
            raise UserError(f"{self.folder} holds {self.ring.total.tolist()} transitions where the checkpoint needs "
                            f"{list(total)}: files were removed or changed; begin anew with another name=")  # fmt: skip
        self.discard(files)

    def discard(self, first: int) -> None:
        """Remove the files from number `first` on."""
        while self._path(first).exists():
            self._path(first).unlink()
            first += 1

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.safetensors"
