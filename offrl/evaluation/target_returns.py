"""Returns that return-conditioned policies achieve for several target returns: no training, only more replicas to
score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.result import Evaluation
from offrl.settings.replicas import Replica, Values, by_cell
from offrl.statistics.intervals import mean_interval
from offrl.system.csv_text import text_of
from offrl.system.files import write_text

BEYOND = 0.2  # from the data's best return to the highest target, as a share of the range of the data's
LEVELS = 6


@dataclass(frozen=True)
class AchievedReturns:
    """Scores of R replicas for each of M target returns."""

    targets: tuple[float, ...]  # in the units of the recorded rewards
    replicas: tuple[Replica, ...]
    evaluations: tuple[Evaluation, ...]  # one for each target
    ahead: bool = (
        False  # targets are discounted returns of the rest of an episode (`TargetReturnSettings.targets_ahead`)
    )

    def means(self, replicas: Sequence[int]) -> list[tuple[float, float, float]]:
        """For each target the mean return over the seeds of these replicas, with its interval."""
        return [mean_interval(e.returns.mean(axis=1)[list(replicas)]) for e in self.evaluations]

    def scores(self, replicas: Sequence[int]) -> list[tuple[float, float, float]] | None:
        """The same as `means`, of normalised scores; None without reference scores."""
        if any(e.scores is None for e in self.evaluations):
            return None
        return [mean_interval(e.per_seed()[list(replicas)]) for e in self.evaluations]

    @property
    def cells(self) -> dict[Values, list[int]]:
        """Replicas that differ in nothing but the seed."""
        return by_cell(self.replicas)


def spread_targets(low: float, high: float) -> list[float]:
    """Target returns for data whose returns lie between `low` and `high`: evenly spaced over these, and one beyond."""
    values = [*np.linspace(low, high, LEVELS).tolist(), high + BEYOND * (high - low)]
    return list(dict.fromkeys(float(f"{v:.4g}") for v in values))


def data_range(config: Any, data: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the largest target that the data may have an answer to. data: the record of a run's."""
    if getattr(config, "targets_ahead", False):
        return (0.0, config.return_scale) if config.target_return > 0.0 else (-config.return_scale, 0.0)
    return data["return_min"], data["return_max"]


def sweep(
    policies: Sequence[TrainedPolicy],
    targets: Sequence[float],
    replicas: Sequence[Replica],
    evaluate: Callable[[Sequence[TrainedPolicy]], Evaluation],
) -> AchievedReturns:
    """Evaluate the policies of `replicas` with every target return, all of them at once.

    Raises UserError for policies that are not return-conditioned.
    """
    evaluation = evaluate([p.with_target_return(t) for t in targets for p in policies])
    ahead = getattr(policies[0].algorithm.config, "targets_ahead", False)
    return AchievedReturns(tuple(targets), tuple(replicas), evaluation.split(len(policies)), ahead)


def write(achieved: AchievedReturns, path: Path) -> None:
    """Write the table as CSV. Raises UserError."""
    names = [name for name, _ in achieved.replicas[0].values]
    lines: list[list[Any]] = [[*names, "seed", "target_return", "return_mean", "return_std", "score", "length_mean"]]
    for target, evaluation in zip(achieved.targets, achieved.evaluations, strict=True):
        for replica, row in zip(achieved.replicas, evaluation.rows(), strict=True):
            values = [v for _, v in replica.values]
            score = "" if row["score"] is None else row["score"]
            lines.append(
                [*values, replica.seed, target, row["return_mean"], row["return_std"], score, row["length_mean"]]
            )
    write_text(path, text_of(lines))
