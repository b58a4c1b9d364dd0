"""The quality of a trained model: errors one and many steps ahead, calibration of its intervals, and detection of
unknown inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.data.dataset import Dataset
from offrl.world_models.model import Prediction, Tree, evenly_spread, past_at, predict_rows
from offrl.world_models.uncertainty import fault, measure, names, prepare

LEVELS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)  # of central intervals
ROWS = 20_000  # looked at, at most, evenly spread
NUMBERS = 20_000_000  # held at once at most: rows x elites x dimensions
HORIZON = 50  # steps ahead
STARTS = 256  # of rollouts along recorded actions
CHUNK = 4096  # rows that the networks are given at once
FEWEST = 30  # rows that a scale is worth finding from
OOD_ROWS = 5_000  # of each of two datasets that are told apart, at most
WIDEST = 1e6  # largest and, inverted, smallest scale


class Held(NamedTuple):
    """Predictions of K elites at R held-out rows, and the outcomes; the reward is the last of D."""

    mean: Tensor  # [K, R, D]
    std: Tensor  # [K, R, D], as learnt: never calibrated
    target: Tensor  # [R, D]
    before: Tensor  # [R, D - 1] the observations


def look(model: Any, tree: Tree, dataset: Dataset, rows: Tensor) -> tuple[Held, Prediction]:
    """The elites' predictions at `rows`, with standard deviations as learnt, beside what came, and as a
    `Prediction`.
    """
    plain = {**tree, "scale": torch.ones_like(tree["scale"])}
    parts = [
        prediction.each(lambda x: x[tree["elites"]])
        for _, _, prediction in predict_rows(model, plain, dataset, rows, CHUNK)
    ]
    elites = Prediction(*(None if x[0] is None else torch.cat(x, 1) for x in zip(*parts, strict=True)))  # type: ignore[arg-type]
    mean = torch.cat([elites.mean, elites.reward.unsqueeze(-1)], -1)
    std = torch.cat([elites.std, elites.reward_std.unsqueeze(-1)], -1)
    following = dataset.flat("next_observations")[rows].float()
    target = torch.cat([following, dataset.columns["rewards"][rows].unsqueeze(-1)], -1)
    return Held(mean, std, target, dataset.flat("observations")[rows].float()), elites


def own_deviations(model: Any) -> bool:
    """True where the model predicts standard deviations; an ensemble that learns none has 1 everywhere, which only
    `scales` make real.
    """
    return model.kind != "ensemble" or model.config.loss == "likelihood"


def room(tree: Tree, model: Any) -> int:
    """The number of rows that may be predicted at once."""
    return min(ROWS, NUMBERS // (len(tree["elites"]) * model.out_dim))


# ---- intervals


def central(predictions: Held, scale: Tensor | float = 1.0) -> Tensor:
    """The level of the smallest central interval that holds what came, [R, D] in [0, 1]: |2 F(y) - 1|, where F is the
    distribution function of the elites' uniform mixture with standard deviations times `scale` ([D])."""
    u = torch.special.ndtr((predictions.target - predictions.mean) / (predictions.std * scale)).mean(0)
    return (2.0 * u - 1.0).abs()


def coverage(level: Tensor, targets: Tensor | None = None) -> Tensor:
    """The share of rows inside the central interval of each of LEVELS, [D, L]; `level` is `central`'s. targets: the
    levels [D, L] at which these intervals are asked for, as `levels` finds them."""
    return (level.unsqueeze(-1) <= (torch.tensor(LEVELS) if targets is None else targets)).float().mean(0)


