"""The range of values that the bins of a value head must cover, from the data."""

from __future__ import annotations

import math

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.transforms import returns_to_go

MARGIN = 0.1  # of the range, beyond both ends: a policy may be better than any episode in the data


def value_range(dataset: Dataset, discount: float) -> tuple[float, float]:
    """Smallest and largest value to expect: discounted returns from every row of the data, in the (transformed) rewards' units.

    What an episode that was cut off would still have earned is unknown: it is taken to have gone on as it was on average, by which a
    discounted return over T steps grows by 1 / (1 - discount**T). A tenth of the range is added at both ends. With `discount` 1 values are
    the returns as they are.
    """
    rewards = dataset.columns["rewards"].cpu().numpy()
    ends = dataset.columns["terminations"].cpu().numpy()
    start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    returns = returns_to_go(rewards, ends, start, end, discount)
    low, high = float(returns.min()), float(returns.max())
    cut = ~ends[end - 1]
    if discount < 1.0 and cut.any():
        whole = returns[start[cut]] / (1.0 - discount ** (end - start)[cut].astype(np.float64))
        low, high = min(low, float(whole.min())), max(high, float(whole.max()))
    margin = MARGIN * (high - low) or max(1.0, abs(high))  # equal returns: any range around them
    # few digits, outwards: the same on machines that round differently, since the range is part of what a run is
    step = 10.0 ** math.floor(math.log10(high - low + 2 * margin) - 3)
    return math.floor((low - margin) / step) * step, math.ceil((high + margin) / step) * step
