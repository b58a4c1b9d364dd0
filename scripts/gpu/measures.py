"""The comparisons and timings of gpu_check.py's worker: a mode's step against the eager one, speed, memory, long
runs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu.plan import EARLY, MOVES, REPLICAS, UPDATES
from peers.runner import Runner, counted, make, synthetic
from torch._inductor import config as inductor
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.system import backend

Answer = dict[str, Any]

SCRATCH = "OFFRL_CHECK_SCRATCH"  # names a folder for what the jobs of one check hand to each other


def scratch() -> Path:
    return Path(os.environ[SCRATCH])


def cases() -> Any:
    """tests/support/cases.py: it makes every algorithm in small, as a run does: with world models and all that is
    trained first.
    """
    try:
        from tests.support import cases
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise RuntimeError(
            "tests/support/cases.py needs pytest: pip install -e '.[dev]', or pip install pytest"
        ) from None
    return cases


# ---- the machine


def machine(device: str) -> Answer:
    """The machine, in words."""
    words = [f"torch {torch.__version__}", f"Python {platform.python_version()}", f"{os.cpu_count()} CPU cores"]
    if device == "cpu":
        return {"text": f"CPU, {', '.join(words)}"}
    properties = torch.cuda.get_device_properties(device)
    driver = nvidia_smi("driver_version")
    capability = f"compute capability {properties.major}.{properties.minor}"
    words = [
        f"{properties.total_memory / 1e9:.0f} GB",
        capability,
        f"CUDA {torch.version.cuda}",
        f"driver {driver or 'unknown'}",
        *words,
    ]
    return {"text": f"{properties.name}, {', '.join(words)}, copies {bandwidth(device) / 1e12:.2f} TB/s"}


def nvidia_smi(field: str) -> str:
    """A fact about the GPU, or an empty text."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


# ---- the same numbers


def equality(algo: str, mode: str, size: str, device: str) -> Answer:
    """The step in `mode` against the eager one: largest difference of a parameter tensor of a replica, relative to its
    norm.

    After `EARLY` and `UPDATES` updates. "rounding": the largest such difference between eager runs when the first
    weights are moved by one unit in the last place, up or down by chance; None where eager is compared with itself. It
    is large because Adam divides by the size of a gradient, so that one which is nothing but rounding becomes a whole
    step, and because rounding decides on which side of its kink a ReLU is. "modules": after `UPDATES`, all tensors of a
    module taken together. "cpu": such a difference between the eager steps of the two devices, after `EARLY` updates of
    the first replica; None on a CPU.
    """
    reason = unfit(algo)
    if reason:
        return {"skipped": reason}
    algorithm, dataset, batch_size = subject(algo, size)
    what = (algorithm, dataset, batch_size)
    eager = once(
        f"eager-{algo}-{size}", lambda: dict(zip(("losses", "trees"), history(*what, "eager", device), strict=True))
    )
    losses, trees = history(*what, mode, device)
    answer: Answer = {
        "losses": largest(eager["losses"], losses),
        "cpu": None,
        "rounding early": None,
        "rounding late": None,
    }
    for phase, expected, actual in zip(("early", "late"), eager["trees"], trees, strict=True):
        answer[f"parameters {phase}"], answer["where"] = difference(expected, actual)
        answer["modules"] = difference(by_module(expected), by_module(actual))[0]
    if mode != "eager":
        answer |= once(f"rounding-{algo}-{size}", lambda: rounding(what, eager["trees"], device))
    if device != "cpu":
        answer |= once(f"cpu-{algo}-{size}", lambda: on_cpu(what, eager["trees"][0]))
    return answer


def once(name: str, work: Callable[[], Answer]) -> Answer:
    """The result of `work`, which is done once in a check, for all modes and workers."""
    path = scratch() / f"{name}.pt"
    if path.exists():
        result: Answer = torch.load(path, weights_only=True)
        return result
    part = path.with_suffix(f".{os.getpid()}")
    torch.save(answer := work(), part)
    part.replace(path)
    return answer


def rounding(what: tuple[Any, Any, int], trees: list[Any], device: str) -> Answer:
    """By how much rounding moves the eager step's parameters `trees`."""
    moved = [history(*what, "eager", device, moved=seed)[1] for seed in range(1, MOVES + 1)]
    early, late = [
        max(difference(ours, other)[0] for other in others)
        for ours, others in zip(trees, zip(*moved, strict=True), strict=True)
    ]
    return {"rounding early": early, "rounding late": late}


def on_cpu(what: tuple[Any, Any, int], tree: Any) -> Answer:
    """By how much the modules after the eager step differ from a CPU's."""
    reference = history(*what, "eager", "cpu", replicas=1, updates=EARLY)[1][0]
    worst, where = difference(by_module(pytree.tree_map(lambda x: x[:1], tree)), by_module(reference))
    return {"cpu": worst, "cpu where": where}


