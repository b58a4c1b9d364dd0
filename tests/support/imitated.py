"""A GPU's paths through the code, without a GPU.

A tensor of class `Held` claims another device ("meta") and keeps its numbers on the CPU: the code takes the paths of a
GPU, and what comes out can be compared. `Machine` sees every operation that reaches a kernel, so it notices what no
CUDA graph can hold (the host waits for a value, a copy between host and GPU, a tensor that lies on the CPU). CUDA
graphs are imitated: capturing notes the operations, replaying repeats them in the same memory. Not imitated: streams,
memory, CUDA's kernels.

    # every algorithm of tests/conformance: a Markdown table, in a few minutes
    python -m tests.support.imitated
    # these only
    python -m tests.support.imitated iql dt
    # beside what the first command wrote in a checkout of another commit
    python -m tests.support.imitated --before TABLE.md
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from offrl.algorithm import stack
from offrl.system import backend
from offrl.training.step import Step

META, ROOT = torch.device("meta"), Path(__file__).resolve().parents[2]
# no kernel
FREE = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "detach",
    "alias",
    "_unsafe_view",
    "lift_fresh",
    "_reshape_alias",
}
SIZES = {"sym_size", "size", "sym_stride", "stride", "sym_numel", "numel", "dim", "sym_storage_offset", "is_contiguous"}
READS = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_consecutive",
    "bincount",
}
# CUDA's may wait for the host
SOLVERS = ("linalg_inv", "linalg_lu", "linalg_solve", "linalg_chol", "linalg_eig", "linalg_svd", "linalg_qr")
ADDING = {"scatter_add", "scatter_add_", "index_add", "index_add_", "scatter_reduce"}  # CUDA adds in no fixed order
# sorted when eager, in no fixed order when compiled
LOOKUPS = {"index_put", "index_put_", "_index_put_impl_", "embedding_dense_backward"}


class Held(Tensor):
    """A tensor on the imitated device."""

    inner: Tensor

    @staticmethod
    def __new__(cls: Any, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=META,
            dispatch_sizes_strides_policy="sizes",
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Machine.now.__torch_dispatch__(func, types, args, kwargs)


class Machine(TorchDispatchMode):
    """Does every operation on the CPU, and counts what a GPU would do."""

    now: ClassVar[Machine]

    def __init__(self) -> None:
        super().__init__()
        self.tape: list[Any] | None = None  # while a graph is captured
        self.seen: Counter[str] = Counter()
        self.captured: Counter[str] = Counter()  # of the last graph
        Machine.now = self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, view = about(func)
        tensors: list[Tensor] = []
        a, k = inside(args, tensors), inside(kwargs, tensors)
        if name in SIZES:
            return func(*a, **k)
        held, to = (
            [x for x in tensors if isinstance(x, Held)],
            kwargs["device"].type if kwargs.get("device") is not None else None,
        )
        if not held and to != "meta":
            return func(*args, **kwargs)
        crosses = name in ("_to_copy", "copy_") and (
            len(held) < len(tensors) or (to is not None and (to == "meta") != bool(held))
        )
        masked = name.startswith("index") and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in pytree.tree_leaves(args[1:2])
        )
        if name in READS or masked or crosses or name.lstrip("_").startswith(SOLVERS):
            what = f"{'copy between host and GPU' if crosses else f'the host waits for a value ({name})'} at {place()}"
            self.seen[what] += 1
            if self.tape is not None:
                raise RuntimeError(f"no CUDA graph can hold this: {what}")
        elif held and any(x.ndim for x in tensors if not isinstance(x, Held)):
            raise RuntimeError(f"{name} mixes tensors of CPU and GPU at {place()}")
        k = {**k, "device": torch.device("cpu")} if to == "meta" else k
        out = func(*a, **k)
        if name not in FREE and not view:
            first = out if isinstance(out, Tensor) else next(iter(pytree.tree_leaves(out)), None)
            self.seen["kernels"] += 1
            self.seen["integer"] += isinstance(first, Tensor) and first.dtype == torch.int64
            self.seen["unordered"] += adds_up(name, a, k)
            if self.tape is not None:
                self.tape.append((func, a, k, out))
        if to == "cpu":
            return out.clone()
        known = {id(x.inner): x for x in held}  # what is changed in place stays the tensor that it was
        return outside(out, known)


@functools.cache
def about(func: Any) -> tuple[str, bool]:
    """The name of an operation, and whether its results are views."""
    returns = func._schema.returns
    view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return func._schema.name.split("::")[1], view


def adds_up(name: str, args: Any, kwargs: Any) -> bool:
    """True where this adds several numbers to one place, in an order that CUDA leaves open, eager or compiled."""
    if name in ADDING:
        base, dim, index = args[:3]
        index = (
            index
            if index.ndim == base.ndim
            else index.view(*[-1 if d == dim % base.ndim else 1 for d in range(base.ndim)])
        )
        return bool((torch.zeros(base.shape).scatter_add(dim, index, torch.ones(index.shape)) > 1).any())
    if name == "embedding_dense_backward":
        return True
    if name in LOOKUPS and (kwargs.get("accumulate") or (len(args) > 3 and args[3] is True)):
        given = torch.broadcast_tensors(*(x for x in args[1] if x is not None))
        places = torch.stack([x.flatten() for x in given], -1)
        return len(places.unique(dim=0)) < len(places)
    return False


def inside(x: Any, tensors: list[Tensor] | None = None) -> Any:
    """The numbers of every `Held` in what an operation is handed; anything else as it is. Tensors are noted in
    `tensors`.
    """
    if isinstance(x, Tensor):
        if tensors is not None:
            tensors.append(x)
        return x.inner if isinstance(x, Held) else x
    if isinstance(x, (tuple, list)):
        return type(x)([inside(y, tensors) for y in x])
    if isinstance(x, dict):
        return {name: inside(y, tensors) for name, y in x.items()}
    return x


def outside(x: Any, known: dict[int, Tensor]) -> Any:
    """The reverse, of what an operation returns."""
    if isinstance(x, Tensor):
        return known[id(x)] if id(x) in known else Held(x)
    return type(x)([outside(y, known) for y in x]) if isinstance(x, (tuple, list)) else x


def place() -> str:
    """The place in the project where this happens."""
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        path = Path(frame.f_code.co_filename)
        if ROOT in path.parents and path.name != Path(__file__).name and "site-packages" not in path.parts:
            return f"{path.relative_to(ROOT)}:{line}"
    return "?"


class Graph:
    """torch.cuda.CUDAGraph."""

    tape: list[Any]

    def replay(self) -> None:
        for func, args, kwargs, out in self.tape:
            for old, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def capture(graph: Graph, **settings: Any) -> Iterator[None]:
    """torch.cuda.graph."""
    machine, graph.tape = Machine.now, []
    machine.tape, machine.seen = graph.tape, Counter()
    try:
        yield
    finally:
        machine.tape, machine.captured, machine.seen = None, machine.seen, Counter()


def imitated() -> contextlib.ExitStack:
    """torch.cuda as the project uses it; and what makes tensors of Python numbers, which on CUDA is a copy from the
    host.
    """
    stream, many = SimpleNamespace(wait_stream=lambda other: None), contextlib.ExitStack()

    def from_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda data, *a, device=None, **k: (
            make(data, *a, **k) if device is None else make(data, *a, **k).to(device)
        )

    def new_tensor(x: Tensor, data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return torch.tensor(data, dtype=dtype or x.dtype).to(device or x.device)

    for where, name, value in (
        (torch.cuda, "Stream", lambda *a: stream),
        (torch.cuda, "current_stream", lambda *a: stream),
        (torch.cuda, "stream", lambda s: contextlib.nullcontext()),
        (torch.cuda, "synchronize", lambda *a: None),
        (torch.cuda, "graph_pool_handle", lambda: None),
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", capture),
        (torch, "tensor", from_host(torch.tensor)),
        (torch, "as_tensor", from_host(torch.as_tensor)),
        (Tensor, "new_tensor", new_tensor),
        (Tensor, "is_cuda", property(lambda x: x.device.type == "meta")),
        (Held, "tolist", lambda x: x.to("cpu").tolist()),
    ):
        many.enter_context(mock.patch.object(where, name, value, create=True))
    return many


def moved(tree: Any) -> Any:
    """Tensors of a tree on the imitated device; inside `Machine` alone."""
    return pytree.tree_map(lambda x: x.to(META), tree)


def numbers(tree: Any) -> Any:
    """Copies of a tree's tensors on the CPU, outside `Machine` too."""
    return pytree.tree_map(lambda x: inside(x).clone(), tree)


