"""Regions of the action space: k-means on the data's actions."""

from __future__ import annotations

import torch
from torch import Tensor

from offrl import rng

MOST_ROWS = 50_000  # of the data, that k-means looks at


def kmeans(points: Tensor, clusters: int, rounds: int = 50) -> Tensor:
    """Centres [clusters, A] of points [R, A], from spread-out first ones (k-means++) by Lloyd's iterations; the same on
    every call.
    """
    key = rng.make_key(0)
    if len(points) > MOST_ROWS:
        points = points[rng.randint(rng.fold_in(key, -1), (MOST_ROWS,), len(points))]
    centres = points[:1]
    for i in range(1, clusters):
        distance = torch.cdist(points, centres).amin(-1).square()
        centres = torch.cat(
            [centres, points[rng.categorical(rng.fold_in(key, i), distance.clamp(min=1e-12).log())].unsqueeze(0)]
        )
    for _ in range(rounds):
        assignment = torch.cdist(points, centres).argmin(-1)
        count = torch.bincount(assignment, minlength=clusters).unsqueeze(-1)
        total = torch.zeros_like(centres).index_add_(0, assignment, points)
        means = torch.where(count > 0, total / count.clamp(min=1), centres)  # a centre without points stays
        if torch.equal(means, centres):
            break
        centres = means
    return centres
