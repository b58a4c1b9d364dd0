"""Evaluation as the training loop sees it: begun with a copy of the policies, fetched when it is there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from offrl.errors import warn
from offrl.evaluation.evaluator import Evaluator, Progress
from offrl.evaluation.pool.host import EvaluationPool, PoolUnavailable, poolable
from offrl.evaluation.result import Evaluation
from offrl.settings.replicas import Replica


class Scorer:
    """Scores policies beside training, in worker processes, or in this one where there are none. The numbers are the
    same.

    One evaluation at a time; `step` says of which update, None when none was begun.
    """

    def __init__(self, evaluator: Evaluator, workers: int) -> None:
        """workers: processes besides this one; they start at once, in the background."""
        self.evaluator = evaluator
        usable = workers > 0 and poolable(evaluator.task)
        self.pool = EvaluationPool(evaluator.task, evaluator.config, workers) if usable else None
        self.step: int | None = None
        self.policies: list[Any] = []
        self.seeds: list[int] = []
        self.started = 0.0

    def begin(self, step: int, policies: Sequence[Any], replicas: Sequence[Replica]) -> None:
        """Score these policies, which nobody changes any more."""
        self.step, self.policies, self.seeds, self.started = (
            step,
            list(policies),
            [r.seed for r in replicas],
            time.monotonic(),
        )
        if self.pool is not None:
            try:
                self.pool.submit(self.policies, self.seeds)
            except PoolUnavailable as error:
                self._alone(error)

    def fetch(self, heed: Progress | None = None) -> tuple[int, Evaluation, float] | None:
        """(step, scores, seconds since `begin`), once; None where the evaluation still runs, or none was begun.

        With `heed`, which is called a few times a second and may raise to end the waiting, it is waited for, and helped
        along."""
        if self.step is None:
            return None
        result = None
        if self.pool is not None:
            try:
                result = self.pool.poll() if heed is None else self.pool.wait(heed, self.evaluator)
                if result is None:
                    return None
            except PoolUnavailable as error:
                self._alone(error)
        if result is None:
            result = self.evaluator(self.policies, self.seeds, heed)
        step, self.step = self.step, None
        return step, result, time.monotonic() - self.started

    def cancel(self) -> None:
        """Abandon the evaluation that runs."""
        if self.step is not None and self.pool is not None:
            self.pool.cancel()
        self.step = None

    def close(self) -> None:
        """Stop the worker processes."""
        if self.pool is not None:
            self.pool.close()

    def _alone(self, error: PoolUnavailable) -> None:
        warn(f"{error}; training waits for each evaluation")
        assert self.pool is not None
        self.pool.close()
        self.pool = None
