"""Policies that are asked for a return: what to ask for, and how much of it is left."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from offrl.algorithm import Algorithm
from offrl.data.dataset import Dataset
from offrl.data.sequences import drawn_episodes
from offrl.settings import setting


@dataclass
class AskingSettings:
    """Settings of return-conditioned policies."""

    target_return: float | None = setting(
        None, "what the policy is asked to earn in an episode, in the units of the recorded rewards; null: the best return in the data"
    )
    return_scale: float | None = setting(
        None, "returns are divided by this before a network sees them; null: the largest absolute return in the data", low=1e-9
    )


class Asking(Algorithm):
    """An algorithm whose config has `AskingSettings`. Returns, here and in `SequenceSampler`, are in the units of the recorded rewards."""

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        config = super().fit_config(config, dataset, grid)
        returns = dataset.raw_returns[drawn_episodes(dataset).cpu()]
        best, largest = float(returns.max()), float(returns.abs().max())
        if config.target_return is None:
            config = dataclasses.replace(config, target_return=round_digits(best))
        if config.return_scale is None:
            config = dataclasses.replace(config, return_scale=round_digits(largest) or 1.0)
        return config

    def recorded(self, rewards: Tensor) -> Tensor:
        """Rewards in training units as they were recorded."""
        return (rewards - self.spec.reward_shift) / (self.spec.reward_scale or 1.0)


def round_digits(value: float, digits: int = 5) -> float:
    """A number with so many digits: the same on machines that add up in another order, for it is part of what a run is."""
    return 0.0 if value == 0.0 else round(value, digits - 1 - math.floor(math.log10(abs(value))))
