"""Fitted Q evaluation with linear networks: random Fourier features of observation and action, whose fixed point is one system of equations
(LSTDQ, Lagoudakis and Parr 2003). Seconds, where networks take minutes; for a first look, not for ranking alike policies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offrl.ope.problem import FLOOR, Problem

FEATURES, RIDGE = 200, 1e-3
BLOCKS, DRAWS = 20, 100  # of the bootstrap: parts of the data that are drawn together, and draws


@dataclass(frozen=True)
class LinearValues:
    """Mean values over the data's initial states, discounted, in the rewards' units: of each policy and of the data's own actions."""

    policies: np.ndarray  # [1 + DRAWS, K]: with all data first, then of bootstrap samples of it
    data: np.ndarray  # [1 + DRAWS]
    low: float  # bounds that the data's smallest and largest reward allow
    high: float


def values(problem: Problem, discount: float, few: int) -> LinearValues:
    """The values of the problem's candidates. few: with fewer episodes, the mean is over all states."""
    dataset = problem.dataset
    columns, spec, rows = dataset.columns, dataset.spec, torch.nonzero(problem.known).squeeze(-1)
    states = [columns[name].reshape(len(dataset), -1).double() for name in ("observations", "next_observations")]
    mean, std = states[0].mean(0), states[0].std(0, unbiased=False) + FLOOR
    states = [((x - mean) / std).clamp(-5.0, 5.0) for x in states]
    rewards, going = columns["rewards"].double(), 1.0 - columns["terminations"].double()
    shift = 0.0 if bool(columns["terminations"].any()) else float(rewards[rows].mean())  # without ends a constant changes no order
    width = states[0].shape[1] + spec.encoded_action_dim
    drawn = np.random.Generator(np.random.PCG64(0))
    weights = torch.from_numpy(drawn.normal(size=(width, FEATURES)) / np.sqrt(width))
    phases = torch.from_numpy(drawn.uniform(0.0, 2.0 * np.pi, FEATURES))

    def features(x: Tensor, actions: Tensor) -> Tensor:
        both = torch.cat([x, spec.encode(actions).double()], -1)
        waves = torch.cos(both @ weights + phases) * np.sqrt(2.0 / FEATURES)
        return torch.cat([torch.ones(len(x), 1, dtype=torch.float64), both, waves], -1)

    here, recorded = features(states[0][rows], columns["actions"][rows]), columns["actions"]
    following = torch.cat([recorded[1:], recorded[-1:]])
    ends = dataset.episode_end - 1
    following[ends] = recorded[ends]  # what was done after the last row is not known
    starts = problem.starts if dataset.num_episodes >= few else torch.arange(len(dataset))
    block = torch.arange(len(rows)) * BLOCKS // len(rows)
    first = torch.bucketize(starts, rows[torch.searchsorted(block, torch.arange(1, BLOCKS))], right=True)
    samples = drawn.multinomial(BLOCKS, np.full(BLOCKS, 1.0 / BLOCKS), size=DRAWS)
    counts = torch.from_numpy(np.concatenate([np.ones((1, BLOCKS), int), samples])).double()
    targets = torch.stack([here[block == b].T @ (rewards[rows] - shift)[block == b] for b in range(BLOCKS)])
    number = torch.bincount(first, minlength=BLOCKS).double()

    def solve(after: Tensor, at_starts: Tensor) -> np.ndarray:
        change = here - discount * going[rows].unsqueeze(-1) * features(states[1][rows], after[rows])
        systems = torch.stack([here[block == b].T @ change[block == b] for b in range(BLOCKS)])
        start = features(states[0][starts], at_starts)
        sums = torch.zeros(BLOCKS, start.shape[1], dtype=torch.float64).index_add(0, first, start)
        out = []
        for draw in counts:
            system = torch.einsum("b,bij->ij", draw, systems) / len(rows)
            ridge = RIDGE * torch.eye(len(system), dtype=torch.float64)
            theta = torch.linalg.solve(system + ridge, (draw @ targets) / len(rows))
            out.append(float((draw @ sums) @ theta / (draw @ number).clamp(min=1.0)))
        return np.array(out) + shift / (1.0 - discount)

    policies = [solve(a.after, a.here[starts]) for a in problem.actions]
    bounds = [float(rewards.min()), float(rewards.max())]
    ended = shift == 0.0
    low, high = (min(bounds[0], 0.0) if ended else bounds[0]), (max(bounds[1], 0.0) if ended else bounds[1])
    return LinearValues(np.stack(policies, 1), solve(following, recorded[starts]), low / (1.0 - discount), high / (1.0 - discount))