def scales(model: Any, tree: Tree, dataset: Dataset, rows: Tensor) -> Tensor:
    """The factor for each output's standard deviation, [D], with which central intervals cover best what they should at
    `rows`.

    It makes the mean square of (share covered - level), over all levels alike, least (the Cramer-von Mises distance of
    `central` from a uniform number). The likelihood would be a proper score too, but its best factor is the root mean
    square of the errors in standard deviations: a few gross errors (contacts) decide that, and intervals become too
    wide nearly everywhere. It has a say all the same: factors that make these rows less likely than the factor 1 does
    are left out. Where the elites' means differ by more than their error, the levels alone would be matched best by a
    mixture of spikes. Of equals the factor nearest to 1 is taken (the smallest, where the model has no deviations of
    its own). From fewer than FEWEST rows no factor is found: 1, or then the root mean square of the errors."""
    predictions, _ = look(model, tree, dataset, evenly_spread(rows, room(tree, model)))
    gaussian = own_deviations(model)
    if len(rows) < FEWEST:
        return (
            torch.ones(model.out_dim)
            if gaussian
            else (predictions.mean.mean(0) - predictions.target).square().mean(0).sqrt().clamp(min=1.0 / WIDEST)
        )
    uniform = (torch.arange(len(predictions.target)) + 0.5).unsqueeze(-1) / len(predictions.target)

    least = nll(predictions)

    def distance(logarithm: Tensor) -> Tensor:
        scale = torch.exp(logarithm)
        level = central(predictions, scale).sort(0).values
        # 1: farther than any two distributions are
        unlikely = torch.where(nll(predictions, scale) > least + 1e-6, 1.0, 0.0)
        tie = logarithm.double().square() if gaussian else logarithm.double()
        return unlikely + (level - uniform).double().square().mean(0) + 1e-6 * tie

    def best(grid: Tensor) -> Tensor:  # [G, D] of logarithms
        return grid.gather(0, torch.stack([distance(row) for row in grid]).argmin(0, keepdim=True))[0]

    edge, points = float(np.log(WIDEST)), 101
    coarse = best(torch.linspace(-edge, edge, points).unsqueeze(-1).expand(points, model.out_dim))
    step = 2.0 * edge / (points - 1)
    return torch.exp(best(coarse + torch.linspace(-step, step, 41).unsqueeze(-1)))


def levels(model: Any, tree: Tree, dataset: Dataset, rows: Tensor) -> Tensor:
    """For each output the level at which to ask for a central interval so that it covers each of LEVELS at `rows`: [D,
    L].

    The quantiles of `central`, which is what recalibrated regression comes to for central intervals (arXiv 1807.00263,
    algorithm 1): errors with heavier tails than a Gaussian's need another factor at each level, and `scales` has one.
    From fewer than FEWEST rows: LEVELS."""
    nominal = torch.tensor(LEVELS)
    if len(rows) < FEWEST:
        return nominal.expand(model.out_dim, -1).clone()
    predictions, _ = look(model, tree, dataset, evenly_spread(rows, room(tree, model)))
    return torch.quantile(central(predictions, tree["scale"]), nominal, dim=0).T.contiguous()


def nll(predictions: Held, scale: Tensor | float = 1.0) -> Tensor:
    """-log of the mixture's density at what came, mean over rows, [D], in nats."""
    std = predictions.std.double() * scale
    z = (predictions.target - predictions.mean).double() / std
    each = -0.5 * z.square() - std.log() - 0.5 * np.log(2.0 * np.pi)
    return -(torch.logsumexp(each, 0) - np.log(len(each))).mean(0)


# ---- one step


def one_step(model: Any, tree: Tree, dataset: Dataset, rows: Tensor) -> dict[str, Any]:
    """Errors, likelihoods and coverage one step ahead, for each dimension."""
    predictions, _ = look(model, tree, dataset, rows)
    error = (predictions.mean.mean(0) - predictions.target).double()
    square = error.square().mean(0)
    change = torch.cat([predictions.target[:, :-1] - predictions.before, predictions.target[:, -1:]], -1).double()
    scale = tree["scale"]
    return {
        "rmse": square.sqrt().tolist(),
        "r2": _explained(square, predictions.target.double()),
        "r2_change": _explained(square, change),
        "nll": nll(predictions).tolist(),
        "nll_calibrated": nll(predictions, scale).tolist(),
        "scale": scale.tolist(),
        "coverage": coverage(central(predictions)).tolist(),
        "coverage_calibrated": coverage(central(predictions, scale)).tolist(),
        "coverage_recalibrated": coverage(central(predictions, scale), tree.get("levels")).tolist(),
    }


def _explained(square: Tensor, target: Tensor) -> list[float]:
    """1 - error's mean square / variance for each dimension; NaN where the data are constant."""
    variance = target.var(0, unbiased=False)
    return torch.where(variance > 1e-12 * (1.0 + target.square().mean(0)), 1.0 - square / variance, torch.nan).tolist()


def endings(model: Any, tree: Tree, dataset: Dataset, rows: Tensor) -> dict[str, Any]:
    """Precision and recall of terminations: learnt ones at probability 0.5, or the known function's at the mean next
    observation.

    `rows` may be some whose next observation is not recorded.
    """
    predictions, elites = look(model, tree, dataset, rows)
    recorded = dataset.columns["terminations"][rows]
    if elites.ending is not None:
        predicted = elites.ending.sigmoid().mean(0) > 0.5
    else:
        following = predictions.mean.mean(0)[:, :-1]
        predicted = registry.get("termination", model.config.termination)(
            *model.to_dataset_units(predictions.before, dataset.columns["actions"][rows], following)
        )
    hits, positives, terminals = (int(x.sum()) for x in (predicted & recorded, predicted, recorded))
    return {
        "function": model.config.termination,
        "rows": len(rows),
        "recorded": terminals,
        "predicted": positives,
        "precision": hits / positives if positives else None,
        "recall": hits / terminals if terminals else None,
    }


