"""The further checks of gpu_check.py: the real command, random numbers, memory, precision, kernels. Each check gives
{"verdict", "text"} and perhaps {"table": rows, the first of them the head}, or {"skipped": why}."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from gpu.measures import (
    Answer,
    begun,
    cases,
    clear,
    configure,
    dataset_of,
    difference,
    largest,
    scratch,
)
from gpu.plan import EARLY
from peers.runner import Runner, keeps_to, make, resident
from torch.func import vmap

from offrl import registry, rng
from offrl.algorithm import stack
from offrl.data.samplers.transitions import TransitionSampler
from offrl.settings.replicas import Replica
from offrl.system import files as checkpoint
from offrl.training import engine
from offrl.training.execution import choose_mode, replica_bytes
from offrl.training.step import Step
from offrl.training.updates import metric_means

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("hydra", "h5py", "gymnasium", "mujoco", "tensorboard", "rich")  # what a command needs besides torch
NEEDS_GPU = {"skipped": "needs a GPU"}
NORMALS = 1e-5  # by how much two devices' cosines and logarithms may differ
KINDS = {"bf16": 0.1, "tf32": 0.02}  # how far a loss may be from float32's


# ---- the real command


def absent(names: tuple[str, ...]) -> str:
    """The packages among these that are not installed, in words; empty where all are."""
    missing = [name for name in names if find_spec(name) is None]
    return f"needs {', '.join(missing)} (pip install -e .)" if missing else ""


def environment(cache: Path) -> dict[str, str]:
    """For a command whose compiled code and data go to a cache of its own."""
    kept = {k: v for k, v in os.environ.items() if k not in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    return {**kept, "OFFRL_CACHE": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(words: list[str], folder: Path, cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "offrl.cli", *words, "quiet=true"]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=environment(cache), stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """The output of a command. Raises RuntimeError with its end where it failed."""
    printed = process.communicate()[0]
    if process.returncode:
        shown = "\n".join(printed.strip().splitlines()[-12:])
        words = cast("list[str]", process.args)[3:]
        raise RuntimeError(f"`offrl {' '.join(words)}` ended with status {process.returncode}:\n{shown}")
    return printed


def last_step(run: Path) -> int:
    """The step of the last whole line of metrics."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def command(device: str, seeds: int, steps: int, settings: list[str]) -> Answer:
    """`offrl train` with an evaluation, three times, each in a fresh cache; the third is killed in its second half and
    begun again.
    """
    if reason := absent(COMMAND):
        return {"skipped": reason}
    words = [
        "train",
        "algo=iql",
        "dataset=builtin",
        f"seeds={seeds}",
        f"steps={steps}",
        f"device={device}",
        "name=run",
        "compare=[]",
    ]
    words += [
        f"eval.every={steps // 2}",
        "eval.episodes=2",
        f"checkpoint.every={steps // 10}",
        f"log_every={steps // 20}",
        *settings,
    ]
    killed_at: list[int] = []

    def whole(name: str) -> Path:
        folder = scratch() / f"command-{name}"
        folder.mkdir()
        finish(start(words, folder, folder / "cache"))
        return folder / "runs" / "run"

    def killed(name: str) -> Path:
        folder = scratch() / f"command-{name}"
        folder.mkdir()
        process, run = start(words, folder, folder / "cache"), folder / "runs" / "run"
        while process.poll() is None and last_step(run) <= steps // 2:
            time.sleep(0.005)
        process.kill()
        process.communicate()
        killed_at.append(last_step(run))
        finish(start(words, folder, folder / "cache"))
        return run

    began = time.perf_counter()
    with ThreadPoolExecutor(1 if device == "cpu" else 3) as pool:
        jobs = [pool.submit(whole, "whole"), pool.submit(whole, "again"), pool.submit(killed, "killed")]
        first, *others = [job.result() for job in jobs]
    pairs = [same_run(first, other) for other in others]
    over = "" if killed_at[0] < steps else " (it was over before it could be killed)"
    text = (
        f"{seeds} seeds, {steps:,} updates; again in a fresh cache: {pairs[0]}; killed at {killed_at[0]:,}{over} and "
        f"resumed: {pairs[1]}"
    )
    verdict = "right" if all(f.startswith("equal") for f in pairs) else "DIFFERENT"
    return {"verdict": verdict, "text": f"{text}; {time.perf_counter() - began:.0f} s"}


