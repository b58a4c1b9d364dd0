"""Trajectory weighting: which episodes are drawn more often than others (Hong et al., arXiv 2306.13085), whatever the
algorithm.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from offrl.data.dataset import Dataset, effective_episodes
from offrl.data.transforms.episodes import best_share
from offrl.errors import UserError, some

KINDS = ("none", "return", "advantage", "top")


def weight_episodes(dataset: Dataset, kind: str, temperature: float = 0.1, fraction: float = 0.1) -> Dataset:
    """The dataset with `Dataset.weights`: how often a row of each episode is drawn. The rows themselves stay as they
    are.

    kind "return" (RW): w_i = exp(g_i / temperature), g_i the undiscounted return, scaled to [0, 1] by the smallest and
    the largest; "advantage" (AW): the same with the return's advantage over what a linear regression predicts from the
    initial state; "top": 1 for the best `fraction` of the episodes by return (at least one) and 0 for the others. All
    rows of an episode share its weight, so that w is a softmax over rows. Returns are those of the rewards as they are
    now. Raises UserError where there is nothing to tell episodes apart by."""
    where = dataset.spec.name
    if kind not in KINDS[1:]:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(KINDS[1:])}")
    if not temperature > 0.0:
        raise UserError(f"dataset.weighting_temperature={temperature} must be above 0")
    returns = dataset.episode_returns().numpy()
    count = dataset.num_episodes
    if kind == "top":
        weights = np.zeros(count)
        weights[best_share(returns, fraction)] = 1.0
        description = f"top {fraction:g}"
    else:
        if kind == "advantage" and not dataset.spec.observation_dim:
            raise UserError(
                f"dataset.weighting=advantage fits values to observations of numbers, and {where} has "
                f"{some(dataset.stores)} alone: use return or top"
            )
        if count == 1:
            raise UserError(
                f"{where} has one episode, so that dataset.weighting={kind} has nothing to prefer; leave it out"
            )
        scores = returns if kind == "return" else advantages(initial_states(dataset), returns)
        span = scores.max() - scores.min()
        if not span > 1e-12 * max(1.0, np.abs(returns).max()):
            raise UserError(
                f"{where}: all {count} episodes have the same {kind}, so that dataset.weighting={kind} has nothing to "
                "prefer"
            )
        weights = np.exp((scores - scores.max()) / span / temperature)
        description = f"{kind} temperature {temperature:g}"
    lengths = dataset.episode_lengths().numpy()
    weights = weights * lengths.sum() / (weights * lengths).sum()
    weighted = replace(dataset, weights=torch.from_numpy(weights))
    return weighted.changed(f"weighting {description}", f"weighting by {description}: {share_text(weighted)}")


def initial_states(dataset: Dataset) -> np.ndarray:
    """The first observation of each episode, flat: [E, O] float64."""
    first = dataset.columns["observations"][dataset.episode_start.to(dataset.device)]
    return first.reshape(dataset.num_episodes, -1).double().cpu().numpy()


def advantages(states: np.ndarray, returns: np.ndarray) -> np.ndarray:
    """G_i - V(s_i), with V the linear regression, with intercept, of the returns [E] on the states [E, O].

    The regression is ridge with a penalty of O on standardised states, worth as many made-up episodes as there are
    dimensions: with thousands of episodes it changes nothing that matters, and with fewer episodes than dimensions,
    where least squares would explain every return and leave rounding errors for advantages, it shrinks the fit.
    """
    spread = states.std(0)
    x = (states - states.mean(0)) / np.where(spread > 1e-9 * np.maximum(1.0, np.abs(states).max(0)), spread, np.inf)
    centred = returns - returns.mean()
    penalty = float(x.shape[1])
    if x.shape[1] <= len(x):
        fitted = x @ np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ centred)
    else:  # images: the same numbers from a system of E equations
        gram = x @ x.T
        fitted = gram @ np.linalg.solve(gram + penalty * np.eye(len(x)), centred)
    return centred - fitted


def share_text(dataset: Dataset) -> str:
    """The amount of data that a weighting uses, in words."""
    shares = dataset.episode_shares().numpy()
    returns = dataset.episode_returns().numpy()
    plain = dataset.episode_lengths().double().numpy()
    return (
        f"draws are worth {effective_episodes(shares):,.1f} of {dataset.num_episodes:,} episodes "
        f"({effective_episodes(plain):,.1f} without it), the likeliest has {100 * shares.max():.2g}% of them; mean "
        f"return of a drawn row's episode {shares @ returns:.6g}, without it {plain @ returns / plain.sum():.6g}"
    )
