"""Scores over the number of steps between decisions, and the one number that sums them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offrl.evaluation.frequency.action_repeat import HeldPolicy
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.result import Evaluation
from offrl.settings.replicas import Replica, Values, by_cell
from offrl.statistics.intervals import mean_interval
from offrl.system.csv_text import text_of
from offrl.system.files import write_text


@dataclass(frozen=True)
class FrequencyScores:
    """Scores of R replicas that decide once in D steps, for each of several D."""

    steps: tuple[int, ...]  # D, ascending
    replicas: tuple[Replica, ...]
    evaluations: tuple[Evaluation, ...]  # one for each D

    @property
    def unit(self) -> str:
        """What `values` are: "score" where there are reference scores, else "return"."""
        return "return" if any(e.scores is None for e in self.evaluations) else "score"

    @property
    def values(self) -> np.ndarray:
        """[D, R]: each replica's mean over episodes."""
        return np.stack([e.returns.mean(axis=1) if self.unit == "return" else e.per_seed() for e in self.evaluations])

    @property
    def decisions(self) -> np.ndarray:
        """[D, R]: decisions in an episode, the mean over episodes."""
        return np.stack(
            [np.ceil(e.lengths / d).mean(axis=1) for d, e in zip(self.steps, self.evaluations, strict=True)]
        )

    def means(self, replicas: Sequence[int]) -> list[tuple[float, float, float]]:
        """For each D the mean of `values` over the seeds of these replicas, with its interval."""
        return [mean_interval(row[list(replicas)]) for row in self.values]

    def returns(self, replicas: Sequence[int]) -> list[tuple[float, float, float]]:
        """The same as `means`, of undiscounted returns."""
        return [mean_interval(e.returns.mean(axis=1)[list(replicas)]) for e in self.evaluations]

    @property
    def frequency_score(self) -> np.ndarray | None:
        """[R]: the mean of `values` over D from the first to the last, by the trapezoid rule; None for a single D.

        The frequency-averaged score of Sequence RL (arXiv 2410.08979), whose code divides by the last D alone: a
        perfect policy does not reach 1 there.
        """
        return None if len(self.steps) == 1 else trapezoid(self.steps, self.values) / (self.steps[-1] - self.steps[0])

    @property
    def cells(self) -> dict[Values, list[int]]:
        """Replicas that differ in nothing but the seed."""
        return by_cell(self.replicas)


def trapezoid(x: Sequence[float], y: np.ndarray) -> np.ndarray:
    """The integral over x [X] of the lines between y [X, ...]: [...]."""
    width = np.diff(np.asarray(x, np.float64)).reshape(-1, *[1] * (np.ndim(y) - 1))
    return (0.5 * width * (np.asarray(y)[1:] + np.asarray(y)[:-1])).sum(axis=0)


def sweep(
    policies: Sequence[TrainedPolicy],
    steps: Sequence[int],
    replicas: Sequence[Replica],
    evaluate: Callable[[Sequence[HeldPolicy]], Evaluation],
) -> FrequencyScores:
    """Evaluate the policies of `replicas` with every number of steps between decisions, all at once and from the same
    start states.

    Raises UserError for policies that have no actions to repeat.
    """
    evaluation = evaluate([HeldPolicy(p, d) for d in steps for p in policies])
    return FrequencyScores(tuple(steps), tuple(replicas), evaluation.split(len(policies)))


def write(scores: FrequencyScores, path: Path) -> None:
    """Write the table as CSV. Raises UserError."""
    names = [name for name, _ in scores.replicas[0].values]
    header = [
        "seed",
        "steps_per_decision",
        "decisions_mean",
        "return_mean",
        "return_std",
        "score",
        "success",
        "length_mean",
    ]
    lines: list[list[Any]] = [[*names, *header]]
    for d, evaluation, decisions in zip(scores.steps, scores.evaluations, scores.decisions.tolist(), strict=True):
        for replica, row, count in zip(scores.replicas, evaluation.rows(), decisions, strict=True):
            score, success = ("" if row[k] is None else row[k] for k in ("score", "success"))
            values = [v for _, v in replica.values]
            lines.append(
                [
                    *values,
                    replica.seed,
                    d,
                    count,
                    row["return_mean"],
                    row["return_std"],
                    score,
                    success,
                    row["length_mean"],
                ]
            )
    write_text(path, text_of(lines))
