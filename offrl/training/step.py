"""One training step for all replicas: sampling, update, metrics; eager, compiled, or captured in a CUDA graph.

`Step` turns an algorithm written for one seed into a function of a state with a leading replica axis N. All modes
compute the same update from the same keys; they differ by float rounding only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Algorithm, Metrics, TrainState, with_config
from offrl.data.samplers.transitions import Batch
from offrl.encoding import encoded_update
from offrl.training import distributed
from offrl.training.compiling.program import Hyper, Program, Updates
from offrl.training.updates import add, update_keys, with_counts

KEYS = 128  # updates whose keys are made at once
REFRESH = -(1 << 41)  # keys of `Algorithm.refresh`: updates have those of 0, 1, ...


class Batches(Protocol):
    """Ready-made batches in step order, for data that stays on disk."""

    def get(self, step: int) -> Batch:
        """The batch of update `step` for all replicas: [N, B, ...]."""


class Step:
    """The training step of an algorithm for N seeds at once. `run` is all that the trainer needs."""

    def __init__(
        self,
        algorithm: Algorithm,
        source: Any,
        *,
        batch_size: int,
        replicas: int,
        mode: str = "eager",
        batches: Batches | None = None,
        hyper: Hyper | None = None,
        precision: str = "float32",
        world: distributed.World = distributed.World(),  # noqa: B008 - frozen
        pool: Any = None,
    ) -> None:
        """source: what the algorithm's sampler prepared from the dataset, on the device. replicas: N. batches: instead
        of sampling inside the step, take the batches from here (the same ones: a sampler is a pure function of the
        key). mode: as `choose_mode` returns. hyper: settings of the algorithm's config that differ between replicas,
        float32 [N] each. precision: float32 or bf16 (autocast). world: the processes that share the batch of a single
        replica; the mode is then eager. pool: of memory that this step's CUDA graphs share with those of steps that
        never run at the same time."""
        self.source, self.batch_size, self.replicas = source, batch_size, replicas
        self.algorithm = with_config(algorithm, copy.copy(algorithm.config))
        self.base = algorithm.config
        self.process_group = world
        if world.size > 1:
            self.algorithm.runtime.reduce_gradients = distributed.average
        self.algorithm.runtime.source = source
        self.sampler = algorithm.sampler()
        self.every = algorithm.every
        if self.every % algorithm.traits.period:
            raise ValueError(
                f"{type(algorithm).__name__}: every {self.every} is no multiple of period {algorithm.traits.period}"
            )
        self.batches, self.hyper = batches, dict(hyper or {})
        # of algorithms that `learns_model` online: an `Experience` [N, ...] in place of the source
        self.experience: Callable[[], Any] = tuple
        self.precision = precision
        # compiled, one replica is faster with the axis too; and then it is the same arithmetic
        self.batched = algorithm.traits.vectorized and (replicas > 1 or mode != "eager")
        self.alone = mode == "eager" and not self.batched
        self.algorithm.runtime.alone = self.alone
        self.updates = functools.cache(self._updates)
        self.program: Program | None = None
        if mode != "eager":
            cache_key = (
                self.algorithm,
                self.sampler,
                source,
                batch_size,
                self.batched,
                list(self.hyper),
                self.base,
                precision,
            )
            self.program = Program(
                self.updates(0, algorithm.traits.period), algorithm.traits.period, mode, precision, pool, cache_key
            )

    @property
    def mode(self) -> str:
        """The execution of a whole pattern of updates: as given, or without compilation where that
        failed.
        """
        return "eager" if self.program is None else self.program.mode

    def _configure(self, values: Mapping[str, Any]) -> None:
        """Set fields of the config, which is this step's own copy, while an update is run or traced."""
        for name in values:
            object.__setattr__(self.algorithm.config, name, values[name])  # a frozen Config refuses an assignment

    def _autocast(self, state: TrainState) -> contextlib.AbstractContextManager[None]:
        """With bf16 networks' products and activations are bfloat16; parameters, optimiser and targets stay float32."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast("cpu" if state.step.device.type == "cpu" else "cuda", torch.bfloat16, cache_enabled=False)

    def _updates(self, first: int, length: int) -> Updates:
        """`length` updates in a row from phase `first`, of all replicas: (state without `buffers`, sums of metrics) of
        a state, keys [N, length, 2] for batches and updates, the replicas' own settings, and batches from outside."""

        algorithm = self.algorithm
        update = algorithm.update if algorithm.encoder is None else functools.partial(encoded_update, algorithm)

        def replica(state: TrainState, keys: Tensor, hyper: Hyper, batches: list[Batch]) -> tuple[TrainState, Metrics]:
            total: Metrics = {}
            self._configure(hyper)
            for i in range(length):
                batch = batches[i] if batches else self.sampler(self.source, keys[i, 0], self.batch_size)
                key = keys[i, 1]
                # each process takes its share of the one batch, and draws noise of its own
                if self.process_group.size > 1:
                    batch = pytree.tree_map(
                        lambda column: column[self.process_group.rank :: self.process_group.size], batch
                    )
                    key = rng.fold_in(key, self.process_group.rank)
                with self._autocast(state):
                    state, metrics = update(state, batch, key, phase=first + i)
                state = state._replace(step=state.step + 1)
                # under autocast they may be bfloat16, which sums badly
                metrics = {k: v.float() for k, v in metrics.items()}
                # a metric may come in some phases only
                total = add(total, metrics if self.algorithm.traits.period == 1 else with_counts(metrics))
            self._configure({name: getattr(self.base, name) for name in hyper})
            return state._replace(buffers={}), total

        if self.batched:
            return vmap(replica)
        return replica if self.alone else lambda *x: _stacked(replica(*_first(x)))

    def _refreshed_together(self, state: TrainState) -> bool:
        """Whether `Algorithm.refresh` is called for all replicas at once: what is as large as this is slower under vmap
        on a CPU.
        """
        return self.batched and state.step.device.type != "cpu"

    def _refresh(self, state: TrainState, sums: Metrics, step: int, hyper: Hyper) -> tuple[TrainState, Metrics]:
        """`Algorithm.refresh` for all replicas, eagerly. Where updates write over the state, so does this."""

        def one(state: TrainState, hyper: Hyper, experience: Any) -> tuple[TrainState, Metrics]:
            self._configure(hyper)
            key = rng.fold_in(rng.fold_in(state.key, REFRESH), state.step)
            with self._autocast(state):
                state, metrics = self.algorithm.refresh(state, experience or self.source, key, step=step)
            self._configure({name: getattr(self.base, name) for name in hyper})
            return state, {k: v.float() for k, v in metrics.items()}

        inputs = state, hyper, self.experience()
        if self._refreshed_together(state):
            new, metrics = vmap(one)(*inputs)
        else:
            results = [one(*pytree.tree_map(lambda x, n=n: x[n], inputs)) for n in range(len(state.step))]
            new, metrics = pytree.tree_map(lambda *leaves: torch.stack(leaves), *results)
        if self.mode == "eager":
            new = pytree.tree_map(lambda x: x.contiguous(), new)
        else:
            for old, leaf in zip(pytree.tree_leaves(state), pytree.tree_leaves(new), strict=True):
                old.copy_(leaf)
            new = state
        return new, add(sums, with_counts(metrics))

    def verify_compiled(self, state: TrainState, hyper: Hyper | None = None) -> str | None:
        """The difference of the compiled updates from the uncompiled ones, beyond rounding, from `state` on; None where
        there is none, nothing is compiled, or batches come from outside."""
        if self.program is None or self.batches is not None:
            return None
        return self.program.verify_compiled(state, self.hyper if hyper is None else hyper, [])

    def run(
        self, state: TrainState, sums: Metrics, step: int, count: int, slot: int = 0, hyper: Hyper | None = None
    ) -> tuple[TrainState, Metrics]:
        """`count` updates from update number `step`; returns the new state and `sums` with each metric [N] of each
        update added.

        The memory of what is handed in may be used for what comes out. The sums are carried along, not added up per
        call, so that where a run was interrupted does not show in their last bits. `slot` separates states that take
        turns in one step: each keeps its own CUDA graph. `hyper`: in place of the step's own.
        """
        hyper = self.hyper if hyper is None else hyper
        period, last = self.algorithm.traits.period, step + count
        while step < last:
            end = last
            if self.every:
                end = min(last, (step // self.every + 1) * self.every)
                if step % self.every == 0:
                    state, sums = self._refresh(state, sums, step, hyper)
            while step < end:
                phase = step % period
                if self.program is not None and phase == 0 and end - step >= period:
                    done, state, sums = self._patterns(self.program, state, sums, step, end, slot, hyper)
                    step += done
                    continue
                # keys of many updates at a time: one by one they would take longer than some of the matrix products
                keys = (
                    update_keys(state, min(end - step, KEYS if self.program is None else period - phase))
                    .unsqueeze(1)
                    .transpose(1, 2)
                )
                values = hyper
                if self.alone:  # the axis of the one replica is off for all of them
                    state, keys, values = _first((state, keys.transpose(0, 1), hyper))
                for key in keys:  # one by one: the sums then do not show where a run was interrupted
                    batches = self._batches(step, 1)
                    new, metrics = self.updates(step % period, 1)(
                        state, key, values, _first(batches) if self.alone else batches
                    )
                    state = new._replace(buffers=state.buffers)
                    sums = add(sums, _stacked(metrics) if self.alone else metrics)
                    step += 1
                state = _stacked(state) if self.alone else state
        return state, sums

    def _patterns(
        self, program: Program, state: TrainState, sums: Metrics, step: int, end: int, slot: int, hyper: Hyper
    ) -> tuple[int, TrainState, Metrics]:
        """Whole patterns from update number `step`, `end` at the latest: (updates done, state, sums)."""
        period, batches = self.algorithm.traits.period, self._batches(step, self.algorithm.traits.period)
        program.trust(state, hyper, batches)
        if "cudagraph" in program.mode:
            times = (end - step) // period if self.batches is None else 1
            return times * period, *program.replay(state, sums, hyper, batches, times, slot)
        count = max(1, min(end - step, KEYS) // period) * period
        keys = update_keys(state, count)
        for first in range(0, count, period):
            batches = batches if first == 0 else self._batches(step + first, period)
            part = keys[first : first + period]
            if program.mode != "eager":
                sums = program.run(state, sums, part, hyper, batches)
            else:
                new, metrics = program.updates(state, part.transpose(0, 1), hyper, batches)
                state, sums = new._replace(buffers=state.buffers), add(sums, metrics)
        return count, state, sums

    def _batches(self, step: int, count: int) -> list[Batch]:
        """The batches from outside of the updates from number `step`; none where the step samples."""
        return [] if self.batches is None else [self.batches.get(step + i) for i in range(count)]


def _first(tree: Any) -> Any:
    """A tree without the replica axis, of the one replica."""
    return pytree.tree_map(lambda x: x[0], tree)


def _stacked(tree: Any) -> Any:
    """The inverse."""
    return pytree.tree_map(lambda x: x.unsqueeze(0), tree)