def same_run(first: Path, second: Path) -> str:
    """Words for how two runs' last checkpoints and scores compare."""
    (a, _), (b, _) = [checkpoint.load_latest(run) or ({}, {}) for run in (first, second)]
    if list(a) != list(b):
        return "OTHER TENSORS"
    scores = [(run / "scores.csv").read_text() for run in (first, second)]
    if all(torch.equal(x, b[k]) for k, x in a.items()):
        return f"equal in all {len(a)} tensors" if scores[0] == scores[1] else "EQUAL TENSORS, OTHER SCORES"
    state = [{k: x[k] for k in a if k.startswith("state/params")} for x in (a, b)]
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (first, second)]
    at = next((json.loads(x)["step"] for x, y in zip(*lines, strict=False) if x != y), None)
    return f"PARAMETERS DIFFER by {difference(*state)[0]:.1e}" + (
        "" if at is None else f", metrics from step {at:,} on"
    )


def mapped(device: str, steps: int) -> Answer:
    """`offrl train` on memory-mapped data, compared with data on the device; and `offrl finetune` of what comes out."""
    if reason := absent(COMMAND):
        return {"skipped": reason}
    folder = scratch() / "mapped"
    folder.mkdir()
    words = [
        "train",
        "dataset=builtin",
        "seeds=2",
        f"steps={steps}",
        f"device={device}",
        "compile=eager",
        "compare=[]",
        "eval.env=none",
    ]
    for memory in ("mmap", "device"):
        finish(start([*words, f"dataset.memory={memory}", f"name={memory}"], folder, folder / "cache"))
    read = [checkpoint.load_latest(folder / "runs" / name) or ({}, {}) for name in ("mmap", "device")]
    worst, where = difference(
        *[{k: v for k, v in tensors.items() if k.startswith("state/params")} for tensors, _ in read]
    )
    tune = [
        "finetune",
        "runs/device",
        "env=Hopper-v5",
        "steps=60",
        "max_steps=20",
        "eval.episodes=1",
        f"device={device}",
        "name=tuned",
    ]
    began = time.perf_counter()
    finish(start([*tune, "log_every=20"], folder, folder / "cache"))
    lines = [json.loads(x) for x in (folder / "runs" / "tuned" / "metrics.jsonl").read_text().splitlines()]
    finite = all(x == x for line in lines for k in line if k.endswith("loss") for x in line[k])
    text = f"mapped and not, {steps} updates: parameters differ by {worst:.1e}{f' at {where}' if worst else ''}"
    verdict = "right" if worst <= 1e-5 and finite else "WRONG"
    losses = "losses finite" if finite else "LOSSES NOT FINITE"
    return {
        "verdict": verdict,
        "text": f"{text}; fine-tuning 60 steps of 2 seeds: {time.perf_counter() - began:.0f} s with the start, {losses}",  # noqa: E501
    }


# ---- random numbers and batches


