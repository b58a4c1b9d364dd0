"""SINDy: dynamics as sparse equations, a small model that can be read.

s' - s = Xi Theta(s, a), where Theta(s, a) lists products of observations and actions and few entries of Xi are not zero
(Brunton, Proctor and Kutz, arXiv 1509.03580, with controls as in arXiv 1605.06682), chosen as in `offrl.nn.sparse`. The
model is the median of the coefficients (SINDy-RL, arXiv 2403.09110), with a sparse fit of the reward beside it.
Coefficients, and so the printed equations, are in the data's units per step.

`fit` runs once on the host, in float64. What it returns is a tree of plain tensors; `predict` and the rest
are pure functions of it that work under vmap and torch.compile, and compute in the coefficients' type, since
polynomials of raw units cancel. Outside the data a polynomial soon grows without bound: who rolls out cuts off at the
data's range (`offrl.world_models.model.WorldModel.to_outcome`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.errors import UserError
from offrl.nn.sparse import SparseSettings, formula, library, monomials, padded, product, regress
from offrl.settings.field import setting

Tree = dict[str, Any]

PARTS = ("dynamics", "reward")  # of a model
REWARD_DEGREE = 2  # of the reward's polynomial in observation and action


@dataclass
class SindyConfig(SparseSettings):
    """Settings of the library of terms and of its sparsity."""

    degree: int = setting(2, "highest degree of the polynomials of the observation", low=1, high=6)
    control_degree: int = setting(
        1, "highest degree in the observation of what multiplies an action; 0: nothing does", low=0, high=6
    )
    joint_library: bool = setting(
        False, "polynomials of observation and action together up to `degree`, instead of affine in the action"
    )
    angles: list[int] = setting([], "numbers of the observations, in radians, whose sine and cosine are terms too")
    target: str = setting("delta", "delta: thresholds are relative to s' - s; next: to s'", choices=("delta", "next"))
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
    factor_lists = monomials([*s, *a] if config.joint_library else s, config.degree) + [(w,) for w in waves]
    if not config.joint_library:
        carriers = monomials(s, config.control_degree) + ([(w,) for w in waves] if config.control_degree else [])
        factor_lists += [(*c, u) for u in a for c in carriers]
    return padded(factor_lists)


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
        "reward": (padded(monomials(range(1, variables + 1), reward_degree)), r),
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
        tree[name], redundant = regress(chosen, s, a, targets, tree["angles"], config, key)
        if name == "dynamics" and redundant:
            labels = _names(tree["angles"], width, a.shape[1])
            redundant_terms = [product(chosen[t], labels) for t in redundant]
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
        terms, members, median, scale = (tree[part][k].cpu() for k in ("factors", "coefficients", "median", "scale"))
        for d in range(len(median)):
            line = formula(terms, members[:, d], median[d], scale, labels)
            lines.append(f"{'reward' if part == 'reward' else f'd {labels[d + 1]}'} = {line}")
    return lines


def _names(angles: Tensor, width: int, action_width: int) -> list[str]:
    """The names of all variables of `library`; the number 1 has none."""
    names = [f"obs[{i}]" for i in range(width)] + [f"act[{i}]" for i in range(action_width)]
    turned = [names[i] for i in angles.tolist()]
    return ["", *names, *(f"sin({x})" for x in turned), *(f"cos({x})" for x in turned)]
