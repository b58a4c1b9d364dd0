"""One command for a machine with a CUDA GPU: is the captured training step right, how fast is it, how much memory does it take.

    python scripts/gpu_check.py --out docs/benchmarks/gpu.md              # at most 8 minutes (--minutes)
    python scripts/gpu_check.py --full --out docs/benchmarks/gpu.md       # the 1,000,000 updates of IQL to their end, however long
    python scripts/gpu_check.py --device cpu --small                      # the same logic in small, eager against compiled

The measurements run in a worker process, which is replaced when one of them breaks it or takes longer than it may: the tables are printed
in any case, with what was measured until then. Needs torch, NumPy and offrl's own files only: `PYTHONPATH=. python scripts/gpu_check.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]

Job = dict[str, Any]
Answer = dict[str, Any]

TOLERANCE = 1e-5
MOVES = 4  # eager runs from weights moved by one rounding
EARLY = 10  # updates; a multiple of every algorithm's period
MEASURED = ("iql", "td3_bc")
FULL_RUN = 1_000_000
SHARE_OF_TIMED_RUN = 0.25  # of the budget


def main(arguments: list[str] | None = None) -> str:
    """Measure, print and return the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the logic")
    parser.add_argument("--minutes", type=float, default=8.0, help="after this time the tables are printed as they are")
    parser.add_argument("--full", action="store_true", help=f"run all {FULL_RUN:,} updates of IQL, whatever the time")
    parser.add_argument("--small", action="store_true", help="few rows, replicas and updates")
    parser.add_argument("--modes", nargs="+", help="modes of the step to compare with eager; the last one is timed")
    parser.add_argument("--algos", nargs="+", help="algorithms to compare (default: all)")
    parser.add_argument("--out", type=Path, help="also write the report to this Markdown file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.device)
        return ""
    start = time.monotonic()
    jobs = plan(options)
    with contextlib.closing(Worker([sys.executable, str(Path(__file__).resolve()), "--worker", "--device", options.device])) as worker:
        answers = measure(jobs, worker, options.minutes * 60.0, options.full)
    text = report(jobs, answers, time.monotonic() - start, options)
    print(text)
    if options.out:
        options.out.write_text(text)
    return text


def plan(options: argparse.Namespace) -> list[Job]:
    """What to measure, the most telling first."""
    cpu = options.device == "cpu"
    modes = options.modes or (["compiled"] if cpu else ["cudagraph", "compiled-cudagraph"])
    if options.algos is None:
        from offrl import registry

        options.algos = list(registry.names("algo"))
    replicas = [1, 2] if options.small else [1, 64, 16, 4]
    rows, seconds = (5_000, 0.3) if options.small else (2_000_000, 4.0)
    equal = {m: [{"job": "equality", "algo": a, "mode": m, "updates": 20 if options.small else 100} for a in options.algos] for m in modes}
    speed = {
        a: [{"job": "speed", "algo": a, "replicas": n, "mode": modes[-1], "rows": rows, "seconds": seconds} for n in replicas]
        for a in MEASURED
    }
    timed = {"job": "timed", "algo": "iql", "mode": modes[-1], "rows": rows, "updates": 200 if options.small else FULL_RUN}
    first, *later = [equal[m] for m in modes]
    return [{"job": "machine"}, *first, *speed["iql"], *[j for jobs in later for j in jobs], *speed["td3_bc"], timed]


def measure(jobs: list[Job], worker: Worker, budget: float, full: bool) -> list[Answer]:
    """An answer for each job: what was measured, or {"error": why not}. Ends within `budget` seconds unless `full`."""
    deadline, answers = time.monotonic() + budget, []
    reserve = 0.0 if full else SHARE_OF_TIMED_RUN * budget
    for job in jobs:
        left = deadline - time.monotonic()
        if job["job"] == "timed":
            seconds = 1e9 if full else left
            job = {**job, "limit": seconds if full else max(0.8 * left - 30.0, 0.5 * left)}  # the rest for the start and the compiler
        else:
            seconds = left - reserve
        if seconds <= 0.0:
            answers.append({"error": "not reached in the time given (--minutes)"})
            continue
        started = time.monotonic()
        answers.append(worker.ask(job, seconds))
        print(f"{describe(job)}: {answers[-1].get('error', 'done')}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return answers


def describe(job: Job) -> str:
    return " ".join(str(v) for k, v in job.items() if k in ("job", "algo", "mode", "replicas"))


class Worker:
    """A process that answers jobs, one line of JSON for each; a new one takes over after it failed or took too long."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: Job, seconds: float) -> Answer:
        """The answer to a job, or {"error": ...}."""
        if self.process is None:
            self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, start_new_session=True)
        assert self.process.stdin is not None and self.process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], seconds)[0]:
                self.close()
                return {"error": f"stopped after {seconds:.0f} s, when its time was over"}
            line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            said = [x.strip() for x in self.errors.read().splitlines() if x.strip()]
            answer = {"error": f"the process ended with status {self.process.returncode}: {said[-1] if said else ''}"}
        else:
            answer = json.loads(line)
        if "error" in answer:  # a failure on a GPU can spoil whatever comes after it in the same process
            self.close()
        return answer

    def close(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, 9)  # with the compilers that it started
            self.process.communicate()
            self.errors.close()
            self.process = None


# ---- the worker: from here on torch is there


def work(device: str) -> None:
    """Answer the jobs on standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        try:
            answer = run(json.loads(line), device)
        except Exception as error:  # whatever it is: the report says so, and the parent starts a new process
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


def run(job: Job, device: str) -> Answer:
    """Do one job."""
    import torch

    from offrl import backend

    backend.configure(torch.device(device), 1)
    if device != "cpu":
        torch.cuda.set_device(torch.device(device))
    settings = {k: v for k, v in job.items() if k != "job"}
    return {"machine": look, "equality": equality, "speed": speed, "timed": timed}[job["job"]](device=device, **settings)


def look(device: str) -> Answer:
    """What machine this is."""
    import torch

    words = [f"torch {torch.__version__}", f"Python {platform.python_version()}", f"{os.cpu_count()} CPU cores"]
    if device == "cpu":
        return {"text": f"CPU, {', '.join(words)}"}
    properties = torch.cuda.get_device_properties(device)
    driver = nvidia_smi("driver_version")
    capability = f"compute capability {properties.major}.{properties.minor}"
    words = [f"{properties.total_memory / 1e9:.0f} GB", capability, f"CUDA {torch.version.cuda}", f"driver {driver or 'unknown'}", *words]
    return {"text": f"{properties.name}, {', '.join(words)}, copies {bandwidth(device) / 1e12:.2f} TB/s"}


def nvidia_smi(field: str) -> str:
    """A fact about the GPU, or an empty text."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""


def equality(algo: str, mode: str, updates: int, device: str) -> Answer:
    """The step in `mode` against the eager one: largest difference of a parameter tensor of a replica, relative to its norm.

    After few updates (`EARLY`) and after all. "rounding": the largest such difference between eager runs when the first weights are moved
    by one unit in the last place, up or down by chance. It is large because Adam divides by the size of a gradient, so that one which is
    nothing but rounding becomes a whole step, and because rounding decides on which side of its kink a ReLU is.
    """
    from peers.runner import make, synthetic

    from offrl import registry

    if not registry.get("algo", algo).vectorized:
        return {"skipped": "not vectorised: one replica at a time, not captured"}
    dataset = synthetic(5_000)
    algorithm = make(algo, dataset)
    ours_losses, ours = history(algorithm, dataset, "eager", updates, device)
    theirs_losses, theirs = history(algorithm, dataset, mode, updates, device)
    moved = [history(algorithm, dataset, "eager", updates, device, moved=seed)[1] for seed in range(1, MOVES + 1)]
    answer: Answer = {}
    for when, at in (("early", 0), ("late", -1)):
        answer[f"parameters {when}"], answer["where"] = difference(ours[at], theirs[at])
        answer[f"rounding {when}"] = max(difference(ours[at], other[at])[0] for other in moved)
    pairs = [(a[k], b[k]) for a, b in zip(ours_losses, theirs_losses, strict=True) for k in a]
    answer["losses"] = max(abs(b - a) / max(abs(a), 1.0) for a, b in pairs)
    return answer


def history(algorithm: Any, dataset: Any, mode: str, updates: int, device: str, moved: int = 0) -> tuple[list[dict[str, float]], list[Any]]:
    """Mean losses over each `EARLY` updates of 4 replicas, and the parameters after each. `moved`: seed of a change of first weights."""
    import torch
    from peers.runner import Runner
    from torch.utils import _pytree as pytree

    runner = Runner(algorithm, dataset, seeds=range(4), mode=mode, device=device)
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


def difference(ours: Any, theirs: Any) -> tuple[float, str]:
    """Largest difference of a leaf of a replica, relative to the leaf's norm, and that leaf's name; infinite for what is not a number."""
    found = [(0.0, "")]
    for name, value in ours.items():
        if isinstance(value, dict):
            worst, where = difference(value, theirs[name])
            found.append((worst, f"{name}/{where}"))
        else:
            a, b = value.double().flatten(1), theirs[name].double().flatten(1)
            relative = ((a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-30)).max().item()
            found.append((relative if relative == relative else float("inf"), name))
    return max(found)


_datasets: dict[int, Any] = {}


def dataset_of(rows: int) -> Any:
    from peers.runner import synthetic

    if rows not in _datasets:
        _datasets[rows] = synthetic(rows)
    return _datasets[rows]


def speed(algo: str, replicas: int, mode: str, rows: int, seconds: float, device: str) -> Answer:
    """Updates per second, memory and how busy the GPU is."""
    import torch
    from peers.runner import Runner, counted, make, synthetic

    dataset = dataset_of(rows)
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    runner = Runner(make(algo, dataset), dataset, seeds=range(replicas), mode=mode, device=device)
    runner.run(2 * runner.algorithm.period)
    runner.wait()
    warm = time.perf_counter() - began
    with sampled(device) as busy:
        rate = runner.rate(seconds)
    state, data = runner.resident_bytes()
    answer: Answer = {"rate": rate, "warm": warm, "state": state, "data": data, "busy": sum(busy) / len(busy) if busy else None}
    if device == "cpu":
        import resource

        answer["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return answer
    answer["peak"], answer["reserved"] = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    answer["kernels"] = kernel_share(runner, rate)
    products = counted(runner.algorithm, synthetic(5_000)) * replicas / product_rate(replicas)
    answer["floor"] = 1.0 / max(products, 2 * state / bandwidth(device))
    return answer


@contextlib.contextmanager
def sampled(device: str) -> Iterator[list[float]]:
    """Collects what nvidia-smi says the GPU's utilisation is (share of the time in which some kernel ran), five times a second."""
    found: list[float] = []
    if device == "cpu" or shutil.which("nvidia-smi") is None:
        yield found
        return
    import torch

    index = str(torch.device(device).index or 0)
    command = ["nvidia-smi", "-i", index, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield found
    finally:
        process.terminate()
        lines = process.communicate()[0].splitlines()
        usable = [float(x) / 100.0 for x in lines if x.strip().replace(".", "").isdigit()]
        found += usable[len(usable) // 2 :]  # the first half of a burst finds out how long a burst is


def kernel_share(runner: Any, rate: float) -> float | None:
    """Time of the kernels of an update, added up by the profiler, over the time of an update without the profiler; None without one."""
    from torch.profiler import ProfilerActivity, profile

    count = 20 * runner.algorithm.period
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
    import torch

    a = torch.randn(2 * replicas, 256, 256, device="cuda")
    out = torch.empty_like(a)
    return 2.0 * 256**3 * 2 * replicas / seconds_of(lambda: torch.bmm(a, a, out=out))


def bandwidth(device: str) -> float:
    """Bytes per second that a copy reads and writes, of an array that no cache holds."""
    import torch

    a = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2.0 * a.numel() / seconds_of(lambda: b.copy_(a))


def seconds_of(call: Any) -> float:
    """Seconds of a call on the GPU, on average over 50."""
    import torch

    for count in (5, 50):  # the first ones warm up
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def timed(algo: str, mode: str, rows: int, updates: int, limit: float, device: str) -> Answer:
    """One seed: the time of `updates` updates, or of as many as fit `limit` seconds. Compiling is not counted, and given apart."""
    from peers.runner import Runner, make

    began = time.perf_counter()
    dataset = dataset_of(rows)
    runner = Runner(make(algo, dataset), dataset, seeds=[0], mode=mode, device=device)
    chunk = 1_000 if device != "cpu" else 20
    runner.run(chunk)
    runner.wait()
    start, first = time.perf_counter(), runner.done
    while runner.done - first < updates and time.perf_counter() - began < limit:
        runner.run(min(chunk, updates - (runner.done - first)))
        runner.wait()
    return {"updates": runner.done - first, "seconds": time.perf_counter() - start, "warm": start - began}


# ---- the report


def report(jobs: list[Job], answers: list[Answer], seconds: float, options: argparse.Namespace) -> str:
    """Everything as Markdown."""
    pairs = list(zip(jobs, answers, strict=True))
    about = answers[0].get("text") or answers[0]["error"]
    lines = ["# Check on a GPU" if options.device != "cpu" else "# The check for GPUs, tried on a CPU", ""]
    lines += [f"{time.strftime('%Y-%m-%d')}, {about}. Took {seconds / 60:.1f} minutes.", ""]
    lines += equality_table([p for p in pairs if p[0]["job"] == "equality"])
    lines += speed_table([p for p in pairs if p[0]["job"] == "speed"])
    lines += timed_lines(*next(p for p in pairs if p[0]["job"] == "timed"))
    return "\n".join(lines) + "\n"


def equality_table(pairs: list[tuple[Job, Answer]]) -> list[str]:
    """Every algorithm and mode against eager."""
    updates = pairs[0][0]["updates"] if pairs else 0
    lines = [
        f"## The same numbers as the eager step, {updates} updates of 4 replicas",
        "",
        f"Largest difference of a parameter tensor, relative to its norm, after {EARLY} and {updates} updates; beside it what eager",
        f"runs differ by when their first weights are moved by one unit in the last place (the largest of {MOVES}). Losses: largest",
        f"difference of a mean over {EARLY} updates, relative to 1 or to the loss if that is larger.",
        "",
        f"| algorithm | mode | {EARLY} updates | one rounding | {updates} updates | one rounding | losses | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for job, answer in pairs:
        head = f"| {job['algo']} | {job['mode']} |"
        if "losses" in answer:
            names = ("parameters early", "rounding early", "parameters late", "rounding late", "losses")
            lines.append(f"{head} {' | '.join(f'{answer[k]:.1e}' for k in names)} | {verdict(answer)} |")
        else:
            lines.append(f"{head} | | | | | {answer.get('skipped') or answer['error']} |")
    return [*lines, ""]


def verdict(answer: Answer) -> str:
    """equal: within 1e-5; as rounding: within three times what a last-place change of the weights makes; else where it differs."""
    if answer["parameters late"] <= TOLERANCE:
        return "equal"
    if all(answer[f"parameters {when}"] <= max(3.0 * answer[f"rounding {when}"], TOLERANCE) for when in ("early", "late")):
        return "as rounding"
    return f"DIFFERENT at {answer['where']}"


def speed_table(pairs: list[tuple[Job, Answer]]) -> list[str]:
    """Updates, memory and business by algorithm and replicas."""
    if not pairs:
        return []
    job = pairs[0][0]
    lines = [
        f"## Speed and memory: mode {job['mode']}, {job['rows']:,} transitions on the device, batch 256, networks 2 x 256",
        "",
        "| algorithm | replicas | updates/s | replicas x updates/s | 1M updates, minutes | peak memory, GB | state, MB | GPU busy "
        "| kernels | of the floor | to the first update, s |",
        "|" + "---|" * 11,
    ]
    for job, answer in sorted(pairs, key=lambda p: (p[0]["algo"], p[0]["replicas"])):
        head = f"| {job['algo']} | {job['replicas']} |"
        if "error" in answer:
            lines.append(f"{head} {answer['error']} |" + " |" * 8)
            continue
        rate, floor = answer["rate"], answer.get("floor")
        cells = [f"{rate:.0f}", f"{rate * job['replicas']:.0f}", f"{1e6 / rate / 60:.1f}", f"{answer['peak'] / 1e9:.2f}"]
        cells += [f"{answer['state'] / 1e6:.0f}", percent(answer["busy"]), percent(answer.get("kernels"))]
        cells += [percent(rate / floor if floor else None), f"{answer['warm']:.0f}"]
        lines.append(f"{head} {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "GPU busy: nvidia-smi's share of the time in which a kernel ran. Kernels: their times added up, over the time. Floor: the longer",
        "of the matrix products at this GPU's float32 rate for that many replicas, and reading and writing the state once at its copy",
        "rate.",
        "1M updates: scaled from a few seconds. On a CPU peak memory is the process's.",
        "",
    ]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def timed_lines(job: Job, answer: Answer) -> list[str]:
    """One run of IQL."""
    head = ["## One seed of IQL", ""]
    if "error" in answer:
        return [*head, f"Not measured: {answer['error']}."]
    updates, seconds = answer["updates"], answer["seconds"]
    words = f"{updates:,} updates in {seconds:.0f} s, after {answer['warm']:.0f} s until the first ones were done"
    if updates >= FULL_RUN:
        return [*head, f"Measured: {words}."]
    if not updates:
        return [*head, "Not measured: its time was over before the first update."]
    return [
        *head,
        f"{words}. EXTRAPOLATED to {FULL_RUN:,} updates: {seconds * FULL_RUN / updates / 60:.1f} minutes (--full runs them all).",
    ]


if __name__ == "__main__":
    main()
