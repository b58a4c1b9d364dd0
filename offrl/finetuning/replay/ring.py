"""Replay buffers: a ring of played transitions for each replica, on the device, and the files that hold its rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from offrl.data.memory import free_bytes
from offrl.data.samplers.tables import Packed, nested
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.finetuning.replay.sources import LAST
from offrl.system import files as checkpoint

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
        self.ends = torch.zeros_like(self.counts)  # the slot after the newest row
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
            if name == LAST:
                values = (values + slots[keep] % self.capacity).astype(np.int32)
            column[index] = torch.from_numpy(np.ascontiguousarray(values)).to(self.device)
        self.counts.copy_(torch.from_numpy(np.minimum(self.total, self.capacity)))
        self.ends.copy_(torch.from_numpy(self.total % self.capacity))

    def take(self, slots: Tensor) -> Batch:
        """The rows in slots [N, B] of each replica: [N, B, ...]."""
        return self.rows(slots + self._first)

    def rows(self, slots: Tensor) -> Batch:
        """The rows in slots [...] of the whole ring: [..., ...]."""
        index = slots.reshape(-1)
        columns = self.packed.take(index) | {name: column[index] for name, column in self.apart.items()}
        return nested({name: columns[name].reshape(*slots.shape, *shape) for name, (shape, _) in self.columns.items()})


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
