"""Batches from memory-mapped data, gathered in the background while the step runs on the ones before."""

from __future__ import annotations

import queue
import threading
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.data.samplers.transitions import Batch, Sampler


class Prefetcher:
    """The batches of updates `first`, `first` + 1, ..., in order: the very ones that the step would have sampled
    itself.

    A batch is a pure function of the replica's key and the update's number, so it can be drawn early, on the host, from
    the disk."""

    def __init__(
        self,
        sampler: Sampler,
        source: Any,
        keys: Tensor,
        batch_size: int,
        first: int,
        device: torch.device,
        depth: int = 8,
    ) -> None:
        """keys: the replicas' keys [N], on the CPU."""
        self.device = device
        self._queue: queue.Queue[tuple[int, Batch] | BaseException] = queue.Queue(maxsize=depth)
        self._stop = threading.Event()

        def one(key: Tensor, step: Tensor) -> Batch:
            return sampler(source, rng.split(rng.fold_in(key, step))[0], batch_size)

        def work() -> None:
            step = first
            try:
                while not self._stop.is_set():
                    batch = vmap(one, in_dims=(0, None))(keys, torch.tensor(step))
                    if device.type == "cuda":
                        batch = pytree.tree_map(lambda v: v.pin_memory(), batch)
                    self._put((step, batch))
                    step += 1
            except BaseException as error:  # handed to the training thread, which raises it
                self._put(error)

        self._thread = threading.Thread(target=work, name="offrl-prefetch", daemon=True)
        self._thread.start()

    def _put(self, item: tuple[int, Batch] | BaseException) -> None:
        while not self._stop.is_set():
            try:
                return self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue

    def get(self, step: int) -> Batch:
        """The batch of update `step` for all replicas, [N, B, ...] on the device. Steps must be requested in order."""
        item = self._queue.get()
        if isinstance(item, BaseException):
            raise item
        if item[0] != step:
            raise RuntimeError(f"batch of step {item[0]} where {step} was asked for")
        batch: Batch = pytree.tree_map(lambda v: v.to(self.device, non_blocking=True), item[1])
        return batch

    def close(self) -> None:
        """Stop the background thread."""
        self._stop.set()
        self._thread.join(timeout=5.0)
