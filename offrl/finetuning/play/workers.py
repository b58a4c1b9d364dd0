"""The environments of play in worker processes, which step them side by side, with the same numbers as one process.

A worker (see `offrl.system.processes`) has some consecutive ones, and does with them what `Sequential` does. It is
asked and answers by turns, so that one message at most is under way.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from offrl.errors import UserError, first_line
from offrl.evaluation.pool.protocol import check_registration, from_bytes, registration, to_bytes
from offrl.evaluation.steppers import Steps
from offrl.finetuning.play.backends import Backend, Beginning, EnvFailed, Sequential
from offrl.settings.evaluation import cores
from offrl.system import processes
from offrl.tasks.task import Task

GRACE = 2.0  # seconds in which environments are closed; a process that takes longer is killed
CURE = "put what makes it into a file of its own and name that, env=FILE.py:NAME, or write backend=sequential"


class Workers(Backend):
    """K environments in as many processes as there are cores, or environments."""

    def __init__(self, task: Task, count: int) -> None:
        """Takes the 2 to 3 seconds in which a process starts. Raises UserError where other processes cannot make the
        environment.
        """
        self.name = task.env_id or task.name
        try:
            content = to_bytes((task, registration(task)))
        except Exception as error:  # whatever a function or an argument of the environment's raises
            raise UserError(
                f"backend=processes: {self.name} cannot be handed to other processes ({first_line(error)}): {CURE}"
            ) from None
        size = min(cores(), count)
        self.edges = np.linspace(0, count, size + 1).round().astype(int).tolist()
        self.workers: list[tuple[subprocess.Popen[bytes], Connection]] = []
        try:
            for _ in range(size):
                self.workers.append(processes.launch("offrl.finetuning.play.workers:work"))
            numbers = range(count)
            self._ask({w: (content, numbers[part]) for w, part in self._parts(numbers).items()})
        except OSError as error:
            self.close()
            raise UserError(f"backend=processes: no process could be started ({error}); leave it out") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes, once they closed their environments."""
        for _, link in self.workers:
            with contextlib.suppress(OSError):  # it died
                processes.send(link, None)
        end = time.monotonic() + GRACE
        for process, link in self.workers:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            link.close()
        self.workers.clear()

    def reset(self, beginnings: Sequence[Beginning]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """As `Backend.reset`."""
        parts = self._parts([beginning.k for beginning in beginnings])
        answers = self._ask({w: ("reset", beginnings[part]) for w, part in parts.items()})
        return [first for answer in answers for first in answer]

    def step(self, at: Sequence[int], actions: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, Steps]:
        """As `Backend.step`."""
        parts = self._parts(at)
        answers = self._ask({w: ("step", at[part], actions[part]) for w, part in parts.items()})
        rows, columns, texts = zip(*answers, strict=True)
        rewards, terminated, over, successes, costs = np.concatenate(columns, axis=1)
        firsts = [part.start for part in parts.values()]
        unstable = {a + i: text for a, part in zip(firsts, texts, strict=True) for i, text in part.items()}
        flags = terminated.astype(bool), over.astype(bool)
        return np.concatenate(rows), Steps([], rewards, *flags, successes, costs, unstable)

    def _parts(self, at: Sequence[int]) -> dict[int, slice]:
        """The parts of the environments `at`, in ascending order, by the worker that has them."""
        cuts = [bisect.bisect_left(at, edge) for edge in self.edges]
        return {w: slice(*ends) for w, ends in enumerate(zip(cuts[:-1], cuts[1:], strict=True)) if ends[0] < ends[1]}

    def _ask(self, orders: Mapping[int, Any]) -> list[Any]:
        """The answers of these workers to an order each. Raises what the first of them raised."""
        answers = []
        for w, order in orders.items():
            with self._alive(w) as link:
                processes.send(link, order)
        for w in orders:
            with self._alive(w) as link:
                answers.append(processes.receive(link))
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    @contextlib.contextmanager
    def _alive(self, w: int) -> Iterator[Connection]:
        process, link = self.workers[w]
        try:
            yield link
        except (EOFError, OSError):
            ending = processes.ending(process)
            cure = "backend=sequential needs none"
            raise UserError(f"a process that steps environments of {self.name} {ending}; {cure}") from None


def work(descriptor: str) -> None:
    """The main loop of a worker process, until it is told to end or its link closes."""
    link = Connection(int(descriptor))
    inbox = processes.attend(link)
    try:
        content, numbers = inbox.get()
        task, registered = from_bytes(content, [])
        envs = Sequential(task, numbers)
        check_registration(task, registered)  # not of the script that runs, or of a notebook
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        processes.send(
            link, UserError(f"backend=processes: another process cannot make the environment ({text}): {CURE}")
        )
        inbox.get()
        return
    processes.send(link, None)
    while (order := inbox.get()) is not None:
        method, *arguments = order
        try:
            answer = getattr(envs, method)(*arguments)
            if method == "step":  # in few arrays, for each takes time on the way
                rows, steps = answer
                columns = (steps.rewards, steps.terminated, steps.over, steps.successes, steps.costs)
                answer = rows, np.array(columns, float), steps.unstable
        except (EnvFailed, UserError) as error:
            answer = error
        processes.send(link, answer)
    with contextlib.suppress(Exception):  # a third-party environment, of which nothing is needed any more
        envs.close()
    sys.stdout.flush()
    os._exit(0)  # without the second in which an interpreter takes torch down