@dataclass(frozen=True)
class Trace:
    """The operations of a GPU in the updates of an algorithm."""

    state: Any  # after them, on the CPU
    updates: int
    kernels: float  # of an update
    integer: float  # of these, random numbers and indices
    unordered: float  # sums without a fixed order


def trace(algorithm: Any, dataset: Any, batch: int, early: bool = False) -> Trace:
    """Some updates of a captured step. early: the data are prepared on the device, not on the CPU and moved then, as
    worker processes do.

    Raises RuntimeError for what no CUDA graph can hold.
    """
    seeds, between = [0, 1] if algorithm.traits.vectorized else [0], algorithm.every
    updates = max(3 * algorithm.traits.period, 2 * between if between < 100 else 0)
    with imitated(), Machine() as machine:
        sampler = algorithm.sampler()
        source = sampler.prepare(dataset.to(META)) if early else backend.move(sampler.prepare(dataset), META)
        state = moved(stack([algorithm.init(s) for s in seeds]))
        state, _ = Step(algorithm, source, batch_size=batch, replicas=len(seeds), mode="cudagraph").run(
            state, {}, 0, updates
        )
    counts = (machine.captured[k] / algorithm.traits.period for k in ("kernels", "integer", "unordered"))
    return Trace(numbers(state), updates, *counts)


