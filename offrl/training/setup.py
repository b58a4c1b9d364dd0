"""Decisions before training: the algorithm for the data, the device, how the step runs, how many replicas share a
program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offrl import registry
from offrl.algorithm import Algorithm, TrainState
from offrl.data.dataset import Dataset
from offrl.data.fit import check_fit, settled
from offrl.data.samplers.prefetch import Prefetcher
from offrl.errors import UserError, first_line, one_line, warn
from offrl.evaluation.evaluator import Evaluator
from offrl.runs import record as runs
from offrl.settings.evaluation import cores
from offrl.settings.replicas import Replica, replicas
from offrl.settings.train import TrainConfig
from offrl.system import backend
from offrl.system.devices import pick_device
from offrl.system.locks import exclusive
from offrl.tasks.environments import resolve_task
from offrl.training import distributed
from offrl.training.compiling import worth
from offrl.training.engine import Engine, LocalEngine, Plan
from offrl.training.grid import try_update
from offrl.training.groups import CPU_GROUP, default_group
from offrl.training.workers import WorkerEngine, WorkersUnavailable, shares

PAYS_FROM = 5_000  # updates; measured on CPU with IQL: compiling takes 13 s; 4 seeds then take 13 ms, not 23


@dataclass(frozen=True)
class Setup:
    """All that is decided before a run's first update."""

    replicas: list[Replica]
    devices: list[torch.device]  # a process trains on each
    dataset: Dataset  # with what the environment says of it
    plan: Plan
    source: Any  # what the algorithm's sampler prepared: on the only device, or on the CPU
    evaluator: Evaluator | None  # None: there is no environment, or nothing that acts
    arithmetic: str  # in words
    long: bool  # so that starting processes pays

    def title(self, config: TrainConfig, dataset: Dataset, run_dir: Path, processes: str) -> str:
        """The first lines of a run's log. processes: words on how many train."""
        seeds = len({r.seed for r in self.replicas})
        count = f"{seeds} seed{'s' if seeds > 1 else ''}" + (
            f" of {len(self.replicas) // seeds} settings" if config.grid else ""
        )
        row = f" ({config.match[0]})" if len(config.match) == 1 else ""  # of the experiment's table
        lines = (
            f"{config.label} on {dataset.spec.name}: {len(dataset):,} rows, {dataset.num_episodes:,} episodes, "
            f"{count}, "
            f"{config.steps:,} updates",
            f"{self.arithmetic}; step {self.plan.mode}{processes}; settings {config.experiment}{row}; {run_dir}",
        )
        return "\n".join(map(one_line, lines))


