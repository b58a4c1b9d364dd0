"""The breakdown of the time of offrl's update: matrix products, optimiser, sampling, other arithmetic, and what is left
for dispatch.

A process of its own: the profiler and the names of the compiled kernels would slow down the one that is timed.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from peers import common
from peers.offrl_speed import ALGO, MODE, batch_size, build
from peers.runner import Runner
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from offrl.algorithm import Algorithm
from offrl.optim import Adam
from offrl.system import backend

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mkldnn", "mkl_linear", "matmul")


def group(name: str) -> str:
    """The part of an update that an operator or a compiled kernel belongs to. Dropout's random numbers count as
    sampling.
    """
    short = name.removeprefix("aten::").lstrip("_")
    if name.startswith("aoti_torch_cpu_"):  # what a compiled update calls
        return (
            "sampling"
            if name.endswith("_stream")
            else "matrix products"
            if "mm" in name or "product" in name
            else "other arithmetic"
        )
    if "cpp_fused" in name:  # named after the operators that were fused into it
        if any(word in name for word in ("sqrt", "lerp")):
            return "optimiser and targets"
        return "sampling" if "randint" in name or "index" in name else "other arithmetic"
    if short in PRODUCTS or short.startswith(("mkldnn", "mkl::", "onednn")) or "linear_pointwise" in name:
        return "matrix products"
    if name.startswith("offrl::") or short in ("index", "index_select", "gather", "take"):
        return "sampling"
    return "other arithmetic" if name.startswith("aten::") else "dispatch"


def _marked(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return wrapper


def shares(runner: Runner, eager: bool, updates: int) -> dict[str, float]:
    """Shares of the time of an update, which add up to 1. `updates`: how many are timed together.

    Eager: what the optimiser and the targets cost includes their dispatch, since operators alone do not say who called
    them.
    """
    if eager:
        Adam.update = _marked(Adam.update, "optimiser and targets")  # type: ignore[method-assign]
        Algorithm.polyak = _marked(Algorithm.polyak, "optimiser and targets")  # type: ignore[method-assign]
    runner.updates(updates)
    plain_wall = statistics.median(timed(runner, updates) for _ in range(5))
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        wall = timed(runner, updates) * 1e6
    spent = dict.fromkeys(("matrix products", "optimiser and targets", "sampling", "other arithmetic"), 0.0)
    inside = 0.0  # the optimiser's operators, which are counted with it as a whole
    for event in seen.events():
        if event.name == "optimiser and targets":
            spent[event.name] += event.cpu_time_total
            inside += sum(
                child.self_cpu_time_total for child in _below(event) if group(child.name) == "other arithmetic"
            )
        elif group(event.name) in spent:
            spent[group(event.name)] += event.self_cpu_time_total
    spent["other arithmetic"] -= inside
    # Products and sampling cost the profiler next to nothing; what it adds to everything else is left out by scaling to
    # the plain time. On a machine that is busy otherwise the plain time can come out shorter than the products: then
    # the profiled time has to do.
    within = 0.95 * plain_wall * 1e6 > spent["matrix products"] + spent["sampling"]
    unprofiled = plain_wall * 1e6 if within else wall
    fixed = {k: spent[k] / unprofiled for k in ("matrix products", "sampling")}
    rest = 1.0 - sum(fixed.values())
    variable = {k: spent[k] for k in ("optimiser and targets", "other arithmetic")}
    variable["dispatch"] = max(wall - sum(spent.values()), 0.0)
    total = sum(variable.values())
    return {**fixed, **{k: rest * v / total for k, v in variable.items()}}


def timed(runner: Runner, updates: int) -> float:
    """Seconds of so many updates."""
    start = time.perf_counter()
    runner.updates(updates)
    return time.perf_counter() - start


def _below(event: Any) -> list[Any]:
    return [e for child in event.cpu_children for e in (child, *_below(child))]


def performed(name: str, rows: int) -> float:
    """FLOPs of the matrix products that one eager update of one seed really does."""
    algorithm, dataset = build(name, rows)
    runner = Runner(algorithm, dataset, seeds=[0], mode="eager", batch_size=batch_size(name))
    with FlopCounterMode(display=False) as counter:
        runner.updates(algorithm.traits.period)
    return counter.get_total_flops() / algorithm.traits.period


def main() -> None:
    options = common.options(ALGO, MODE)
    backend.configure(torch.device("cpu"), 1)
    if options.mode == "compiled":
        import torch._inductor.config as inductor

        inductor.cpp.enable_kernel_profile = True
        # what is kept does not tell the profiler
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="offrl-profile-")
        atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
    algorithm, dataset = build(options.algo, options.rows)
    size = batch_size(options.algo)
    runner = Runner(algorithm, dataset, seeds=range(options.replicas), mode=options.mode, batch_size=size)
    updates = 2 * common.CHUNKS.get(options.algo, 20)
    common.report(shares=shares(runner, options.mode == "eager", updates), performed=performed(options.algo, 2_000))


if __name__ == "__main__":
    main()
