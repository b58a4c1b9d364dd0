"""Evaluation in processes of its own, beside training: the same numbers as `Evaluator`, bit for bit, while the caller
does other things.

A worker (see `offrl.system.processes`) keeps its environments alive between evaluations and works on one thread.
Policies are copied when they are handed in.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from offrl.algorithm import Algorithm
from offrl.errors import UserError, warn
from offrl.evaluation.evaluator import Evaluator, Progress
from offrl.evaluation.result import Evaluation, Policy, Tally
from offrl.settings.evaluation import EvalConfig, cores
from offrl.system import processes
from offrl.tasks.provenance import Provenance
from offrl.tasks.task import Task

__all__ = ["EvaluationPool", "PoolUnavailable", "evaluate_parallel", "poolable"]

SECONDS = 0.2  # between a worker's reports, and between calls of `heed`
CURE = "eval.workers=0 evaluates in the training process"


class PoolUnavailable(UserError):
    """These processes cannot score these policies, or one of them was killed. The caller's own process can: `Evaluator`
    gives the same.
    """


def poolable(task: Task) -> bool:
    """True where worker processes can make the task's environment: not where a function makes it, or the script that
    runs registers it.
    """
    if task.env_factory is not None or task.env_id is None:
        return False
    registered = _registration(task)
    if registered is not None and registered.startswith("__main__:"):
        return False
    try:
        pickle.dumps(task)
    except Exception:  # whatever the objects among the environment's arguments raise
        return False
    return True


def evaluate_parallel(
    policies: Sequence[Policy],
    seeds: Sequence[int],
    task: Task,
    config: EvalConfig,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Evaluation:
    """`evaluate` with all cores: by this process from the start and, if it is not over in 2 seconds, by `workers` more
    (None: one less than there are cores, at most 15). The same numbers."""
    count = min(cores() - 1, 15) if workers is None else workers
    count = min(count, len(policies) * config.episodes - 1)
    with Evaluator(task, config) as evaluator:
        if count < 1 or not poolable(task):
            return evaluator(policies, seeds, progress)
        try:
            with EvaluationPool(task, config, count, delay=2.0) as pool:
                return pool.evaluate(policies, seeds, evaluator, progress)
        except PoolUnavailable as error:
            warn(f"{str(error).partition(';')[0]}; this process scores alone")
            return evaluator(policies, seeds, progress)


@dataclass(eq=False)
class _Unit:
    """Some episodes of one policy: what one process does at a time."""

    policy: int
    seed: int
    episodes: list[int]
    blob: bytes
    finished: int = 0


@dataclass(eq=False)
class _Job:
    """One evaluation."""

    number: int
    seeds: list[int]
    tally: Tally
    waiting: list[_Unit]  # not begun; the next one last
    algorithms: list[Any]  # that the policies refer to by their places here, and
    pickled: bytes  # the same, for the workers
    running: list[_Unit] = field(default_factory=list)

    def add(self, unit: _Unit, part: Tally) -> None:
        """The results of a unit, whose policy is the only one of `part`."""
        n, at = unit.policy, unit.episodes
        for name in ("returns", "lengths", "successes", "discounted", "estimates"):
            getattr(self.tally, name)[n, at] = getattr(part, name)[0, at]
        self.tally.faults += part.faults
        self.tally.finished += len(at)
        self.running.remove(unit)

    @property
    def finished(self) -> int:
        """Episodes over so far, those of running units included."""
        return self.tally.finished + sum(u.finished for u in self.running)


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    link: Connection
    ready: bool = False
    unit: _Unit | None = None
    job: int = 0  # of the last unit
    lock: threading.Lock = field(default_factory=threading.Lock)  # of sending


class EvaluationPool:
    """Worker processes that score policies while the caller trains. One evaluation at a time. Use as a context manager,
    or call `close`.
    """

    def __init__(self, task: Task, config: EvalConfig, workers: int, delay: float = 0.0) -> None:
        """Returns at once; `workers` processes start after `delay` seconds and are ready 2 to 3 seconds later. What
        goes wrong is raised by the methods: PoolUnavailable where a worker cannot make the environment, cannot load the
        policies or was killed."""
        if workers < 1:
            raise ValueError(f"{workers} workers")
        self.task, self.config = task, config
        self.provenance: Provenance | None = None
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._job: _Job | None = None
        self._count = 0  # evaluations so far
        self._trouble: Exception | None = None  # of the evaluation
        self._broken: PoolUnavailable | None = None  # for good
        self._warnings: list[tuple[str, str]] = []
        self._told: set[str] = set()
        self._delay, self._size = delay, workers
        self._closing = threading.Event()
        self._bell, self._ear = get_context("spawn").Pipe()  # wakes the thread
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None
        try:
            self._hello = pickle.dumps((task, config, _registration(task)))
        except Exception as error:
            self._broken = PoolUnavailable(f"{task.name} cannot be handed to an evaluation process ({error}); {CURE}")
            return
        self._thread = threading.Thread(target=self._serve, name="offrl-evaluation", daemon=True)
        self._thread.start()

    def __enter__(self) -> EvaluationPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers, whatever they do. Takes milliseconds."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            self._bell.send_bytes(b"!")
        with self._lock:
            for worker in self._workers:
                worker.process.kill()  # they hold nothing that could be lost
        if self._thread is not None:
            self._thread.join(5.0)
        for worker in self._workers:
            worker.process.wait()
            worker.link.close()
        self._bell.close()
        self._ear.close()

    @property
    def pending(self) -> bool:
        """True while a submitted evaluation's result has not been fetched."""
        return self._job is not None

    @property
    def ready(self) -> bool:
        """True once all workers have started."""
        return self._broken is None and len(self._workers) == self._size and all(w.ready for w in self._workers)

    def submit(self, policies: Sequence[Policy], seeds: Sequence[int], shared: bool = False) -> None:
        """Begin an evaluation of policies as they are now; changing their tensors afterwards does no harm.

        `shared`: the caller will `wait` with an evaluator of its own, so the work is cut for one process more. Raises
        PoolUnavailable when the policies cannot be handed over, for instance because the algorithm's class stands in
        the script that runs.
        """
        if self._job is not None:
            raise RuntimeError("an evaluation is running: fetch its result, or cancel it")
        tally = Tally.of(policies, seeds, self.config.episodes)
        self._raise_if_broken()
        algorithms: list[Any] = []
        try:
            blobs = [_dumps(policy, algorithms) for policy in policies]
            pickled = _pickled(algorithms)  # at once, for those of a grid share their networks
        except Exception as error:  # whatever a third-party algorithm raises when it is pickled
            raise PoolUnavailable(
                f"the policies cannot be handed to an evaluation process ({error}); {CURE}"
            ) from error
        shares = _shares(len(policies), self.config.episodes, self._size + shared)
        units = [_Unit(n, int(seeds[n]), episodes, blobs[n]) for n, episodes in shares]
        with self._lock:
            self._count += 1
            self._trouble = None
            self._job = _Job(self._count, [int(s) for s in seeds], tally, units[::-1], algorithms, pickled)
        self._bell.send_bytes(b"!")

    def poll(self) -> Evaluation | None:
        """The result, once; None while the evaluation runs, or when there is none.

        Raises UserError for what a worker could not score, PoolUnavailable where the workers are of no use; the
        evaluation is over then."""
        with self._lock:
            return self._take()

    def wait(self, heed: Progress | None = None, evaluator: Evaluator | None = None) -> Evaluation:
        """The result of the evaluation that runs. `heed(done, total)` counts episodes, is called at least a few times a
        second and may raise; the evaluation then goes on, to be waited for again or cancelled. With an `evaluator` of
        the same task and settings this process takes its share, so that waiting is never slower than evaluating here,
        even while the workers start. Raises as `poll`."""
        if self._job is None:
            raise RuntimeError("no evaluation is running")
        if evaluator is not None and (evaluator.task != self.task or evaluator.config != self.config):
            raise ValueError("the evaluator is of another task, or has other settings")
        while True:
            with self._changed:
                result = self._take()
                if result is not None:
                    return result
                job = self._job
                assert job is not None
                if evaluator is not None and job.waiting:
                    unit = job.waiting.pop()
                    job.running.append(unit)
                else:
                    unit = None
                    self._changed.wait(SECONDS)
                done, total = job.finished, job.tally.returns.size
            if heed is not None:
                try:
                    heed(done, total)
                except BaseException:
                    self._put_back(job, unit)
                    raise
            if unit is not None and evaluator is not None:
                self._play_here(job, unit, evaluator, heed)

    def evaluate(
        self,
        policies: Sequence[Policy],
        seeds: Sequence[int],
        evaluator: Evaluator | None = None,
        heed: Progress | None = None,
    ) -> Evaluation:
        """`submit` and `wait`, shared with `evaluator` where one is given; nothing goes on after an exception."""
        self.submit(policies, seeds, shared=evaluator is not None)
        try:
            return self.wait(heed, evaluator)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Abandon the evaluation that runs, if one does."""
        with self._lock:
            self._job, self._trouble = None, None
            busy = [w for w in self._workers if w.unit is not None]
        for worker in busy:
            with contextlib.suppress(OSError):
                _send(worker, ("cancel", worker.job, None))

    # what follows runs under the lock, or in the thread

    def _take(self) -> Evaluation | None:
        """The result if there is one. Under the lock."""
        warnings, self._warnings = self._warnings, []
        for kind, message in warnings:
            if kind not in self._told:
                self._told.add(kind)
                warn(message)
        job = self._job
        if job is None:
            return None
        if self._trouble is not None:
            trouble, self._trouble, self._job = self._trouble, None, None
            raise trouble
        if job.waiting or job.running:
            if self._broken is not None:
                self._job = None
                self._raise_if_broken()
            return None
        self._job = None
        assert self.provenance is not None
        return job.tally.evaluation(self.task, self.provenance, job.seeds)

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise PoolUnavailable(str(self._broken))
        if self._closing.is_set():
            raise RuntimeError("the pool is closed")

    def _play_here(self, job: _Job, unit: _Unit, evaluator: Evaluator, heed: Progress | None) -> None:
        """Do a unit in this process."""
        self.provenance = evaluator.provenance

        def progress(done: int, total: int) -> None:
            unit.finished = done
            if heed is not None:
                with self._lock:
                    over = job.finished
                heed(over, job.tally.returns.size)

        try:
            part = _play(evaluator, unit.seed, unit.episodes, _loads(unit.blob, job.algorithms), progress)
        except BaseException:
            self._put_back(job, unit)
            raise
        with self._lock:
            job.add(unit, part)

    def _put_back(self, job: _Job, unit: _Unit | None) -> None:
        if unit is not None:
            with self._lock:
                unit.finished = 0
                job.running.remove(unit)
                job.waiting.append(unit)
            self._bell.send_bytes(b"!")

    def _serve(self) -> None:
        """The thread: starts the workers, hands out units, and takes in what the workers say."""
        if self._delay and self._closing.wait(self._delay):
            return
        self._start()
        links: dict[Any, _Worker] = {w.link: w for w in self._workers}
        while not self._closing.is_set():
            for link in mp_connection.wait([self._ear, *links]):
                if link is self._ear:
                    self._ear.recv_bytes()
                    continue
                worker = links[link]
                try:
                    message = processes.receive(worker.link)
                except (EOFError, OSError):
                    del links[link]
                    self._lost(worker)
                    continue
                with self._changed:
                    self._hear(worker, *message)
                    self._changed.notify_all()
            for worker in self._workers:
                try:
                    self._feed(worker)
                except OSError:  # it died; its link will say so
                    continue

    def _start(self) -> None:
        for _ in range(self._size):
            with self._changed:  # not while `close` kills them
                if self._closing.is_set():
                    return
                try:
                    worker = _Worker(*processes.launch("offrl.evaluation.pool:work"))
                except OSError as error:
                    self._broken = PoolUnavailable(f"an evaluation process could not be started ({error}); {CURE}")
                    self._changed.notify_all()
                    return
                self._workers.append(worker)
            with contextlib.suppress(OSError):  # it died already: its link says so
                _send(worker, ("task", 0, self._hello))

    def _feed(self, worker: _Worker) -> None:
        """Give a free worker its next unit."""
        with self._lock:
            job = self._job
            free = worker.ready and worker.unit is None and self._broken is None
            if job is None or not free or not job.waiting or self._trouble is not None:
                return
            unit, new = job.waiting.pop(), worker.job != job.number
            worker.unit, worker.job = unit, job.number
            job.running.append(unit)
        if new:
            _send(worker, ("algorithms", job.number, job.pickled))
        _send(worker, ("unit", job.number, pickle.dumps((unit.seed, unit.episodes, unit.blob))))

    def _hear(self, worker: _Worker, kind: str, number: int, content: Any) -> None:
        """Take in one message of a worker. Under the lock."""
        job, unit = self._job, worker.unit
        current = job is not None and job.number == number and unit in job.running
        if kind == "ready":
            worker.ready, self.provenance = True, content
        elif kind == "warning":
            self._warnings.append(content)
        elif kind == "unavailable":
            self._broken = PoolUnavailable(f"{content}; {CURE}")
        elif kind == "progress":
            if current and unit is not None:
                unit.finished = content
        else:  # "done", "error", "bug" or "cancelled": the worker is free
            worker.unit = None
            if not current or job is None or unit is None:
                return
            if kind == "done":
                job.add(unit, content)
            elif kind != "cancelled":
                self._trouble = (
                    UserError(content) if kind == "error" else RuntimeError(f"an evaluation process failed:\n{content}")
                )

    def _lost(self, worker: _Worker) -> None:
        """A worker's link is closed: it is dead."""
        if self._closing.is_set():
            return
        why = processes.ending(worker.process)
        with self._changed:
            self._broken = self._broken or PoolUnavailable(f"an evaluation process {why}; {CURE}, with less memory")
            self._changed.notify_all()


