"""A worker process of an evaluation pool: environments that stay alive between evaluations, on one thread."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.pool import protocol
from offrl.evaluation.pool.protocol import (
    AlgorithmsMessage,
    CancelMessage,
    PlayMessage,
    ProgressMessage,
    ReadyMessage,
    ResultMessage,
    UnavailableMessage,
    WarningMessage,
)
from offrl.system import processes


class _Cancelled(Exception):
    pass


def work(descriptor: str) -> None:
    """The main loop of a worker process, until its link closes."""
    link, sending = Connection(int(descriptor)), threading.Lock()
    cancelled = 0

    def send(message: Any) -> None:
        with sending:
            processes.send(link, message)

    def cancel(message: Any) -> bool:
        nonlocal cancelled
        if isinstance(message, CancelMessage):
            cancelled = message.job
        return isinstance(message, CancelMessage)

    inbox = processes.attend(link, cancel)
    sys.stderr = _Lines(lambda line: send(WarningMessage(line, line.removeprefix("offrl: warning: "))))
    try:
        task, config, registered = pickle.loads(inbox.get().content)
        torch.set_num_threads(1)
        evaluator = Evaluator(
            task, config, lambda kind, text: send(WarningMessage(kind, f"evaluation in {task.env_id}: {text}"))
        )
        protocol.check_registration(task, registered)
    except Exception as error:
        text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        send(UnavailableMessage(f"an evaluation process cannot make the environment ({text})"))
        return _wait_for_end()
    send(ReadyMessage(evaluator.provenance))
    algorithms: list[Any] = []
    while True:
        message = inbox.get()
        try:
            if isinstance(message, AlgorithmsMessage):
                algorithms = pickle.loads(message.content)
                continue
            assert isinstance(message, PlayMessage)
            policy = protocol.from_bytes(message.policy, algorithms)
        except Exception as error:
            send(
                UnavailableMessage(f"an evaluation process cannot load the policies ({type(error).__name__}: {error})")
            )
            return _wait_for_end()
        job, reported = message.job, time.monotonic()

        def on_progress(done: int, total: int, job: int = job) -> None:
            nonlocal reported
            if cancelled == job:
                raise _Cancelled
            now = time.monotonic()
            if now - reported > protocol.REPORT_INTERVAL:
                reported = now
                send(ProgressMessage(job, done))

        try:
            send(ResultMessage(job, protocol.play(evaluator, message.seed, message.episodes, policy, on_progress)))
        except _Cancelled:
            send(ResultMessage(job))
        except UserError as error:
            send(ResultMessage(job, error=UserError(str(error))))
        except Exception:
            text = f"an evaluation process failed:\n{traceback.format_exc()}"
            send(ResultMessage(job, error=RuntimeError(text)))


def _wait_for_end() -> None:
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
