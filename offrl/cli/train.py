"""`offrl train`: train an algorithm on a data set, all seeds at once, and score it. And `offrl doctor`: how training would go here."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from offrl.errors import UserError, first_line, nearest
from offrl.settings.field import describe, setting
from offrl.system.signals import handled

PICTURES = ("learning_curve.png", "grid.png", "goal_map.png", "model.png")
WRITTEN = ("scores.csv", "metrics.jsonl", *PICTURES, "policies", "models", "tensorboard")


def run(arguments: list[str]) -> int:
    if any(a in ("-h", "--help") for a in arguments):
        print(_settings_help(arguments), end="")
        return 0
    arguments = ["quiet=true" if a in ("-q", "--quiet") else a for a in arguments]
    from offrl.settings.compose import parse

    values = parse(arguments)
    from offrl.api import train_from
    from offrl.runs.record import report
    from offrl.training.distributed import world
    from offrl.training.loop import Interrupted

    try:
        with terminable():
            runs = train_from(values)
    except Interrupted as stop:
        print(f"offrl: {stop}", file=sys.stderr)
        return 130
    if not world().first:  # the first of torchrun's processes reports for all
        return 0
    main_run = runs[0]
    lost = [r for run in runs for r in run.diverged]
    environment = main_run.final_scores[0]["environment"] if main_run.scores else ""
    report(runs, environment)
    for run in runs:
        files = ", ".join(n for n in WRITTEN if (run.dir / n).exists())
        print(f"{run.algorithm}: {run.dir}{os.sep} ({files})")
    if lost:
        print(f"offrl: warning: diverged and frozen: {', '.join(map(str, lost))}", file=sys.stderr)
    return 1 if len(main_run.diverged) == len(main_run.replicas) else 0


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM before training has begun, or after it, ends the command as Ctrl-C does."""

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handled(handler, signal.SIGTERM):
        yield


def _settings_help(arguments: list[str]) -> str:
    from offrl.settings.field import describe
    from offrl.settings.train import TrainConfig

    lines = ["usage: offrl train [name=value ...] [--quiet]", "", "Settings and their defaults (lists are written [a,b]):", ""]
    lines += describe(TrainConfig())
    algo = next((a.removeprefix("algo=") for a in arguments if a.startswith("algo=")), None)
    if algo is not None:
        from offrl.cli.listing import algorithm_settings

        lines += algorithm_settings(algo)
    return "\n".join([*lines, ""])


# ---- offrl doctor


@dataclass
class DoctorConfig:
    """Settings of `offrl doctor`."""

    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    algo: str = setting("iql", "the algorithm to try, on the data set that ships with offrl")
    compile: str = setting("auto", "how the step is to run: see offrl train", choices=("auto", "eager", "cudagraph", "compiled"))
    seconds: float = setting(1.0, "how long each timing takes", low=0.01, high=60.0)


DOCTOR_USAGE = "\n".join(
    [
        "usage: offrl doctor [device=cuda] [name=value ...]",
        "",
        "The first minute on a machine: does offrl train right on it, how fast, and how many seeds fit. Each line is a check; one that",
        "fails says why, and the others go on. Exit status 0: all is right; 1: something is not.",
        "",
        *describe(DoctorConfig()),
    ]
)
SEEDS = 8  # that are tried side by side
TRIED = 20  # updates that are compared; a multiple of every algorithm's period
SAME = 1e-4  # relative difference of a module that is rounding. It moves them by 1e-5 in so many updates of IQL, another batch by 5e-3


def doctor(arguments: list[str]) -> int:
    """`offrl doctor`: checks of this machine, one line each; the exit status is 0 where all went well, else 1."""
    from offrl.settings.compose import fill, parse

    config = fill(DoctorConfig(), parse(_named(arguments)), "doctor")
    return _Doctor(config).run()


def _named(arguments: list[str]) -> list[str]:
    """`--device cuda` and `--device=cuda` as device=cuda. Raises UserError for another option."""
    known = [f.name for f in fields(DoctorConfig)]
    words, found = iter(arguments), []
    for word in words:
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            if name not in known:
                raise UserError(f"offrl doctor has no option {word}.{nearest(name, known)} Settings: {', '.join(known)}")
            word = f"{name}={value if equals else next(words, '')}"
        found.append(word)
    return found


class _Cure(Exception):
    """A check found something wrong: what, and what helps."""


