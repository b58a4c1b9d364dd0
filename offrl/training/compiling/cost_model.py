"""Whether compiling a run's step, and starting processes for it, takes less time than it saves: by a few updates that
are timed once.

What was measured is kept beside the compiled code, so that the same run on the same machine is carried out alike, to
the last bit."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from offrl.errors import UserError
from offrl.settings.replicas import Replica
from offrl.system import backend
from offrl.system.files import write_text
from offrl.training.compiling import ahead
from offrl.training.compiling.fingerprint import sources
from offrl.training.engine import LocalEngine, Plan, first_state, group_sizes

MIN_UPDATES = 200  # updates; shorter runs are eager without being timed
TIMED = 3  # patterns of updates, after one that sets things up
ENOUGH = 1.0  # seconds of timing, where an update takes long
BACKWARD = 1.5  # operations of a compiled graph for each call of torch
UNROLLED = 300  # and for each step of a recurrence besides, whose gradients are long (docs/benchmarks/latent-models.md)
SAVED = 0.5  # of an eager update's time, which compiled code saves (docs/benchmarks/speed-journal.md)
STARTING = 5.0  # seconds of a core until a process works


@dataclass(frozen=True)
class Cost:
    """One pattern's share of a run, eagerly."""

    seconds: float  # an update of all replicas, one group after the other
    compiling: float  # seconds that compiling a pattern takes; about

    def compiling_pays(self, updates: int, processes: int) -> bool:
        """Whether `updates` by so many processes end sooner compiled."""
        return updates * self.seconds * SAVED / processes > self.compiling

    def processes_pay(self, updates: int) -> bool:
        """Whether `updates` take long enough for other processes to be of help."""
        return updates * self.seconds > 2 * STARTING


FREE = Cost(0.0, 0.0)  # a trial's updates, too few to be timed


def cost(plan: Plan, source: Any, replicas: list[Replica]) -> Cost:
    """What updates of these replicas cost on this machine: as it was measured before, or is now."""
    size = group_sizes(len(replicas), min(len(replicas), plan.group))[0]
    algorithm = plan.algorithm
    run = (
        type(algorithm).__qualname__,
        algorithm.config,
        algorithm.spec,
        plan.batch_size,
        plan.precision,
        size,
        len(replicas),
    )
    name = hashlib.sha256(repr((sources("offrl"), *run)).encode()).hexdigest()[:32]
    path = backend.compiled_folder() / f"cost-{name}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_text())
        return Cost(float(known["seconds"]), float(known["compiling"]))
    cost = _measured(plan, source, replicas, size)
    with contextlib.suppress(OSError, UserError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(dataclasses.asdict(cost)) + "\n")
    return cost


def _measured(plan: Plan, source: Any, replicas: list[Replica], size: int) -> Cost:
    """Time some eager updates of fresh replicas on the CPU, of as many as one program may hold."""
    period = plan.algorithm.traits.period
    engine = LocalEngine(
        dataclasses.replace(plan, mode="eager", group=size), source, replicas[:size], torch.device("cpu")
    )
    state = first_state(plan.algorithm, replicas[:size])
    engine.load(state, state, {})
    step = 0 if plan.algorithm.every in (0, period) else period  # without what comes once in a while
    with _Counter() as counter:
        engine.run(step, period)
    times: list[float] = []
    while len(times) < TIMED and sum(times) < ENOUGH:
        step += period
        start = time.perf_counter()
        engine.run(step, period)
        times.append(time.perf_counter() - start)
    operations = int(BACKWARD * counter.count) + UNROLLED * plan.algorithm.traits.unrolled
    compiling = ahead.compiling_seconds(operations)
    return Cost(min(times) / period * len(replicas) / size, compiling)


class _Counter(TorchFunctionMode):
    """Counts what is called of torch. (What it does in turn is known to a TorchDispatchMode only, which imports a
    compiler.)
    """

    count = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))
