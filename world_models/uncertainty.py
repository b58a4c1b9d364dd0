"""Uncertainty of a model's predictions: measures by name, shared by all algorithms.

Every measure is a function of (model, tree, prediction, observations [B, O], actions [B, A] or int64 [B]) that returns
[B] numbers of at least 0, in the units of the observations (and of the reward, for "aleatoric"), unless said otherwise.
All members take part, elites or not. A function that `prepare` has seen raises no error later. Plain tensor code: it
runs under `vmap` and `torch.compile(fullgraph=True)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.errors import UserError, nearest
from offrl.world_models.model import Prediction, Tree, evenly_spread, predict_rows

Measure = Callable[[Any, Tree, Prediction, Tensor, Tensor], Tensor]
UNCERTAINTIES: dict[str, Measure] = {}
ROWS_AT_ONCE = 2048  # of the data, whose uncertainty is measured
FIT_ROWS = 100_000  # rows that a density is fitted to, at most
MEASURED_ROWS = 100_000  # transitions whose uncertainty is measured, at most
QUADRATIC = 16  # principal directions whose products the density knows
LINEAR = 256  # principal directions that it knows at all
RIDGE = 1e-6  # added to the diagonals of its two moment matrices
FAR = 1e4  # standard deviations at which it stops growing: all numbers stay finite in float32


def _measure(name: str) -> Callable[[Measure], Measure]:
    def add(function: Measure) -> Measure:
        UNCERTAINTIES[name] = function
        return function

    return add


def names() -> tuple[str, ...]:
    """All measures."""
    return tuple(UNCERTAINTIES)


def measure(name: str) -> Measure:
    """The measure called `name`. Raises UserError."""
    if name not in UNCERTAINTIES:
        raise UserError(f"unknown uncertainty '{name}'.{nearest(name, names())} Known: {', '.join(names())}")
    return UNCERTAINTIES[name]


def fault(name: str, model: Any) -> str:
    """The reason why the measure says nothing about this model; empty where it does."""
    measure(name)
    if name == "aleatoric" and getattr(model.config, "loss", "likelihood") != "likelihood":
        return f"uncertainty=aleatoric needs learnt variances, and the model was trained with loss={model.config.loss}"
    if name in ("ensemble_std", "deviation", "disagreement") and model.members == 1:
        return f"uncertainty={name} compares the members of an ensemble, and the model has one"
    return ""


def prepare(name: str, model: Any, tree: Tree, dataset: Dataset, rows: Tensor | None = None) -> Tree:
    """`tree` with what the measure needs: for "density" one fitted to `rows` of `dataset` (all transitions by default),
    unless it is there.

    Raises UserError for an unknown measure, and where it would be the same for all pairs.
    """
    if problem := fault(name, model):
        raise UserError(f"{problem}; choose another: {', '.join(n for n in names() if not fault(n, model))}")
    if name != "density" or "density" in tree:
        return tree
    rows = dataset.transition_rows() if rows is None else rows
    rows = evenly_spread(rows, FIT_ROWS)
    observations = dataset.flat("observations")[rows].float()
    density = fit_density(pairs(model, observations, dataset.columns["actions"][rows]))
    return {**tree, "density": {k: v.to(tree["low"].device) for k, v in density.items()}}


def on_data(measure: Measure, model: Any, tree: Tree, dataset: Dataset) -> Tensor:
    """A measure at the data's transitions, or at MEASURED_ROWS of them evenly spread: [n] on the CPU."""
    rows = evenly_spread(dataset.transition_rows(), MEASURED_ROWS)
    with torch.no_grad():
        parts = predict_rows(model, tree, dataset, rows, ROWS_AT_ONCE)
        return torch.cat([measure(model, tree, prediction, o, a).cpu() for o, a, prediction in parts])


def quantile(ordered: Tensor, share: float | Tensor) -> Tensor:
    """The quantile [] of sorted numbers [n]."""
    position = torch.as_tensor(share, device=ordered.device).clamp(max=1.0) * (len(ordered) - 1)
    index = position.floor().long()
    return torch.lerp(ordered[index], ordered[(index + 1).clamp(max=len(ordered) - 1)], position - index)


# ---- what the members say


@_measure("aleatoric")
def aleatoric(model: Any, tree: Tree, prediction: Prediction, observations: Tensor, actions: Tensor) -> Tensor:
    """The largest member's norm of the predicted standard deviations, the reward's among them (MOPO, arXiv 2005.13239,
    section 4.3).
    """
    return (prediction.std.square().sum(-1) + prediction.reward_std.square()).sqrt().amax(0)


