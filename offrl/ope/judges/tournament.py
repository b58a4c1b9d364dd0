"""Which of several value functions of one policy fits the data best: LSTD tournament and BVFT, as pure functions of
vectors.

Candidate i is two vectors over the same n rows (s, a, r, s'): q[i] = Q_i(s, a) and v[i] = Q_i(s', pi(s')), 0 where the
episode ended. Its TD error is d_i = q_i - (r + discount v_i).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offrl.errors import UserError
from offrl.ope.config import LSTD_LOSSES

SAME = 1e-10  # of the largest |q|: a spread that is rounding
COARSE, FINE, COUNT = 8, 64, 10  # BVFT's grids: range / FINE to range / COARSE, in geometric steps
CELLS = 4  # pairs of cells for each row, up to which they are counted rather than sorted


@dataclass(frozen=True)
class Bvft:
    """The outcome of a BVFT tournament of m candidates."""

    losses: np.ndarray  # [m] float64, in the rewards' units; the smallest wins
    resolution: float  # the width of the grid at which they are


def lstd_losses(q: np.ndarray, v: np.ndarray, rewards: np.ndarray, discount: float) -> dict[str, np.ndarray]:
    """The losses of m candidates, [m] float64, by every variant of the LSTD tournament (arXiv 2502.08021) and by two
    baselines.

    q, v: [m, n]; rewards: [n], all in the same units. With d_i as above, means over rows, and the largest over
    candidates j:

    - minus: |mean (q_i - q_j) d_i|; plain: |mean q_j d_i|; minus_std, plain_std: the same over the standard deviation
      of q_i - q_j, or q_j
    - hybrid: minus_std for j other than i, plain_std for j = i
    - td_square: mean d_i^2, which prefers flat functions where outcomes are random; avg_bellman: |sum d_i|

    Pairs without spread (equal candidates, or equal up to a constant) are left out of a normalised maximum, which is 0
    where no pair is left. A candidate with a value that is not finite loses: inf, and it is no opponent. Raises
    ValueError for other shapes, UserError where no candidate is finite.
    """
    q, v, rewards, able = _checked(q, v, rewards)
    out = {name: np.full(len(q), np.inf) for name in LSTD_LOSSES}
    errors = q[able] - (rewards + discount * v[able])
    for k, (i, d) in enumerate(zip(able, errors, strict=True)):
        terms: dict[str, list[float]] = {name: [0.0] for name in LSTD_LOSSES}
        for j in able:
            difference, plain = q[i] - q[j], abs(float(np.mean(q[j] * d)))
            minus = abs(float(np.mean(difference * d)))
            terms["minus"].append(minus)
            terms["plain"].append(plain)
            if spread := _spread(difference, q[i], q[j]):
                terms["minus_std"].append(minus / spread)
                terms["hybrid"].append(minus / spread)
            if spread := _spread(q[j], q[j]):
                terms["plain_std"].append(plain / spread)
                if i == j:
                    terms["hybrid"].append(plain / spread)
        terms["td_square"].append(float(np.mean(errors[k] ** 2)))
        terms["avg_bellman"].append(abs(float(np.sum(errors[k]))))
        for name, values in terms.items():
            out[name][i] = max(values)
    return out


def bvft_losses(
    q: np.ndarray,
    v: np.ndarray,
    rewards: np.ndarray,
    discount: float,
    resolutions: Sequence[float] | None = None,
    names: Sequence[str] = (),
) -> Bvft:
    """Batch value-function tournament (Xie and Jiang, arXiv 2008.04990; practical form as in arXiv 2502.08021's code).

    q, v: [m, n]; rewards: [n]. Each q_i is rounded to a grid of one width; for a pair (i, j) the rows in the same cell
    of both are one group, g is the group's mean of r + discount v_i, and the loss is sqrt(mean (q_i - g)^2); the
    largest over j (i itself too) counts. Of the widths the one at which the smallest loss is smallest is taken.

    resolutions: widths in the units of q; by default COUNT from 1/64 to 1/8 of the smallest range of a candidate.
    names: of the candidates, for messages. A candidate with a value that is not finite loses: inf. Raises ValueError
    for other shapes, UserError for a candidate that is the same in every row, whose grid would have no width, and where
    none is finite.
    """
    q, v, rewards, able = _checked(q, v, rewards)
    ranges = np.ptp(q[able], axis=1)
    for i, size in zip(able, ranges, strict=True):
        if size <= SAME * np.abs(q[i]).max():
            name = names[i] if len(names) else f"candidate {i}"
            raise UserError(
                f"bvft: {name} has the same value in all of {q.shape[1]:,} rows, which no grid divides: fit it longer, "
                "leave it out, or use method=lstd"
            )
    widths = (
        np.geomspace(ranges.min() / FINE, ranges.min() / COARSE, COUNT)
        if resolutions is None
        else np.asarray(resolutions, float)
    )
    if not len(widths) or not np.isfinite(widths).all() or widths.min() <= 0.0:
        raise ValueError(f"resolutions must be positive numbers, at least one; got {list(widths)}")
    targets = rewards + discount * v
    best: Bvft | None = None
    for width in widths:
        cells = {i: _cells(q[i], float(width)) for i in able}
        losses = np.full(len(q), np.inf)
        for i in able:
            losses[i] = max(_projected(q[i], targets[i], cells[i], cells[j]) for j in able)
        if best is None or losses.min() < best.losses.min():
            best = Bvft(losses, float(width))
    assert best is not None
    return best


def _checked(
    q: np.ndarray, v: np.ndarray, rewards: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """float64 arrays, and the numbers of the candidates that are finite: int64 [<= m]."""
    q, v, rewards = (np.asarray(x, np.float64) for x in (q, v, rewards))
    if q.ndim != 2 or v.shape != q.shape or rewards.shape != q.shape[1:] or not q.size:
        raise ValueError(
            f"q and v are [candidates, rows] and rewards [rows]; got {q.shape}, {v.shape} and {rewards.shape}"
        )
    if not np.isfinite(rewards).all():
        raise UserError("the rewards hold NaN or infinity")
    able = np.flatnonzero(np.isfinite(q).all(1) & np.isfinite(v).all(1))
    if not len(able):
        raise UserError(
            f"none of {len(q)} value functions is finite in every row: all of their fits diverged; use a smaller "
            "learning_rate"
        )
    return q, v, rewards, able


def _spread(values: np.ndarray, *of: np.ndarray) -> float:
    """The standard deviation of `values` [n] over rows; 0.0 where it is rounding, beside the vectors that they were
    made of.
    """
    std = float(values.std())
    return std if std > SAME * max(float(np.abs(x).max()) for x in of) else 0.0


def _cells(values: np.ndarray, width: float) -> np.ndarray:
    """The cell of each value on the grid min + width, min + 2 width, ... below the largest, ends clipped: int64 [n]
    from 0, dense.
    """
    low = float(values.min())
    last = max(1, int(np.ceil(float(np.ptp(values)) / width)) - 1)
    nearest_point = np.clip(np.rint((values - low) / width), 1, last).astype(np.int64)
    return np.unique(nearest_point, return_inverse=True)[1].reshape(-1)


def _projected(q: np.ndarray, targets: np.ndarray, cells: np.ndarray, other_cells: np.ndarray) -> float:
    """sqrt(mean (q - g)^2), g the mean of the targets over rows of the same cells."""
    count = int(other_cells.max()) + 1
    group = cells * count + other_cells
    if (int(cells.max()) + 1) * count > CELLS * len(group):
        group = np.unique(group, return_inverse=True)[1].reshape(-1)
    number = np.bincount(group)
    means = np.bincount(group, weights=targets) / np.maximum(number, 1)
    return float(np.sqrt(np.mean((q - means[group]) ** 2)))
