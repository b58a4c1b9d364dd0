"""SINDy: dynamics as sparse equations, a small model that can be read.

s' - s = Xi Theta(s, a), where Theta(s, a) lists products of observations and actions and few entries of Xi are not zero
(Brunton, Proctor and Kutz, arXiv 1509.03580, with controls as in arXiv 1605.06682). Terms are chosen by sequentially
thresholded least squares in an ensemble: first each member sees a bootstrap sample of the rows and a random part of the
library, and terms chosen by too few of the members that saw them leave; then each member is fitted to what is left
(library bagging, then bagging: Fasel et al., arXiv 2111.10992). The model is the median of the coefficients (SINDy-RL,
arXiv 2403.09110), with a sparse fit of the reward beside it.

Thresholds are relative: a term stays where its coefficient times its standard deviation is at least `threshold` of the
target's standard deviation, whatever the units. Coefficients, and so the printed equations, are in the data's units per
step.

`fit` runs once on the host, in float64. What it returns is a tree of plain tensors; `library`, `predict` and the rest
are pure functions of it that work under vmap and torch.compile, and compute in the coefficients' type, since
polynomials of raw units cancel. Outside the data a polynomial soon grows without bound: who rolls out cuts off at the
data's range (`offrl.world_models.model.WorldModel.to_outcome`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.errors import UserError
from offrl.settings.field import setting

Tree = dict[str, Any]

# A column whose part that is no combination of the columns before it is smaller than this, in its standard deviations,
# carries nothing: cos^2 + sin^2 = 1 leaves 1e-7 in float32.
_REDUNDANT = 3e-5
PARTS = ("dynamics", "reward")  # of a model
REWARD_DEGREE = 2  # of the reward's polynomial in observation and action


@dataclass
class SindyConfig:
    """Settings of the library of terms and of its sparsity. Defaults of `threshold`, `ridge` and `members`: SINDy-RL's
    (spec D.10).
    """

    degree: int = setting(2, "highest degree of the polynomials of the observation", low=1, high=6)
    control_degree: int = setting(
        1, "highest degree in the observation of what multiplies an action; 0: nothing does", low=0, high=6
    )
    joint_library: bool = setting(
        False, "polynomials of observation and action together up to `degree`, instead of affine in the action"
    )
    angles: list[int] = setting([], "numbers of the observations, in radians, whose sine and cosine are terms too")
    target: str = setting("delta", "delta: thresholds are relative to s' - s; next: to s'", choices=("delta", "next"))
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
    max_terms: int = setting(500, "more terms than this are refused", low=2)


def terms(observations: int, actions: int, config: SindyConfig) -> int:
    """The number of terms in the library of the dynamics, the constant included."""
    if config.joint_library:
        size = math.comb(observations + actions + config.degree, config.degree)
    else:
        size = math.comb(observations + config.degree, config.degree)
        size += actions * math.comb(observations + config.control_degree, config.control_degree)
    with_action = 0 if config.joint_library or config.control_degree == 0 else actions
    return size + 2 * len(config.angles) * (1 + with_action)


def factors(observations: int, actions: int, config: SindyConfig) -> Tensor:
    """The library of the dynamics, [T, F] int64: term t is the product of variables factors[t] of [1, s, a,
    sin(angles), cos(angles)].

    Terms are sorted by degree, so that of several that say the same the simplest comes first. Raises UserError for
    angles that are no observations, and for a library of more than `max_terms` terms, with its size and what would make
    it smaller.
    """
    for angle in config.angles:
        if not 0 <= angle < observations:
            raise UserError(f"angles names observation {angle}, and there are {observations}: 0 to {observations - 1}")
    if (count := terms(observations, actions, config)) > config.max_terms:
        small = SindyConfig(degree=1, control_degree=0, angles=config.angles)
        raise UserError(
            f"SINDy with degree={config.degree} has {count:,} terms for {observations} observations and {actions} "
            f"actions, more than max_terms={config.max_terms}: too many to choose from or to read. degree=1 "
            f"control_degree=0 has {terms(observations, actions, small):,}; an ensemble of networks (algo=dynamics) "
            "suits larger observations"
        )
    s = range(1, observations + 1)
    a = range(observations + 1, observations + actions + 1)
    waves = range(a.stop, a.stop + 2 * len(config.angles))
    factor_lists = _monomials([*s, *a] if config.joint_library else s, config.degree) + [(w,) for w in waves]
    if not config.joint_library:
        carriers = _monomials(s, config.control_degree) + ([(w,) for w in waves] if config.control_degree else [])
        factor_lists += [(*c, u) for u in a for c in carriers]
    return _padded(factor_lists)


def _monomials(variables: Sequence[int], degree: int) -> list[tuple[int, ...]]:
    return [m for d in range(degree + 1) for m in combinations_with_replacement(variables, d)]


def _padded(products: list[tuple[int, ...]]) -> Tensor:
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


def fit(
    observations: Any,
    actions: Any,
    rewards: Any,
    next_observations: Any,
    config: SindyConfig | None = None,
    seed: int = 0,
) -> tuple[Tree, list[str]]:
    """A model of s', r = f(s, a), and sentences on what a person should know about how it was found.

    observations, next_observations [N, O], actions [N, A] (discrete ones as one-hot rows), rewards [N]: rows whose
    successor is known, in any order, best in the environment's own units, in which its equations are sparse. The tree
    holds, for "dynamics" (of s' - s, D = O) and "reward" (D = 1), `factors` [T, F] int64, `scale` [T] (each term's
    standard deviation), `coefficients` [E, D, T], their `median` [D, T] and its one-step error `residual` [D] (root of
    the mean square); and `angles` [G] and `partner` [O] (the other half of a cosine and sine). Raises UserError for
    numbers that are not finite, too few rows, and as `factors` does.
    """
    config = config or SindyConfig()
    samples = (observations, actions, rewards, next_observations)
    s, a, r, nexts = (torch.as_tensor(x).detach().cpu().double().reshape(len(x), -1) for x in samples)
    for name, column in (("observations", s), ("actions", a), ("rewards", r), ("next_observations", nexts)):
        if bad := torch.nonzero(~torch.isfinite(column).all(-1)).squeeze(-1)[:1].tolist():
            raise UserError(
                f"{name} holds NaN or infinity in row {bad[0]:,}: SINDy needs finite numbers; leave the row out"
            )
    width, variables = s.shape[1], s.shape[1] + a.shape[1]
    of_reward = math.comb(variables + REWARD_DEGREE, REWARD_DEGREE)
    reward_degree = REWARD_DEGREE if of_reward <= config.max_terms else 1
    both = {
        "dynamics": (factors(width, a.shape[1], config), nexts - s if config.target == "delta" else nexts),
        "reward": (_padded(_monomials(range(1, variables + 1), reward_degree)), r),
    }
    if len(s) < 2 * len(both["dynamics"][0]):
        raise UserError(
            f"{len(s):,} rows are too few to choose among {len(both['dynamics'][0]):,} terms: lower degree, or bring "
            "more data"
        )
    tree: Tree = {"angles": torch.tensor(config.angles, dtype=torch.int64), "partner": _partners(s)}
    notes = [
        f"obs[{i}] and obs[{j}] are a cosine and a sine: put back on the circle after each step"
        for i, j in enumerate(tree["partner"].tolist())
        if i < j
    ]
    if reward_degree < REWARD_DEGREE:
        notes.append(
            f"the reward is linear in observation and action: degree {REWARD_DEGREE} has over {config.max_terms} terms"
        )
    for index, (name, (chosen, targets)) in enumerate(both.items()):
        key = rng.fold_in(rng.make_key(seed), index)
        tree[name], redundant = _fit(chosen, s, a, targets, tree["angles"], config, key)
        if name == "dynamics" and redundant:
            labels = _names(tree["angles"], width, a.shape[1])
            redundant_terms = [_product(chosen[t], labels) for t in redundant]
            more = f" and {len(redundant_terms) - 6} more" if len(redundant_terms) > 6 else ""
            notes.append(
                f"left out, being combinations of simpler terms in these data: {', '.join(redundant_terms[:6])}{more}"
            )
            one_hot = ((a == 0) | (a == 1)).all() and (a.sum(1) == 1).all()
            if idle := [
                x for x in redundant_terms if x.startswith("act[") and " " not in x and "^" not in x and not one_hot
            ]:
                notes.append(
                    f"these data do not tell what {', '.join(idle)} does: it is constant or follows from the "
                    "observation"
                )
    if config.target == "next":
        terms = both["dynamics"][0]
        alone = (terms[:, 1:] == 0).all(-1) & (terms[:, 0] > 0)
        # [O, T]: 1 where a term is the observation itself
        identity_terms = ((terms[:, 0] == torch.arange(1, width + 1)[:, None]) & alone).double()
        for part in ("coefficients", "median"):
            tree["dynamics"][part] = tree["dynamics"][part] - identity_terms
    return tree, notes


def _fit(
    terms: Tensor, s: Tensor, a: Tensor, targets: Tensor, angles: Tensor, config: SindyConfig, key: Tensor
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


def _partners(observations: Tensor) -> Tensor:
    """For each observation the one with which it lies on the unit circle, or itself: [O] int64."""
    partner, squares = torch.arange(observations.shape[1]), observations**2
    for i in range(len(partner)):
        for j in range(i + 1, len(partner)):
            free = partner[i] == i and partner[j] == j
            if free and (squares[:, i] + squares[:, j] - 1.0).abs().max() < 1e-3 and squares[:, i].std() > 1e-3:
                partner[i], partner[j] = j, i
    return partner


def predict(tree: Tree, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Next observations [..., O] and rewards [...] by the median coefficients, for observations [..., O] and actions
    [..., A].
    """
    nexts, rewards = _evaluate(tree, observations, actions, *(tree[k]["median"].unsqueeze(0) for k in PARTS))
    return nexts[0], rewards[0]