def _shares(policies: int, episodes: int, hands: int) -> list[tuple[int, list[int]]]:
    """(policy, episodes) of each piece of work for so many processes, the largest first.

    A policy's episodes are kept together where that keeps all hands busy, since each piece asks the policy anew at each
    step.
    """
    pairs = [(n, e) for n in range(policies) for e in range(episodes)]
    if policies % hands == 0 or policies >= 3 * hands:
        cuts = [pairs[n * episodes : (n + 1) * episodes] for n in range(policies)]
    else:
        edges = np.linspace(0, len(pairs), min(hands, len(pairs)) + 1).round().astype(int)
        cuts = [pairs[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    shares = [(n, [e for m, e in cut if m == n]) for cut in cuts for n in sorted({n for n, _ in cut})]
    return sorted(shares, key=lambda share: -len(share[1]))


def _play(
    evaluator: Evaluator, seed: int, episodes: list[int], policy: Policy, progress: Callable[[int, int], None]
) -> Tally:
    part = Tally.of([policy], [seed], evaluator.config.episodes)
    evaluator.play(0, policy, seed, episodes, part, progress)
    return part


def _registration(task: Task) -> str | None:
    """Gymnasium's registration of the task's environment in this process, as text; None where it is not registered
    (yet).
    """
    gym: Any = sys.modules.get("gymnasium")
    spec = None if gym is None or task.env_id is None else gym.registry.get(task.env_id.rpartition(":")[2])
    if spec is None:
        return None
    entry = spec.entry_point
    place = f"{entry.__module__}:{entry.__qualname__}" if callable(entry) else str(entry)
    return f"{place} {spec.max_episode_steps} {spec.kwargs} {[w.name for w in spec.additional_wrappers]}"


class _Pickler(pickle.Pickler):
    """Pickles for our own processes only. Tensors are copied first: a view would take all of its storage along."""

    number: Callable[[Any], int | None] | None = None

    def persistent_id(self, obj: Any) -> int | None:
        return None if self.number is None else self.number(obj)

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is torch.Tensor and obj.numel() * obj.element_size() < obj.untyped_storage().nbytes():
            return obj.detach().clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _pickled(thing: Any, number: Callable[[Any], int | None] | None = None) -> bytes:
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
    pickler.number = number
    pickler.dump(thing)
    return buffer.getvalue()


def _dumps(policy: Policy, algorithms: list[Any]) -> bytes:
    """A copy of a policy. Its algorithm, networks and all, is left out and appended to the list, unless it is there."""

    def number(thing: Any) -> int | None:
        if not isinstance(thing, Algorithm):
            return None
        for n, known in enumerate(algorithms):
            if known is thing:
                return n
        algorithms.append(thing)
        return len(algorithms) - 1

    return _pickled(policy, number)


def _loads(blob: bytes, algorithms: Sequence[Any]) -> Any:
    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            return algorithms[pid]

    return Unpickler(io.BytesIO(blob)).load()


def _send(worker: _Worker, message: tuple[str, int, Any]) -> None:
    with worker.lock:
        processes.send(worker.link, message)


class _Cancelled(Exception):
    pass


def work(descriptor: str) -> None:
    """The main loop of a worker process, until its link closes."""
    link, sending = Connection(int(descriptor)), threading.Lock()
    cancelled = 0

    def say(kind: str, job: int, content: Any) -> None:
        with sending:
            processes.send(link, (kind, job, content))

    def urgent(message: tuple[str, int, Any]) -> bool:
        nonlocal cancelled
        if message[0] == "cancel":
            cancelled = message[1]
        return message[0] == "cancel"

    inbox = processes.attend(link, urgent)
    sys.stderr = _Lines(lambda line: say("warning", 0, (line, line.removeprefix("offrl: warning: "))))
    try:
        task, config, registration = pickle.loads(inbox.get()[2])
        torch.set_num_threads(1)

        def tell(kind: str, message: str) -> None:
            say("warning", 0, (kind, f"evaluation in {task.env_id}: {message}"))

        evaluator = Evaluator(task, config, tell)
        if registration is not None and _registration(task) != registration:
            raise UserError(f"environment '{task.env_id}' is another one in an evaluation process than in this program")
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        say("unavailable", 0, f"an evaluation process cannot make the environment ({text})")
        return _linger()
    say("ready", 0, evaluator.provenance)
    algorithms: list[Any] = []
    while True:
        kind, job, content = inbox.get()
        try:
            if kind == "algorithms":
                algorithms = pickle.loads(content)
                continue
            seed, episodes, blob = pickle.loads(content)
            policy = _loads(blob, algorithms)
        except Exception as error:
            say("unavailable", job, f"an evaluation process cannot load the policies ({type(error).__name__}: {error})")
            return _linger()
        last = time.monotonic()

        def progress(done: int, total: int, job: int = job) -> None:
            nonlocal last
            if cancelled == job:
                raise _Cancelled
            now = time.monotonic()
            if now - last > SECONDS:
                last = now
                say("progress", job, done)

        try:
            say("done", job, _play(evaluator, seed, episodes, policy, progress))
        except _Cancelled:
            say("cancelled", job, None)
        except UserError as error:
            say("error", job, str(error))
        except Exception:
            say("bug", job, traceback.format_exc())


def _linger() -> None:
    """Until the pool has read the reason and closes: its thread would take an early end for a crash."""
    while True:
        time.sleep(60.0)


class _Lines(io.TextIOBase):
    """Standard error of a worker: whole lines go to `line`."""

    def __init__(self, line: Callable[[str], None]) -> None:
        self._line, self._rest = line, ""

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                with contextlib.suppress(OSError):
                    self._line(line)
        return len(text)
