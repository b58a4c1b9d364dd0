"""Scores without an environment that stays open."""

from __future__ import annotations

from collections.abc import Sequence

from offrl.evaluation.evaluator import Evaluator, Progress
from offrl.evaluation.result import Evaluation, Policy
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.task import Task


def evaluate(
    policies: Sequence[Policy], seeds: Sequence[int], task: Task, config: EvalConfig, progress: Progress | None = None
) -> Evaluation:
    """The scores of an `Evaluator` that is closed at once."""
    with Evaluator(task, config) as evaluator:
        return evaluator(policies, seeds, progress)