def predict_members(tree: Tree, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Each member's next observations [E, ..., O] and rewards [E, ...]."""
    return _evaluate(tree, observations, actions, *(tree[k]["coefficients"] for k in PARTS))


def _evaluate(tree: Tree, observations: Tensor, actions: Tensor, *coefficients: Tensor) -> tuple[Tensor, Tensor]:
    kind = coefficients[0].dtype
    s, a = observations.to(kind), actions.to(kind)
    change, rewards = (
        torch.einsum("edt,...t->e...d", xi, library(tree[k]["factors"], s, a, tree["angles"]))
        for k, xi in zip(PARTS, coefficients, strict=True)
    )
    return _on_circle(tree, s + change).to(observations.dtype), rewards[..., 0].to(observations.dtype)


def _on_circle(tree: Tree, nexts: Tensor) -> Tensor:
    """Cosines and sines divided by their length."""
    other = nexts[..., tree["partner"]]
    length = torch.sqrt((nexts**2 + other**2).clamp(min=1e-12))  # before the root, whose derivative at 0 is infinite
    return torch.where(tree["partner"] == torch.arange(nexts.shape[-1], device=nexts.device), nexts, nexts / length)


def equations(tree: Tree) -> list[str]:
    """The model to read: a line for each observation's change in one step, and the reward's.

    Terms are sorted by the size of their effect in the data, the constant last. A coefficient has as many digits as the
    members agree on, two to five."""
    width, lines = len(tree["partner"]), []
    labels = _names(tree["angles"], width, int(tree["reward"]["factors"].max()) - width)
    for part in PARTS:
        terms, members, median = (tree[part][k].cpu() for k in ("factors", "coefficients", "median"))
        spread = members.std(0, unbiased=False)
        effect = median.abs() * tree[part]["scale"].cpu()
        for d in range(len(median)):
            line = ""
            for t in effect[d].argsort(descending=True, stable=True).tolist():
                if median[d, t] != 0:
                    value = _digits(abs(float(median[d, t])), float(spread[d, t]), len(members))
                    sign = "-" if median[d, t] < 0 else "+"
                    text = " ".join(filter(None, [value, _product(terms[t], labels)])).removeprefix("1 ")
                    line += f" {sign} {text}" if line else ("-" if sign == "-" else "") + text
            lines.append(f"{'reward' if part == 'reward' else f'd {labels[d + 1]}'} = {line or '0'}")
    return lines


def _digits(value: float, spread: float, members: int) -> str:
    agreed = 4 if members == 1 else 5 if spread == 0.0 else math.floor(math.log10(value / spread)) + 1
    return f"{value:.{min(5, max(2, agreed))}g}"


def _names(angles: Tensor, width: int, action_width: int) -> list[str]:
    """The names of all variables of `library`; the number 1 has none."""
    names = [f"obs[{i}]" for i in range(width)] + [f"act[{i}]" for i in range(action_width)]
    turned = [names[i] for i in angles.tolist()]
    return ["", *names, *(f"sin({x})" for x in turned), *(f"cos({x})" for x in turned)]


def _product(term: Tensor, labels: Sequence[str]) -> str:
    """A term's name: "obs[0]^2 act[1]"; empty for the constant."""
    used = [v for v in term.tolist() if v > 0]
    return " ".join(labels[v] + (f"^{used.count(v)}" if used.count(v) > 1 else "") for v in dict.fromkeys(used))
