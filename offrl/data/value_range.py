"""The range of values that the bins of a value head must cover, from the data, and the largest return of episodes."""

from __future__ import annotations

import math

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.transforms.columns import returns_to_go

MARGIN = 0.1  # of the range, beyond both ends: a policy may be better than any episode in the data
# a spread of returns below this share of their size is rounding, which float32 bins could not tell apart either
EQUAL = 1e-4
LARGEST_RETURN = "largest_return"  # a column of batches online: that of the episodes so far


def value_range(dataset: Dataset, discount: float) -> tuple[float, float]:
    """Smallest and largest value to expect: discounted returns from every row of the data, in the (transformed)
    rewards' units.

    What an episode that was cut off would still have earned is unknown. It is taken to have gone on at its own average
    discounted reward as far as T remaining rows show it (a share 1 - discount**T of the whole return), else at that of
    all episodes that were cut off: so a long episode counts by itself, and a large reward just before the end of the
    file is no rate of income. A tenth of the range is added at both ends. With `discount` 1 values are the returns as
    they are.
    """
    rewards = dataset.columns["rewards"].cpu().numpy()
    ends = dataset.columns["terminations"].cpu().numpy()
    start, end = dataset.bounds()
    returns = returns_to_go(rewards, ends, start, end, discount)
    low, high = float(returns.min()), float(returns.max())
    cut = ~ends[end - 1].astype(bool)
    if discount < 1.0 and cut.any():
        known = -np.expm1((end - start)[cut] * math.log(discount)) if discount > 0.0 else np.ones(int(cut.sum()))
        usual = float(returns[start[cut]].sum() / known.sum())  # return of going on for ever at the usual rate
        for first, last in zip(start[cut], end[cut], strict=True):
            unknown = discount ** np.arange(last - first, 0, -1, dtype=np.float64)  # discount**T of each row
            episode_returns = returns[first:last]
            # own + unknown * (rate of income / (1 - discount)), and own = (1 - unknown) * (own rate of income / (1 -
            # discount))
            totals = episode_returns + unknown * episode_returns + unknown**2 * usual
            low, high = min(low, float(totals.min())), max(high, float(totals.max()))
    spread, size = high - low, max(abs(low), abs(high))
    margin = MARGIN * spread if spread > EQUAL * size else max(1.0, size)  # equal returns: any range around them
    # few digits, outwards: the same on machines that round differently, since the range is part of what a run is
    digits = 3 - math.floor(math.log10(spread + 2 * margin))
    step = 10.0**-digits
    return round(math.floor((low - margin) / step) * step, digits), round(
        math.ceil((high + margin) / step) * step, digits
    )


def largest_return(rewards: np.ndarray, start: np.ndarray, end: np.ndarray, cut: np.ndarray, discount: float) -> float:
    """The largest |G| of R rewards, G_t = r_t + discount G_{t+1} inside each of the episodes [start, end).

    cut [E] bool: episodes that were cut off, which are taken to have gone on for ever at their mean reward, as in BRC's
    code (arXiv 2505.23150). discount: below 1.
    """
    sums = np.concatenate([[0.0], np.cumsum(rewards, dtype=np.float64)])
    extended = rewards.astype(np.float64)
    extended[end - 1] += cut * (discount / (1.0 - discount)) * (sums[end] - sums[start]) / (end - start)
    return float(np.abs(returns_to_go(extended, np.zeros(len(rewards)), start, end, discount)).max())
