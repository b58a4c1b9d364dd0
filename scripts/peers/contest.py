"""Starts the contestants of the speed scripts, holds each on its core, asks them for bursts, and says where that was.
Standard library only; what the contestants are made of is in `peers.common`."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]


@dataclass
class Contestant:
    """A program to be started: `core` is the number of the core (among those allowed) that it is held on."""

    key: str
    module: str
    arguments: list[str] = field(default_factory=list)
    environment: str = "offrl"
    core: int = 0
    process: subprocess.Popen[str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


def start(contestant: Contestant, python: str, rows: int, core: int) -> None:
    """Start a contestant, warm it up on any of the cores, and hold it on its own; notes why if it does not get
    there.
    """
    line, surroundings = command(python, contestant.module, [*contestant.arguments, "--rows", str(rows)])

    def hold() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the program has ended
    pipe = subprocess.PIPE
    contestant.process = subprocess.Popen(
        line, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=surroundings, preexec_fn=hold
    )
    assert contestant.process.stdout is not None
    ready = contestant.process.stdout.readline()
    if ready:
        contestant.facts = json.loads(ready)
        if hasattr(os, "sched_setaffinity"):
            # its threads, each of which is held by itself
            for task in Path(f"/proc/{contestant.process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {cores()[contestant.core]})
    else:
        contestant.process.wait()
        errors.seek(0)
        contestant.failure = last_line(errors.read()) or f"ended with status {contestant.process.returncode}"
        say(f"{contestant.key} failed: {contestant.failure}")


def burst(group: list[Contestant], seconds: float) -> list[float]:
    """Updates per second of contestants that run side by side."""
    for contestant in group:
        assert contestant.process is not None and contestant.process.stdin is not None
        contestant.process.stdin.write(f"burst {seconds}\n")
        contestant.process.stdin.flush()
    rates = []
    for contestant in group:
        assert contestant.process is not None and contestant.process.stdout is not None
        line = contestant.process.stdout.readline()
        if not line:
            raise SystemExit(f"{contestant.key} ended during a burst")
        rates.append(json.loads(line)["rate"])
    return rates


def stop(programs: list[Contestant]) -> None:
    for contestant in programs:
        if contestant.process is not None and contestant.process.stdin is not None:
            contestant.process.stdin.close()
            contestant.process.wait()


def ask(module: str, python: str, arguments: list[str]) -> dict[str, Any]:
    """Run a program of scripts/peers on the first core and return its one answer."""
    line, surroundings = command(python, module, arguments)
    done = subprocess.run(line, env=surroundings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module}: {last_line(done.stderr)}")
    return json.loads(last_line(done.stdout))


def command(python: str, module: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that starts a program of scripts/peers, and its environment, with one thread for everything."""
    paths = [str(SCRIPTS), str(SCRIPTS.parent)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    jax = {"XLA_FLAGS": flags.strip(), "JAX_PLATFORMS": "cpu"}
    surroundings = {**os.environ, **threads, **jax, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    return [python, "-m", f"peers.{module}", *arguments], surroundings


def environment(folder: Path, calls: list[list[str]]) -> tuple[str, str]:
    """The interpreter of a virtual environment with these packages, made if need be, and an empty text, or why there is
    none.
    """
    python, mark = folder / "bin" / "python", folder / "installed.json"
    if mark.exists() and json.loads(mark.read_text()) == calls:
        return str(python), ""
    say(f"making the environment {folder}: {' '.join(word for call in calls for word in call)}")
    commands = [
        [sys.executable, "-m", "venv", str(folder)],
        *([str(python), "-m", "pip", "install", "-q", *call] for call in calls),
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return "", last_line(done.stderr) or f"{' '.join(command)} failed"
    mark.write_text(json.dumps(calls))
    return str(python), ""


def machine() -> str:
    """One line about the machine and when this was."""
    model = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        model = next(
            (line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")),
            model,
        )
    vectors = subprocess.run([sys.executable, "-c", VECTORS], capture_output=True, text=True).stdout.strip()
    return f"{time.strftime('%Y-%m-%d')}, {model}, {vectors}, {len(cores())} cores, Python {platform.python_version()}."


VECTORS = """
import torch
from pathlib import Path
info = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().split("\\n\\n")[0].splitlines() if ":" in line)
fields = {k.strip(): v.strip() for k, v in info.items()}
print(f"{fields.get('vendor_id')} family {fields.get('cpu family')} model {fields.get('model')}, {torch.backends.cpu.get_cpu_capability()}")
"""  # noqa: E501


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def span(values: list[float], digits: int = 2) -> str:
    """The median, with the smallest and the largest in brackets."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
