"""Actions as the rows of play hold them, in [-1, 1] or choices, and as the environment takes them."""

from __future__ import annotations

import numpy as np

from offrl.data.dataset import DataSpec


class ActionScale:
    """Between both, for actions [K, A] or [A] in float32 and for choices, which are the same in both."""

    def __init__(self, spec: DataSpec, margin: float) -> None:
        """margin: actions stay in +-(1 - margin), as the data's."""
        self.discrete, self.margin = spec.discrete, margin
        self.low, self.high = spec.action_bounds

    def stored(self, actions: np.ndarray) -> np.ndarray:
        """A policy's actions within their range, as a dataset has them."""
        if self.discrete:
            return np.asarray(actions, np.int64)
        return np.clip(np.asarray(actions, np.float32), self.margin - 1.0, 1.0 - self.margin).astype(np.float32)

    def values(self, stored: np.ndarray) -> np.ndarray:
        """`stored` in the environment's units."""
        if self.discrete:
            return stored
        return np.clip(
            self.low + (stored + np.float32(1.0)) * np.float32(0.5) * (self.high - self.low), self.low, self.high
        )

    def of_values(self, values: np.ndarray) -> np.ndarray:
        """Actions in the environment's units as a dataset has them."""
        return self.stored(values if self.discrete else 2.0 * (values - self.low) / (self.high - self.low) - 1.0)