def unfit(algo: str) -> str:
    """The reason why an algorithm cannot be compared on this machine; empty where it can."""
    kind = registry.get("algo", algo)
    if kind.traits.text:
        return "learns from texts, which no graph can hold: see the checks"
    if not kind.traits.vectorized:
        return "not vectorised: one replica at a time, not captured"
    if not kind.traits.cuda_graph:
        return "waits for values: runs eagerly on a GPU"
    if kind.traits.on_policy:
        return "learns from what it plays, and has no batches of data"
    if algo in cases().ABSENT:
        return "needs transformers and peft (pip install -e '.[text]')"
    return ""


def subject(algo: str, size: str) -> tuple[Any, Any, int]:
    """Algorithm, data and batch size: "small" as the conformance tests have them, "real" with default settings."""
    if size == "small":
        small = cases()
        return small.Case(algo).make(), small.data(False), small.BATCH
    dataset = dataset_of(5_000)
    algorithm = make(algo, dataset)
    return algorithm, dataset, algorithm.config.batch_size


def history(
    algorithm: Any,
    dataset: Any,
    batch_size: int,
    mode: str,
    device: str,
    moved: int = 0,
    replicas: int = REPLICAS,
    updates: int = UPDATES,
) -> tuple[list[dict[str, float]], list[Any]]:
    """Mean losses over each `EARLY` updates, and parameters after each, on the CPU. `moved`: seed of a change of the
    first weights.
    """
    runner = Runner(algorithm, dataset, seeds=range(replicas), mode=mode, batch_size=batch_size, device=device)
    if moved:
        generator, infinity = torch.Generator().manual_seed(moved), torch.tensor(float("inf"))

        def move(p: torch.Tensor) -> torch.Tensor:
            up = torch.rand(p.shape, generator=generator) < 0.5
            return torch.nextafter(p.cpu(), torch.where(up, infinity, -infinity)).to(device)

        runner.state = runner.state._replace(params=pytree.tree_map(move, runner.state.params))
    losses, trees = [], []
    for _ in range(updates // EARLY):
        losses.append(runner.updates(EARLY))
        tree = {"params": runner.state.params, "target": runner.state.target}
        trees.append(pytree.tree_map(lambda x: x.to("cpu", copy=True), tree))
    return losses, trees


def difference(expected: Any, actual: Any) -> tuple[float, str]:
    """Largest difference of a leaf of a replica, relative to the leaf's norm, and that leaf's name; infinite for what
    is not a number.
    """
    differences = [(0.0, "")]
    for name, value in expected.items():
        if isinstance(value, dict):
            worst, where = difference(value, actual[name])
            differences.append((worst, f"{name}/{where}"))
        else:
            a, b = (x.double().reshape(len(x), -1) for x in (value, actual[name]))
            relative = ((a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-30)).max().item()
            differences.append((relative if relative == relative else float("inf"), name))
    return max(differences)


def by_module(tree: Any) -> Any:
    """Parameters {kind: {module: {name: [N, ...]}}} as one row for each replica and module: {kind: {module: [N, K]}}. A
    tensor that was 0 at first is small, and one step of Adam that rounding turned round is much of it."""
    return {
        kind: {
            name: torch.cat([x.reshape(len(x), -1) for x in module.values()], 1)
            for name, module in modules.items()
            if module
        }
        for kind, modules in tree.items()
    }


def largest(expected: list[dict[str, float]], actual: list[dict[str, float]]) -> float:
    """Largest difference of a loss, relative to it or to 1 if that is larger; infinite for what is not a number."""
    pairs = [(a[k], b[k]) for a, b in zip(expected, actual, strict=True) for k in a]
    differences = [abs(b - a) / max(abs(a), 1.0) for a, b in pairs]
    return max((x if x == x else float("inf") for x in differences), default=0.0)


# ---- speed and memory

_datasets: dict[int, Any] = {}


def dataset_of(rows: int) -> Any:
    if rows not in _datasets:
        _datasets[rows] = synthetic(rows)
    return _datasets[rows]


def compile_ahead(
    algo: str, replicas: int, mode: str, rows: int, device: str, options: dict[str, Any] | None = None
) -> Answer:
    """The first updates of a run, for the compiler's cache: {"warm": seconds}."""
    return {"warm": begun(algo, replicas, mode, rows, device, options)[1]}


def begun(
    algo: str, replicas: int, mode: str, rows: int, device: str, options: dict[str, Any] | None
) -> tuple[Runner, float]:
    """A run of `replicas` seeds after its first updates, and the seconds until then. options: of Inductor, also in
    place of the step's.
    """
    began = time.perf_counter()
    dataset = dataset_of(rows)
    algorithm = make(algo, dataset)
    # the step sets those that are listed
    others = [name for name in torch._inductor.list_options() if name not in (options or {})]
    with inductor.patch(options or {}), mock.patch.object(torch._inductor, "list_options", lambda: others):
        runner = Runner(
            algorithm, dataset, seeds=range(replicas), mode=mode, batch_size=algorithm.config.batch_size, device=device
        )
        runner.run(2 * algorithm.traits.period)
        runner.wait()
    return runner, time.perf_counter() - began


def speed(
    algo: str, replicas: int, mode: str, rows: int, seconds: float, device: str, options: dict[str, Any] | None = None
) -> Answer:
    """Updates per second, memory and how busy the GPU is."""
    missing = [name for name in options or {} if not hasattr(inductor, name)]
    if missing:
        return {"skipped": f"torch {torch.__version__} has no such option"}
    clear(device)
    runner, warm = begun(algo, replicas, mode, rows, device, options)
    with sampled(device) as busy:
        rate = runner.rate(seconds)
    state, data = runner.resident_bytes()
    answer: Answer = {
        "rate": rate,
        "warm": warm,
        "state": state,
        "data": data,
        "busy": sum(busy) / len(busy) if busy else None,
    }
    if device == "cpu":
        import resource

        answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return answer
    answer["peak"], answer["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    answer["kernels"] = kernel_share(runner, rate)
    products = (
        counted(runner.algorithm, synthetic(5_000), runner.algorithm.config.batch_size)
        * replicas
        / product_rate(replicas)
    )
    answer["floor"] = 1.0 / max(products, 2 * state / bandwidth(device))
    return answer


def clear(device: str) -> None:
    """Give back what earlier jobs took of a GPU's memory, so that its peak is that of the next one."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@contextlib.contextmanager
def sampled(device: str) -> Iterator[list[float]]:
    """Collects what nvidia-smi says the GPU's utilisation is (share of the time in which some kernel ran), five times a
    second.
    """
    durations: list[float] = []
    if device == "cpu" or shutil.which("nvidia-smi") is None:
        yield durations
        return
    index = str(torch.device(device).index or 0)
    command = ["nvidia-smi", "-i", index, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield durations
    finally:
        process.terminate()
        lines = process.communicate()[0].splitlines()
        usable = [float(x) / 100.0 for x in lines if x.strip().replace(".", "").isdigit()]
        durations += usable[len(usable) // 2 :]  # the first half of a burst finds out how long a burst is


def kernel_share(runner: Any, rate: float) -> float | None:
    """Time of the kernels of an update, added up by the profiler, over the time of an update without the profiler; None
    without one.
    """
    from torch.profiler import ProfilerActivity, profile

    count = 20 * runner.algorithm.traits.period
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            runner.run(count)
            runner.wait()
        spent = sum(e.self_device_time_total for e in seen.key_averages())
    except Exception as error:  # profilers are often not allowed on a borrowed GPU
        print(f"no profile: {error}", file=sys.stderr)
        return None
    return spent / 1e6 / count * rate if spent else None


def product_rate(replicas: int) -> float:
    """FLOPs per second of float32 products of 256 x 256 matrices, two for each replica at once."""
    a = torch.randn(2 * replicas, 256, 256, device="cuda")
    out = torch.empty_like(a)
    return 2.0 * 256**3 * 2 * replicas / seconds_of(lambda: torch.bmm(a, a, out=out))


def bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes, of an array that no cache holds."""
    a = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2.0 * a.numel() / seconds_of(lambda: b.copy_(a))


def seconds_of(call: Any) -> float:
    """Seconds of a call on the GPU, on average over 50."""
    for count in (5, 50):  # the first ones warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def timed(algo: str, replicas: int, mode: str, rows: int, updates: int, seconds: float, device: str) -> Answer:
    """The time of `updates` updates, or of as many as fit `seconds` with the start. Compiling is not counted, and given
    apart.
    """
    began = time.perf_counter()
    runner, warm = begun(algo, replicas, mode, rows, device, None)
    chunk = 1_000 if device != "cpu" else 20
    start, first = time.perf_counter(), runner.done
    while runner.done - first < updates and time.perf_counter() - began < seconds:
        runner.run(min(chunk, updates - (runner.done - first)))
        runner.wait()
    return {"updates": runner.done - first, "seconds": time.perf_counter() - start, "warm": warm}


def configure(device: str, precision: str = "float32") -> None:
    """Arithmetic as a run has it."""
    backend.configure(torch.device(device), 1, precision)


JOBS: dict[str, Callable[..., Answer]] = {
    "machine": machine,
    "equality": equality,
    "warm": compile_ahead,
    "speed": speed,
    "timed": timed,
}