def largest_difference(left: Any, right: Any) -> float:
    """The largest difference between the numbers of two trees."""
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return max(float((a.double() - b.double()).nan_to_num(0.0, 0.0, 0.0).abs().max()) for a, b in pairs if a.numel())


def kernels_of(table: str) -> dict[str, str]:
    """The kernels of each case in a table that `main` printed: its second column."""
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("| ")]
    return {case: count for case, count in rows[1:] if count.isdigit()}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="algorithms (default: all)")
    parser.add_argument(
        "--before", type=Path, metavar="TABLE", help="what this printed at another commit: a column of its kernels"
    )
    options = parser.parse_args(words)
    before = None if options.before is None else kernels_of(options.before.read_text())
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    from tests.support import cases

    heads = ["algorithm", "kernels an update", "of these integer", "unordered sums", "largest difference from the CPU"]
    heads += [] if before is None else ["kernels before"]
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for case in cases.ALL:
        if options.names and case.name not in options.names:
            continue
        try:
            algorithm, dataset = case.make(), cases.data(case.discrete)
            result = trace(algorithm, dataset, cases.BATCH)
            reference = cases.train(algorithm, list(range(len(result.state.step))), result.updates)[0]
            gap = largest_difference(result.state, reference)
            cells = [f"{result.kernels:.0f}", f"{result.integer:.0f}", f"{result.unordered:.0f}", f"{gap:.0e}"]
        except RuntimeError as error:
            cells = [str(error).strip().splitlines()[0], *[""] * 3]
        cells += [] if before is None else [before.get(str(case), "-")]
        print(f"| {case} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
