"""An algorithm of offrl on synthetic data, ready to be timed; what offrl_speed.py, growth.py and gpu_check.py have in
common.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import common

from offrl import registry
from offrl.algorithm import Algorithm, Metrics, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.memory import MANIFEST, Memory, chunks, open_mapped
from offrl.data.samplers.prefetch import Prefetcher
from offrl.system import backend
from offrl.training.step import Step
from offrl.training.updates import metric_means


def synthetic(rows: int) -> Dataset:
    """`common.transitions` as a dataset of offrl; the first tenth is marked as an expert's for the algorithms that
    imitate one.
    """
    columns = common.transitions(rows)
    columns.pop("masks")
    columns["expert"] = np.arange(rows) < rows // 10
    terminations, truncations = common.flags(rows)
    return from_arrays(
        **columns,
        terminations=terminations,
        truncations=truncations,
        action_low=-1.0,
        action_high=1.0,
        name="synthetic",
        check=False,
    )


def on_disk(rows: int, folder: Path, repeated: int = 1_000_000) -> Dataset:
    """As much in memory-mapped files under `folder`, as `dataset.memory=mmap` keeps it, 107 bytes a row: so many rows
    over and over. Written by the first call."""
    target = folder / f"synthetic-{rows}"
    if not (target / MANIFEST).exists():
        block = synthetic(min(rows, repeated))
        if rows % len(block):
            raise ValueError(f"{rows} rows are no multiple of {len(block)}")
        memory, columns = Memory(-1.0, folder), {}
        for name in block.columns.keys() - {"expert"}:
            values = block.columns[name].numpy()
            out = memory.empty(name, (rows, *values.shape[1:]), values.dtype)
            for part in chunks(rows, len(values)):
                out[part] = values
            columns[name] = torch.from_numpy(out)
        shifts = torch.arange(0, rows, len(block))[:, None]
        starts, ends = ((shifts + at).flatten() for at in (block.episode_start, block.episode_end))
        about = {
            "raw_returns": torch.zeros(len(ends), dtype=torch.float64),
            "complete": torch.ones(len(ends), dtype=torch.bool),
        }
        memory.write(
            replace(block, columns=columns, episode_start=starts, episode_end=ends, **about), target, "benchmark"
        )
    return open_mapped(target)


def make(name: str, dataset: Dataset, settings: dict[str, Any] | None = None) -> Algorithm:
    """The registered algorithm `name` with its default settings but for `settings`, those that the data decide found as
    in a run.

    What a run would train first, such as a world model, must be there (tests/support/cases.py makes all algorithms, in
    small)."""
    kind = registry.get("algo", name)
    return kind(kind.fit_config(kind.Config(**(settings or {})), dataset), dataset.spec)


class Runner:
    """State, step and data of `seeds` replicas. Batches of memory-mapped data are read ahead, as in a run."""

    def __init__(
        self,
        algorithm: Algorithm,
        dataset: Dataset,
        *,
        seeds: Sequence[int],
        mode: str,
        batch_size: int = common.BATCH,
        device: str = "cpu",
        source: Any = None,
    ) -> None:
        """source: what another runner on these data prepared."""
        self.algorithm, self.device, self.mode = algorithm, torch.device(device), mode
        if mode == "compiled":
            # as a run does: torch's own folder may hold code for other instructions of this CPU
            backend.cache_compiled()
        sampler = algorithm.sampler()
        self.source = source or sampler.prepare(dataset if dataset.mapped else dataset.to(self.device))
        self.state = stack([algorithm.init(s) for s in seeds], self.device)
        self.ahead = (
            Prefetcher(sampler, self.source, self.state.key, batch_size, 0, self.device) if dataset.mapped else None
        )
        self.step = Step(
            algorithm, self.source, batch_size=batch_size, replicas=len(seeds), mode=mode, batches=self.ahead
        )
        self.sums: Metrics = {}
        self.done = 0

    def run(self, count: int) -> None:
        """`count` updates; on a GPU they may still be under way on return. Raises RuntimeError where they ran in
        another mode.
        """
        self.state, self.sums = self.step.run(self.state, self.sums, self.done, count)
        self.done += count
        keeps_to(self.mode, self.step)

    def updates(self, count: int) -> dict[str, float]:
        """`count` updates to their end, and the mean over replicas and updates of each loss."""
        self.sums = {k: torch.zeros_like(v) for k, v in self.sums.items()}
        self.run(count)
        means = metric_means(self.sums, count)
        return {k: float(v.mean()) for k, v in means.items() if k.endswith("loss")}

    def rate(self, seconds: float) -> float:
        """Updates per second over about that many seconds."""
        chunk = 5 * self.algorithm.traits.period
        while True:
            start = time.perf_counter()
            self.run(chunk)
            self.wait()
            spent = time.perf_counter() - start
            if spent >= seconds:
                return chunk / spent
            chunk *= max(2, min(20, int(1.2 * seconds / max(spent, 1e-6))))

    def wait(self) -> None:
        """Until a GPU is done with what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """Stop reading ahead."""
        if self.ahead is not None:
            self.ahead.close()

    def resident_bytes(self) -> tuple[int, int]:
        """Bytes of the state and of the data that the sampler prepared."""
        return nbytes(self.state), nbytes(self.source)


def keeps_to(mode: str, step: Step) -> None:
    """Raise RuntimeError where a step goes on in another mode: a measurement would be one of something else. Its
    warning has said why.
    """
    if step.mode != mode:
        raise RuntimeError(f"the step was to run {mode} and goes on {step.mode}")


def nbytes(tree: Any) -> int:
    """Bytes of all tensors in nested dictionaries, lists, tuples and objects; a storage counts once."""
    sizes: dict[int, int] = {}
    _storages(tree, sizes)
    return sum(sizes.values())


def _storages(tree: Any, sizes: dict[int, int]) -> None:
    if isinstance(tree, torch.Tensor):
        storage = tree.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    elif isinstance(tree, dict):
        for item in tree.values():
            _storages(item, sizes)
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _storages(item, sizes)
    elif hasattr(tree, "__dict__"):
        _storages(vars(tree), sizes)


def resident() -> int:
    """Bytes of memory that this process holds now (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def products_per_second() -> float:
    """FLOPs per second of float32 products of 256 x 256 matrices on the CPU; the best of some tries."""
    a = torch.randn(256, 256)
    out, best = torch.empty_like(a), float("inf")
    for _ in range(30):
        start = time.perf_counter()
        for _ in range(20):
            torch.mm(a, a, out=out)
        best = min(best, (time.perf_counter() - start) / 20)
    return 2.0 * 256**3 / best


def counted(algorithm: Algorithm, dataset: Dataset, batch_size: int = common.BATCH) -> float:
    """FLOPs of the matrix products of one update of one replica, on average over a pattern of updates, as torch counts
    them.
    """
    from torch.utils.flop_counter import FlopCounterMode

    one = Runner(algorithm, dataset, seeds=[0], mode="eager", batch_size=batch_size)
    with FlopCounterMode(display=False) as counter:
        one.run(algorithm.traits.period)
    return counter.get_total_flops() / algorithm.traits.period
