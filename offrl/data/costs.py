"""Costs of steps, whose undiscounted sum over an episode a limit bounds (DSRL's protocol, arXiv 2306.09303)."""

from __future__ import annotations

import numpy as np

from offrl.data.dataset import Dataset
from offrl.errors import UserError

LIMITS = (10, 20, 40, 80)


def refuse_costless(dataset: Dataset, reader: str) -> None:
    """Raise UserError where the data have no costs, which `reader` reads."""
    if "costs" not in dataset.columns:
        raise UserError(
            f"{reader} needs costs, and {dataset.spec.name} has none: name their column, dataset.fields.costs=COLUMN, "
            "or compute them, dataset.cost_labels=file.py:function"
        )


def refuse_unreached(dataset: Dataset, limit: float) -> None:
    """Raise UserError where every episode of the data costs more than `limit`."""
    if limit < (least := float(dataset.episode_costs().min())):
        raise UserError(
            f"algo.cost_limit={limit:g} is below what any episode of {dataset.spec.name} costs: the cheapest costs "
            f"{least:g}"
        )


def within_limits(costs: np.ndarray, returns: np.ndarray) -> list[list[str]]:
    """The usual limits that some episodes [E] exceed, as texts, each with the share of them that keeps it and the best
    return of these.
    """
    lines = []
    for limit in (limit for limit in LIMITS if (costs > limit).any()):
        safe = returns[costs <= limit]
        best = f", best return {safe.max():.6g}" if len(safe) else ""
        lines.append([f"cost <= {limit}", f"{100 * len(safe) / len(costs):.1f}% of the episodes{best}"])
    return lines
