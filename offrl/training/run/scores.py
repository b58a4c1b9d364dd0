"""Scores of a run's policies: one evaluation at a time, of a copy of the policies, written down when it is there."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from offrl.evaluation.background import Scorer
from offrl.runs.log import NoLog, RunLog
from offrl.runs.tables import score_text
from offrl.settings.replicas import Replica
from offrl.system.signals import StopSignals


class _CutShort(Exception):
    """A signal came while an evaluation was waited for."""


class Scores:
    """The evaluations of a run, from their beginning to the line in its log. Without a `Scorer` nothing is ever
    scored.
    """

    def __init__(
        self,
        scorer: Scorer | None,
        log: RunLog | NoLog,
        replicas: Sequence[Replica],
        dataset: str,
        signals: StopSignals,
        show: Callable[[str], None],
        on_scores: Callable[[int, list[dict[str, Any]], list[Any]], None] = lambda step, rows, policies: None,
    ) -> None:
        """dataset: its name, for scores.csv. signals: end the waiting for scores. show: called with new scores in
        words, and on_scores with their step, their rows and the policies."""
        self.scorer, self.log, self.replicas, self.dataset, self.signals, self.show = (
            scorer,
            log,
            replicas,
            dataset,
            signals,
            show,
        )
        self.on_scores = on_scores
        self.text = ""  # the last scores in words
        self.seconds_waited = 0.0

    @property
    def step(self) -> int | None:
        """The step of the policies whose evaluation runs; None where none does."""
        return None if self.scorer is None else self.scorer.step

    def policies(self) -> list[Any]:
        """The policies whose evaluation runs."""
        return [] if self.scorer is None else self.scorer.policies

    def begin(self, step: int, policies: Callable[[], list[Any]]) -> None:
        """Score the policies of `step`, when the evaluation that runs is over: a checkpoint holds the policies of one
        only.

        Returns at once where worker processes evaluate, unless an earlier evaluation still runs.
        """
        if self.scorer is None:
            return
        self.wait(stop_on_signal=False)
        self.scorer.begin(step, policies(), self.replicas)
        if self.scorer.pool is None:
            self.wait()

    def wait(self, stop_on_signal: bool = True) -> None:
        """Until the evaluation that runs, if any, is over, or a signal came."""
        started = time.monotonic()
        with contextlib.suppress(_CutShort):
            self.poll(self._look if stop_on_signal else lambda done, total: None)
        self.seconds_waited += time.monotonic() - started

    def poll(self, wait: Callable[[int, int], None] | None = None) -> None:
        """Write the scores if they are there; with `wait`, which is called meanwhile and may raise, wait for them."""
        policies = self.policies()
        scored = None if self.scorer is None else self.scorer.fetch(wait)
        if scored is None:
            return
        step, result, seconds = scored
        constants = {"dataset": self.dataset, **dataclasses.asdict(result.provenance)}
        rows = [{**row, **constants} for row in result.rows()]
        self.log.scores(step, rows, result.returns, result.lengths)
        self.log.timing(step, evaluation=seconds)
        self.text = score_text(
            "score" if result.scores is not None else "return", result.per_seed().tolist(), self.replicas
        )
        self.show(self.text)
        self.on_scores(step, [{"step": step, **row} for row in rows], policies)

    def cancel(self) -> None:
        """Abandon the evaluation that runs."""
        if self.scorer is not None:
            self.scorer.cancel()

    def close(self) -> None:
        """Stop the processes that evaluate."""
        if self.scorer is not None:
            self.scorer.close()

    def _look(self, done: int, total: int) -> None:
        if self.signals.count:
            raise _CutShort
