"""`offrl doctor`: how training would go on this machine."""

from __future__ import annotations

import contextlib
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, first_line, say
from offrl.settings.field import describe, setting

if TYPE_CHECKING:
    from offrl.training.engine import LocalEngine
    from offrl.training.selfcheck import SelfCheck


@dataclass
class DoctorConfig:
    """Settings of `offrl doctor`."""

    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    algo: str = setting("iql", "the algorithm to try, on the dataset that ships with offrl")
    compile: str = setting(
        "auto", "how the step is to run: see offrl train", choices=("auto", "eager", "cudagraph", "compiled")
    )
    seconds: float = setting(1.0, "how long each timing takes", low=0.01, high=60.0)


USAGE = """\
usage: offrl doctor [device=cuda] [name=value ...]

The first minute on a machine: does offrl train right on it, how fast, and how many seeds fit. Each line is a check; one that
fails says why, and the others go on. Exit status 0: all is right; 1: something is not.

{0}"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    return USAGE.format("\n".join(describe(DoctorConfig())))


def run(arguments: list[str]) -> int:
    from offrl.settings.compose import fill, parse

    config = fill(DoctorConfig(), parse(arguments), "doctor")
    return _Doctor(config).run()


class _Cure(Exception):
    """A check found something wrong: what, and what helps."""


class _Doctor:
    """The checks in their order. What one finds out the later ones use; those whose ground is missing are left out."""

    def __init__(self, config: DoctorConfig) -> None:
        self.config = config
        self.failed: list[str] = []
        self.device: Any = None
        self.check: SelfCheck | None = None
        self.fastest: LocalEngine | None = None  # of the modes that are right

    def run(self) -> int:
        self.look("device", self.find_device)
        self.look("torch", self.versions)
        self.look("cache", self.cache)
        if self.device is not None:
            self.look("compiling", self.compiles)
            self.look("data", self.data)
        if (check := self.check) is not None:
            if self.device.type != "cpu":
                self.look("right", partial(self.compare_with_cpu, check))
            for mode in check.modes:
                self.look("right", partial(self.compare, check, mode))
            self.look("speed", partial(self.speed, check))
            self.look("memory", partial(self.memory, check))
        if self.failed:
            say(f"verdict    NOT RIGHT: {', '.join(dict.fromkeys(self.failed))}")
            return 1
        say(f"verdict    right: offrl trains on {self.device} as it should")
        return 0

    def look(self, name: str, check: Callable[[], str]) -> None:
        """Do a check and print its line."""
        try:
            line = check()
        except Exception as error:  # whatever is wrong with a machine: the others go on
            self.failed.append(name)
            plain = isinstance(error, (_Cure, UserError))
            line = f"FAILED: {'' if plain else f'{type(error).__name__}: '}{first_line(error)}"
            if "out of memory" in line:
                line += "; another program may hold the memory"
        say(f"{name:<10} {line}")

    def find_device(self) -> str:
        from offrl.data.memory import free_bytes
        from offrl.settings.evaluation import cores
        from offrl.system.backend import configure
        from offrl.system.devices import pick_device

        device = pick_device(self.config.device)
        arithmetic = configure(device, 1)
        if device.type == "cpu":
            description = f"{cores()} cores, {free_bytes() / 1e9:.0f} GB of memory free; {_vectors()}"
        elif device.type == "mps":
            description = f"the host: {_vectors()}"
        else:
            import torch

            free, total = torch.cuda.mem_get_info(device)
            major, minor = torch.cuda.get_device_capability(device)
            description = (
                f"compute capability {major}.{minor}, {free / 1e9:.0f} of {total / 1e9:.0f} GB free; the host: "
                f"{_vectors()}"
            )
        self.device = device
        return f"{device} ({arithmetic}), {description}"

    def versions(self) -> str:
        import torch

        from offrl import __version__

        text = (
            f"{torch.__version__}, offrl {__version__}, Python {platform.python_version()}, {platform.system()} "
            f"{platform.machine()}"
        )
        if not torch.cuda.is_available():
            return f"{text}; no CUDA GPU found{'' if torch.version.cuda else ' (a build of torch without CUDA)'}"
        return f"{text}; CUDA {torch.version.cuda}, driver {_driver()}"

    def cache(self) -> str:
        from offrl.system.files import cache_dir

        folder = cache_dir(None)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _Cure(f"cannot write to {folder} ({error.strerror}); name another folder with OFFRL_CACHE") from None
        return f"{folder}, {shutil.disk_usage(folder).free / 1e9:.0f} GB free"

    def compiles(self) -> str:
        """Triton, or the C++ compiler: one line of code."""
        if self.config.compile in ("eager", "cudagraph"):
            return f"not tried (compile={self.config.compile})"
        import torch

        from offrl.system import backend
        from offrl.training.execution import no_triton

        backend.cache_compiled()
        start = time.monotonic()
        if self.device.type == "cuda":
            if problem := no_triton(str(self.device)):
                raise _Cure(f"{problem}; compile=cudagraph does without")
            return f"Triton works ({time.monotonic() - start:.0f} s)"
        compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
        if compiler is None:
            raise _Cure("no C++ compiler; install g++, or train with compile=eager")
        try:
            torch.compile(lambda x: x + 1, fullgraph=True)(torch.zeros(8))
        except Exception as error:
            raise _Cure(
                f"{compiler} is there, but one line of code did not compile ({first_line(error)}); compile=eager does "
                "without"
            ) from None
        return f"{compiler} works ({time.monotonic() - start:.0f} s)"

    def data(self) -> str:
        """The built-in data and the algorithm for it."""
        from offrl.training.selfcheck import SelfCheck

        self.check = check = SelfCheck(self.config.algo, self.config.compile, self.device)
        dataset, config = check.dataset, check.plan.algorithm.config
        return f"{dataset.spec.name}, {len(dataset):,} rows; {config.name}, batches of {config.batch_size}"

    def judge(self, check: SelfCheck, difference: float, title: str, cure: str) -> str:
        """The line of a comparison. Raises _Cure where more than rounding lies between."""
        from offrl.training.selfcheck import TRIED

        line = (
            f"{title}, {TRIED} updates: largest relative difference {difference:.1e} (rounding: up to "
            f"{check.tolerance:.0e})"
        )
        if difference > check.tolerance:
            raise _Cure(f"WRONG: {line}; {cure}, and tell offrl's authors")
        return f"{line}: right"

    def compare(self, check: SelfCheck, mode: str) -> str:
        """The step of a run against the eager one, from the same state."""
        from offrl.training import selfcheck

        engine, start = check.engine(mode), time.monotonic()
        parameters = check.parameters(engine)
        seconds = time.monotonic() - start
        if engine.groups[0].mode != mode:  # the step has said why
            raise _Cure(
                f"the step was to run {mode}, and goes on {engine.groups[0].mode}: runs here do so too, and are slower"
            )
        title = f"{mode} against eager, {selfcheck.SEEDS} seeds"
        line = self.judge(check, selfcheck.difference(check.eager, parameters), title, "train with compile=eager")
        self.fastest = self.fastest or engine
        return f"{line}; {seconds:.0f} s for them"

    def compare_with_cpu(self, check: SelfCheck) -> str:
        """The eager step against the CPU's."""
        return self.judge(check, check.cpu_difference(), "eager against the CPU, 1 seed", "train with device=cpu")

    def speed(self, check: SelfCheck) -> str:
        """Updates per second of one seed and of several, in the fastest mode that is right."""
        from offrl.training.selfcheck import SEEDS

        if self.fastest is None:
            self.fastest = check.engine("eager")
            check.parameters(self.fastest)
        mode = self.fastest.groups[0].mode
        single = check.engine(mode, 1)
        check.parameters(single)  # compiled, captured
        rates = {
            seeds: check.rate(engine, self.config.seconds) for seeds, engine in ((1, single), (SEEDS, self.fastest))
        }
        hours = 1e6 / rates[SEEDS] / 3600
        speeds = ", ".join(f"{n} seed{'s' if n > 1 else ''} {rate:,.0f} updates/s" for n, rate in rates.items())
        alone = "" if self.device.type != "cpu" else " in one process (a run has one for each core)"
        return f"{mode}{alone}: {speeds}; 1,000,000 updates of {SEEDS} seeds in {_hours(hours)}"

    def memory(self, check: SelfCheck) -> str:
        """The number of seeds that fit beside each other."""
        from offrl.training.execution import SHARE

        self.fastest = None  # its memory is free again
        state, working, free = check.memory()
        each = f"a seed takes {state / 1e6:,.1f} MB" + (
            f" and {working / 1e6:,.1f} MB while its group trains" if working else ""
        )
        return f"{each}: some {int(SHARE * free / (state + working)):,} fit in the {free / 1e9:.0f} GB that are free"


def _hours(hours: float) -> str:
    return f"{60 * hours:.0f} minutes" if hours < 2.0 else f"{hours:.1f} hours"


def _vectors() -> str:
    """The processor and the vector instructions that torch uses."""
    import torch

    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next(line for line in lines if line.startswith("model name")).partition(":")[2].strip()
    return f"{name}, vector instructions {torch.backends.cpu.get_cpu_capability()}"


def _driver() -> str:
    """The version of the GPU's driver."""
    if shutil.which("nvidia-smi") is None:
        return "unknown (nvidia-smi is not there)"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else "unknown"
