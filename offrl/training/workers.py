"""Replicas spread over processes: one thread each on a CPU's cores, or one process for each GPU. The loop sees one
engine.
"""

from __future__ import annotations

import contextlib
import itertools
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.algorithm import Metrics, TrainState
from offrl.errors import UserError
from offrl.settings.replicas import Replica
from offrl.system import backend, processes
from offrl.system.plugins.loading import blamed
from offrl.training.engine import LocalEngine, Plan, group_sizes


class WorkersUnavailable(UserError):
    """Worker processes cannot train this; the caller's own process can."""


def shares(replicas: int, group: int, workers: int) -> list[tuple[slice, list[int]]]:
    """The replicas that each worker trains, and the sizes of their groups: whole groups of the run, so that the result
    is the one of a single process."""
    sizes = group_sizes(replicas, group)
    edges = [0, *itertools.accumulate(sizes)]
    workers = min(workers, len(sizes))
    cuts = [round(i * len(sizes) / workers) for i in range(workers + 1)]
    return [(slice(edges[a], edges[b]), sizes[a:b]) for a, b in itertools.pairwise(cuts)]


class WorkerEngine:
    """A `LocalEngine` in each of several worker processes, with the same methods. They step together: each call of
    `run` ends when the slowest is done.
    """

    def __init__(
        self, plan: Plan, source: Any, replicas: Sequence[Replica], devices: Sequence[torch.device], threads: int
    ) -> None:
        """One worker for each of `devices`. source: what the algorithm's sampler prepared, on the CPU.

        Raises WorkersUnavailable where the algorithm or the data cannot be handed to another process.
        """
        parts = shares(len(replicas), plan.group, len(devices))
        self.parts = [part for part, _ in parts]
        self.links: list[Connection] = []
        self.children: list[Any] = []
        self.shared: processes.Shared | None = None
        if type(plan.algorithm).__module__ == "__main__":
            raise WorkersUnavailable(
                f"{type(plan.algorithm).__name__} stands in the script that runs, which is not run again elsewhere"
            )
        try:
            self.shared = processes.Shared((plan, source))
            for (part, sizes), device in zip(parts, devices, strict=False):
                process, link = processes.launch("offrl.training.workers:work")
                self.children.append(process)
                self.links.append(link)
                processes.send(link, (self.shared.blob, list(replicas[part]), sizes, str(device), threads))
            for i in range(len(self.links)):
                self._receive(i)
        except WorkersUnavailable:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise WorkersUnavailable(f"{type(error).__name__}: {error}") from error
        finally:
            if self.shared is not None:
                self.shared.close()  # the workers have mapped what they need

    def run(self, step: int, count: int) -> None:
        self._all("run", step, count)

    def sums(self) -> Metrics:
        parts = [_tensors(part) for part in self._all("sums")]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def settle(self, alive: Tensor) -> None:
        self._each("settle", [(alive[part],) for part in self.parts])

    def freeze(self, alive: Tensor) -> None:
        if not alive.all():
            self._each("freeze", [(alive[part],) for part in self.parts])

    def state(self) -> TrainState:
        return self._gather("state")

    def acting(self) -> TrainState:
        return self._gather("acting")

    def good(self) -> TrainState:
        return self._gather("good")

    def load(self, state: TrainState, good: TrainState, sums: Metrics) -> None:
        self._each("load", [pytree.tree_map(lambda x, p=p: x[p], (state, good, sums)) for p in self.parts])

    def verify_compiled(self) -> str | None:
        return next((problem for problem in self._all("verify_compiled") if problem), None)

    def finished(self) -> Tensor | None:
        parts = [_tensors(part) for part in self._all("finished")]
        return None if any(part is None for part in parts) else torch.cat(parts)

    def close(self) -> None:
        """End the processes."""
        for child in self.children:
            child.kill()  # all that counts is in the checkpoints, which the loop writes
        for child, link in zip(self.children, self.links, strict=True):
            child.wait()
            link.close()
        self.children, self.links = [], []

    def _gather(self, method: str) -> TrainState:
        return pytree.tree_map(lambda *leaves: torch.cat(leaves), *[_tensors(part) for part in self._all(method)])

    def _all(self, name: str, *arguments: Any) -> list[Any]:
        return self._each(name, [arguments] * len(self.links))

    def _each(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of every worker's engine, at the same time; their answers."""
        for link, argument in zip(self.links, arguments, strict=True):
            with contextlib.suppress(OSError):  # it died: said when its answer is read
                processes.send(link, (name, *_arrays(argument)))
        return [self._receive(i) for i in range(len(self.links))]

    def _receive(self, index: int) -> Any:
        while not self.links[index].poll(0.5):
            if self.children[index].poll() is not None and not self.links[index].poll(0.0):
                self._lost(index)
        try:
            kind, content = processes.receive(self.links[index])
        except (EOFError, OSError):
            self._lost(index)
        if kind == "user":
            raise UserError(content)
        if kind == "bug":
            raise RuntimeError(f"a training process failed:\n{content}")
        return content

    def _lost(self, index: int) -> None:
        raise UserError(
            f"a training process {processes.ending(self.children[index])}; the last checkpoint survives: the same "
            "command continues, and workers=1 trains in one process"
        )


Engine = LocalEngine | WorkerEngine


def _arrays(tree: Any) -> Any:
    """Tensors as arrays, which pickle without a detour."""
    return pytree.tree_map(lambda x: x.numpy() if isinstance(x, Tensor) else x, tree)


def _tensors(tree: Any) -> Any:
    return pytree.tree_map(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, tree)


def work(descriptor: str) -> None:
    """The loop of a worker process, until its pipe closes."""
    link = Connection(int(descriptor))
    inbox = processes.attend(link)

    def answer(kind: str, content: Any = None) -> None:
        processes.send(link, (kind, content))

    engine: LocalEngine | None = None
    while True:
        message = inbox.get()
        try:
            if engine is None:
                engine = _engine(*message)
                answer("ok")
                continue
            name, *arguments = message
            answer("ok", _arrays(getattr(engine, name)(*_tensors(arguments))))
        except UserError as error:
            answer("user", str(error))
        except Exception as error:
            line = blamed(error)
            answer("bug" if line is None else "user", line or traceback.format_exc())


def _engine(
    blob: processes.Blob, replicas: list[Replica], sizes: list[int], device_name: str, threads: int
) -> LocalEngine:
    plan: Plan
    plan, source = processes.attach(blob)
    device = torch.device(device_name)
    backend.configure(device, threads, plan.precision)
    if device.type == "cuda":
        source = backend.move(source, device)
    return LocalEngine(plan, source, replicas, device, sizes=sizes)