def draws(device: str, mode: str) -> Answer:
    """Random numbers, and a sampler's batches, against those of the CPU, for four seeds as a step draws them. mode:
    eager or compiled.
    """
    sampler, dataset = TransitionSampler(), dataset_of(5_000)

    def drawn(where: str) -> Callable[[torch.Tensor], dict[str, torch.Tensor]]:
        source = sampler.prepare(dataset.to(where))

        def one(key: torch.Tensor) -> dict[str, torch.Tensor]:
            batch_key, noise = rng.split(rng.fold_in(key, 7))
            numbers = {
                "bits": rng.bits(noise, (64, 3)),
                "uniform": rng.uniform(noise, (64, 3)),
                "normal": rng.normal(noise, (64, 3)),
            }
            numbers["randint"] = rng.randint(noise, (64,), 1_000_003)
            return {**numbers, **{f"batch's {k}": v for k, v in sampler(source, batch_key, 256).items()}}

        return vmap(one)

    keys = torch.stack([rng.make_key(seed) for seed in range(4)])
    expected, draw = drawn("cpu")(keys), drawn(device)
    result = (draw if mode == "eager" else torch.compile(draw, fullgraph=True, dynamic=False))(keys.to(device))
    wrong = []
    for name, value in expected.items():
        actual = result[name].cpu()
        if not (
            torch.allclose(actual, value, rtol=0.0, atol=NORMALS) if name == "normal" else torch.equal(actual, value)
        ):
            wrong.append(f"{name} ({(actual != value).double().mean():.0%} of the numbers)")
    distance = (result["normal"].cpu() - expected["normal"]).abs().max().item()
    text = f"bits, uniform, randint and {len(expected) - 4} columns of a batch equal; normal within {distance:.0e}"
    return (
        {"verdict": "WRONG", "text": f"differ from the CPU's: {', '.join(wrong)}"}
        if wrong
        else {"verdict": "right", "text": text}
    )


# ---- memory


def engine_of(
    algo: str, device: str, mode: str, sizes: list[int], rows: int
) -> tuple[engine.Plan, Any, engine.LocalEngine]:
    """Groups of seeds as a run trains them: (plan, what the sampler prepared, engine)."""
    dataset = dataset_of(rows)
    algorithm, where = make(algo, dataset), torch.device(device)
    plan = engine.Plan(algorithm, algorithm.config.batch_size, mode, "float32", max(sizes))
    source, replicas = algorithm.sampler().prepare(dataset.to(where)), [Replica(seed) for seed in range(sum(sizes))]
    trainer = engine.LocalEngine(plan, source, replicas, where, sizes=sizes)
    state = engine.first_state(algorithm, replicas)
    trainer.load(state, state, {})
    return plan, source, trainer


def memory(device: str, mode: str, size: int, looks: list[int], rows: int) -> Answer:
    """Memory of three groups of `size` seeds of IQL after so many updates; what grows between the looks leaks."""
    sizes, done = [size] * 3, 0
    clear(device)
    trainer, peaks = engine_of("iql", device, mode, sizes, rows)[2], []
    for look in looks:
        while done < look:
            count = min(500, look - done)
            trainer.run(done, count)
            keeps_to(mode, trainer.groups[0])
            done += count
            trainer.settle(torch.ones(sum(sizes), dtype=torch.bool))  # as with each line of metrics
        peaks.append(resident() if device == "cpu" else torch.cuda.max_memory_reserved())
    grown = peaks[-1] - peaks[0]
    what = "resident" if device == "cpu" else "max_memory_reserved"
    text = ", ".join(f"{what} {x / 1e6:.0f} MB after {look:,} updates" for look, x in zip(looks, peaks, strict=True))
    return {
        "verdict": "LEAKS" if grown > max(0.05 * peaks[0], 32e6) else "right",
        "text": f"three groups of {size}: {text}",
    }


def replica(algo: str, device: str, mode: str) -> Answer:
    """Bytes that a replica takes: the difference between 4 and 8 of them in the step of a run, against what the engine
    reckons with.
    """
    if device == "cpu":
        return NEEDS_GPU
    peaks = []
    for count in (4, 8):
        clear(device)
        before = torch.cuda.memory_reserved()  # graphs keep what they once took
        plan, source, trainer = engine_of(algo, device, mode, [count], 5_000)
        trainer.run(0, 4 * plan.algorithm.traits.period)
        peaks.append(torch.cuda.max_memory_reserved() - before)
        del trainer
    real = (peaks[1] - peaks[0]) / 4
    estimate = sum(replica_bytes(plan, source, torch.device(device)))
    verdict = "right" if real <= 1.1 * estimate else "TOO SMALL"
    return {
        "verdict": verdict,
        "text": f"{real / 1e6:.0f} MB more for each of 4; the engine reckons with {estimate / 1e6:.0f} MB",
    }


