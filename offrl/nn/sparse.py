"""Sparse regression on products of variables: the library of terms, the choice of the few that count, how they read.

Terms are chosen by sequentially thresholded least squares in an ensemble: first each member sees a bootstrap sample of
the rows and a random part of the library, and terms chosen by too few of the members that saw them leave; then each
member is fitted to what is left (library bagging, then bagging: Fasel et al., arXiv 2111.10992). `threshold` is
relative: a term stays where its coefficient times its standard deviation is at least that share of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.settings.field import setting

# A column whose part that is no combination of the columns before it is smaller than this, in its standard deviations,
# carries nothing: cos^2 + sin^2 = 1 leaves 1e-7 in float32.
_REDUNDANT = 3e-5


@dataclass
class SparseSettings:
    """Settings of the choice of terms. Defaults of `threshold`, `ridge` and `members`: SINDy-RL's (spec D.10)."""

    threshold: float = setting(
        7e-3, "a term's smallest effect, in standard deviations of what it explains", low=0.0, high=1.0, shared=True
    )
    ridge: float = setting(5e-5, "ridge penalty while terms are chosen; the last fit has none", low=0.0, shared=True)
    iterations: int = setting(10, "most rounds of thresholding", low=1)
    members: int = setting(20, "members of the ensemble; 1: one fit to all rows, without bagging", low=1)
    term_dropout: float = setting(
        0.1, "share of the terms hidden from each member while terms are chosen", low=0.0, high=0.9, shared=True
    )
    min_z_score: float = setting(
        3.0, "a term's smallest coefficient, in standard deviations over the members; 0: any", low=0.0, shared=True
    )
    rows: int = setting(20_000, "most rows in a member's bootstrap sample", low=10)


def monomials(variables: Sequence[int], degree: int) -> list[tuple[int, ...]]:
    return [m for d in range(degree + 1) for m in combinations_with_replacement(variables, d)]


def padded(products: list[tuple[int, ...]]) -> Tensor:
    """Sorted by degree, filled up with variable 0, which is the number 1."""
    products = sorted(products, key=len)
    return torch.tensor([[*m, *[0] * (len(products[-1]) - len(m))] for m in products], dtype=torch.int64).reshape(
        len(products), -1
    )


def library(terms: Tensor, observations: Tensor, actions: Tensor, angles: Tensor) -> Tensor:
    """Theta(s, a) [..., T] of observations [..., O] and actions [..., A]; `terms` [T, F] as from `factors`, `angles`
    [G] int64.
    """
    turned = observations[..., angles]
    values = torch.cat(
        [torch.ones_like(observations[..., :1]), observations, actions, torch.sin(turned), torch.cos(turned)], -1
    )
    product = values[..., terms[:, 0]]
    for k in range(1, terms.shape[1]):  # not prod(), whose derivative looks for zeros on the host
        product = product * values[..., terms[:, k]]
    return product