# ---- many steps


def starts_of(dataset: Dataset, allowed: Tensor) -> tuple[Tensor, int]:
    """Rows (of `allowed`, bool [R]) to roll out from, all with as many recorded steps ahead as the second number says:
    HORIZON, or fewer where fewer than half of the rows (and than half of STARTS) have so many. No row, and 0, where no
    successor is known."""
    known = dataset.columns["successor_known"].numpy()
    ends = np.repeat(dataset.episode_end.numpy(), dataset.episode_lengths().numpy())
    stop = np.minimum.accumulate(np.where(known, ends, np.arange(len(known)))[::-1])[::-1]
    ahead = np.where(allowed.numpy(), stop - np.arange(len(known)), 0)
    enough = min(STARTS // 2, -(-int((ahead > 0).sum()) // 2))
    if not enough:
        return torch.zeros(0, dtype=torch.int64), 0
    horizon = max(k for k in range(1, HORIZON + 1) if int((ahead >= k).sum()) >= enough)
    return evenly_spread(torch.from_numpy(np.nonzero(ahead >= horizon)[0]), STARTS), horizon


def many_steps(model: Any, tree: Tree, dataset: Dataset, allowed: Tensor) -> dict[str, Any] | None:
    """Errors of rollouts along recorded actions, cut off at the data's range as all rollouts are: of the elites' mean,
    and of samples (a random elite and noise in each step, as algorithms draw them), beside those of "nothing changes".

    An error is the root of the mean over dimensions of squares, each in the data's standard deviations: its median over
    starts and the band that holds 80% of them, for each number of steps. "rmse" [H, O] of the mean is in the
    dimensions' own units, as is "return_rmse" [H], of the sum of rewards. None where there is nothing to start from.
    """
    starts, horizon = starts_of(dataset, allowed)
    if not horizon:
        return None
    columns = {n: dataset.flat(n) for n in ("observations", "next_observations")}
    deviation = columns["observations"].float().std(0, unbiased=False)
    unit = torch.where(deviation < 1e-12, torch.ones_like(deviation), deviation)
    first = columns["observations"][starts].float()
    real = torch.stack([columns["next_observations"][starts + k].float() for k in range(horizon)])  # [H, B, O]
    earned = torch.stack([dataset.columns["rewards"][starts + k] for k in range(horizon)]).cumsum(0)
    result: dict[str, Any] = {"horizon": horizon, "starts": len(starts), "std": deviation.tolist()}
    for kind in ("mean", "sampled"):
        states, rewards = roll(model, tree, dataset, starts, horizon, kind == "sampled")
        result[kind] = bands((states - real) / unit)
        if kind == "mean":
            result["rmse"] = (states - real).double().square().mean(1).sqrt().tolist()
            result["return_rmse"] = (rewards.cumsum(0) - earned).double().square().mean(1).sqrt().tolist()
    result["unchanged"] = bands((first - real) / unit)
    return result


def roll(
    model: Any, tree: Tree, dataset: Dataset, starts: Tensor, horizon: int, sampled: bool
) -> tuple[Tensor, Tensor]:
    """Observations [H, B, O] and rewards [H, B] that the model expects from rows `starts` on, under the actions
    recorded there.
    """
    observations = dataset.flat("observations")[starts].float()
    past, root = past_at(model, dataset, starts), rng.make_key(0)
    states, rewards = [], []
    for k in range(horizon):
        actions, key = dataset.columns["actions"][starts + k], rng.fold_in(root, k)
        prediction = model.predict(tree, observations, actions, past)
        if sampled:
            outcome = model.outcome(tree, prediction, observations, actions, key)
        else:
            one = prediction.each(lambda x: x[tree["elites"]].mean(0, keepdim=True))
            outcome = model.to_outcome(tree, one, observations, actions, one.mean[0], one.reward[0], key)
        past = model.later_past(past, observations, actions)
        observations = outcome.next_observations
        states.append(observations)
        rewards.append(outcome.rewards)
    return torch.stack(states), torch.stack(rewards)


def bands(errors: Tensor) -> dict[str, list[float]]:
    """Quantiles over B, for each of H steps, of the size of [H, B, O] errors in standard deviations."""
    size = errors.double().square().mean(-1).sqrt()
    low, median, high = torch.quantile(size, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), 1).tolist()
    return {"median": median, "low": low, "high": high}


