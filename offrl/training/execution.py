"""How a run executes: on which devices, eagerly or compiled, how many replicas as one program; and a grid's first
update, tried before the run begins.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from offrl.algorithm import Algorithm, Traits, with_settings
from offrl.data.dataset import Dataset
from offrl.errors import UserError, first_line, warn
from offrl.settings.evaluation import cores
from offrl.settings.field import marked
from offrl.settings.replicas import Replica, hyper
from offrl.settings.train import TrainConfig
from offrl.system import backend
from offrl.training import distributed
from offrl.training.compiling import cost_model
from offrl.training.engine import Plan, first_state
from offrl.training.step import Step

PAYS_FROM = 5_000  # updates; measured on CPU with IQL: compiling takes 13 s; 4 seeds then take 13 ms, not 23
# steps of `Traits.unrolled` up to which compile=auto compiles, on a CPU alone (docs/benchmarks/latent-models.md)
LONGEST = 48
SHARE = 0.8  # of a GPU's free memory that replicas may take
# copies of a replica's state that stay on a GPU: as it is, as it was when its losses were last looked at, and in the
# graph
STATES = 3.0
CPU_GROUP = 4  # replicas in one program on CPU: more gain nothing there, and their activations leave the cache


class Execution:
    """How the replicas of a run train, decided once; its mode and group are kept in the run."""

    def __init__(
        self, config: TrainConfig, dataset: Dataset, plan: Plan, members: Sequence[Replica], device: torch.device
    ) -> None:
        """plan: its algorithm, group of processes and precision count. Measures an update on the CPU where how long
        the run is does not say whether compiling or starting processes pays.
        """
        self.config, self.dataset, self.device = config, dataset, device
        self.plan, self.num_replicas = replace(plan, group=len(members)), len(members)
        sampler, text = plan.algorithm.sampler(), plan.algorithm.traits.text
        specified = config.compile != "auto" and config.workers is not None and config.eval.workers is not None
        measurable = device.type == "cpu" and plan.world.size == 1 and not dataset.mapped and not text
        source, cost = None, None
        if measurable and not specified:
            source = sampler.prepare(dataset) if config.steps >= cost_model.MIN_UPDATES else None
            cost = cost_model.FREE if source is None else cost_model.cost(plan, source, list(members))
        self.start_workers = config.steps >= PAYS_FROM if cost is None else cost.processes_pay(config.steps)
        self.devices = training_devices(config, device, len(members), dataset.mapped, self.start_workers)
        self._compiling_pays = None if cost is None else cost.compiling_pays(config.steps, len(self.devices))
        if source is None:  # each of several processes moves it to its own device
            home = self.devices[0] if len(self.devices) == 1 else torch.device("cpu")
            source = sampler.prepare(dataset if dataset.mapped else dataset.to(home))
        self.source = source

    def mode_and_group(self) -> tuple[str, int]:
        """The step's mode, and the number of replicas in one program."""
        config, device = self.config, self.device
        mode = "eager"
        if self.plan.world.size == 1:
            mode = choose_mode(config.compile, device, config.steps, self.plan.algorithm, self._compiling_pays)
        if self.dataset.mapped or config.group:
            return mode, config.group or self.num_replicas
        source = backend.move(self.source, device) if device.type == "cuda" else None
        group = default_group(self.num_replicas, len(self.devices), self.plan, source, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # other processes may train there
        return mode, group


def training_devices(
    config: TrainConfig, device: torch.device, num_replicas: int, mapped: bool, start_workers: bool = True
) -> list[torch.device]:
    """The devices on which the replicas train, a process each; one device alone is this process. start_workers: see
    `Setup`."""
    if num_replicas == 1 or mapped or distributed.world().size > 1:
        return [device]
    if device.type == "cpu":
        free = cores() // config.threads if start_workers else 1  # starting processes takes seconds
        return [device] * max(1, min(num_replicas, config.workers or free))
    if device.type == "mps" or device.index is not None:  # this GPU was chosen
        return [device]
    gpus = torch.cuda.device_count()
    if config.workers is not None and config.workers > gpus:
        warn(f"workers={config.workers}: at most one for each of the {gpus} GPUs; processes that share one take turns")
    count = min(num_replicas, config.workers or gpus, gpus)
    return [torch.device("cuda", i) for i in range(count)] if count > 1 else [device]


def choose_mode(
    compile: str,
    device: torch.device,
    steps: int,
    algorithm: Algorithm | type[Algorithm] = Algorithm,
    compiling_pays: bool | None = None,
) -> str:
    """Resolve compile=auto|eager|cudagraph|compiled to how the step will run: eager, compiled, cudagraph or
    compiled-cudagraph.

    compiling_pays: whether compiling saves more time than it takes, where that was measured (`cost_model`); None: it
    does from PAYS_FROM updates on. Language models run eagerly: their sequences have many lengths. Raises UserError
    where the mode requested is impossible.
    """
    if algorithm.traits.text:
        if compile == "compiled":
            warn("language models are not compiled: compile=compiled is ignored")
        return "eager"
    if device.type == "mps":
        if compile not in ("auto", "eager"):
            raise UserError(f"compile={compile} is not for device=mps; use compile=auto, which runs eagerly there")
        return "eager"
    compiling_pays = steps >= PAYS_FROM if compiling_pays is None else compiling_pays
    short = algorithm.traits.unrolled <= (LONGEST if device.type == "cpu" else 0)
    compiles = compile == "compiled" or (compile == "auto" and compiling_pays and algorithm.traits.compiles and short)
    if device.type == "cuda":
        if compile == "eager" or not algorithm.traits.cuda_graph:
            return "eager"
        if compiles:
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
    return "compiled" if compiles and has_compiler else "eager"


def why_eager(compile: str, mode: str, device: torch.device, updates: int, traits: Traits) -> list[str]:
    """A line for the first ones of a long run whose step compile=auto leaves uncompiled, its program being too long;
    none for other runs.
    """
    chosen = compile == "auto" and mode == "eager" and device.type == "cpu"
    if not chosen or updates < PAYS_FROM or traits.unrolled <= LONGEST:
        return []
    return [
        f"the step is not compiled: its recurrences are unrolled over {traits.unrolled} steps, and programs of more "
        f"than {LONGEST} take too long to compile; compile=compiled compiles it all the same"
    ]


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
            f"a line of code did not compile there ({first_line(error)}); install Python's headers (python3-dev), or "
            "see the message"
        )
    return None


