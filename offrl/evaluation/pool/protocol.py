"""Messages between an evaluation pool and its worker processes, policies as bytes, and the work in pieces.

Contents that a worker might be unable to read travel as bytes of their own, so that it can say so.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from offrl.algorithm import Algorithm
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.result import Policy, Tally
from offrl.tasks.provenance import Provenance
from offrl.tasks.task import Task

REPORT_INTERVAL = 0.2  # seconds between a worker's reports, and between calls of `on_progress`


@dataclass(frozen=True)
class SetupMessage:
    """To a worker, first: a pickled (task, config, registration), of which the last is `registration(task)`."""

    content: bytes


@dataclass(frozen=True)
class AlgorithmsMessage:
    """To a worker: the pickled algorithms that the policies of the next units refer to by their places."""

    content: bytes


@dataclass(frozen=True)
class PlayMessage:
    """To a worker: play these episodes of a policy."""

    job: int
    seed: int
    episodes: list[int]
    policy: bytes  # see `to_bytes`


@dataclass(frozen=True)
class CancelMessage:
    """To a worker: stop playing for this job."""

    job: int


@dataclass(frozen=True)
class ReadyMessage:
    """From a worker: its environments are made."""

    provenance: Provenance


@dataclass(frozen=True)
class WarningMessage:
    """From a worker: a warning, to be shown once for each kind."""

    kind: str
    text: str


@dataclass(frozen=True)
class UnavailableMessage:
    """From a worker: it is of no use, and why."""

    reason: str


@dataclass(frozen=True)
class ProgressMessage:
    """From a worker: so many episodes of its unit are over."""

    job: int
    episodes: int


@dataclass(frozen=True)
class ResultMessage:
    """From a worker, which is free then: the results of its unit; `error` where there are none; neither: cancelled."""

    job: int
    tally: Tally | None = None
    error: Exception | None = None


def play(
    evaluator: Evaluator, seed: int, episodes: list[int], policy: Policy, on_progress: Callable[[int, int], None]
) -> Tally:
    """The results of some episodes of one policy, in the first row of a tally."""
    tally = Tally.of([policy], [seed], evaluator.config.episodes)
    evaluator.play(0, policy, seed, episodes, tally, on_progress)
    return tally


def registration(task: Task) -> str | None:
    """Gymnasium's registration of the task's environment in this process, as text; None where it is not registered
    (yet).
    """
    gym: Any = sys.modules.get("gymnasium")
    spec = None if gym is None or task.env_id is None else gym.registry.get(task.env_id.rpartition(":")[2])
    if spec is None:
        return None
    entry = spec.entry_point
    target = f"{entry.__module__}:{entry.__qualname__}" if callable(entry) else str(entry)
    return f"{target} {spec.max_episode_steps} {spec.kwargs} {[w.name for w in spec.additional_wrappers]}"


def check_registration(task: Task, registered: str | None) -> None:
    """Raise UserError where the environment, once it is made, is registered as another one than it is elsewhere."""
    if registered is not None and registration(task) != registered:
        raise UserError(f"environment '{task.env_id}' is another one in that process than in this program")


class _Pickler(pickle.Pickler):
    """Pickles for our own processes only. Tensors are copied first: a view would take all of its storage along."""

    algorithms: list[Algorithm] | None = None  # that are left out

    def persistent_id(self, obj: Any) -> int | None:
        if self.algorithms is None or not isinstance(obj, Algorithm):
            return None
        numbers = [n for n, known in enumerate(self.algorithms) if known is obj]
        if not numbers:
            self.algorithms.append(obj)
        return numbers[0] if numbers else len(self.algorithms) - 1

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.numel() * obj.element_size() < obj.untyped_storage().nbytes():
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def to_bytes(thing: Any, algorithms: list[Algorithm] | None = None) -> bytes:
    """A copy of an object. Its algorithms, networks and all, are left out and appended to `algorithms`, unless they are
    there. Raises whatever pickling raises.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.algorithms = algorithms
    pickler.dump(thing)
    return buffer.getvalue()


def from_bytes(content: bytes, algorithms: Sequence[Algorithm]) -> Any:
    """The inverse of `to_bytes`."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return algorithms[pid]

    return Unpickler(io.BytesIO(content)).load()


# ---- an evaluation in pieces of work, which the processes share


@dataclass(eq=False)
class Unit:
    """Some episodes of one policy: what one process does at a time."""

    policy: int
    seed: int
    episodes: list[int]
    policy_bytes: bytes
    finished: int = 0


@dataclass(eq=False)
class Job:
    """One evaluation."""

    number: int
    seeds: list[int]
    tally: Tally
    waiting: list[Unit]  # not begun; the next one last
    algorithms: list[Algorithm]  # that the policies refer to by their places here
    algorithms_bytes: bytes  # the same, for the workers
    running: list[Unit] = field(default_factory=list)

    def add(self, unit: Unit, part: Tally) -> None:
        """The results of a unit, whose policy is the only one of `part`."""
        for name in ("returns", "lengths", "successes", "discounted", "estimates", "costs", "limits", "shielded"):
            getattr(self.tally, name)[unit.policy, unit.episodes] = getattr(part, name)[0, unit.episodes]
        self.tally.faults += part.faults
        self.tally.finished += len(unit.episodes)
        self.running.remove(unit)

    @property
    def finished(self) -> int:
        """Episodes over so far, those of running units included."""
        return self.tally.finished + sum(u.finished for u in self.running)


def cut(policies: int, episodes: int, num_processes: int) -> list[tuple[int, list[int]]]:
    """(policy, episodes) of each piece of work for so many processes, the largest first.

    A policy's episodes are kept together where that keeps all processes busy, since each piece asks the policy anew at
    each step.
    """
    pairs = [(n, e) for n in range(policies) for e in range(episodes)]
    if policies % num_processes == 0 or policies >= 3 * num_processes:
        cuts = [pairs[n * episodes : (n + 1) * episodes] for n in range(policies)]
    else:
        edges = np.linspace(0, len(pairs), min(num_processes, len(pairs)) + 1).round().astype(int)
        cuts = [pairs[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    shares = [(n, [e for m, e in part if m == n]) for part in cuts for n in sorted({n for n, _ in part})]
    return sorted(shares, key=lambda share: -len(share[1]))