# ---- precision


def precision(kind: str, device: str, mode: str, updates: int) -> Answer:
    """IQL in another precision against float32: it is really on if the first losses differ, and learns the same if the
    last are close.
    """
    if kind == "tf32" and device == "cpu":
        return NEEDS_GPU
    dataset = dataset_of(5_000)
    algorithm = make("iql", dataset)
    source = algorithm.sampler().prepare(dataset.to(device))
    found = {}
    for name in ("float32", kind):
        configure(device, name)
        try:
            step = Step(algorithm, source, batch_size=256, replicas=4, mode=mode, precision=name)
            state, losses = stack([algorithm.init(s) for s in range(4)], device), []
            for first, count in ((0, EARLY), (EARLY, updates - EARLY)):
                state, sums = step.run(state, {}, first, count)
                keeps_to(mode, step)
                losses.append({k: float(v.mean()) for k, v in metric_means(sums, count).items() if k.endswith("loss")})
            found[name] = losses
        finally:
            configure(device)
    early, late = [largest([a], [b]) for a, b in zip(found["float32"], found[kind], strict=True)]
    verdict = "NOT ON" if early < 1e-6 else "right" if late <= KINDS[kind] else "WRONG"
    return {
        "verdict": verdict,
        "text": f"losses differ from float32's by {early:.1e} in {EARLY} updates, {late:.1e} in {updates}",
    }


# ---- texts


def texts(algo: str, device: str, updates: int) -> Answer:
    """An algorithm with a language model, as a run trains it, against the CPU."""
    if reason := absent(("transformers", "peft")):
        return {"skipped": reason}
    if registry.get("algo", algo).traits.text:
        algorithm, dataset = of_texts(algo)
    else:
        algorithm, dataset = cases().Case(algo).make(), cases().data(False)
    losses = []
    for where in ("cpu", device):
        mode = choose_mode("auto", torch.device(where), updates, algorithm)
        runner = Runner(algorithm, dataset, seeds=[0], mode=mode, batch_size=algorithm.config.batch_size, device=where)
        losses.append([runner.updates(updates)])
    worst = largest(*losses)
    return {
        "verdict": "right" if worst <= 1e-3 else "WRONG",
        "text": f"{updates} updates, {mode}: losses differ from the CPU's by {worst:.1e}",
    }


def of_texts(algo: str) -> tuple[Any, Any]:
    """An algorithm of texts in small, and data for it: say what is said."""
    from offrl.data.text.dataset import from_episodes

    def episode(i: int) -> dict[str, Any]:
        turns = [
            {"obs": f"say {word}\n", "action": f"{word}\n", "reward": 1.0}
            for word in ("red", "blue", "a b")[: 1 + i % 3]
        ]
        return {"turns": turns, "final_obs": "bye\n", "terminated": True, "truncated": False}

    dataset = from_episodes(map(episode, range(20)), name="echo")
    kind = registry.get("algo", algo)
    config = kind.Config(width=8, layers=1, heads=2, batch_size=6, length=60, history=1)
    return kind(kind.fit_config(config, dataset), dataset.spec), dataset


# ---- the machine


def pair(device: str, job_of_each: dict[str, Any]) -> Answer:
    """Two processes that train on one device at the same time: both go on, and how fast."""
    job = job_of_each
    words = [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), "--worker", "--device", device]

    def child(_: int) -> Answer:
        done = subprocess.run(words, input=json.dumps(job) + "\n", capture_output=True, text=True)
        if not done.stdout.strip():
            raise RuntimeError(f"a process ended with status {done.returncode}: {done.stderr.strip()[-500:]}")
        answer: Answer = json.loads(done.stdout.splitlines()[-1])
        if "rate" not in answer:
            raise RuntimeError(answer["error"])
        return answer

    with ThreadPoolExecutor(2) as pool:
        rates = [answer["rate"] for answer in pool.map(child, range(2))]
    alone = f"the table of speeds has {job['algo']} with {job['replicas']} alone"
    return {
        "verdict": "right",
        "text": f"{rates[0]:.0f} and {rates[1]:.0f} updates/s, together {sum(rates):.0f}; {alone}",
    }