# ---- what it does not know


def auroc(inside: Tensor, outside: Tensor) -> float:
    """The probability that a score outside [m] is larger than one inside [n], equal ones counted half."""
    ordered, outside = inside.double().sort().values, outside.double()
    below = torch.searchsorted(ordered, outside) + torch.searchsorted(ordered, outside, right=True)
    return float(below.double().mean()) / (2 * len(inside))


def ood(
    model: Any,
    tree: Tree,
    inside: Dataset,
    outside: Dataset,
    rows: Tensor | None = None,
) -> dict[str, float]:
    """The AUROC with which each measure of uncertainty tells rows of `outside` from those of `inside`: 0.5 is chance, 1
    always.

    rows: which of `inside` to compare, by default all; OOD_ROWS of each, evenly spread, are taken. Give rows that the
    model was not trained on, or it looks surer than it is. "single" is a lone member's norm of standard
    deviations, all a single network can say: the mean over members of each one's AUROC. Measures that say nothing about
    this model are left out.
    """
    if rows is not None and "density" not in tree:  # fitted to what is not compared
        all_rows = inside.transition_rows()
        remaining_rows = all_rows[~torch.isin(all_rows, rows)]
        tree = prepare("density", model, tree, inside, remaining_rows if len(remaining_rows) else rows)
    kinds = [name for name in names() if not fault(name, model)]
    measures: dict[str, list[list[Tensor]]] = {name: [[], []] for name in kinds}
    alone: list[list[Tensor]] = [[], []]
    for name in kinds:
        tree = prepare(name, model, tree, inside)
    for i, (dataset, subset) in enumerate(((inside, rows), (outside, None))):
        chosen = evenly_spread(dataset.transition_rows() if subset is None else subset, OOD_ROWS)
        for o, a, prediction in predict_rows(model, tree, dataset, chosen, CHUNK):
            for name in kinds:
                measures[name][i].append(measure(name)(model, tree, prediction, o, a))
            alone[i].append((prediction.std.square().sum(-1) + prediction.reward_std.square()).sqrt())
    result = {name: auroc(torch.cat(a), torch.cat(b)) for name, (a, b) in measures.items()}
    if "aleatoric" in kinds and model.members > 1:
        one, two = (torch.cat(x, 1) for x in alone)
        result["single"] = float(np.mean([auroc(a, b) for a, b in zip(one, two, strict=True)]))
    return result


# ---- all of it


class Sample(NamedTuple):
    """The data that a model is measured on."""

    rows: Tensor  # one step ahead: the next observation is known
    ends: Tensor  # whether the episode ends there is known
    allowed: Tensor  # bool [R]: where rollouts may begin
    description: str


def sample(dataset: Dataset, parts: Any) -> Sample:
    """The episodes kept apart (`parts.test`); where there are none the rows held out for early stopping
    (`parts.held_out`).
    """
    known = dataset.columns["successor_known"]
    if len(parts.test):
        apart = torch.zeros(len(dataset), dtype=torch.bool)
        for e in parts.test.tolist():
            apart[dataset.episode_start[e] : dataset.episode_end[e]] = True
        rows = torch.nonzero(apart & known).squeeze(-1)
        if len(rows):
            ends = dataset.transition_rows()
            return Sample(
                rows,
                ends[apart[ends]],
                apart,
                f"{len(parts.test):,} episode{'s' * (len(parts.test) > 1)} that it was not trained on",
            )
    allowed = torch.zeros(len(dataset), dtype=torch.bool)
    allowed[parts.held_out] = True
    description = (
        f"{len(parts.held_out):,} rows held out for early stopping (no episode was kept apart; many steps run through "
        "rows it was trained on)"
    )
    return Sample(parts.held_out, parts.held_out, allowed, description)


def measured(model: Any, tree: Tree, dataset: Dataset, chosen: Sample) -> dict[str, Any]:
    """All measurements of one model."""
    with torch.no_grad():
        rows = evenly_spread(chosen.rows, room(tree, model))
        return {
            "rows": len(rows),
            "one_step": one_step(model, tree, dataset, rows),
            "many_steps": many_steps(model, tree, dataset, chosen.allowed),
            "termination": endings(model, tree, dataset, evenly_spread(chosen.ends, room(tree, model))),
        }


def dimensions(model: Any) -> list[str]:
    return [*(f"obs[{i}]" for i in range(model.out_dim - 1)), "reward"]
