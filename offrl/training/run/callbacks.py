"""`offrl.train(..., on_evaluation=f)`: a user's function that sees each evaluation and may end the run."""

from __future__ import annotations

import inspect
import json
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.runs.paths import STOPPED
from offrl.system import files


@dataclass(frozen=True)
class EvaluationEvent:
    """An evaluation that has just been written down."""

    step: int  # updates that the policies had
    # the new rows of scores.csv, one for each replica: seed, score, return_mean, ...
    scores: Sequence[Mapping[str, Any]]
    policies: Sequence[TrainedPolicy]  # those that were scored, in the same order
    run_dir: Path

    @property
    def mean(self) -> float:
        """The mean over replicas of the normalised score, or of the return where there is no score."""
        name = "score" if all(row.get("score") is not None for row in self.scores) else "return_mean"
        return float(sum(row[name] for row in self.scores) / len(self.scores))


BY_CALLBACK = "on_evaluation returned False"
OnEvaluation = Callable[[EvaluationEvent], Any]


class Callbacks:
    """The functions of one run, and what they asked for: `stops`, or `problem`, where one failed."""

    def __init__(self, functions: OnEvaluation | Iterable[OnEvaluation] | None, run_dir: Path, steps: int) -> None:
        """steps: the run's. Raises UserError for what cannot be called with one argument."""
        self.functions = [functions] if callable(functions) else list(functions or [])
        self.run_dir, self.steps = run_dir, steps
        self.stops, self.problem = False, ""
        for function in self.functions:
            if not callable(function):
                raise UserError(
                    f"on_evaluation={function!r} is no function; give one of an EvaluationEvent, or a list of them"
                )
            try:
                inspect.signature(function).bind(None)
            except TypeError as error:
                raise UserError(
                    f"on_evaluation: {_name(function)} cannot be called with one argument, the event: {error}"
                ) from None
            except ValueError:  # a built-in's signature is not known
                continue

    def __call__(self, step: int, scores: Sequence[Mapping[str, Any]], policies: Sequence[TrainedPolicy]) -> None:
        """Hand an evaluation to the functions. One that returns False ends the run; one that fails ends it too, and
        raises nothing here.
        """
        if not self.functions or self.problem:
            return
        event = EvaluationEvent(step, scores, policies, self.run_dir)
        for function in self.functions:
            try:
                self.stops |= function(event) is False
            except Exception as error:
                frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
                at = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
                reason = " ".join(str(error).split())
                self.problem = (
                    f"on_evaluation: {_name(function)} failed{at} (step {step:,}): {type(error).__name__}: {reason}"
                )
                return

    def record(self, step: int) -> None:
        """Note in the run that it ended here: the same call does not go on."""
        files.write_text(self.run_dir / STOPPED, json.dumps({"step": step, "steps": self.steps}) + "\n")


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))
