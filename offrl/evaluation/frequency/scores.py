"""Scores over the number of steps between decisions, and the one number that sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offrl.evaluation.result import Sweep


@dataclass(frozen=True)
class FrequencyScores(Sweep):
    """Scores of R replicas that decide once in D steps, for each of several D."""

    steps: tuple[int, ...]  # D, ascending

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

    @property
    def frequency_score(self) -> np.ndarray | None:
        """[R]: the mean of `values` over D from the first to the last, by the trapezoid rule; None for a single D.

        The frequency-averaged score of Sequence RL (arXiv 2410.08979), whose code divides by the last D alone: a
        perfect policy does not reach 1 there.
        """
        return None if len(self.steps) == 1 else trapezoid(self.steps, self.values) / (self.steps[-1] - self.steps[0])

    def write(self, path: Path) -> None:
        """Write the table as CSV. Raises UserError."""
        columns = {
            "steps_per_decision": [[d] * len(self.replicas) for d in self.steps],
            "decisions_mean": self.decisions.tolist(),
        }
        self.write_table(path, columns, ("return_mean", "return_std", "score", "success", "length_mean"))


def trapezoid(x: Sequence[float], y: np.ndarray) -> np.ndarray:
    """The integral over x [X] of the lines between y [X, ...]: [...]."""
    width = np.diff(np.asarray(x, np.float64)).reshape(-1, *[1] * (np.ndim(y) - 1))
    return (0.5 * width * (np.asarray(y)[1:] + np.asarray(y)[:-1])).sum(axis=0)
