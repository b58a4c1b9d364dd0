"""Training a few small models beside each other on held-out data: the inverse dynamics and preferences that label data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from offrl.algorithm import Algorithm
from offrl.errors import UserError
from offrl.optim import Params
from offrl.settings.replicas import Replica
from offrl.system.progress import Progress
from offrl.training.engine import LocalEngine, Plan, first_state
from offrl.training.setup import default_group

LOOKS = 50  # validations of a whole training
PATIENCE = 10  # of them in a row without a better model, after which training ends


@dataclass(frozen=True)
class Trained:
    """The members of an ensemble, each as it was when its error on held-out data was smallest."""

    params: list[Params]
    errors: Tensor  # [N] float64
    updates: int  # that were made


def train_members(
    algorithm: Algorithm,
    module: str,
    source: Any,
    validate: Callable[[Params], float],
    seeds: Sequence[int],
    updates: int,
    batch_size: int,
    device: torch.device,
    title: str,
    quiet: bool,
) -> Trained:
    """Train one model for each seed, at most `updates` updates, fewer where no member gets better any more.

    validate: the error on held-out data of the parameters of `module`. source: what the algorithm's sampler prepared, on `device`. The same
    call gives the same numbers on the same machine. Raises UserError when the error of some member was never finite.
    """
    them = [Replica(seed) for seed in seeds]
    mode = "cudagraph" if device.type == "cuda" else "eager"
    plan = Plan(algorithm, batch_size, mode, "float32", len(them))
    plan = replace(plan, group=default_group(len(them), 1, plan, source, device))
    engine = LocalEngine(plan, source, them, device)
    state = first_state(algorithm, them)
    engine.load(state, state, {})
    best = torch.full((len(them),), torch.inf, dtype=torch.float64)
    kept: list[Params] = [{} for _ in them]
    every, stale, step = max(1, updates // LOOKS), 0, 0
    with Progress(title, updates, "updates", quiet) as bar:
        while step < updates and stale < PATIENCE:
            stop = min(updates, step + every)
            while step < stop:  # in slices, so that the bar moves
                count = min(stop - step, max(1, every // 10))
                engine.run(step, count)
                step += count
                bar.update(step, "" if not kept[0] else f"validation error {float(best.mean()):.4g}")
            params = engine.state().params[module]
            stale += 1
            for n in range(len(them)):
                # contiguous: with other strides a product rounds differently, and so would a model that was saved and read
                mine = {k: v[n].clone(memory_format=torch.contiguous_format).to(device) for k, v in params.items()}
                error = validate(mine)
                if error < best[n]:
                    best[n], kept[n], stale = error, mine, 0
    engine.close()
    if not all(kept):
        raise UserError(f"{title}: training diverged (the error is not finite); look for outliers with `offrl data inspect`")
    return Trained(kept, best, step)
