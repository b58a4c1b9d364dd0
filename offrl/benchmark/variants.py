"""On which variants of an environment to train, so that some policy does well on each: equal spacing, or MBTL (arXiv
2408.04498).

Variants lie at positions c in [0, 1], the values of one parameter over their range. A policy that is trained at i earns
J(i -> j) at j; what counts is mean_j max_i J(i -> j) over the trained ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from offrl.errors import UserError

NOISE = 0.1  # standard deviation of a scaled score, as in MBTL's code
NEAR = 0.15  # distance over which the slope is measured
LENGTHS, VARIANCES = np.geomspace(0.01, 10.0, 31), np.geomspace(0.01, 10.0, 16)  # of the Gaussian process, tried all


def equal(count: int, budget: int) -> list[int]:
    """The variants in the middles of `budget` equal parts of `count`, the first one in the middle of all."""
    middles = [(2 * k + 1) * count // (2 * budget) for k in range(budget)]
    return sorted(middles, key=lambda i: abs(2 * i + 1 - count))


def gaussian_process(x: np.ndarray, y: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean, standard deviation) at points [M] from observations y [n] at x [n], float64: a constant times an RBF
    kernel around their mean, of the length and variance that make y most likely.
    """
    middle, gaps = float(y.mean()), np.subtract.outer(x, x) ** 2
    best: tuple[float, float, float, np.ndarray] | None = None
    for length in LENGTHS:
        for variance in VARIANCES:
            factor = np.linalg.cholesky(variance * np.exp(-0.5 * gaps / length**2) + NOISE**2 * np.eye(len(x)))
            white = np.linalg.solve(factor, y - middle)
            likelihood = float(-0.5 * white @ white - np.log(np.diag(factor)).sum())
            if best is None or likelihood > best[0] + 1e-12:
                best = likelihood, float(length), float(variance), factor
    assert best is not None
    _, length, variance, factor = best
    cross = variance * np.exp(-0.5 * np.subtract.outer(x, at) ** 2 / length**2)
    projection = np.linalg.solve(factor, cross)  # [n, M]
    mean = middle + projection.T @ np.linalg.solve(factor, y - middle)
    return mean, np.sqrt(np.maximum(variance - (projection**2).sum(0), 0.0))


def acquisition(
    mean: np.ndarray, deviation: np.ndarray, best: np.ndarray, positions: np.ndarray, slope: float, trained: int
) -> np.ndarray:
    """What training at each variant i is expected to add, [M]: mean_j max(mu_i + sqrt(log(k + 1)) sd_i - slope |c_i -
    c_j| - best_j, 0) after k trainings; best [M]: the most that any trained policy earns at j.
    """
    hope = mean + np.sqrt(np.log(trained + 1.0)) * deviation
    transfer = hope[:, None] - slope * np.abs(np.subtract.outer(positions, positions))
    return np.maximum(transfer - best, 0.0).mean(1)


def slope_of(rows: Mapping[int, np.ndarray], positions: np.ndarray) -> float:
    """The median of |J(i, i) - J(i -> j)| / |c_i - c_j| over the trained i and all j that are NEAR, or next to it:
    farther away scores lie at their floor, and the slope would seem to be small.
    """
    parts = []
    for i, row in rows.items():
        gaps = np.abs(positions - positions[i])
        near = (gaps > 0.0) & (gaps <= max(NEAR, float(np.delete(gaps, i).min())))
        parts.append(np.abs(row[i] - row[near]) / gaps[near])
    return float(np.median(np.concatenate(parts)))


def following(rows: Mapping[int, np.ndarray], positions: np.ndarray, budget: int, choose: str) -> int:
    """The variant to train on next, after those in `rows`: {i: J(i -> all) [M]}, in the order of training."""
    if choose == "equal":
        return next(i for i in equal(len(positions), budget) if i not in rows)
    if not rows:
        return equal(len(positions), 1)[0]
    scores = np.stack(list(rows.values()))
    low, span = scores.min(), np.ptp(scores) or 1.0
    scaled = {i: (row - low) / span for i, row in rows.items()}
    x, y = positions[list(rows)], np.array([row[i] for i, row in scaled.items()])
    mean, deviation = gaussian_process(x, y, positions)
    best = np.stack(list(scaled.values())).max(0)
    gains = acquisition(mean, deviation, best, positions, slope_of(scaled, positions), len(rows))
    gains[list(rows)] = -1.0
    return int(gains.argmax())


@dataclass(frozen=True)
class Bank:
    """The policies that were trained, by their variants, and which to use where."""

    matrix: np.ndarray  # [K, M]: J(i -> j) of the trained i, in the order of training
    trained: tuple[int, ...]  # [K]
    positions: np.ndarray  # [M]

    @property
    def best(self) -> np.ndarray:
        """For each variant the row of the policy that was measured to be the best there, int64 [M]."""
        return self.matrix.argmax(0)

    @property
    def nearest(self) -> np.ndarray:
        """For each variant the row of the policy that was trained nearest to it, int64 [M]."""
        return np.abs(np.subtract.outer(self.positions[list(self.trained)], self.positions)).argmin(0)

    def earned(self, rows: np.ndarray) -> np.ndarray:
        """What the policies in these rows [M] earn at the variants, [M]."""
        return self.matrix[rows, np.arange(self.matrix.shape[1])]


def train_bank(
    positions: np.ndarray,
    budget: int,
    choose: str,
    train: Callable[[int], np.ndarray],
) -> Bank:
    """Train on `budget` of the variants at `positions` [M], one after the other.

    train: of a variant's number the scores of the policy that was trained there at all of them, [M] float64. Raises
    UserError for a budget that is none.
    """
    count = len(positions)
    if count < 2:
        raise UserError("there is one variant alone, and nothing to choose: points=grid:10 has ten")
    if not 1 <= budget <= count:
        raise UserError(f"budget={budget} trainings of {count} variants: at least 1, and no more than there are")
    rows: dict[int, np.ndarray] = {}
    while len(rows) < budget:
        i = following(rows, positions, budget, choose)
        rows[i] = train(i)
    return Bank(np.stack(list(rows.values())), tuple(rows), positions)
