"""A pattern of updates as one compiled function or CUDA graph that overwrites the state, checked against the uncompiled
one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError, first_line, warn
from offrl.system import backend
from offrl.training.compiling import ahead
from offrl.training.updates import update_keys

Hyper = dict[str, Tensor]  # field of an algorithm's config -> one value for each replica, float32 [N]
# the new state comes without `buffers`
Updates = Callable[[TrainState, Tensor, Hyper, list[Batch]], tuple[TrainState, Metrics]]

ALIKE = {"float32": 0.02, "tf32": 0.1, "bf16": 0.3}  # relative; code for another CPU differs by more than 1


class Program:
    """A whole pattern of updates in place; `mode` becomes eager or cudagraph where compiled code is not to be had or
    wrong.
    """

    def __init__(
        self, updates: Updates, period: int, mode: str, precision: str, pool: Any, cache_key: Sequence[Any] = ()
    ) -> None:
        """updates: the pattern, eager. mode: compiled, cudagraph or compiled-cudagraph. pool: see `Step`.
        cache_key:
        all that decides what `updates` does, by which it is found when it has been compiled before; empty: it is not
        kept."""
        self.updates, self.period, self.mode, self.precision, self.pool, self.cache_key = (
            updates,
            period,
            mode,
            precision,
            pool,
            cache_key,
        )
        self._function: Callable[..., None] | None = None
        self._graphs: dict[int, _CudaGraph] = {}
        self._names: dict[str, torch.dtype] | None = None  # of the pattern's metrics
        self._checked = False  # against the uncompiled updates

    def run(self, state: TrainState, sums: Metrics, keys: Tensor, hyper: Hyper, batches: list[Batch]) -> Metrics:
        """One pattern without a graph, which overwrites `state`; the sums."""
        sums = self.complete(sums, state, keys, hyper, batches)
        metrics = {name: sums[name] for name in self._names or ()}  # those of `Algorithm.refresh` have other names
        self.function()(state, metrics, keys, hyper, batches)
        return sums

    def replay(
        self, state: TrainState, sums: Metrics, hyper: Hyper, batches: list[Batch], times: int, slot: int
    ) -> tuple[TrainState, Metrics]:
        """`times` patterns by the CUDA graph of `slot`, whose state is the one that is returned."""
        if slot not in self._graphs:
            self._graphs[slot] = _CudaGraph(self, state, hyper, batches)
        return self._graphs[slot].replay(state, sums, hyper, batches, times)

    def function(self) -> Callable[..., None]:
        """`_in_place`, compiled if the mode says so."""
        if self._function is None:
            self._function = self._in_place
            if self.mode == "compiled" and self.cache_key and self.precision == "float32" and ahead.available():
                self._function = self._by_library
            elif self.mode.startswith("compiled"):
                self._function = self._jit()
        return self._function

    def _by_library(self, *arguments: Any) -> None:
        """The first call of `_in_place` as a library, which then takes this function's place; or torch.compile's."""
        try:
            cache_key = [self.period, *self.cache_key]
            self._function = ahead.Library(self._in_place, arguments, cache_key)
        except Exception as error:
            if isinstance(error, (UserError, MemoryError)) or "out of memory" in str(error):
                raise
            self._function = self._jit()
        self._function(*arguments)

    def _jit(self) -> Callable[..., None]:
        """`_in_place` by torch.compile."""
        from offrl.training.compiling import passes

        # an update may take gradients inside the traced function; older versions of torch have no such switch
        if hasattr(torch._dynamo.config, "trace_autograd_ops"):
            torch._dynamo.config.trace_autograd_ops = True

        def program(*arguments: Any) -> None:
            self._in_place(*arguments)

        # Shapes never change here, and checking each tensor before each update costs as much as a small matrix product.
        # Without checks what was compiled must be found by this step alone: it is kept with the code object, hence one
        # of its own.
        skip = getattr(torch.compiler, "skip_all_guards_unsafe", None)
        program.__code__ = program.__code__.replace()
        options: dict[str, Any] = {"joint_custom_pre_pass": passes.Simpler()}
        if skip is not None:
            options["guard_filter_fn"] = skip
        if skip is not None and "cudagraph" not in self.mode:
            options["cpp_wrapper"] = True  # calling a hundred kernels from Python takes a twentieth of a small update
        if "cudagraph" in self.mode and "deterministic" in torch._inductor.list_options():
            options["deterministic"] = (
                True  # else timings decide the last bits, and those of a resumed run may find otherwise
            )
        return torch.compile(program, fullgraph=True, dynamic=False, options=options)

    def _in_place(
        self, state: TrainState, sums: Metrics, keys: Tensor | None, hyper: Hyper, batches: list[Batch]
    ) -> None:
        """One pattern whose results overwrite `state` and are added to `sums`: no memory is taken, none is copied."""
        if keys is None:
            keys = update_keys(state, self.period)
        new, metrics = self.updates(state, keys.transpose(0, 1), hyper, batches)
        olds, leaves = pytree.tree_leaves(state._replace(buffers={})), pytree.tree_leaves(new)
        # what an update passes on under another name is read before it is overwritten
        leaves = [
            x.clone() if x is not old and any(x is other for other in olds) else x
            for old, x in zip(olds, leaves, strict=True)
        ]
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

    def complete(self, sums: Metrics, state: TrainState, keys: Tensor, hyper: Hyper, batches: list[Batch]) -> Metrics:
        """`sums` with a zero for every metric that a whole pattern gives: the first time an update is tried for their
        names.
        """
        if self._names is None:
            _, metrics = self.updates(state, keys.transpose(0, 1), hyper, batches)
            self._names = {name: value.dtype for name, value in metrics.items()}
        if all(name in sums for name in self._names):
            return sums
        zeros = {
            name: torch.zeros(state.step.shape, dtype=dtype, device=state.step.device)
            for name, dtype in self._names.items()
        }
        return {**zeros, **sums}

    # ---- the compiled pattern against the uncompiled one

    def trust(self, state: TrainState, hyper: Hyper, batches: list[Batch]) -> None:
        """Before the compiled pattern is used: go on without it, with a warning, where it cannot be made or computes
        something else.
        """
        if self._checked or not self.mode.startswith("compiled"):
            return
        self._checked = True
        try:
            problem = self.verify_compiled(state, hyper, batches)
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
            self._function = None
            warn(f"the step {problem}; this run goes on without compilation")

    def verify_compiled(self, state: TrainState, hyper: Hyper, batches: list[Batch]) -> str | None:
        """The difference of the compiled pattern from the uncompiled one, beyond rounding, from `state` on; None where
        there is none, or nothing is compiled."""
        if not self.mode.startswith("compiled"):
            return None
        keys = update_keys(state, self.period)
        # copies: an update may work in place, and the compiled one does; neither changes the buffers
        one, other = (
            pytree.tree_map(torch.clone, state._replace(buffers={}))._replace(buffers=state.buffers) for _ in range(2)
        )
        expected, metrics = self.updates(one, keys.transpose(0, 1), hyper, batches)
        sums = {name: torch.zeros_like(value) for name, value in metrics.items()}
        # called as it will be: nothing looks at the arguments again
        self.function()(other, sums, None if "cudagraph" in self.mode else keys, hyper, batches)
        return difference(state, (expected, metrics), (other, sums), self.precision)


def difference(
    before: TrainState, first: tuple[TrainState, Metrics], second: tuple[TrainState, Metrics], precision: str
) -> str | None:
    """The first place where two results of the same updates differ by more than rounding, such as "moments of critic by
    1.4"; None for none.

    Adam turns a gradient that is nothing but rounding into a whole step, so parameters are compared by how far they
    moved, a module at a time, and moments are what tells.
    """
    limit, (a, metrics), (b, sums) = ALIKE[precision], first, second
    if not (torch.equal(a.step, b.step) and torch.equal(a.key, b.key)):
        return "the updates' number or key"
    for name, value in metrics.items():
        gap = _gap([value], [sums[name]], at_least=1.0)
        if gap > limit:
            return f"{name} by {gap:.2g}"
    for module in a.params:
        moments = [pytree.tree_leaves(state.opt.get(module)) for state in (a, b)]
        moved = [
            [x - y for x, y in zip(s.params[module].values(), before.params[module].values(), strict=True)]
            for s in (a, b)
        ]
        # noise around 0 is compared with the parameters' own size
        small = (
            1e-6 * float(torch.cat([x.flatten().double() for x in a.params[module].values()]).norm())
            if a.params[module]
            else 0.0
        )
        for label, (x, y), allowed in (("moments", moments, limit), ("steps", moved, 0.5 + limit)):
            gap = _gap(x, y, at_least=small)
            if gap > allowed:
                return f"{label} of {module} by {gap:.2g}"
    gap = _gap(pytree.tree_leaves((a.target, a.extra)), pytree.tree_leaves((b.target, b.extra)), at_least=1e-6)
    return f"targets or statistics by {gap:.2g}" if gap > limit else None


def _gap(left: list[Tensor], right: list[Tensor], at_least: float) -> float:
    """Distance of two lists of tensors, relative to the size of the first; entries that are not finite there do not
    count.
    """
    total, size = 0.0, 0.0
    for x, y in zip(left, right, strict=True):
        if x.is_floating_point():
            fine = x.isfinite()
            total += float(torch.where(fine, x.double() - y.double(), 0.0).square().sum())
            size += float(torch.where(fine, x.double(), 0.0).square().sum())
    return math.sqrt(total) / max(math.sqrt(size), at_least, 1e-30) if math.isfinite(total) else math.inf


class _CudaGraph:
    """A pattern captured once and replayed; the state lies in fixed memory, which the graph updates in place."""

    def __init__(self, program: Program, state: TrainState, hyper: Hyper, batches: list[Batch]) -> None:
        self.state, self.hyper, self.batches = (pytree.tree_map(torch.clone, tree) for tree in (state, hyper, batches))
        self.hyper_tensors: list[Tensor] = []  # whose numbers `hyper` holds
        function = program.function()
        self.sums = program.complete({}, self.state, update_keys(self.state, program.period), self.hyper, self.batches)
        # `replay` undoes what the calls before the capture do to the state
        self.graph = backend.capture(
            lambda: function(self.state, self.sums, None, self.hyper, self.batches), program.pool
        )

    def replay(
        self, state: TrainState, sums: Metrics, hyper: Hyper, batches: list[Batch], times: int
    ) -> tuple[TrainState, Metrics]:
        if state is not self.state:
            backend.overwrite(pytree.tree_leaves(self.state), pytree.tree_leaves(state))
        tensors = list(hyper.values())
        if len(tensors) != len(self.hyper_tensors) or any(
            new is not old for new, old in zip(tensors, self.hyper_tensors, strict=True)
        ):
            backend.overwrite(list(self.hyper.values()), tensors)
            self.hyper_tensors = tensors
        backend.overwrite(pytree.tree_leaves(self.batches), pytree.tree_leaves(batches))
        for name, value in self.sums.items():
            if sums.get(name) is not value:
                value.copy_(sums[name]) if name in sums else value.zero_()
        for _ in range(times):
            self.graph.replay()
        return self.state, {**sums, **self.sums}
