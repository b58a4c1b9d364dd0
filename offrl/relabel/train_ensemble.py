"""Training a few small models beside each other on held-out data: the inverse dynamics, preferences and classifiers of
success that label datasets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.algorithm import Algorithm, Params
from offrl.errors import UserError
from offrl.system.progress import Progress
from offrl.training.engine import LocalEngine
from offrl.training.fit import fit

LOOKS = 50  # validations of a whole training
PATIENCE = 10  # of them in a row without a better model, after which training ends


@dataclass(frozen=True)
class Trained:
    """The members of an ensemble, each as it was when its error on held-out data was smallest."""

    params: list[dict[str, Params]]  # of each member, by module
    errors: Tensor  # [N] float64
    updates: int  # that were made


def train_members(
    algorithm: Algorithm,
    source: Any,
    validate: Callable[[dict[str, Params]], float],
    device: torch.device,
    title: str,
    quiet: bool,
) -> Trained:
    """Train the members that the algorithm's settings ask for, at most `updates` updates, fewer where no member gets
    better any more.

    validate: the error on held-out data of parameters by module. source: what the algorithm's sampler prepared,
    on `device`. The same call gives the same numbers on the same machine. Raises UserError when the error of some
    member was never finite.
    """
    config = algorithm.config
    seeds, updates = [config.seed + n for n in range(config.members)], config.updates
    best = torch.full((len(seeds),), torch.inf, dtype=torch.float64)
    best_params: list[dict[str, Params]] = [{} for _ in seeds]
    interval, stale, last_step = max(1, updates // LOOKS), 0, 0

    def look(engine: LocalEngine, step: int) -> bool:
        nonlocal stale, last_step
        params = engine.state().params
        stale, last_step = stale + 1, step
        for n in range(len(seeds)):
            # contiguous: with other strides a product rounds differently, and so would a model that was saved and read
            member = pytree.tree_map(lambda v: v[n].clone(memory_format=torch.contiguous_format).to(device), params)  # noqa: B023
            error = validate(member)
            if error < best[n]:
                best[n], best_params[n], stale = error, member, 0
        return stale >= PATIENCE

    with Progress(title, updates, "updates", quiet) as bar:
        fit(
            algorithm,
            source,
            seeds,
            updates,
            config.batch_size,
            device,
            compile="cudagraph" if device.type == "cuda" else "eager",
            stops=[*range(interval, updates, interval), updates],
            look=look,
            progress=lambda step, rate: bar.update(
                step, f"validation error {float(best.mean()):.4g}" if best_params[0] else ""
            ),
        )
    if not all(best_params):
        raise UserError(
            f"{title}: training diverged (the error is not finite); look for outliers with `offrl data inspect`"
        )
    return Trained(best_params, best, last_step)