def default_group(replicas: int, workers: int, plan: Plan, source: Any, device: torch.device) -> int:
    """The number of replicas to train as one program: on a GPU as many as its memory holds. source: what the sampler
    prepared, there.

    Group sizes decide the last bits of a result on some machines, so a run keeps the one that it began with.
    """
    if not plan.algorithm.traits.vectorized:
        return 1
    share = -(-replicas // workers)
    if device.type in ("cpu", "mps"):
        return max(1, min(share, CPU_GROUP))
    if share == 1:
        return 1
    state, working = replica_bytes(plan, source, device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # every replica's states stay there, whatever the group; what an update needs besides is needed by one group at a
    # time
    return max(1, min(share, int((SHARE * free - share * state) / working)))


def replica_bytes(plan: Plan, source: Any, device: torch.device) -> tuple[float, float]:
    """Bytes of GPU memory that one more replica takes: for good, by its states, and while its group trains, by
    activations and gradients.

    Measured: the peaks of eager updates of two replicas and of four.
    """
    seeds = [Replica(0), Replica(1), Replica(2), Replica(3)]
    algorithm = plan.algorithm
    peaks, state = [], first_state(algorithm, seeds[:1])
    for size in (2, 4):
        step = Step(algorithm, source, batch_size=plan.batch_size, replicas=size, precision=plan.precision)
        states = pytree.tree_map(lambda x: x.to(device), first_state(algorithm, seeds[:size]))
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step.run(states, {}, 0, algorithm.traits.period)
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return STATES * float(sum(x.nbytes for x in pytree.tree_leaves(state))), max(1.0, (peaks[1] - peaks[0]) / 2)


class _Used(TorchFunctionMode):
    """Notes which settings of `config` take part in an operation, while they are tensors."""

    def __init__(self, config: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.config, self.names = config, names
        self.names_used: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = {id(x) for x in pytree.tree_leaves((args, kwargs))}
        self.names_used |= {name for name in self.names if id(getattr(self.config, name)) in operands}
        return func(*args, **kwargs)


def try_update(plan: Plan, source: Any, replicas: Sequence[Replica], device: torch.device) -> None:
    """Raise UserError where the algorithm cannot be trained with the grid's settings side by side: an update is tried,
    and dropped. Warns of settings that make no difference."""
    columns = hyper(replicas)
    values = {name: torch.tensor(column[:2], dtype=torch.float32, device=device) for name, column in columns.items()}
    if not values or len(replicas) < 2:
        return
    algorithm = plan.algorithm
    step = Step(algorithm, source, batch_size=plan.batch_size, replicas=2, hyper=values, precision=plan.precision)
    state = pytree.tree_map(lambda x: x.to(device), first_state(algorithm, replicas[:2]))
    used = _Used(step.algorithm.config, list(values))
    try:
        with used:
            state, _ = step.run(state, {}, 0, algorithm.traits.period)
            if algorithm.every:
                step.run(state, {}, algorithm.every, algorithm.traits.period)
    except UserError:
        raise
    except Exception as error:  # whatever a third-party update does with a number that is now a tensor
        names = " or ".join(f"grid.{name}" for name in values)
        raise UserError(
            f"{names}: the update of {plan.algorithm.config.name} cannot take a value of its own for each replica "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); train each value by itself: "
            f"algo.{next(iter(values))}=VALUE"
        ) from error
    looked_at = {*used.names_used, *marked(algorithm.config, "acting")}
    for name, column in columns.items():
        if name not in looked_at and not _begins_with(algorithm, name, column):
            warn(
                f"grid.{name}: no update of {algorithm.config.name} with these settings looks at algo.{name}, so its "
                "values train alike"
            )


def _begins_with(algorithm: Algorithm, name: str, column: Sequence[float]) -> bool:
    """True where the state before the first update depends on a setting, as it does on the first value of a weight that
    is learnt.
    """
    states = [
        pytree.tree_leaves(with_settings(algorithm, {name: value}).init(0)) for value in (min(column), max(column))
    ]
    return not all(map(torch.equal, *states))