def set_up(
    config: TrainConfig,
    dataset: Dataset,
    run_dir: Path,
    pretrained: Mapping[str, Any] | None,
    resources: contextlib.ExitStack,
) -> Setup:
    """Claim `run_dir` for this run and decide how it trains.

    config, pretrained: as `stages.ready` gives them. resources: close what is opened here. Raises UserError for
    settings that do not fit the data, the environment or the run in `run_dir`.
    """
    crowd = replicas(config)
    device = distributed.own_device(pick_device(config.device))
    world = distributed.join(device, len(crowd), config.algo.batch_size)
    resources.callback(distributed.leave)
    arithmetic = backend.configure(device, config.threads, config.precision)
    algorithm = make_algorithm(config, dataset, pretrained)
    if not algorithm.traits.vectorized and len(crowd) > 1 and config.group not in (None, 1):
        raise UserError(f"{config.algo.name} trains one replica at a time: leave out group=")
    if algorithm.every and world.size > 1:
        raise UserError(f"{config.algo.name} trains in one process; start it without torchrun")
    evaluator = None
    if world.first and algorithm.traits.policy_modules:
        task = resolve_task(dataset.spec.task, config.eval, algorithm.traits.goal_conditioned)
        if task is not None:
            evaluator = resources.enter_context(Evaluator(task, config.eval))
            check_fit(dataset.spec, task, evaluator.envs[0])
            algorithm.spec = settled(dataset.spec, evaluator.envs[0], dataset)
            dataset = dataclasses.replace(dataset, spec=algorithm.spec)
    if world.first:
        resources.enter_context(exclusive(run_dir))
    plan = Plan(
        algorithm,
        config.algo.batch_size,
        "eager",
        config.precision,
        CPU_GROUP if algorithm.traits.vectorized else 1,
        world,
    )
    by_hand = config.compile != "auto" and config.workers is not None and config.eval.workers is not None
    timed = (
        device.type == "cpu" and world.size == 1 and not dataset.mapped and not algorithm.traits.text and not by_hand
    )
    prepared = algorithm.sampler().prepare(dataset) if timed and config.steps >= worth.LEAST else None
    cost = None if not timed else worth.FREE if prepared is None else worth.cost(plan, prepared, crowd)
    long = config.steps >= PAYS_FROM if cost is None else cost.processes_pay(config.steps)
    devices = training_devices(config, device, len(crowd), dataset.mapped, long)
    pays = None if cost is None else cost.compiling_pays(config.steps, len(devices))
    plan = dataclasses.replace(plan, group=len(crowd))

    @functools.cache
    def source() -> Any:  # each of several processes moves it to its own device
        if prepared is not None:
            return prepared
        home = devices[0] if len(devices) == 1 else torch.device("cpu")
        return algorithm.sampler().prepare(dataset if dataset.mapped else dataset.to(home))

    def choose() -> tuple[str, int]:
        mode = "eager" if world.size > 1 else choose_mode(config.compile, device, config.steps, algorithm, pays)
        if dataset.mapped or config.group:
            return mode, config.group or len(crowd)
        group = default_group(
            len(crowd), len(devices), plan, backend.move(source(), device) if device.type == "cuda" else None, device
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other processes may train there
        return mode, group

    mode, group = runs.prepare(run_dir, config, dataset, choose, device) if world.first else choose()
    if dataset.mapped:
        group = len(crowd)  # batches are read ahead for all replicas together
    return Setup(
        crowd,
        devices,
        dataset,
        dataclasses.replace(plan, mode=mode, group=group),
        source(),
        evaluator,
        arithmetic,
        long,
    )


def make_engine(
    config: TrainConfig,
    dataset: Dataset,
    setup: Setup,
    state: TrainState,
    step: int,
    trains: bool,
    resources: contextlib.ExitStack,
) -> tuple[Engine, str]:
    """The engine that trains the replicas from update number `step`, to be loaded with `state`, and words for the log
    on its processes.

    trains: there are updates to make. resources: close what is opened here.
    """
    plan, source, device = setup.plan, setup.source, setup.devices[0]
    if plan.mode.startswith("compiled"):
        backend.cache_compiled()
    if config.grid:
        try_update(plan, source, setup.replicas, device if len(setup.devices) == 1 else torch.device("cpu"))
    processes = len(shares(len(setup.replicas), plan.group, len(setup.devices)))
    if processes > 1 and trains:
        try:
            workers = WorkerEngine(plan, source, setup.replicas, setup.devices, config.threads)
            resources.callback(workers.close)
            return workers, f" in {processes} processes"
        except WorkersUnavailable as error:
            warn(f"training in one process: {error}")
            source = backend.move(source, device)
    prefetcher = None
    if dataset.mapped and trains:
        prefetcher = Prefetcher(plan.algorithm.sampler(), source, state.key, config.algo.batch_size, step, device)
        resources.callback(prefetcher.close)
    engine = LocalEngine(plan, source, setup.replicas, device, prefetcher)
    return engine, f" in {len(engine.parts)} groups" if len(engine.parts) > 1 else ""


def make_algorithm(config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any] | None = None) -> Algorithm:
    """The configured algorithm for this data, with what it builds on (see `stages.ready`). Raises UserError where it
    does not support the data's actions, or sees goals in them."""
    algorithm_class = registry.get("algo", config.algo.name)
    check_kind(algorithm_class, config.algo.name, dataset)
    check_n_step(config.algo, algorithm_class.traits.n_step)
    if dataset.spec.discrete and not algorithm_class.traits.discrete:
        able = [n for n, c in registry.names("algo").items() if c.traits.discrete]
        raise UserError(
            f"{config.algo.name} needs continuous actions and {dataset.spec.name} has discrete ones; use "
            f"{' or '.join(able)}"
        )
    algorithm: Algorithm = algorithm_class(config.algo, dataset.spec, pretrained)
    if (n_step := getattr(config.algo, "n_step", 1)) > 1:
        check_n_step(config.algo, getattr(algorithm.sampler(), "n_step", 1) == n_step)
    check_stitching(config.algo, algorithm, dataset)
    task = dataset.spec.task
    if algorithm.traits.goal_conditioned and task is not None and "desired_goal" in task.observation_keys:
        others = ",".join(k for k in task.observation_keys if k != "desired_goal")
        raise UserError(
            f"the observations of {dataset.spec.name} hold the desired goal, which {config.algo.name} must be told "
            "apart from them: "
            f"dataset.observation_keys=[{others}]"
        )
    return algorithm