@_measure("ensemble_std")
def ensemble_std(model: Any, tree: Tree, prediction: Prediction, observations: Tensor, actions: Tensor) -> Tensor:
    """Root of the mean, over the next observation's entries, of the (biased) variance of the members' means."""
    return prediction.mean.var(0, unbiased=False).mean(-1).sqrt()


@_measure("deviation")
def deviation(model: Any, tree: Tree, prediction: Prediction, observations: Tensor, actions: Tensor) -> Tensor:
    """The largest distance of a member's next observation from the mean over members."""
    return (prediction.mean - prediction.mean.mean(0)).square().sum(-1).sqrt().amax(0)


@_measure("disagreement")
def disagreement(model: Any, tree: Tree, prediction: Prediction, observations: Tensor, actions: Tensor) -> Tensor:
    """The largest distance between two members' next observations (MOReL, arXiv 2005.05951, equation 2)."""
    mean = prediction.mean
    # member i beside member i + shift, round the circle: all pairs are met with half of the shifts, in memory for one
    # copy of the means
    shifts = range(1, mean.shape[0] // 2 + 1)
    distances = [(mean - mean.roll(shift, 0)).square().sum(-1).amax(0) for shift in shifts]
    return torch.stack(distances).amax(0).sqrt() if distances else torch.zeros_like(mean[0, :, 0])


# ---- how common the pair itself is


def pairs(model: Any, observations: Tensor, actions: Tensor) -> Tensor:
    """[B, I]: observation and action beside each other, discrete ones as one-hot."""
    return torch.cat([observations, model.spec.encode(actions)], -1)


def fit_density(inputs: Tensor) -> dict[str, Tensor]:
    """The statistics of `density`, from inputs [n, I] of the data: an empirical Christoffel function of degree 2,
    fitted in float64.

    Inputs are standardised and turned to their principal directions w, each divided by its standard deviation; of more
    than LINEAR the first ones are kept. v holds 1, all w, and the products of the first QUADRATIC. With M the mean of v
    v' over the data and a ridge, v' M^-1 v is large where the data are rare (Lasserre and Pauwels, arXiv 1810.08480);
    its mean over the data is the length of v."""
    x = inputs.detach().double()
    x = x if x.is_meta else x.cpu()  # drawn only, for the shapes
    mean, std = x.mean(0), x.std(0, unbiased=False)
    std = torch.where(std < 1e-12, torch.ones_like(std), std)
    z = (x - mean) / std
    values, vectors = torch.linalg.eigh(z.T @ z / len(z))
    order = values.argsort(descending=True)[:LINEAR]
    turn = vectors[:, order] / (values[order].clamp(min=0.0) + RIDGE).sqrt()
    left, right = torch.triu_indices(*[min(QUADRATIC, len(order))] * 2).unbind()
    moments = torch.zeros(1 + len(order) + len(left), dtype=torch.float64).diag()
    for part in z.split(8192):
        v = _monomials(part @ turn, left, right)
        moments += v.T @ v
    moments = moments / len(z) + RIDGE * torch.eye(len(moments), dtype=torch.float64)
    factor = torch.linalg.cholesky(moments)
    whiten = torch.linalg.solve_triangular(factor, torch.eye(len(factor), dtype=torch.float64), upper=False)
    whitening = {"mean": mean, "turn": turn / std.unsqueeze(-1), "whiten": whiten}
    return {**{k: v.float() for k, v in whitening.items()}, "left": left, "right": right}


def _monomials(w: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(w[..., :1]), w, w[..., left] * w[..., right]], -1)


@_measure("density")
def density(model: Any, tree: Tree, prediction: Prediction, observations: Tensor, actions: Tensor) -> Tensor:
    """log(1 + v' M^-1 v / length of v) of `fit_density`, without unit: about 0.7 where data are common, log of squared
    distance far off.

    It asks nothing of the model: only whether a pair (s, a) is like the data's (OGSRL, arXiv 2505.16242).
    """
    fitted = tree["density"]
    w = ((pairs(model, observations, actions) - fitted["mean"]) @ fitted["turn"]).clamp(-FAR, FAR)
    v = _monomials(w, fitted["left"], fitted["right"])
    squares = (v @ fitted["whiten"].T).square().sum(-1)
    return torch.log1p(squares / fitted["whiten"].shape[0])
