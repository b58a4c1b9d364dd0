"""Training without a run directory: for estimators, and for models that label data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from offrl.algorithm import Algorithm
from offrl.settings.replicas import Replica
from offrl.system import backend
from offrl.training.engine import LocalEngine, Plan, Slices, first_state
from offrl.training.execution import choose_mode, default_group

Progress = Callable[[int, float], None]  # updates done, updates per second


def fit(
    algorithm: Algorithm,
    source: Any,
    seeds: Sequence[int],
    updates: int,
    batch_size: int,
    device: torch.device,
    *,
    compile: str = "auto",
    stops: Collection[int] = (),
    look: Callable[[LocalEngine, int], bool] | None = None,
    progress: Progress | None = None,
) -> LocalEngine:
    """Train one replica for each seed, side by side in this process; the engine holds them.

    source: what the algorithm's sampler prepared, on `device`. compile: as the setting of a run. look: called after the
    updates of `stops`; training ends early where it is true. The same call gives the same numbers on the same machine.
    """
    replicas = [Replica(seed) for seed in seeds]
    mode = choose_mode(compile, device, updates)
    if mode.startswith("compiled"):
        backend.cache_compiled()
    plan = Plan(algorithm, batch_size, mode, "float32", len(replicas))
    plan = replace(plan, group=default_group(len(replicas), 1, plan, source, device))
    engine = LocalEngine(plan, source, replicas, device)
    state = first_state(algorithm, replicas)
    engine.load(state, state, {})
    slices, step = Slices(algorithm.traits.period), 0
    slices.begin(step)
    for stop in sorted({*(s for s in stops if 0 < s < updates), updates}):
        while step < stop:
            end = slices.next(step, stop)
            engine.run(step, end - step)
            slices.done(end)
            step = end
            if progress is not None:
                progress(step, slices.rate)
        if look is not None and stop in stops and look(engine, step):
            break
    return engine
