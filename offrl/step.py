"""One training step for all replicas: sampling, update, metrics; eager, compiled, or captured in a CUDA graph.

`make_step` turns an algorithm written for one seed into a function of a state with a leading replica axis N. All modes compute the same
update from the same keys; they differ by float rounding only.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Algorithm, Metrics, TrainState
from offrl.data.samplers import Batch
from offrl.errors import UserError

COUNT = "count of "  # prefix of the sums that count in how many updates a metric came
COMPILE_PAYS_FROM = 5_000  # updates; measured on CPU with IQL: compiling takes 13 s; 4 seeds then take 13 ms, not 23


class Batches(Protocol):
    """Ready-made batches in step order, for data that stays on disk."""

    def get(self, step: int) -> Batch:
        """The batch of update `step` for all replicas: [N, B, ...]."""


def choose_mode(compile: str, device: torch.device, steps: int) -> str:
    """Resolve compile=auto|eager|compiled to how the step will run: eager, compiled, cudagraph or compiled-cudagraph."""
    if device.type == "cuda":
        return {"auto": "compiled-cudagraph", "compiled": "compiled-cudagraph", "eager": "cudagraph"}[compile]
    has_compiler = any(shutil.which(c) for c in ("c++", "g++", "clang++"))
    if compile == "compiled" and not has_compiler:
        raise UserError("compile=compiled needs a C++ compiler on CPU and none was found; install g++ or use compile=eager")
    if compile == "auto":
        return "compiled" if has_compiler and steps >= COMPILE_PAYS_FROM else "eager"
    return compile


def stack(states: list[TrainState], device: torch.device | str = "cpu") -> TrainState:
    """One state with a leading replica axis from the states of single seeds."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves).to(device), *states)


def select(state: TrainState, index: int) -> TrainState:
    """The state of one replica."""
    return pytree.tree_map(lambda leaf: leaf[index], state)


def add(total: Metrics, metrics: Metrics) -> Metrics:
    """Sums by name; either side may lack a name."""
    return {**total, **{k: total[k] + v if k in total else v for k, v in metrics.items()}}


def metric_means(sums: Metrics, updates: int) -> dict[str, Tensor]:
    """Mean of each metric over the updates in which it came, per replica [N] float64 on the CPU, from what `Step.run` summed."""
    names = [k for k in sums if not k.startswith(COUNT)]
    return {k: (sums[k].double() / sums.get(COUNT + k, updates)).cpu() for k in names}


