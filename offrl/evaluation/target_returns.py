"""Returns that return-conditioned policies achieve for several target returns: no training, only more replicas to
score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from offrl.evaluation.result import Sweep

BEYOND = 0.2  # from the data's best return to the highest target, as a share of the range of the data's
LEVELS = 6


@dataclass(frozen=True)
class AchievedReturns(Sweep):
    """Scores of R replicas for each of M target returns."""

    targets: tuple[float, ...]  # in the units of the recorded rewards
    # targets are discounted returns of the rest of an episode (`TargetReturnSettings.targets_ahead`)
    ahead: bool = False

    def write(self, path: Path) -> None:
        """Write the table as CSV. Raises UserError."""
        columns = {"target_return": [[target] * len(self.replicas) for target in self.targets]}
        self.write_table(path, columns, ("return_mean", "return_std", "score", "length_mean"))


def spread_targets(low: float, high: float) -> list[float]:
    """Target returns for data whose returns lie between `low` and `high`: evenly spaced over these, and one beyond."""
    values = [*np.linspace(low, high, LEVELS).tolist(), high + BEYOND * (high - low)]
    return list(dict.fromkeys(float(f"{v:.4g}") for v in values))


def data_range(config: Any, data: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the largest target that the data may have an answer to. data: the record of a run's."""
    if getattr(config, "targets_ahead", False):
        return (0.0, config.return_scale) if config.target_return > 0.0 else (-config.return_scale, 0.0)
    return data["return_min"], data["return_max"]
