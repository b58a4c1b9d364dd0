"""The coverage of the intervals of `offrl.statistics.aggregate`: simulated seeds of made-up algorithms whose true IQM
is known.

python scripts/bench/simulate_coverage.py                      # the table of docs/statistics.md, three minutes
python scripts/bench/simulate_coverage.py --experiments 200    # a rough one
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import numpy as np

from offrl.runs.tables import print_table
from offrl.statistics.aggregate import aggregates

TASKS = 10
STATISTICS = ("iqm", "mean", "median", "optimality_gap")
Draw = Callable[[np.random.Generator, int], np.ndarray]  # runs -> scores [runs, TASKS]
LEVELS = np.array([0.42, 0.47, 0.65, 0.68, 0.81, 0.82, 0.95, 0.97, 1.07, 1.12])  # about what IQL has on D4RL's gym sets


def steady(rng: np.random.Generator, runs: int) -> np.ndarray:
    """Seeds scatter by 5 points on every task."""
    return LEVELS + 0.05 * rng.standard_normal((runs, TASKS))


def skewed(rng: np.random.Generator, runs: int) -> np.ndarray:
    """Some tasks have hardly any scatter, some have 15 points, with a long tail downwards."""
    return LEVELS - np.linspace(0.005, 0.15, TASKS)[::-1] * rng.exponential(1.0, (runs, TASKS))


def bimodal(rng: np.random.Generator, runs: int) -> np.ndarray:
    """On half of the tasks three seeds in ten fail altogether, as model-based methods do on hopper."""
    failed = (rng.random((runs, TASKS)) < 0.3) & (np.arange(TASKS) % 2 == 0)
    return np.where(failed, 0.2, LEVELS) + 0.03 * rng.standard_normal((runs, TASKS))


WORLDS: dict[str, Draw] = {"steady": steady, "skewed": skewed, "bimodal": bimodal}


def truth(draw: Draw, runs: int = 400_000) -> dict[str, float]:
    """Each statistic of infinitely many runs, from very many."""
    x = draw(np.random.default_rng(123), runs)
    pooled, means = np.sort(x.reshape(-1)), x.mean(0)
    cut = pooled.size // 4
    return {
        "iqm": float(pooled[cut:-cut].mean()),
        "mean": float(means.mean()),
        "median": float(np.median(means)),
        "optimality_gap": float(1.0 - np.minimum(x, 1.0).mean()),
    }


def coverage(draw: Draw, seeds: int, experiments: int, reps: int) -> dict[str, tuple[float, float]]:
    """{statistic: (share of experiments whose 95% interval holds the truth, mean width of the interval)}."""
    true, rng = truth(draw), np.random.default_rng(1000 + seeds)
    inside, width = dict.fromkeys(STATISTICS, 0), dict.fromkeys(STATISTICS, 0.0)
    for experiment in range(experiments):
        for name, estimate in aggregates(draw(rng, seeds), reps=reps, seed=experiment).items():
            inside[name] += estimate.low <= true[name] <= estimate.high
            width[name] += estimate.high - estimate.low
    return {name: (inside[name] / experiments, width[name] / experiments) for name in STATISTICS}


def main() -> None:
    """Print coverage and width for each kind of scatter and number of seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--reps", type=int, default=1000, help="resamples of each bootstrap")
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 5, 10, 20])
    options = parser.parse_args()
    started, rows = time.monotonic(), []
    for world, draw in WORLDS.items():
        for seeds in options.seeds:
            shares = coverage(draw, seeds, options.experiments, options.reps)
            rows.append(
                [world, str(seeds), *(f"{100 * share:.1f}% ({100 * width:.1f})" for share, width in shares.values())]
            )
    error = 100 * math.sqrt(0.05 * 0.95 / options.experiments)
    title = (
        f"share of 95% intervals that hold the truth (mean width, points), {TASKS} tasks; standard error {error:.1f}"
    )
    print_table(["scatter", "seeds", *STATISTICS], rows, title)
    print(f"{options.experiments} experiments of {options.reps} resamples, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