class Step:
    """Callable training step; see `make_step`. `run` is all that the trainer needs."""

    def __init__(self, algorithm: Algorithm, source: Any, batch_size: int, replicas: int, mode: str, batches: Batches | None) -> None:
        self.algorithm, self.source, self.batch_size, self.replicas, self.mode = algorithm, source, batch_size, replicas, mode
        self.sampler = algorithm.sampler()
        self.batches = batches
        self._functions: dict[tuple[int, int], Callable[..., tuple[TrainState, Metrics]]] = {}
        self._graph: _CudaGraph | None = None

    def _one(self, state: TrainState, batch: Batch | None, phase: int) -> tuple[TrainState, Metrics]:
        """One update of one seed."""
        key_batch, key_update = rng.split(rng.fold_in(state.key, state.step))
        if batch is None:
            batch = self.sampler(self.source, key_batch, self.batch_size)
        state, metrics = self.algorithm.update(state, batch, key_update, phase=phase)
        return state._replace(step=state.step + 1), metrics

    def _pattern(self, first: int, length: int) -> Callable[..., tuple[TrainState, Metrics]]:
        """`length` updates in a row from phase `first`, for all replicas; metrics are summed."""

        def one(state: TrainState, *batches: Batch) -> tuple[TrainState, Metrics]:
            total: Metrics = {}
            for i in range(length):
                state, metrics = self._one(state, batches[i] if batches else None, first + i)
                if self.algorithm.period > 1:  # a metric may come in some phases only
                    metrics = {**metrics, **{COUNT + k: torch.ones_like(v) for k, v in metrics.items()}}
                total = add(total, metrics)
            return state, total

        return one if self.replicas == 1 else vmap(one)

    def _function(self, first: int, length: int) -> Callable[..., tuple[TrainState, Metrics]]:
        key = (first, length)
        if key not in self._functions:
            function = self._pattern(first, length)
            if self.mode.startswith("compiled") and length == self.algorithm.period:
                # an update may take gradients inside the traced function; older versions of torch have no such switch
                if hasattr(torch._dynamo.config, "trace_autograd_ops"):
                    torch._dynamo.config.trace_autograd_ops = True
                function = torch.compile(function, fullgraph=True, dynamic=False)
            self._functions[key] = function
        return self._functions[key]

    def run(self, state: TrainState, sums: Metrics, step: int, count: int) -> tuple[TrainState, Metrics]:
        """`count` updates from update number `step`; returns the new state and `sums` with each metric [N] of each update added.

        The sums are carried along, not added up per call, so that where a run was interrupted does not show in their last bits.
        """
        single = self.replicas == 1
        if single:
            state, sums = pytree.tree_map(lambda x: x[0], (state, sums))
        period, end = self.algorithm.period, step + count
        while step < end:
            phase = step % period
            # eagerly one by one: the sums then do not show where a run was interrupted inside a pattern
            length = period if self.mode != "eager" and phase == 0 and end - step >= period else 1
            function = self._function(phase, length)
            if "cudagraph" in self.mode and length == period and self.batches is None:
                if self._graph is None:
                    self._graph = _CudaGraph(function, state)
                state, sums = self._graph.replay(state, sums, (end - step) // period)
                step += (end - step) // period * period
            else:
                batches = [] if self.batches is None else [self.batches.get(step + i) for i in range(length)]
                if single:
                    batches = [{k: v[0] for k, v in batch.items()} for batch in batches]
                state, metrics = function(state, *batches)
                sums = add(sums, metrics)
                step += length
        if single:
            state, sums = pytree.tree_map(lambda x: x.unsqueeze(0), (state, sums))
        return state, sums


class _CudaGraph:
    """A step captured once and replayed; the state lives in fixed buffers that the graph updates in place."""

    def __init__(self, function: Callable[..., tuple[TrainState, Metrics]], state: TrainState) -> None:
        self.state = pytree.tree_map(torch.clone, state)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # warm-up: compilation and library handles must not be captured; its result is dropped
            for _ in range(3):
                _, metrics = function(self.state)
        torch.cuda.current_stream().wait_stream(stream)
        self.sums = {k: torch.zeros_like(v) for k, v in metrics.items()}
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            new, metrics = function(self.state)
            torch._foreach_copy_(pytree.tree_leaves(self.state), pytree.tree_leaves(new))
            torch._foreach_add_(list(self.sums.values()), [metrics[k] for k in self.sums])

    def replay(self, state: TrainState, sums: Metrics, times: int) -> tuple[TrainState, Metrics]:
        torch._foreach_copy_(pytree.tree_leaves(self.state), pytree.tree_leaves(state))
        torch._foreach_zero_(list(self.sums.values()))
        for name, value in sums.items():
            self.sums[name].copy_(value)
        for _ in range(times):
            self.graph.replay()
        return pytree.tree_map(torch.clone, self.state), {k: v.clone() for k, v in self.sums.items()}


def make_step(
    algorithm: Algorithm, source: Any, *, batch_size: int, replicas: int, mode: str = "eager", batches: Batches | None = None
) -> Step:
    """The training step of `algorithm` for `replicas` seeds at once.

    source: what the algorithm's sampler prepared from the data set, on the device. batches: instead of sampling inside the step, take
    the batches from here (the same ones: a sampler is a pure function of the key). mode: as `choose_mode` returns.
    """
    return Step(algorithm, source, batch_size, replicas, mode, batches)