def kernels(algo: str, replicas: int, mode: str, rows: int, device: str) -> Answer:
    """The ten kernels (on a CPU: operators) that take the longest in an update, and the gaps between kernels."""
    from torch.profiler import ProfilerActivity, profile

    runner, _ = begun(algo, replicas, mode, rows, device, None)
    count = 20 * runner.algorithm.traits.period
    with profile(activities=[ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA]) as seen:
        runner.run(count)
        runner.wait()
    field = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    totals = sorted(
        ((getattr(e, field), e.count, e.key) for e in seen.key_averages() if getattr(e, field) > 0), reverse=True
    )
    total = sum(t for t, _, _ in totals)
    if not total:
        raise RuntimeError(
            "the profiler saw no kernel: CUPTI may not be allowed here (it needs a driver that lets users profile)"
        )
    table = [["kernel", "launches an update", "µs an update", "share"]]
    table += [
        [f"`{name[:90]}`", f"{n / count:.1f}", f"{t / count:.1f}", f"{t / total:.0%}"] for t, n, name in totals[:10]
    ]
    text = (
        f"{algo} with {replicas}, {mode}: {total / count:.0f} µs an update in "
        f"{sum(n for _, n, _ in totals) / count:.0f} launches"
    )
    if device != "cpu":
        text += f"; {gaps([e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA], count)}"
    return {"verdict": "measured", "text": text, "table": table}


def gaps(events: list[Any], count: int) -> str:
    """Words for the time between kernels of `count` updates. events: of the profiler, those on the GPU."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in events)
    end, idle = spans[0][1], []
    for first, last in spans[1:]:
        if first > end:
            idle.append(first - end)
        end = max(end, last)
    if not idle:
        return "no gaps between kernels"
    share = sum(idle) / max(end - spans[0][0], 1e-9)
    middle = statistics.median(idle)
    return (
        f"gaps {sum(idle) / count:.0f} µs an update ({share:.0%} of the time), median {middle:.1f} µs, longest "
        f"{max(idle):.0f} µs"
    )


def sanitizer(device: str, mode: str, rows: int) -> Answer:
    """compute-sanitizer's memcheck over the first updates of IQL. Eagerly each tensor has memory of its own, so that
    none hides beside another."""
    if device == "cpu":
        return NEEDS_GPU
    if shutil.which("compute-sanitizer") is None:
        return {"skipped": "compute-sanitizer is not installed (it comes with the CUDA toolkit)"}
    job = {"job": "warm", "algo": "iql", "replicas": 2, "mode": mode, "rows": rows}
    words = [
        "compute-sanitizer",
        "--tool",
        "memcheck",
        sys.executable,
        str(ROOT / "scripts" / "gpu_check.py"),
        "--worker",
        "--device",
        device,
    ]
    settings = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if mode == "eager" else {})}
    done = subprocess.run(words, input=json.dumps(job) + "\n", capture_output=True, text=True, env=settings)
    lines = (done.stdout + done.stderr).splitlines()
    summary = next((x.strip("= ") for x in reversed(lines) if "ERROR SUMMARY" in x), None)
    answered = any(x.startswith('{"warm"') for x in lines)
    if summary is None or not answered:
        raise RuntimeError("\n".join(["compute-sanitizer did not get to the end:", *lines[-15:]]))
    return {"verdict": "right" if summary.endswith(" 0 errors") else "WRONG", "text": f"{mode}: {summary}"}


JOBS: dict[str, Callable[..., Answer]] = {
    "command": command,
    "mapped": mapped,
    "draws": draws,
    "memory": memory,
    "replica": replica,
    "precision": precision,
    "texts": texts,
    "pair": pair,
    "kernels": kernels,
    "sanitizer": sanitizer,
}