class _Doctor:
    """The checks in their order. What one finds out the later ones use; those whose ground is missing are left out."""

    def __init__(self, config: DoctorConfig) -> None:
        self.config = config
        self.failed: list[str] = []
        self.device: Any = None
        self.plan: Any = None  # how a run would train
        self.source: Any = None
        self.best: Any = None  # the engine of the fastest mode that is right

    def run(self) -> int:
        self.look("device", self.find_device)
        self.look("torch", self.versions)
        self.look("cache", self.cache)
        if self.device is not None:
            self.look("compiling", self.compiles)
            self.look("data", self.data)
        if self.plan is not None:
            if self.device.type != "cpu":
                self.look("right", self.compare_with_cpu)
            for mode in self.modes():
                self.look("right", partial(self.compare, mode))
            self.look("speed", self.speed)
            self.look("memory", self.memory)
        if self.failed:
            print(f"verdict    NOT RIGHT: {', '.join(dict.fromkeys(self.failed))}")
            return 1
        print(f"verdict    right: offrl trains on {self.device} as it should")
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
        print(f"{name:<10} {line}", flush=True)

    def find_device(self) -> str:
        from offrl.data.memory import free_bytes
        from offrl.settings.evaluation import cores
        from offrl.system.backend import configure
        from offrl.training.loop import pick_device

        device = pick_device(self.config.device)
        arithmetic = configure(device, 1)
        if device.type == "cpu":
            words = f"{cores()} cores, {free_bytes() / 1e9:.0f} GB of memory free; {_vectors()}"
        else:
            import torch

            free, whole = torch.cuda.mem_get_info(device)
            major, minor = torch.cuda.get_device_capability(device)
            words = f"compute capability {major}.{minor}, {free / 1e9:.0f} of {whole / 1e9:.0f} GB free; the host: {_vectors()}"
        self.device = device
        return f"{device} ({arithmetic}), {words}"

    def versions(self) -> str:
        import torch

        from offrl import __version__

        words = f"{torch.__version__}, offrl {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
        if not torch.cuda.is_available():
            return f"{words}; no CUDA GPU found{'' if torch.version.cuda else ' (a build of torch without CUDA)'}"
        return f"{words}; CUDA {torch.version.cuda}, driver {_driver()}"

    def cache(self) -> str:
        from offrl.data.formats.download import cache_dir

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
        from offrl.training.step import no_triton

        backend.cache_compiled()
        began = time.monotonic()
        if self.device.type == "cuda":
            if problem := no_triton(str(self.device)):
                raise _Cure(f"{problem}; compile=cudagraph does without")
            return f"Triton works ({time.monotonic() - began:.0f} s)"
        found = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
        if found is None:
            raise _Cure("no C++ compiler; install g++, or train with compile=eager")
        try:
            torch.compile(lambda x: x + 1, fullgraph=True)(torch.zeros(8))
        except Exception as error:
            raise _Cure(
                f"{found} is there, but one line of code did not compile ({first_line(error)}); compile=eager does without"
            ) from None
        return f"{found} works ({time.monotonic() - began:.0f} s)"

    def data(self) -> str:
        """The built-in data, the algorithm for it, and where a run would put them."""
        from offrl import registry
        from offrl.algorithm import Algorithm
        from offrl.data.load import load_dataset
        from offrl.settings.compose import compose
        from offrl.training.engine import Plan, default_group
        from offrl.training.loop import check_kind, make_algorithm, ready
        from offrl.training.step import PAYS_FROM, choose_mode

        settings = {"algo": self.config.algo, "compile": self.config.compile, "device": str(self.device), "steps": PAYS_FROM, "quiet": True}
        config = compose(settings)
        kind = registry.get("algo", config.algo.name)
        dataset = load_dataset(config.dataset, str(self.device), True)
        check_kind(kind, config.algo.name, dataset)
        if kind.prerequisites.__func__ is not Algorithm.prerequisites.__func__:  # type: ignore[attr-defined]
            raise _Cure(f"algo={config.algo.name} has others trained first, which takes long; try one that begins at once, such as iql")
        config = ready(config, dataset)
        algorithm = make_algorithm(config, dataset)
        self.source = algorithm.sampler().prepare(dataset.to(self.device))
        mode = choose_mode(config.compile, self.device, config.steps, algorithm)
        plan = Plan(algorithm, config.algo.batch_size, mode, config.precision, SEEDS)
        self.plan = replace(plan, group=default_group(SEEDS, 1, plan, self.source, self.device))
        return f"{dataset.spec.name}, {len(dataset):,} rows; {config.algo.name}, batches of {config.algo.batch_size}"

    def modes(self) -> list[str]:
        """How the step may run here, the fastest first."""
        others = ["cudagraph"] if self.plan.mode == "compiled-cudagraph" else []
        return [self.plan.mode, *others]

    def engine(self, mode: str, seeds: int, device: Any = None, moved: bool = False) -> Any:
        """Fresh replicas. moved: their first weights by one unit in the last place, up or down by chance."""
        import torch
        from torch.utils import _pytree as pytree

        from offrl.settings.replicas import Replica
        from offrl.system.backend import move
        from offrl.training.engine import LocalEngine, first_state

        plan, where = replace(self.plan, mode=mode), device or self.device
        them = [Replica(seed) for seed in range(seeds)]
        state = first_state(plan.algorithm, them)
        if moved:
            generator, infinity = torch.Generator().manual_seed(0), torch.tensor(float("inf"))

            def nudge(p: Any) -> Any:
                return torch.nextafter(p, torch.where(torch.rand(p.shape, generator=generator) < 0.5, infinity, -infinity))

            state = state._replace(params=pytree.tree_map(nudge, state.params))
        made = LocalEngine(plan, move(self.source, where), them, where)
        made.load(state, state, {})
        return made

    def after(self, engine: Any) -> dict[str, Any]:
        """Each module's parameters after the updates that are compared, [N, all of them] on the CPU. One by one, those that were 0 at first
        are small, and one step of Adam that rounding turned round is much of them."""
        import torch

        engine.run(0, TRIED)
        modules = engine.state().params
        return {name: torch.cat([x.reshape(len(x), -1) for x in module.values()], 1) for name, module in modules.items() if module}

    @cached_property
    def eager(self) -> dict[str, Any]:
        """What all is compared with."""
        return self.after(self.engine("eager", SEEDS))

    @cached_property
    def allowed(self) -> float:
        """Relative difference that is rounding: three times what moving the first weights by one unit in the last place makes."""
        return max(SAME, 3.0 * _apart(self.eager, self.after(self.engine("eager", SEEDS, moved=True))))

    def same(self, ours: Mapping[str, Any], theirs: Mapping[str, Any], what: str, cure: str) -> str:
        apart = _apart(ours, theirs)
        line = f"{what}, {TRIED} updates: largest relative difference {apart:.1e} (rounding: up to {self.allowed:.0e})"
        if apart > self.allowed:
            raise _Cure(f"WRONG: {line}; {cure}, and tell offrl's authors")
        return f"{line}: right"

    def compare(self, mode: str) -> str:
        """The step of a run against the eager one, from the same state."""
        engine, began = self.engine(mode, SEEDS), time.monotonic()
        found = self.after(engine)
        seconds = time.monotonic() - began
        if engine.groups[0].mode != mode:  # the step has said why
            raise _Cure(f"the step was to run {mode}, and goes on {engine.groups[0].mode}: runs here do so too, and are slower")
        line = self.same(self.eager, found, f"{mode} against eager, {SEEDS} seeds", "train with compile=eager")
        self.best = self.best or engine
        return f"{line}; {seconds:.0f} s for them"

    def compare_with_cpu(self) -> str:
        """The eager step against the CPU's."""
        import torch

        there = self.after(self.engine("eager", 1, torch.device("cpu")))
        return self.same({name: x[:1] for name, x in self.eager.items()}, there, "eager against the CPU, 1 seed", "train with device=cpu")

    def speed(self) -> str:
        """Updates per second of one seed and of several, in the fastest mode that is right."""
        if self.best is None:
            self.best = self.engine("eager", SEEDS)
            self.after(self.best)
        mode = self.best.groups[0].mode
        rates = {}
        for seeds, engine in ((1, self.engine(mode, 1)), (SEEDS, self.best)):
            if seeds == 1:
                self.after(engine)  # compiled, captured
            rates[seeds] = self.rate(engine)
        hours = 1e6 / rates[SEEDS] / 3600
        words = ", ".join(f"{n} seed{'s' if n > 1 else ''} {rate:,.0f} updates/s" for n, rate in rates.items())
        alone = "" if self.device.type != "cpu" else " in one process (a run has one for each core)"
        return f"{mode}{alone}: {words}; 1,000,000 updates of {SEEDS} seeds in {_hours(hours)}"

    def rate(self, engine: Any) -> float:
        """Updates per second."""
        done, count = TRIED, TRIED
        while True:
            began = time.perf_counter()
            engine.run(done, count)
            if self.device.type == "cuda":
                import torch

                torch.cuda.synchronize(self.device)
            spent, done = time.perf_counter() - began, done + count
            if spent >= self.config.seconds / 2:
                return count / spent
            per_update = max(spent, 1e-6) / count
            count = TRIED * max(2, math.ceil(min(20 * count, self.config.seconds / per_update) / TRIED))

    def memory(self) -> str:
        """How many seeds fit beside each other."""
        import torch
        from torch.utils import _pytree as pytree

        from offrl.data.memory import free_bytes
        from offrl.settings.replicas import Replica
        from offrl.training.engine import SHARE, STATES, first_state, replica_bytes

        if self.device.type == "cpu":  # what an update needs besides the states is little there: a few seeds' at a time
            tensors = pytree.tree_leaves(first_state(self.plan.algorithm, [Replica(0)]))
            state, working, free = STATES * float(sum(x.nbytes for x in tensors)), 0.0, free_bytes()
        else:
            self.best = None  # its memory is free again
            state, working = replica_bytes(self.plan, self.source, self.device)
            torch.cuda.empty_cache()
            free = float(torch.cuda.mem_get_info(self.device)[0])
        each = f"a seed takes {state / 1e6:,.1f} MB" + (f" and {working / 1e6:,.1f} MB while its group trains" if working else "")
        return f"{each}: some {int(SHARE * free / (state + working)):,} fit in the {free / 1e9:.0f} GB that are free"


def _apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    """Largest difference of a row of [N, K], relative to its norm; infinite where one is not a number."""
    worst = 0.0
    for name, value in ours.items():
        a, b = value.double(), theirs[name].double()
        relative = ((a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-30)).max().item()
        worst = max(worst, relative if relative == relative else float("inf"))
    return worst


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
