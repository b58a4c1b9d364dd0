"""Updates of RSSM with a GRU and with a scan as its recurrent core: `python scripts/bench/recurrent_cores.py`.

Vectors of noise; each figure is the median over interleaved rounds of the CPU seconds of one thread: a
whole update, and the loss of the model with its gradient, without imagination.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from image_replicas import seconds

import offrl
from offrl import registry, rng
from offrl.algorithm import Algorithm, stack
from offrl.data.samplers.states import in_time
from offrl.training.step import Step
from offrl.world_models.recurrent.objectives import OBJECTIVES

ROWS, LENGTH, OBSERVATION, ACTION = 4_000, 200, 12, 3


def problem(core: str, length: int, options: argparse.Namespace) -> tuple[Algorithm[Any], Any]:
    """RSSM with one of the cores, and what it draws windows from."""
    draw = np.random.default_rng(0)
    dataset = offrl.from_arrays(
        draw.normal(size=(ROWS, OBSERVATION)),
        draw.uniform(-1.0, 1.0, (ROWS, ACTION)),
        draw.normal(size=ROWS),
        truncations=np.arange(ROWS) % LENGTH == LENGTH - 1,
        action_low=-1.0,
        action_high=1.0,
    )
    kind = registry.get("algo", "rssm")
    width = options.scan_width if core == "scan" else options.width
    config = kind.Config(
        core=core, length=length, recurrent_width=width, horizon=options.horizon, members=1, penalty=0.0
    )
    algorithm: Algorithm[Any] = kind(kind.fit_config(config, dataset), dataset.spec)
    return algorithm, algorithm.sampler().prepare(dataset)


def model_gradient(algorithm: Any, source: Any, batch_size: int) -> Callable[[], object]:
    """The model's loss of one batch, and its gradient."""
    state = algorithm.init(0)
    batch = in_time(algorithm.sampler()(source, rng.make_key(0), batch_size))
    params = {n: {k: v.clone().requires_grad_() for k, v in state.params[n].items()} for n in algorithm.model}
    leaves = [v for module in params.values() for v in module.values()]

    def run() -> object:
        latents = algorithm.latents(params)
        windows = latents.observe_windows(
            batch["observations"], batch["previous_actions"], batch["is_first"], rng.make_key(1)
        )
        loss, _ = OBJECTIVES["reconstruction"](latents, windows, batch, rng.make_key(2), params)
        return torch.autograd.grad(loss, leaves, allow_unused=True)

    return run


def whole_update(algorithm: Algorithm[Any], source: Any, batch_size: int) -> Callable[[], object]:
    step = Step(algorithm, source, batch_size=batch_size, replicas=1)
    state = stack([algorithm.init(0)])
    return lambda: step.run(state, {}, 0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--scan-width", type=int, default=512)
    parser.add_argument("--horizon", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("T", "core", "its parameters", "update, s", "updates/s", "model's gradient, s")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for length in (16, 64):
        runs, sizes = {}, {}
        for core in ("gru", "scan"):
            algorithm, source = problem(core, length, options)
            sizes[core] = sum(p.numel() for p in algorithm.networks["dynamics"].parameters())
            runs[core] = [make(algorithm, source, options.batch_size) for make in (whole_update, model_gradient)]
        for each in runs.values():
            for run in each:
                run()
        rounds = [{core: [seconds(run) for run in each] for core, each in runs.items()} for _ in range(options.rounds)]
        for core in runs:
            update, gradient = (statistics.median(r[core][i] for r in rounds) for i in (0, 1))
            print(
                f"| {length} | {core} | {sizes[core]:,} | {update:.2f} | {1.0 / update:.1f} | {gradient:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
