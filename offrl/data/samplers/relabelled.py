"""Windows of episodes of which some have a better return and cost to go than they earned (CDT, arXiv 2302.07351)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import (
    COSTS,
    RETURNS,
    Sequences,
    SequenceSampler,
    costs_to_go,
    recorded_returns_to_go,
)
from offrl.data.transforms.episodes import keep_episodes, share_of


@dataclass(frozen=True)
class RelabelledSampler(SequenceSampler):
    """Windows of the data's episodes and of relabelled copies of some of them; cheap episodes are drawn more often.

    A copy's return and cost to go are shifted to (R, C), a pair that no episode reaches: costs are spread evenly over
    the data's, returns are drawn between the best that C allowed in the data and the best of all. The copy is of the
    episode with the best return among those that cost at most C (section 3.3, where it is the nearest one on the
    Pareto front).
    """

    share: float = 0.0
    drawn_cost: float = 0.0

    def prepare(self, dataset: Dataset) -> Sequences:
        copies, shifts = relabelled(dataset.raw_returns.numpy(), dataset.episode_costs().numpy(), self.share)
        numbers = torch.cat([torch.arange(dataset.num_episodes), copies])
        shifts = torch.cat([torch.zeros(dataset.num_episodes, 2), shifts])
        data = keep_episodes(dataset, numbers, f"relabelled {self.share:g}")
        if self.drawn_cost:
            weights = (self.drawn_cost - data.episode_costs() - shifts[:, 1]).clamp(min=0.0).double()
            data = replace(data, weights=weights / data.episode_lengths())
        to_go = {
            RETURNS: recorded_returns_to_go(data) + data.per_row(shifts[:, 0]),
            COSTS: costs_to_go(data) + data.per_row(shifts[:, 1]),
        }
        return SequenceSampler(self.length, self.extra, self.left_padded, lambda _: to_go).prepare(data)


def relabelled(returns: np.ndarray, costs: np.ndarray, share: float) -> tuple[Tensor, Tensor]:
    """(numbers [M] of the episodes to copy, shifts [M, 2] of their returns and costs); see `RelabelledSampler`."""
    if not share:
        return torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2)
    draw = np.random.Generator(np.random.PCG64(0))
    order = np.argsort(costs, kind="stable")
    limits = np.linspace(costs.min(), costs.max(), share_of(share, len(costs)))
    cheap = np.searchsorted(costs[order], limits, side="right")  # episodes that cost no more
    numbers = np.array([order[:count][returns[order[:count]].argmax()] for count in cheap])
    targets = np.stack([draw.uniform(returns[numbers], returns.max()), limits], 1)
    shifts = targets - np.stack([returns[numbers], costs[numbers]], 1)
    return torch.from_numpy(numbers), torch.from_numpy(shifts.astype(np.float32))
