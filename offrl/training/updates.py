"""Keys that updates take, and metrics that they give."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Metrics, TrainState
from offrl.errors import warn
from offrl.settings.replicas import Replica

COUNT = "count of "  # prefix of the sums that count in how many updates a metric came


def update_keys(state: TrainState, count: int) -> Tensor:
    """[count, N, 2] int64: for each of the next `count` updates a key for its batch and one for its own noise."""
    steps = state.step + torch.arange(count, dtype=torch.int64, device=state.step.device).unsqueeze(-1)
    return torch.stack(rng.split(rng.fold_in(state.key, steps)), -1)


def add(total: Metrics, metrics: Metrics) -> Metrics:
    """Sums by name; either side may lack a name."""
    return {**total, **{k: total[k] + v if k in total else v for k, v in metrics.items()}}


def counted(metrics: Metrics) -> Metrics:
    """`metrics` that come in some updates only, with a count of 1 for each."""
    return {**metrics, **{COUNT + k: torch.ones_like(v) for k, v in metrics.items()}}


def metric_means(sums: Metrics, updates: int) -> Metrics:
    """Mean of each metric over the updates in which it came, per replica [N] float64 on the CPU, from what `Step.run` summed."""
    names = [k for k in sums if not k.startswith(COUNT)]
    return {k: (sums[k].double() / sums.get(COUNT + k, updates)).cpu() for k in names}


def finite(metrics: Metrics, alive: Tensor) -> Tensor:
    """Mask of the replicas that are `alive` [N] and have finite metrics only."""
    return torch.stack([alive, *(v.isfinite() for v in metrics.values())]).all(0)


def warn_diverged(replica: Replica, since: int, step: int, reason: str, cure: str) -> None:
    """Warn that a replica is trained no further, as its losses or actions were not finite between two looks at them."""
    warn(
        f"{replica} diverged between step {since:,} and {step:,} ({reason}): its parameters stay as they were at step {since:,}; "
        f"the others go on. {cure}"
    )


def rows(metrics: Metrics, alive: Tensor) -> dict[str, list[float]]:
    """Metrics as lists of one value for each replica, NaN for those that are not `alive`."""
    return {k: [x if on else math.nan for x, on in zip(v.tolist(), alive.tolist(), strict=True)] for k, v in metrics.items()}