def regress(
    terms: Tensor, s: Tensor, a: Tensor, targets: Tensor, angles: Tensor, config: SparseSettings, key: Tensor
) -> tuple[dict[str, Tensor], list[int]]:
    """One sparse regression with its ensemble, and which terms were redundant."""
    count, total, keys = min(len(s), config.rows), len(s), rng.split(key, 3)
    sample = torch.arange(total) if total == count else rng.uniform(keys[0], (total,)).argsort(stable=True)[:count]
    theta = library(terms, s[sample], a[sample], angles)
    deviation = theta.std(0, unbiased=False)
    # a constant column, the library's first among them, is measured by its size, and so are targets that never change
    scale = torch.where(deviation > 1e-9 * theta.abs().amax(0), deviation, theta.abs().amax(0))
    scale = torch.where(scale > 0, scale, 1.0)
    size, spread = targets[sample].abs().amax(0), targets[sample].std(0, unbiased=False)
    unit = torch.where(spread > 1e-9 * size, spread, torch.where(size > 0, size, 1.0))

    def reduced(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows as the triangle that has the same least-squares problems: columns of terms, columns of targets."""
        matrix = torch.cat([library(terms, s[rows], a[rows], angles) / scale, targets[rows] / unit], 1)
        triangle = torch.linalg.qr(matrix, mode="r").R
        return triangle[:, : len(terms)], triangle[:, len(terms) :]

    data_problem = reduced(sample)
    independent = _independent(data_problem[0] / math.sqrt(count))
    offered = independent.expand(targets.shape[1], -1)

    # the constant is free, or 1 would be had cheaper as 2 h / m - h^2 / m^2 of an h that is always near m
    penalty = torch.full((len(terms),), config.ridge, dtype=scale.dtype).index_fill(0, torch.tensor([0]), 0.0)

    def solve(problem: tuple[Tensor, Tensor], offered: Tensor) -> Tensor:
        return stlsq(*problem, offered, config.threshold, penalty, config.iterations)

    if config.members == 1:
        solutions = solve(data_problem, offered)[None]
    else:
        problems = [reduced(rng.randint(rng.fold_in(keys[1], e), (count,), total)) for e in range(config.members)]
        visible = independent & torch.stack(
            [_visible(keys[2], e, len(terms), config.term_dropout) for e in range(config.members)]
        )
        votes = torch.stack([solve(p, visible[e].expand_as(offered)) != 0 for e, p in enumerate(problems)]).sum(0)
        stable = offered & (2 * votes >= visible.sum(0)) & (votes > 0)
        stable = torch.where(visible.any(0), stable, offered)  # a term that no member saw has not been judged
        solutions = _certain(problems, stable, solve, config.min_z_score)
    coefficients = _rounded(solutions * unit[:, None] / scale)
    median = torch.from_numpy(np.median(coefficients.numpy(), 0))  # torch.median takes the lower of two middle values
    residual = _rounded((targets[sample] - theta @ median.mT).square().mean(0).sqrt())
    part = {"factors": terms, "scale": torch.where(deviation > 1e-9 * scale, deviation, 0.0), "residual": residual}
    return part | {"coefficients": coefficients, "median": median}, torch.nonzero(~independent).squeeze(-1).tolist()


def _rounded(x: Tensor) -> Tensor:
    """To 30 bits, nine digits: LAPACK's last bits depend on where its memory lies, and one seed should give one
    model.
    """
    mantissa, exponent = np.frexp(x.numpy())
    return torch.from_numpy(np.ldexp(np.round(mantissa * 2.0**30), exponent - 30))


def _certain(
    problems: list[tuple[Tensor, Tensor]], stable: Tensor, solve: Callable[..., Tensor], min_z_score: float
) -> Tensor:
    """Each member's coefficients [E, D, T], once terms smaller than `min_z_score` times their spread over the members
    have left.

    The most doubtful quarter leaves at a time: of two terms that stand in for each other both look doubtful, and one is
    needed."""
    solutions = torch.stack([solve(p, stable) for p in problems])
    while min_z_score > 0.0:
        ratio = solutions.mean(0).abs() / solutions.std(0).clamp(min=1e-300)
        weak = (solutions != 0).any(0) & (ratio < min_z_score)
        touched = torch.nonzero(weak.any(1)).squeeze(-1)
        if len(touched) == 0:
            break
        for d in touched.tolist():
            order = torch.where(weak[d], ratio[d], torch.inf).argsort(stable=True)
            stable[d, order[: math.ceil(int(weak[d].sum()) / 4)]] = False
        for e, (columns, targets) in enumerate(problems):
            solutions[e, touched] = solve((columns, targets[:, touched]), stable[touched])
    return solutions


def _visible(key: Tensor, member: int, count: int, dropout: float) -> Tensor:
    """All but a random share `dropout` of the terms, never hiding the constant."""
    order = rng.uniform(rng.fold_in(key, member), (count,)).index_fill(0, torch.tensor([0]), 2.0).argsort(stable=True)
    return torch.ones(count, dtype=torch.bool).index_fill(0, order[: min(count - 1, math.ceil(dropout * count))], False)


def _independent(columns: Tensor) -> Tensor:
    """The columns of [R, T] that are no linear combination of those before them, bool [T]: Gram-Schmidt, twice for its
    rounding.
    """
    basis, independent = columns.new_zeros(len(columns), 0), torch.zeros(columns.shape[1], dtype=torch.bool)
    for t in range(columns.shape[1]):
        residual = columns[:, t]
        for _ in range(2):
            residual = residual - basis @ (basis.mT @ residual)
        if (length := residual.norm()) > _REDUNDANT:
            basis, independent[t] = torch.cat([basis, (residual / length)[:, None]], 1), True
    return independent


def stlsq(matrix: Tensor, targets: Tensor, offered: Tensor, threshold: float, ridge: Tensor, iterations: int) -> Tensor:
    """Sequentially thresholded least squares: coefficients [D, T] of targets [N, D] on the `offered` (bool [D, T])
    columns of [N, T].

    Ridge regression with penalties [T]; coefficients below `threshold` leave; again on the others until none leaves.
    Those that stay are fitted without the penalty, which only serves to choose.
    """
    coefficients, below = matrix.new_zeros(offered.shape), torch.diag(ridge.sqrt())
    for d, use in enumerate(offered):
        for _ in range(iterations):
            index = torch.nonzero(use).squeeze(-1)
            penalised = torch.cat([matrix[:, index], below[index][:, index]])
            target = torch.cat([targets[:, d], matrix.new_zeros(len(index))])[:, None]
            solution = torch.linalg.lstsq(penalised, target, driver="gelsy").solution[:, 0]
            large = solution.abs() >= threshold
            use = torch.zeros_like(use).index_fill(0, index[large], True)
            if large.all():
                break
        index = torch.nonzero(use).squeeze(-1)
        coefficients[d, index] = torch.linalg.lstsq(matrix[:, index], targets[:, d, None], driver="gelsy").solution[
            :, 0
        ]
    return coefficients


def formula(terms: Tensor, members: Tensor, median: Tensor, scale: Tensor, labels: Sequence[str]) -> str:
    """The sum of the terms [T, F] whose coefficient in `median` [T] is not 0, by the size of their effect in data where
    they have the deviations `scale` [T].

    A coefficient has as many digits as the members [E, T] agree on, two to five; labels: of the variables of `library`.
    """
    spread, line = members.std(0, unbiased=False), ""
    for t in (median.abs() * scale).argsort(descending=True, stable=True).tolist():
        if median[t] != 0:
            value = _digits(abs(float(median[t])), float(spread[t]), len(members))
            sign = "-" if median[t] < 0 else "+"
            text = " ".join(filter(None, [value, product(terms[t], labels)])).removeprefix("1 ")
            line += f" {sign} {text}" if line else ("-" if sign == "-" else "") + text
    return line or "0"


def _digits(value: float, spread: float, members: int) -> str:
    agreed = 4 if members == 1 else 5 if spread == 0.0 else math.floor(math.log10(value / spread)) + 1
    return f"{value:.{min(5, max(2, agreed))}g}"


def product(term: Tensor, labels: Sequence[str]) -> str:
    """A term's name: "obs[0]^2 act[1]"; empty for the constant."""
    used = [v for v in term.tolist() if v > 0]
    return " ".join(labels[v] + (f"^{used.count(v)}" if used.count(v) > 1 else "") for v in dict.fromkeys(used))
