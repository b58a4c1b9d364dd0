"""Scores of a run's policies: one evaluation at a time, of a copy of the policies, written down when it is there."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from offrl.errors import warn
from offrl.evaluation.evaluator import Evaluator, Progress
from offrl.evaluation.pool.host import EvaluationPool, PoolUnavailable, poolable
from offrl.runs.log import NoLog, RunLog
from offrl.runs.tables import score_text
from offrl.settings.replicas import Replica
from offrl.system.signals import StopSignals


class _CutShort(Exception):
    """A signal came while an evaluation was waited for."""


class Scores:
    """The evaluations of a run, from their beginning to the line in its log, beside training in worker processes, or in
    this one where there are none. The numbers are the same.

    `step` is that of the `policies` whose evaluation runs, None where none does.
    """

    def __init__(
        self,
        evaluator: Evaluator | None,
        workers: int,
        log: RunLog | NoLog,
        replicas: Sequence[Replica],
        dataset: str,
        signals: StopSignals,
        show: Callable[[str], None],
        on_scores: Callable[[int, list[dict[str, Any]], list[Any]], None] = lambda step, rows, policies: None,
    ) -> None:
        """evaluator: None: nothing is ever scored. workers: processes besides this one; they start at once, in the
        background. dataset: its name, for scores.csv. signals: end the waiting for scores. show: called with new scores
        in words, and on_scores with their step, their rows and the policies."""
        self.evaluator, self.log, self.replicas, self.dataset = evaluator, log, replicas, dataset
        self.signals, self.show, self.on_scores = signals, show, on_scores
        self.pool: EvaluationPool | None = None
        if evaluator is not None and workers > 0 and poolable(evaluator.task):
            self.pool = EvaluationPool(evaluator.task, evaluator.config, workers)
        self.step: int | None = None
        self.policies: list[Any] = []
        self.started = self.seconds_waited = 0.0
        self.text = ""  # the last scores in words

    def submit(self, step: int, policies: list[Any]) -> None:
        """Begin to score these policies of `step`, which nobody changes any more."""
        self.step, self.policies, self.started = step, policies, time.monotonic()
        if self.pool is not None:
            try:
                self.pool.submit(policies, self._seeds)
            except PoolUnavailable as error:
                self._leave_pool(error)

    def begin(self, step: int, policies: Callable[[], list[Any]]) -> None:
        """Score the policies of `step`, when the evaluation that runs is over: a checkpoint holds the policies of one
        only.

        Returns at once where worker processes evaluate, unless an earlier evaluation still runs.
        """
        if self.evaluator is None:
            return
        self.wait(stop_on_signal=False)
        self.submit(step, policies())
        if self.pool is None:
            self.wait()

    def wait(self, stop_on_signal: bool = True) -> None:
        """Until the evaluation that runs, if any, is over, or a signal came."""
        started = time.monotonic()
        with contextlib.suppress(_CutShort):
            self.poll(self._look if stop_on_signal else lambda done, total: None)
        self.seconds_waited += time.monotonic() - started

    def poll(self, wait: Progress | None = None) -> None:
        """Write the scores if they are there; with `wait`, which is called a few times a second meanwhile and may
        raise, wait for them, and help them along."""
        if self.step is None or self.evaluator is None:
            return
        result = None
        if self.pool is not None:
            try:
                result = self.pool.poll() if wait is None else self.pool.wait(wait, self.evaluator)
                if result is None:
                    return
            except PoolUnavailable as error:
                self._leave_pool(error)
        if result is None:
            result = self.evaluator(self.policies, self._seeds, wait)
        step, self.step = self.step, None
        constants = {"dataset": self.dataset, **dataclasses.asdict(result.provenance)}
        rows = [{**row, **constants} for row in result.rows()]
        seconds = time.monotonic() - self.started
        self.log.scores(step, rows, result.returns, result.lengths, result.costs)
        self.log.timing(step, evaluation=seconds)
        self.text = score_text(
            "score" if result.scores is not None else "return", result.per_seed().tolist(), self.replicas
        )
        self.show(self.text)
        self.on_scores(step, [{"step": step, **row} for row in rows], self.policies)

    def cancel(self) -> None:
        """Abandon the evaluation that runs."""
        if self.step is not None and self.pool is not None:
            self.pool.cancel()
        self.step = None

    def close(self) -> None:
        """Stop the processes that evaluate."""
        if self.pool is not None:
            self.pool.close()

    @property
    def _seeds(self) -> list[int]:
        return [replica.seed for replica in self.replicas]

    def _leave_pool(self, error: PoolUnavailable) -> None:
        warn(f"{error}; training waits for each evaluation")
        self.close()
        self.pool = None

    def _look(self, done: int, total: int) -> None:
        if self.signals.count:
            raise _CutShort
