"""Updates with encoders for several seeds, one after another and side by side under vmap:
`python scripts/bench/image_replicas.py`.

TD3+BC learns from drawn noise; each figure is the median over interleaved rounds of the CPU seconds of one thread that
an update of all seeds takes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

import offrl
from offrl import registry
from offrl.algorithm import Algorithm, stack
from offrl.settings.encoder import EncoderConfig
from offrl.training.step import Step

ROWS, LENGTH, UPDATES = 2_000, 100, 2
CASES = (("drq", 32, 2), ("drq", 64, 3), ("impala_small", 64, 1))


def problem(encoder: str, size: int, frames: int) -> tuple[Algorithm, object]:
    """TD3+BC, and what it draws batches from."""
    draw = np.random.default_rng(0)
    dataset = offrl.from_arrays(
        draw.integers(0, 256, (ROWS, size, size, 3)).astype(np.uint8),
        draw.uniform(-1.0, 1.0, (ROWS, 2)),
        draw.normal(size=ROWS),
        truncations=np.arange(ROWS) % LENGTH == LENGTH - 1,
        action_low=-1.0,
        action_high=1.0,
    )
    spec = replace(dataset.spec, frames=frames, encoder=EncoderConfig(encoder))
    dataset = replace(dataset, spec=spec)
    kind = registry.get("algo", "td3_bc")
    algorithm: Algorithm = kind(kind.fit_config(kind.Config(), dataset), spec)
    return algorithm, algorithm.sampler().prepare(dataset)


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.seeds} seeds, batch {options.batch_size}, CPU seconds for an update of all seeds\n")
    columns = ("encoder", "images", "one seed", "one after another", "vmap", "vmap / one after another")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for name, size, frames in CASES:
        algorithm, source = problem(name, size, frames)

        def made(replicas: int, algorithm: Algorithm = algorithm, source: object = source) -> Callable[[], object]:
            step = Step(algorithm, source, batch_size=options.batch_size, replicas=replicas)
            state = stack([algorithm.init(seed) for seed in range(replicas)])
            return lambda: step.run(state, {}, 0, UPDATES)

        runs = [made(1), made(options.seeds)]
        with torch.no_grad():
            rounds = [[seconds(run) for run in runs] for _ in range(options.rounds + 1)][1:]
        one, together = (statistics.median(times) / UPDATES for times in zip(*rounds, strict=True))
        ratio = together / (options.seeds * one)
        shape = f"{size} x {size} x {3 * frames}"
        print(
            f"| {name} | {shape} | {one:.2f} | {options.seeds * one:.2f} | {together:.2f} | {ratio:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
