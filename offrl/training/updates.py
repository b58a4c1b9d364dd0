"""Keys that updates take, and metrics that they give."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Metrics, TrainState, Traits
from offrl.data.dataset import Dataset
from offrl.errors import warn
from offrl.settings.replicas import Replica

DIVERGED = (
    1e8  # losses beyond so many times the square of the data's largest number come of parameters that have blown up
)
HORIZON = 1000.0  # rewards add up to so many times the largest one, as with a discount of 0.999
UNKNOWN = 1e10  # in place of the data's largest number
LOOKED_AT = 10_000  # rows of the other columns, whose largest number matters by its size only
LARGE_RATE = 0.1
SATURATED = 0.05
COUNT = "count of "  # prefix of the sums that count in how many updates a metric came


def update_keys(state: TrainState, count: int) -> Tensor:
    """[count, N, 2] int64: for each of the next `count` updates a key for its batch and one for its own noise."""
    steps = state.step + torch.arange(count, dtype=torch.int64, device=state.step.device).unsqueeze(-1)
    return torch.stack(rng.split(rng.fold_in(state.key, steps)), -1)


def add(total: Metrics, metrics: Metrics) -> Metrics:
    """Sums by name; either side may lack a name."""
    return {**total, **{k: total[k] + v if k in total else v for k, v in metrics.items()}}


def with_counts(metrics: Metrics) -> Metrics:
    """`metrics` that come in some updates only, with a count of 1 for each."""
    return {**metrics, **{COUNT + k: torch.ones_like(v) for k, v in metrics.items()}}


def metric_means(sums: Metrics, updates: int) -> Metrics:
    """Mean of each metric over the updates in which it came, per replica [N] float64 on the CPU, from what `Step.run`
    summed.
    """
    names = [k for k in sums if not k.startswith(COUNT)]
    sums = {k: v.cpu() for k, v in sums.items()}  # before float64, which not every device has
    return {k: sums[k].double() / sums.get(COUNT + k, updates) for k in names}


def loss_limit(dataset: Dataset | None) -> float:
    """A loss beyond which training on these data has diverged: DIVERGED times the square of their largest number, a
    return at least.

    Losses are squares of errors in the units of rewards or observations, or smaller. dataset: None where nobody knows
    them.
    """
    if dataset is None or dataset.spec.text:
        return DIVERGED * UNKNOWN**2
    largest = HORIZON * float(dataset.columns["rewards"].abs().max())
    for name, column in dataset.columns.items():
        if column.is_floating_point() and column.numel() and name != "rewards":
            largest = max(largest, float(column[:: max(1, len(column) // LOOKED_AT)].abs().max()))
    return DIVERGED * max(1.0, largest) ** 2


def trouble(metrics: Metrics, index: int, limit: float) -> str:
    """The metrics of a replica that are not finite, or its loss beyond `limit`, in words; empty where there is
    neither.
    """
    names = [name for name, column in metrics.items() if not column[index].isfinite()]
    if names:
        return f"not finite: {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    losses = {name: float(column[index]) for name, column in metrics.items() if name.endswith("loss")}
    name = max(losses, key=lambda k: abs(losses[k]), default="")
    return f"{name} is {losses[name]:.2g}, which no loss on such data is" if name and abs(losses[name]) > limit else ""


def check_divergence(metrics: Metrics, alive: Tensor, limit: float) -> tuple[Tensor, dict[int, str]]:
    """(mask of the replicas that are `alive` [N] and whose metrics are finite and losses within `limit`, the reasons of
    those that were alive and are in trouble)."""
    reasons = {n: reason for n in torch.nonzero(alive).squeeze(-1).tolist() if (reason := trouble(metrics, n, limit))}
    diverged = torch.zeros_like(alive)
    diverged[list(reasons)] = True
    return alive & ~diverged, reasons


def warn_of_rates(config: Any, grid: Mapping[str, Sequence[float]]) -> None:
    """Warn of learning rates of an algorithm, and of its grid, that no network survives."""
    for name in (f.name for f in dataclasses.fields(config) if f.name.endswith("learning_rate")):
        large = [v for v in grid.get(name) or [getattr(config, name)] if v is not None and v >= LARGE_RATE]
        if large:
            # 3e4: 3e-4
            meant = f"; is {large[0] / 100.0 ** math.floor(math.log10(large[0])):g} meant?" if large[0] >= 10.0 else ""
            warn(
                f"algo.{name}={large[0]:g} moves every parameter by about that much in each update; 1e-5 to 1e-2 are "
                f"usual{meant}"
            )


def warn_saturated(metrics: Metrics, limits: Sequence[float] | None, replicas: Sequence[Replica]) -> bool:
    """Warn, and return True, where more than SATURATED of the targets [N] lie beyond the range of the critics' bins.

    limits: that range, the setting value_range; None: no setting has it (TD-MPC2)."""
    shares = metrics.get("critic/saturation", torch.zeros(0))
    if not bool((shares > SATURATED).any()):
        return False
    worst = int(shares.nan_to_num(0.0).argmax())
    bins, cure = f"algo.value_range={list(limits or [])}", "a wider range, which has to hold every discounted return"
    if limits is None:
        bins, cure = "the range of the critics' bins", "smaller rewards (dataset.reward_scale=, or the environment's)"
    warn(
        f"{shares[worst]:.0%} of the targets of {replicas[worst]} lie beyond {bins}, where they are cut off "
        f"(critic/saturation): begin anew with {cure}"
    )
    return True


def warn_of_no_rewards(traits: Traits, algorithm: str, dataset: Dataset) -> None:
    """Warn where a critic is to learn from rewards that are all zero, as those of data whose goals decide the
    rewards.
    """
    if not traits.critic_modules or traits.goal_conditioned or bool(dataset.columns["rewards"].any()):
        return
    cure = (
        ": name a task of theirs, as antmaze-large-navigate-singletask-task1-v0 does, or take a goal-conditioned "
        "algorithm"
    )
    hint = cure if dataset.spec.source == "ogbench" else ""
    warn(f"every reward of {dataset.spec.name} is 0, and {algorithm} learns from rewards{hint}")


def warn_diverged(replica: Replica, since: int, step: int, reason: str, cure: str) -> None:
    """Warn that a replica is trained no further, as its losses or actions went wrong between two looks at them."""
    warn(
        f"{replica} diverged between step {since:,} and {step:,} ({reason}): its parameters stay as they were at step "
        f"{since:,}; the others go on. {cure}"
    )


def rows(metrics: Metrics, alive: Tensor) -> dict[str, list[float]]:
    """Metrics as lists of one value for each replica, NaN for those that are not `alive`."""
    return {
        k: [x if on else math.nan for x, on in zip(v.tolist(), alive.tolist(), strict=True)] for k, v in metrics.items()
    }