def check_kind(algorithm_class: Any, name: str, dataset: Dataset) -> None:
    """Raise UserError where one of data and algorithm is of texts and the other of numbers, or observations are no
    vectors.
    """
    spec = dataset.spec
    if len(spec.observation_shape) > 1:
        raise UserError(
            f"{name} learns from vectors, and the observations of {spec.name} have shape "
            f"{list(spec.observation_shape)}: save each as one "
            f"row of {spec.observation_dim} numbers, or where they are images take the version of the data with states "
            "(OGBench: the name "
            "without visual-)"
        )
    if spec.text == algorithm_class.traits.text:
        return
    able = [
        n for n, c in registry.names("algo").items() if c.traits.text == dataset.spec.text and c.traits.policy_modules
    ]
    kinds = ("numbers", "texts")
    names = f"{', '.join(able[:6])}{', ...' if len(able) > 6 else ''}"
    learns, holds = kinds[algorithm_class.traits.text], kinds[dataset.spec.text]
    raise UserError(f"{name} learns from {learns}, and {dataset.spec.name} holds {holds}; use one of {names}")


def check_n_step(config: Any, possible: bool) -> None:
    """Raise UserError for n-step targets of an algorithm whose batches are not steps of the data in a row."""
    if not possible and getattr(config, "n_step", 1) > 1:
        raise UserError(
            f"algo.n_step={config.n_step}: {config.name} has no n-step targets, for it does not learn from steps of "
            "the data in a row; "
            "leave it at 1 (docs/critics.md lists those that have them)"
        )


def check_stitching(config: Any, algorithm: Algorithm, dataset: Dataset) -> None:
    """Raise UserError for stitched goals of an algorithm that draws none."""
    if dataset.stitch and not getattr(algorithm.sampler(), "stitching", False):
        asks = next((f"algo.{field}=goal" for field in ("condition", "prompt") if "goal" in choices(config, field)), "")
        able = (
            f"{config.name} does with {asks}"
            if asks
            else "take one that learns towards goals, such as gcbc, gciql or hiql"
        )
        raise UserError(
            f"dataset.augment=stitch replaces the goals that a policy learns towards, and {config.name} has none; "
            f"{able}"
        )


def choices(config: Any, name: str) -> tuple[str, ...]:
    """What a setting may be; () where there is none of that name, or anything goes."""
    return next((f.metadata.get("choices") or () for f in dataclasses.fields(config) if f.name == name), ())


def training_devices(
    config: TrainConfig, device: torch.device, many: int, mapped: bool, long: bool = True
) -> list[torch.device]:
    """The devices on which the replicas train, a process each; one device alone is this process. long: see `Setup`."""
    if many == 1 or mapped or distributed.world().size > 1:
        return [device]
    if device.type == "cpu":
        free = cores() // config.threads if long else 1  # starting processes takes seconds
        return [device] * max(1, min(many, config.workers or free))
    if device.type == "mps" or device.index is not None:  # this GPU was chosen
        return [device]
    gpus = torch.cuda.device_count()
    if config.workers is not None and config.workers > gpus:
        warn(f"workers={config.workers}: at most one for each of the {gpus} GPUs; processes that share one take turns")
    count = min(many, config.workers or gpus, gpus)
    return [torch.device("cuda", i) for i in range(count)] if count > 1 else [device]


def choose_mode(
    compile: str,
    device: torch.device,
    steps: int,
    algorithm: Algorithm | type[Algorithm] = Algorithm,
    pays: bool | None = None,
) -> str:
    """Resolve compile=auto|eager|cudagraph|compiled to how the step will run: eager, compiled, cudagraph or
    compiled-cudagraph.

    pays: whether compiling saves more time than it takes, where that was measured (`worth`); None: it does from
    PAYS_FROM updates on. Language models run eagerly: their sequences have many lengths. Raises UserError where the
    mode requested is impossible.
    """
    if algorithm.traits.text:
        if compile == "compiled":
            warn("language models are not compiled: compile=compiled is ignored")
        return "eager"
    if device.type == "mps":
        if compile not in ("auto", "eager"):
            raise UserError(f"compile={compile} is not for device=mps; use compile=auto, which runs eagerly there")
        return "eager"
    pays = steps >= PAYS_FROM if pays is None else pays
    pays = compile == "compiled" or (compile == "auto" and pays and algorithm.traits.compiles)
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
        raise UserError(
            "compile=compiled needs a C++ compiler on CPU and none was found; install g++ or use compile=eager"
        )
    return "compiled" if pays and has_compiler else "eager"


@functools.lru_cache
def no_triton(device: str) -> str | None:
    """The reason why Inductor cannot compile for this GPU, found by compiling one line of code; None where it can."""
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
        return (
            f"a line of code did not compile there ({first_line(error)}); install Python's headers "
            "(python3-dev), or see the message"
        )
    return None
