"""Fitted Q evaluation with linear networks: random Fourier features of observation and action, whose fixed point is one
system of equations (LSTDQ, Lagoudakis and Parr 2003). Seconds, where networks take minutes; for a first look, not for
ranking alike policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offrl.ope.problem import FLOOR, Problem
from offrl.statistics.intervals import student_t

FITS, FEATURES = 10, 150  # feature maps, and random features of each
# between which the width of a map's features and its regularisation are drawn, by logarithms
SCALES, RIDGES = ((0.3, 2.0), (1e-5, 1e-3))
BLOCKS, DRAWS = 20, 12  # of each map's bootstrap: parts of the data that are drawn together, and draws
DRAWN = 300  # rows whose nearest neighbours are looked for
SPREAD = 0.02  # added to the standard deviation of the data's actions, which are in [-1, 1]


@dataclass(frozen=True)
class LinearValues:
    """Mean values over the data's initial states, discounted, in the rewards' units: of each policy and of the data's
    own actions.
    """

    # [FITS, 1 + DRAWS, K]: by each feature map, with all data first, then of bootstrap samples of it
    policies: np.ndarray
    data: np.ndarray  # [FITS, 1 + DRAWS]
    rows: np.ndarray  # [FITS, K]: how many rows of equal weight would say as much as those of which the value is made
    gaps: np.ndarray  # [1 + K], of the data's own actions first: see `gap`
    low: float  # bounds that the data's smallest and largest reward allow
    high: float


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """(value, low, high) of values [F, 1 + DRAWS] by F feature maps: the median, and the interval that holds the truth
    with 95% if it is to the maps' values as one more of them: Student's t of F - 1 degrees of freedom, times the root
    of the variance between the maps and of that between bootstrap samples within them."""
    variance = values[:, 0].var(ddof=1) + values[:, 1:].var(1, ddof=1).mean()
    value, half = float(np.median(values[:, 0])), student_t(0.95, len(values) - 1) * float(np.sqrt(variance))
    return value, value - half, value + half


def gap(queries: Tensor, known: Tensor, episode: Tensor) -> float:
    """How far the data are from a policy's states and actions: the median over rows drawn of `queries` [R, D] of the
    distance to the nearest row of `known` [R, D] in another episode, root mean square over inputs, which are in
    standard deviations; 0 where there is no other.

    Features that are wider see what is between; in a larger gap all feature maps guess alike, and their spread does not
    show it."""
    rows = torch.from_numpy(np.random.Generator(np.random.PCG64(0)).integers(0, len(known), DRAWN))
    distance = torch.cdist(queries[rows], known) / float(np.sqrt(known.shape[1]))
    distance[episode[rows].unsqueeze(1) == episode] = torch.inf
    nearest = float(distance.min(1).values.median())
    return nearest if np.isfinite(nearest) else 0.0


def values(problem: Problem, discount: float, few: int) -> LinearValues:
    """The values of the problem's candidates. few: with fewer episodes, the mean is over all states.

    A value is a weighted sum of the data's rewards, mean_i w_i r_i with w = phi(s, a) A^-T phi(s0, pi(s0)): w is the
    ratio of how often the policy and the data are in (s, a), as far as the features can tell (DualDICE's, arXiv
    1906.04733, in closed form). (sum w)^2 / sum w^2 rows of equal weight would say as much.
    """
    dataset = problem.dataset
    columns, spec, rows = dataset.columns, dataset.spec, torch.nonzero(problem.known).squeeze(-1)
    states = [dataset.flat(name).double() for name in ("observations", "next_observations")]
    mean, std = states[0].mean(0), states[0].std(0, unbiased=False) + FLOOR
    states = [((x - mean) / std).clamp(-5.0, 5.0) for x in states]
    recorded = columns["actions"]
    encoded = spec.encode(recorded).double()
    middle, spread = encoded.mean(0), encoded.std(0, unbiased=False) + SPREAD

    def inputs(x: Tensor, actions: Tensor) -> Tensor:
        return torch.cat([x, (spec.encode(actions).double() - middle) / spread], -1)

    rewards, going = columns["rewards"].double(), 1.0 - columns["terminations"].double()
    ended = bool(columns["terminations"].any())
    shift = 0.0 if ended else float(rewards[rows].mean())  # without ends a constant changes no order
    following = torch.cat([recorded[1:], recorded[-1:]])
    ends = dataset.episode_end - 1
    following[ends] = recorded[ends]  # what was done after the last row is not known
    starts = problem.starts if dataset.num_episodes >= few else torch.arange(len(dataset))
    block = torch.arange(len(rows)) * BLOCKS // len(rows)
    first = torch.bucketize(starts, rows[torch.searchsorted(block, torch.arange(1, BLOCKS))], right=True)
    number = torch.bincount(first, minlength=BLOCKS).double()
    # the data's own first
    choices = [(following, recorded[starts])] + [(a.after, a.current[starts]) for a in problem.actions]
    generator = np.random.Generator(np.random.PCG64(0))
    episode = dataset.per_row(torch.arange(dataset.num_episodes))
    known = inputs(states[0], recorded)
    width = known.shape[1]
    gaps = [
        gap(inputs(states[0], actions), known, episode) for actions in (recorded, *(a.current for a in problem.actions))
    ]
    means = np.zeros((FITS, 1 + DRAWS, len(choices)))
    effective = np.zeros((FITS, len(choices)))
    for fit in range(FITS):
        scale, ridge = (float(np.exp(generator.uniform(*np.log(between)))) for between in (SCALES, RIDGES))
        number_of = np.array([1, min(2, width), width])[np.arange(FEATURES) % 3]  # inputs that a feature looks at
        looks = generator.random((width, FEATURES)).argsort(0) < number_of
        weights = torch.from_numpy(generator.normal(size=(width, FEATURES)) * looks / (scale * np.sqrt(number_of)))
        phases = torch.from_numpy(generator.uniform(0.0, 2.0 * np.pi, FEATURES))
        samples = generator.multinomial(BLOCKS, np.full(BLOCKS, 1.0 / BLOCKS), size=DRAWS)
        counts = torch.from_numpy(np.concatenate([np.ones((1, BLOCKS), int), samples])).double()

        def features(x: Tensor, actions: Tensor, weights: Tensor = weights, phases: Tensor = phases) -> Tensor:
            both = inputs(x, actions)
            waves = torch.cos(both @ weights + phases) * np.sqrt(2.0 / FEATURES)
            return torch.cat([torch.ones(len(x), 1, dtype=torch.float64), both, waves], -1)

        current = features(states[0][rows], recorded[rows])
        targets = torch.stack([current[block == b].T @ (rewards[rows] - shift)[block == b] for b in range(BLOCKS)])
        regular = ridge * torch.eye(current.shape[1], dtype=torch.float64)
        for k, (after, at_starts) in enumerate(choices):
            change = current - discount * going[rows].unsqueeze(-1) * features(states[1][rows], after[rows])
            systems = torch.stack([current[block == b].T @ change[block == b] for b in range(BLOCKS)])
            start = features(states[0][starts], at_starts)
            sums = torch.zeros(BLOCKS, start.shape[1], dtype=torch.float64).index_add(0, first, start)
            system = torch.einsum("db,bij->dij", counts, systems) / len(rows) + regular
            theta = torch.linalg.solve(system, counts @ targets / len(rows))
            means[fit, :, k] = ((counts @ sums * theta).sum(-1) / (counts @ number).clamp(min=1.0)).numpy() + shift / (
                1.0 - discount
            )
            ratio = current @ torch.linalg.solve(system[0].T, start.mean(0))
            effective[fit, k] = float(ratio.sum() ** 2 / ratio.square().sum())
    bounds = [float(rewards.min()), float(rewards.max())]
    low, high = (min(bounds[0], 0.0) if ended else bounds[0]), (max(bounds[1], 0.0) if ended else bounds[1])
    return LinearValues(
        means[..., 1:], means[..., 0], effective[:, 1:], np.array(gaps), low / (1.0 - discount), high / (1.0 - discount)
    )
