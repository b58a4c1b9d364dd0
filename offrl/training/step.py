"""One training step for all replicas: sampling, update, metrics; eager, compiled, or captured in a CUDA graph.

`make_step` turns an algorithm written for one seed into a function of a state with a leading replica axis N. All modes compute the same
update from the same keys; they differ by float rounding only.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import math
import shutil
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Algorithm, Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError, first_line, warn
from offrl.system import backend
from offrl.training import distributed

COUNT = "count of "  # prefix of the sums that count in how many updates a metric came
KEYS = 128  # updates whose keys are made at once
BETWEEN = -(1 << 41)  # keys of `Algorithm.refresh`: updates have those of 0, 1, ...
PAYS_FROM = 5_000  # updates; measured on CPU with IQL: compiling takes 13 s; 4 seeds then take 13 ms, not 23
Hyper = dict[str, Tensor]  # field of an algorithm's config -> one value for each replica, float32 [N]


class Batches(Protocol):
    """Ready-made batches in step order, for data that stays on disk."""

    def get(self, step: int) -> Batch:
        """The batch of update `step` for all replicas: [N, B, ...]."""


def choose_mode(compile: str, device: torch.device, steps: int, algorithm: Algorithm | type[Algorithm] = Algorithm) -> str:
    """Resolve compile=auto|eager|cudagraph|compiled to how the step will run: eager, compiled, cudagraph or compiled-cudagraph.

    Raises UserError where what was asked for cannot be.
    """
    pays = compile == "compiled" or (compile == "auto" and steps >= PAYS_FROM and algorithm.traits.compiles)
    if device.type == "cuda":
        if compile == "eager" or not algorithm.traits.cuda_graph:
            return "eager"
        if pays:
            problem = no_triton(str(device))
            if problem is None:
                return "compiled-cudagraph"
            if compile == "compiled":
                raise UserError(f"compile=compiled cannot be on this machine: {problem}; compile=auto does without")
            warn(f"the step is not compiled, but captured in a CUDA graph as it is: {problem}")
        return "cudagraph"
    if compile == "cudagraph":
        raise UserError("compile=cudagraph needs a CUDA GPU; on a CPU use compile=auto")
    has_compiler = any(shutil.which(c) for c in ("c++", "g++", "clang++"))
    if compile == "compiled" and not has_compiler:
        raise UserError("compile=compiled needs a C++ compiler on CPU and none was found; install g++ or use compile=eager")
    return "compiled" if pays and has_compiler else "eager"


@functools.lru_cache
def no_triton(device: str) -> str | None:
    """Why Inductor cannot compile for this GPU, found out with one line of code; None where it can."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 7:
        return f"Triton needs a GPU of compute capability 7.0 or newer, and this one's is {major}.{minor}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    if not any(shutil.which(c) for c in ("cc", "gcc", "clang")):
        return "Triton needs a C compiler and none was found; install gcc"
    backend.cache_compiled()  # before torch chooses a folder of its own
    try:
        torch.compile(lambda x: x + 1, fullgraph=True)(torch.zeros(8, device=device))
    except Exception as error:  # headers of Python or CUDA's library are not there, mostly
        return f"a line of code did not compile there ({first_line(error)}); install Python's headers (python3-dev), or see the message"
    return None


def add(total: Metrics, metrics: Metrics) -> Metrics:
    """Sums by name; either side may lack a name."""
    return {**total, **{k: total[k] + v if k in total else v for k, v in metrics.items()}}


def metric_means(sums: Metrics, updates: int) -> dict[str, Tensor]:
    """Mean of each metric over the updates in which it came, per replica [N] float64 on the CPU, from what `Step.run` summed."""
    names = [k for k in sums if not k.startswith(COUNT)]
    return {k: (sums[k].double() / sums.get(COUNT + k, updates)).cpu() for k in names}


