"""Evaluation in processes of its own, beside training: the same numbers as `Evaluator`, bit for bit, while the caller
does other things.

A worker (see `offrl.system.processes`) keeps its environments alive between evaluations and works on one thread.
Policies are copied when they are handed in.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as mp_connection
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from offrl.algorithm import Algorithm
from offrl.errors import UserError, warn
from offrl.evaluation.evaluator import Evaluator, Progress
from offrl.evaluation.pool import protocol
from offrl.evaluation.pool.protocol import (
    Job,
    ProgressMessage,
    ReadyMessage,
    ResultMessage,
    UnavailableMessage,
    Unit,
    WarningMessage,
    cut,
)
from offrl.evaluation.result import Evaluation, Policy, Tally
from offrl.settings.evaluation import EvalConfig, cores
from offrl.system import processes
from offrl.tasks.provenance import Provenance
from offrl.tasks.task import Task

CURE = "eval.workers=0 evaluates in the training process"


class PoolUnavailable(UserError):
    """These processes cannot score these policies, or one of them was killed. The caller's own process can: `Evaluator`
    gives the same.
    """

    def __init__(self, reason: str, cure: str = CURE) -> None:
        super().__init__(f"{reason}; {cure}")
        self.reason = reason


def poolable(task: Task) -> bool:
    """True where worker processes can make the task's environment: not where a function makes it, or the script that
    runs registers it.
    """
    if task.env_factory is not None or task.env_id is None:
        return False
    registered = protocol.registration(task)
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
    """The scores of an `Evaluator`, with all cores: by this process from the start and, if it is not over in 2 seconds,
    by `workers` more (None: one less than there are cores, at most 15)."""
    count = min(cores() - 1, 15) if workers is None else workers
    count = min(count, len(policies) * config.episodes - 1)
    with Evaluator(task, config) as evaluator:
        if count < 1 or not poolable(task):
            return evaluator(policies, seeds, progress)
        try:
            with EvaluationPool(task, config, count, delay=2.0) as pool:
                return pool.evaluate(policies, seeds, evaluator, progress)
        except PoolUnavailable as error:
            warn(f"{error.reason}; this process scores alone")
            return evaluator(policies, seeds, progress)


@dataclass(eq=False)
class _Worker:
    process: subprocess.Popen[bytes]
    link: Connection
    ready: bool = False
    unit: Unit | None = None
    job: int = 0  # of the last unit
    sending: threading.Lock = field(default_factory=threading.Lock)

    def send(self, message: Any) -> None:
        with self.sending:
            processes.send(self.link, message)


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
        self._job: Job | None = None
        self._count = 0  # evaluations so far
        self._job_error: Exception | None = None
        self._unavailable: PoolUnavailable | None = None  # for good
        self._warnings: list[WarningMessage] = []
        self._shown_warnings: set[str] = set()
        self._delay, self._size = delay, workers
        self._closing = threading.Event()
        self._wake_send, self._wake_receive = get_context("spawn").Pipe()  # wakes the thread
        self._workers: list[_Worker] = []
        self._thread: threading.Thread | None = None
        try:
            self._setup = protocol.SetupMessage(pickle.dumps((task, config, protocol.registration(task))))
        except Exception as error:
            self._unavailable = PoolUnavailable(f"{task.name} cannot be handed to an evaluation process ({error})")
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
            self._wake_send.send_bytes(b"!")
        with self._lock:
            for worker in self._workers:
                worker.process.kill()  # they hold nothing that could be lost
        if self._thread is not None:
            self._thread.join(5.0)
        for worker in self._workers:
            worker.process.wait()
            worker.link.close()
        self._wake_send.close()
        self._wake_receive.close()

    @property
    def pending(self) -> bool:
        """True while a submitted evaluation's result has not been fetched."""
        return self._job is not None

    @property
    def ready(self) -> bool:
        """True once all workers have started."""
        return self._unavailable is None and len(self._workers) == self._size and all(w.ready for w in self._workers)

    def submit(self, policies: Sequence[Policy], seeds: Sequence[int], shared: bool = False) -> None:
        """Begin an evaluation of policies as they are now; changing their tensors afterwards does no harm.

        `shared`: the caller will `wait` with an evaluator of its own, so the work is cut for one process more. Raises
        PoolUnavailable when the policies cannot be handed over, for instance because the algorithm's class stands in
        the script that runs.
        """
        if self._job is not None:
            raise RuntimeError("an evaluation is running: fetch its result, or cancel it")
        tally = Tally.of(policies, seeds, self.config.episodes)
        self._raise_if_unavailable()
        algorithms: list[Algorithm] = []
        try:
            contents = [protocol.to_bytes(policy, algorithms) for policy in policies]
            algorithms_bytes = protocol.to_bytes(algorithms)  # at once, for those of a grid share their networks
        except Exception as error:  # whatever a third-party algorithm raises when it is pickled
            raise PoolUnavailable(f"the policies cannot be handed to an evaluation process ({error})") from error
        parts = cut(len(policies), self.config.episodes, self._size + shared)
        units = [Unit(n, int(seeds[n]), episodes, contents[n]) for n, episodes in parts]
        with self._lock:
            self._count += 1
            self._job_error = None
            self._job = Job(self._count, [int(s) for s in seeds], tally, units[::-1], algorithms, algorithms_bytes)
        self._wake_send.send_bytes(b"!")

    def poll(self) -> Evaluation | None:
        """The result, once; None while the evaluation runs, or when there is none.

        Raises UserError for what a worker could not score, PoolUnavailable where the workers are of no use; the
        evaluation is over then."""
        with self._lock:
            return self._take()

    def wait(self, on_progress: Progress | None = None, evaluator: Evaluator | None = None) -> Evaluation:
        """The result of the evaluation that runs. `on_progress(done, total)` counts episodes, is called at least a few
        times a second and may raise; the evaluation then goes on, to be waited for again or cancelled. With an
        `evaluator` of the same task and settings this process takes its share, so that waiting is never slower than
        evaluating here, even while the workers start. Raises as `poll`."""
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
                    self._changed.wait(protocol.REPORT_INTERVAL)
                done, total = job.finished, job.tally.returns.size
            if on_progress is not None:
                try:
                    on_progress(done, total)
                except BaseException:
                    self._put_back(job, unit)
                    raise
            if unit is not None and evaluator is not None:
                self._play_here(job, unit, evaluator, on_progress)

    def evaluate(
        self,
        policies: Sequence[Policy],
        seeds: Sequence[int],
        evaluator: Evaluator | None = None,
        on_progress: Progress | None = None,
    ) -> Evaluation:
        """`submit` and `wait`, shared with `evaluator` where one is given; nothing goes on after an exception."""
        self.submit(policies, seeds, shared=evaluator is not None)
        try:
            return self.wait(on_progress, evaluator)
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """Abandon the evaluation that runs, if one does."""
        with self._lock:
            self._job, self._job_error = None, None
            busy = [w for w in self._workers if w.unit is not None]
        for worker in busy:
            with contextlib.suppress(OSError):
                worker.send(protocol.CancelMessage(worker.job))

    # what follows runs under the lock, or in the thread

    def _take(self) -> Evaluation | None:
        """The result if there is one. Under the lock."""
        warnings, self._warnings = self._warnings, []
        for warning in warnings:
            if warning.kind not in self._shown_warnings:
                self._shown_warnings.add(warning.kind)
                warn(warning.text)
        job = self._job
        if job is None:
            return None
        if self._job_error is not None:
            error, self._job_error, self._job = self._job_error, None, None
            raise error
        if job.waiting or job.running:
            if self._unavailable is not None:
                self._job = None
                self._raise_if_unavailable()
            return None
        self._job = None
        assert self.provenance is not None
        return job.tally.evaluation(self.task, self.provenance, job.seeds)

    def _raise_if_unavailable(self) -> None:
        if self._unavailable is not None:
            raise self._unavailable
        if self._closing.is_set():
            raise RuntimeError("the pool is closed")

    def _play_here(self, job: Job, unit: Unit, evaluator: Evaluator, on_progress: Progress | None) -> None:
        """Do a unit in this process."""
        self.provenance = evaluator.provenance

        def progress(done: int, total: int) -> None:
            unit.finished = done
            if on_progress is not None:
                with self._lock:
                    over = job.finished
                on_progress(over, job.tally.returns.size)

        try:
            tally = protocol.play(
                evaluator, unit.seed, unit.episodes, protocol.from_bytes(unit.policy_bytes, job.algorithms), progress
            )
        except BaseException:
            self._put_back(job, unit)
            raise
        with self._lock:
            job.add(unit, tally)

    def _put_back(self, job: Job, unit: Unit | None) -> None:
        if unit is not None:
            with self._lock:
                unit.finished = 0
                job.running.remove(unit)
                job.waiting.append(unit)
            self._wake_send.send_bytes(b"!")

    def _serve(self) -> None:
        """The thread: starts the workers, hands out units, and takes in what the workers say."""
        if self._delay and self._closing.wait(self._delay):
            return
        self._start()
        links: dict[Any, _Worker] = {w.link: w for w in self._workers}
        while not self._closing.is_set():
            for link in mp_connection.wait([self._wake_receive, *links]):
                if link is self._wake_receive:
                    self._wake_receive.recv_bytes()
                    continue
                worker = links[link]
                try:
                    message = processes.receive(worker.link)
                except (EOFError, OSError):
                    del links[link]
                    self._lost(worker)
                    continue
                with self._changed:
                    self._on_message(worker, message)
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
                    worker = _Worker(*processes.launch("offrl.evaluation.pool.worker:work"))
                except OSError as error:
                    self._unavailable = PoolUnavailable(f"an evaluation process could not be started ({error})")
                    self._changed.notify_all()
                    return
                self._workers.append(worker)
            with contextlib.suppress(OSError):  # it died already: its link says so
                worker.send(self._setup)

    def _feed(self, worker: _Worker) -> None:
        """Give a free worker its next unit."""
        with self._lock:
            job = self._job
            free = worker.ready and worker.unit is None and self._unavailable is None
            if job is None or not free or not job.waiting or self._job_error is not None:
                return
            unit, new = job.waiting.pop(), worker.job != job.number
            worker.unit, worker.job = unit, job.number
            job.running.append(unit)
        if new:
            worker.send(protocol.AlgorithmsMessage(job.algorithms_bytes))
        worker.send(protocol.PlayMessage(job.number, unit.seed, unit.episodes, unit.policy_bytes))

    def _on_message(self, worker: _Worker, message: Any) -> None:
        """Take in one message of a worker. Under the lock."""
        if isinstance(message, ReadyMessage):
            worker.ready, self.provenance = True, message.provenance
        elif isinstance(message, WarningMessage):
            self._warnings.append(message)
        elif isinstance(message, UnavailableMessage):
            self._unavailable = PoolUnavailable(message.reason)
        else:
            self._on_progress(worker, message)

    def _on_progress(self, worker: _Worker, message: ProgressMessage | ResultMessage) -> None:
        """Take in what a worker says of its unit, which may be of an evaluation that is over. Under the lock."""
        job, unit = self._job, worker.unit
        if isinstance(message, ResultMessage):
            worker.unit = None
        if job is None or unit is None or job.number != message.job or unit not in job.running:
            return
        if isinstance(message, ProgressMessage):
            unit.finished = message.episodes
        elif message.tally is not None:
            job.add(unit, message.tally)
        elif message.error is not None:
            self._job_error = message.error

    def _lost(self, worker: _Worker) -> None:
        """A worker's link is closed: it is dead."""
        if self._closing.is_set():
            return
        ending = processes.ending(worker.process)
        with self._changed:
            self._unavailable = self._unavailable or PoolUnavailable(
                f"an evaluation process {ending}", f"{CURE}, with less memory"
            )
            self._changed.notify_all()
