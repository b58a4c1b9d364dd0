"""Prompts from the episodes that a policy has played: the best of them, and the steps at which the world model errs
most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offrl.data.samplers.transitions import Batch


def best_of(pool: Batch, additions: Batch, count: int) -> Batch:
    """The `count` episodes [E, P, ...] with the highest returns of those in the pool and the new ones."""
    if not pool:
        return additions
    length = max(x["error"].shape[2] for x in (pool, additions))

    def padded(column: Tensor) -> Tensor:
        if column.ndim < 3:
            return column
        return torch.cat([column, column.new_zeros(*column.shape[:2], length - column.shape[2], *column.shape[3:])], 2)

    episodes = {name: torch.cat([padded(pool[name]), padded(additions[name])], 1) for name in additions}
    best = episodes["return"].argsort(dim=1, descending=True, stable=True)[:, :count]
    return {name: column[torch.arange(len(best)).unsqueeze(-1), best] for name, column in episodes.items()}


def begin_logits(error: Tensor, lengths: Tensor, steps: int, history: int) -> Tensor:
    """Log-probabilities, but for a constant, of the steps [E, T] at which a prompt begins: of the sum of the errors [E,
    T] over it; see `prompt_windows`."""
    total = torch.cat([torch.zeros_like(error[:, :1]), error.cumsum(1)], 1)
    step = torch.arange(error.shape[1])
    sums = total[:, (step + steps).clamp(max=error.shape[1])] - total[:, :-1]
    limit = lengths.unsqueeze(-1) - steps
    mask = torch.where(limit >= history, (step >= history) & (step <= limit), step == 0)
    return torch.where(mask, sums.clamp(min=1e-9).log(), float("-inf"))