class Step:
    """Callable training step; see `make_step`. `run` is all that the trainer needs."""

    cpp_wrapper = True  # False shows a profiler the matrix products by name

    def __init__(
        self,
        algorithm: Algorithm,
        source: Any,
        batch_size: int,
        replicas: int,
        mode: str,
        batches: Batches | None,
        hyper: Hyper,
        precision: str,
        world: distributed.World,
        pool: Any,
    ) -> None:
        self.source, self.batch_size, self.replicas, self.mode = source, batch_size, replicas, mode
        self.algorithm = copy.copy(algorithm)
        self.algorithm.config = copy.copy(algorithm.config)
        self.base = algorithm.config
        self.world, self.pool = world, pool
        if world.size > 1:
            self.algorithm.average = distributed.average
        self.algorithm.source = source
        self.algorithm.graphs = "cudagraph" in mode
        self.sampler = algorithm.sampler()
        self.every = algorithm.every
        if self.every % algorithm.traits.period:
            raise ValueError(f"{type(algorithm).__name__}: interval {self.every} is no multiple of period {algorithm.traits.period}")
        self.batches, self.hyper = batches, dict(hyper)
        self.precision = precision
        # compiled, one replica is faster with the axis too; and then it is the same arithmetic
        self.batched = algorithm.traits.vectorized and (replicas > 1 or mode != "eager")
        self._eager: dict[tuple[int, int], Callable[..., tuple[TrainState, Metrics]]] = {}
        self._compiled: Callable[..., None] | None = None
        self._graphs: dict[int, _CudaGraph] = {}
        self._names: dict[str, torch.dtype] | None = None  # of a whole pattern's metrics
        self._checked = False  # the compiled step against the uncompiled one

    def _configure(self, values: Mapping[str, Any]) -> None:
        """Set fields of the config, which is this step's own copy, while an update is run or traced."""
        for name in values:
            object.__setattr__(self.algorithm.config, name, values[name])  # a frozen Config refuses an assignment

    def _autocast(self, state: TrainState) -> contextlib.AbstractContextManager[None]:
        """With bf16 networks' products and activations are bfloat16; parameters, optimiser and targets stay float32."""
        if self.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast("cpu" if state.step.device.type == "cpu" else "cuda", torch.bfloat16, cache_enabled=False)

    def _pattern(self, first: int, length: int) -> Callable[..., tuple[TrainState, Metrics]]:
        """`length` updates in a row from phase `first`, of one seed; metrics are summed. keys: [length, 2] for batches and updates."""

        def one(state: TrainState, keys: Tensor, hyper: Hyper, batches: list[Batch]) -> tuple[TrainState, Metrics]:
            total: Metrics = {}
            self._configure(hyper)
            for i in range(length):
                batch = batches[i] if batches else self.sampler(self.source, keys[i, 0], self.batch_size)
                key = keys[i, 1]
                if self.world.size > 1:  # each process takes its share of the one batch, and draws noise of its own
                    batch = {name: column[self.world.rank :: self.world.size] for name, column in batch.items()}
                    key = rng.fold_in(key, self.world.rank)
                with self._autocast(state):
                    state, metrics = self.algorithm.update(state, batch, key, phase=first + i)
                state = state._replace(step=state.step + 1)
                metrics = {k: v.float() for k, v in metrics.items()}  # under autocast they may be bfloat16, which sums badly
                if self.algorithm.traits.period > 1:  # a metric may come in some phases only
                    metrics = {**metrics, **{COUNT + k: torch.ones_like(v) for k, v in metrics.items()}}
                total = add(total, metrics)
            self._configure({name: getattr(self.base, name) for name in hyper})
            return state._replace(buffers={}), total

        run = self._for_all(one)

        def pattern(state: TrainState, *rest: Any) -> tuple[TrainState, Metrics]:
            new, total = run(state, *rest)
            return new._replace(buffers=state.buffers), total

        return pattern

    def _for_all(self, one: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one replica as a function of all."""
        if self.batched:
            return vmap(one)

        def alone(*arguments: Any) -> Any:
            result = one(*pytree.tree_map(lambda x: x[0], arguments))
            return pytree.tree_map(lambda x: x.unsqueeze(0), result)

        return alone

    def _refresh(self, state: TrainState, sums: Metrics, step: int, hyper: Hyper) -> tuple[TrainState, Metrics]:
        """`Algorithm.refresh` for all replicas, eagerly. Where updates write over the state, so does this."""

        def one(state: TrainState, hyper: Hyper) -> tuple[TrainState, Metrics]:
            self._configure(hyper)
            key = rng.fold_in(rng.fold_in(state.key, BETWEEN), state.step)
            with self._autocast(state):
                state, metrics = self.algorithm.refresh(state, self.source, key, step=step)
            self._configure({name: getattr(self.base, name) for name in hyper})
            return state, {k: v.float() for k, v in metrics.items()}

        if state.step.device.type == "cpu":  # what is as large as this is slower under vmap there
            each = [one(*pytree.tree_map(lambda x, n=n: x[n], (state, hyper))) for n in range(len(state.step))]
            new, metrics = pytree.tree_map(lambda *leaves: torch.stack(leaves), *each)
        else:
            new, metrics = self._for_all(one)(state, hyper)
        if self.mode == "eager":
            new = pytree.tree_map(lambda x: x.contiguous(), new)
        else:
            for old, leaf in zip(pytree.tree_leaves(state), pytree.tree_leaves(new), strict=True):
                old.copy_(leaf)
            new = state
        return new, add(sums, {**metrics, **{COUNT + k: torch.ones_like(v) for k, v in metrics.items()}})

    def _plain(self, first: int, length: int) -> Callable[..., tuple[TrainState, Metrics]]:
        key = (first, length)
        if key not in self._eager:
            self._eager[key] = self._pattern(first, length)
        return self._eager[key]

    def _in_place(self, state: TrainState, sums: Metrics, keys: Tensor | None, hyper: Hyper, batches: list[Batch]) -> None:
        """One pattern whose results overwrite `state` and are added to `sums`: no memory is taken, none is copied."""
        if keys is None:
            keys = update_keys(state, self.algorithm.traits.period)
        new, metrics = self._plain(0, self.algorithm.traits.period)(state, keys.transpose(0, 1), hyper, batches)
        olds, leaves = pytree.tree_leaves(state), pytree.tree_leaves(new)
        # what an update passes on under another name is read before it is overwritten
        leaves = [x.clone() if x is not old and any(x is other for other in olds) else x for old, x in zip(olds, leaves, strict=True)]
        if self.mode == "cudagraph":
            backend.overwrite(olds, leaves)
            if sums:
                torch._foreach_add_(list(sums.values()), [metrics[name] for name in sums])
            return
        for old, leaf in zip(olds, leaves, strict=True):
            if old is not leaf:
                old.copy_(leaf)
        for name, total in sums.items():
            total.add_(metrics[name])

    def _program(self) -> Callable[..., None]:
        """`_in_place`, compiled if the mode says so."""
        if self._compiled is None:
            self._compiled = self._in_place
            if self.mode.startswith("compiled"):
                # an update may take gradients inside the traced function; older versions of torch have no such switch
                if hasattr(torch._dynamo.config, "trace_autograd_ops"):
                    torch._dynamo.config.trace_autograd_ops = True

                def program(*arguments: Any) -> None:
                    self._in_place(*arguments)

                # Shapes never change here, and checking each tensor before each update costs as much as a small matrix product. Without
                # checks what was compiled must be found by this step alone: it is kept with the code object, hence one of its own.
                skip = getattr(torch.compiler, "skip_all_guards_unsafe", None)
                program.__code__ = program.__code__.replace()
                options: dict[str, Any] = {} if skip is None else {"guard_filter_fn": skip}
                if skip is not None and self.cpp_wrapper and "cudagraph" not in self.mode:
                    options["cpp_wrapper"] = True  # calling a hundred kernels from Python takes a twentieth of a small update
                if "cudagraph" in self.mode and "deterministic" in torch._inductor.list_options():
                    options["deterministic"] = True  # else timings decide the last bits, and those of a resumed run may find otherwise
                self._compiled = torch.compile(program, fullgraph=True, dynamic=False, options=options)
        return self._compiled

    def _trust(self, state: TrainState, hyper: Hyper, batches: list[Batch]) -> None:
        """Before the compiled step is used: go on without it, with a warning, where it cannot be made or computes something else."""
        if self._checked or not self.mode.startswith("compiled"):
            return
        self._checked = True
        try:
            problem = self.doubt(state, hyper, batches)
            if problem is None:
                backend.seal_compiled()
            else:
                problem = f"computes something else than the uncompiled one ({problem}): {backend.set_aside_compiled()}"
        except Exception as error:  # whatever a compiler says; an update that fails uncompiled has failed before
            if isinstance(error, (UserError, MemoryError)) or "out of memory" in str(error):
                raise
            problem = f"cannot be compiled here ({type(error).__name__}: {first_line(error)[:200]})"
        if problem:
            self.mode = "cudagraph" if "cudagraph" in self.mode else "eager"
            self._compiled = None
            warn(f"the step {problem}; this run goes on without compilation")

    def doubt(self, state: TrainState, hyper: Hyper | None = None, batches: list[Batch] | None = None) -> str | None:
        """What the compiled step computes otherwise than the uncompiled one, beyond rounding, on one pattern of updates from `state`; None
        where nothing is, or where nothing is compiled. Batches from outside have to be given."""
        if not self.mode.startswith("compiled") or (self.batches is not None and not batches):
            return None
        hyper, batches = self.hyper if hyper is None else hyper, batches or []
        keys = update_keys(state, self.algorithm.traits.period)
        # copies: an update may work in place, and the compiled one does; neither changes what is frozen
        one, other = (pytree.tree_map(torch.clone, state._replace(buffers={}))._replace(buffers=state.buffers) for _ in range(2))
        expected, metrics = self._plain(0, self.algorithm.traits.period)(one, keys.transpose(0, 1), hyper, batches)
        sums = {name: torch.zeros_like(value) for name, value in metrics.items()}
        # called as it will be: nothing looks at the arguments again
        self._program()(other, sums, None if "cudagraph" in self.mode else keys, hyper, batches)
        return difference(state, (expected, metrics), (other, sums), self.precision)

    def _complete(self, sums: Metrics, state: TrainState, keys: Tensor, hyper: Hyper, batches: list[Batch]) -> Metrics:
        """`sums` with a zero for every metric that a whole pattern gives: the first time an update is tried for their names."""
        if self._names is None:
            _, metrics = self._plain(0, self.algorithm.traits.period)(state, keys.transpose(0, 1), hyper, batches)
            self._names = {name: value.dtype for name, value in metrics.items()}
        if all(name in sums for name in self._names):
            return sums
        zeros = {name: torch.zeros(self.replicas, dtype=dtype, device=state.step.device) for name, dtype in self._names.items()}
        return {**zeros, **sums}

    def run(
        self, state: TrainState, sums: Metrics, step: int, count: int, slot: int = 0, hyper: Hyper | None = None
    ) -> tuple[TrainState, Metrics]:
        """`count` updates from update number `step`; returns the new state and `sums` with each metric [N] of each update added.

        The memory of what is handed in may be used for what comes out. The sums are carried along, not added up per call, so that where a
        run was interrupted does not show in their last bits. `slot` tells states apart that take turns in one step: each keeps its own
        CUDA graph. `hyper`: in place of the step's own.
        """
        hyper = self.hyper if hyper is None else hyper
        last = step + count
        while step < last:
            end = last
            if self.every:
                end = min(last, (step // self.every + 1) * self.every)
                if step % self.every == 0:
                    state, sums = self._refresh(state, sums, step, hyper)
            state, sums = self._updates(state, sums, step, end, slot, hyper)
            step = end
        return state, sums

    def _updates(self, state: TrainState, sums: Metrics, step: int, end: int, slot: int, hyper: Hyper) -> tuple[TrainState, Metrics]:
        """Updates number `step` to `end` - 1."""
        period = self.algorithm.traits.period
        while step < end:
            phase = step % period
            whole = phase == 0 and end - step >= period and self.mode != "eager"
            if whole and "cudagraph" in self.mode:
                times = (end - step) // period if self.batches is None else 1
                batches = [] if self.batches is None else [self.batches.get(step + i) for i in range(period)]
                if slot not in self._graphs:
                    self._trust(state, hyper, batches)
                    self._graphs[slot] = _CudaGraph(self, state, hyper, batches)
                state, sums = self._graphs[slot].replay(state, sums, hyper, batches, times)
                step += times * period
                continue
            # keys of many updates at a time: one by one they would take longer than some of the matrix products
            many = min(end - step, KEYS) // period * period if whole else min(end - step, period - phase if self.mode != "eager" else KEYS)
            keys = update_keys(state, many)
            length = period if whole else 1  # eagerly one by one: the sums then do not show where a run was interrupted
            for first in range(0, many, length):
                batches = [] if self.batches is None else [self.batches.get(step + i) for i in range(length)]
                part = keys[first : first + length]
                if whole:
                    self._trust(state, hyper, batches)
                if whole and self.mode != "eager":
                    sums = self._complete(sums, state, part, hyper, batches)
                    own = {name: sums[name] for name in self._names or ()}  # `_refresh` has others
                    self._program()(state, own, part, hyper, batches)
                else:
                    state, metrics = self._plain(step % period, length)(state, part.transpose(0, 1), hyper, batches)
                    sums = add(sums, metrics)
                step += length
        return state, sums


def update_keys(state: TrainState, count: int) -> Tensor:
    """[count, N, 2] int64: for each of the next `count` updates a key for its batch and one for its own noise."""
    steps = state.step + torch.arange(count, dtype=torch.int64, device=state.step.device).unsqueeze(-1)
    return torch.stack(rng.split(rng.fold_in(state.key, steps)), -1)


ALIKE = {"float32": 0.02, "tf32": 0.1, "bf16": 0.3}  # relative; code for another CPU differs by more than 1


def difference(before: TrainState, left: tuple[TrainState, Metrics], right: tuple[TrainState, Metrics], precision: str) -> str | None:
    """What two results of the same updates differ in by more than rounding explains, such as "moments of critic by 1.4"; None for nothing.

    Adam turns a gradient that is nothing but rounding into a whole step, so parameters are looked at by how far they moved, a module at a
    time, and moments are what tells.
    """
    limit, (a, metrics), (b, sums) = ALIKE[precision], left, right
    if not (torch.equal(a.step, b.step) and torch.equal(a.key, b.key)):
        return "the updates' number or key"
    for name, value in metrics.items():
        gap = _gap([value], [sums[name]], at_least=1.0)
        if gap > limit:
            return f"{name} by {gap:.2g}"
    for module in a.params:
        moments = [pytree.tree_leaves(state.opt.get(module)) for state in (a, b)]
        moved = [[x - y for x, y in zip(s.params[module].values(), before.params[module].values(), strict=True)] for s in (a, b)]
        # noise around 0 is compared with the parameters' own size
        small = 1e-6 * float(torch.cat([x.flatten().double() for x in a.params[module].values()]).norm()) if a.params[module] else 0.0
        for what, (x, y), allowed in (("moments", moments, limit), ("steps", moved, 0.5 + limit)):
            gap = _gap(x, y, at_least=small)
            if gap > allowed:
                return f"{what} of {module} by {gap:.2g}"
    gap = _gap(pytree.tree_leaves((a.target, a.extra)), pytree.tree_leaves((b.target, b.extra)), at_least=1e-6)
    return f"targets or statistics by {gap:.2g}" if gap > limit else None


def _gap(left: list[Tensor], right: list[Tensor], at_least: float) -> float:
    """Distance of two lists of tensors, relative to the size of the first; what is not finite there does not count."""
    total, size = 0.0, 0.0
    for x, y in zip(left, right, strict=True):
        if x.is_floating_point():
            fine = x.isfinite()
            total += float(torch.where(fine, x.double() - y.double(), 0.0).square().sum())
            size += float(torch.where(fine, x.double(), 0.0).square().sum())
    return math.sqrt(total) / max(math.sqrt(size), at_least, 1e-30) if math.isfinite(total) else math.inf


class _CudaGraph:
    """A pattern captured once and replayed; the state lies in fixed memory, which the graph updates in place."""

    def __init__(self, step: Step, state: TrainState, hyper: Hyper, batches: list[Batch]) -> None:
        self.state, self.hyper, self.batches = (pytree.tree_map(torch.clone, tree) for tree in (state, hyper, batches))
        self.given: list[Tensor] = []  # whose numbers `hyper` holds
        program = step._program()
        self.sums = step._complete({}, self.state, update_keys(self.state, step.algorithm.traits.period), self.hyper, self.batches)
        # `replay` undoes what the calls before the capture do to the state
        self.graph = backend.capture(lambda: program(self.state, self.sums, None, self.hyper, self.batches), step.pool)

    def replay(self, state: TrainState, sums: Metrics, hyper: Hyper, batches: list[Batch], times: int) -> tuple[TrainState, Metrics]:
        if state is not self.state:
            backend.overwrite(pytree.tree_leaves(self.state), pytree.tree_leaves(state))
        given = list(hyper.values())
        if len(given) != len(self.given) or any(new is not old for new, old in zip(given, self.given, strict=True)):
            backend.overwrite(list(self.hyper.values()), given)
            self.given = given
        backend.overwrite(pytree.tree_leaves(self.batches), pytree.tree_leaves(batches))
        for name, value in self.sums.items():
            if sums.get(name) is not value:
                value.copy_(sums[name]) if name in sums else value.zero_()
        for _ in range(times):
            self.graph.replay()
        return self.state, {**sums, **self.sums}


def make_step(
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
) -> Step:
    """The training step of `algorithm` for `replicas` seeds at once.

    source: what the algorithm's sampler prepared from the data set, on the device. batches: instead of sampling inside the step, take
    the batches from here (the same ones: a sampler is a pure function of the key). mode: as `choose_mode` returns. hyper: settings of the
    algorithm's config that differ between replicas, float32 [N] each. precision: float32 or bf16 (autocast). world: the processes that
    share the batch of a single replica; the mode is then eager. pool: of memory that this step's CUDA graphs share with those of steps that
    never run at the same time.
    """
    return Step(algorithm, source, batch_size, replicas, mode, batches, hyper or {}, precision, world, pool)
