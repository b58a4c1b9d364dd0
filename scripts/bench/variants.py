"""Equal spacing and MBTL on tasks that are made up: `python scripts/bench/variants.py`.

Each task has `--variants` variants at equal distances in [0, 1]. A policy that is trained at i earns there a number
between 0 and 1, which a Gaussian process of length 0.2 draws, and elsewhere less by a slope times the distance, at
least 0. The slope of a task is drawn between 0.5 and 7.5 by its logarithm; with `--by-source` each policy has its own.
Printed is the mean over tasks of mean_j max_i J(i -> j), with its 95% interval, and the share of tasks in which MBTL
earns as much as equal spacing or more.
"""

from __future__ import annotations

import argparse

import numpy as np

from offrl.benchmark.variants import CHOICES, train_bank
from offrl.runs.tables import interval_text
from offrl.statistics.intervals import mean_interval

LENGTH, SLOPES = 0.2, (0.5, 7.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--variants", type=int, default=50)
    parser.add_argument("--budgets", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--by-source", action="store_true")
    options = parser.parse_args()
    draw = np.random.default_rng(0)
    positions = np.linspace(0.0, 1.0, options.variants)
    matrices = [made_up(positions, options.by_source, draw) for _ in range(options.tasks)]
    print("| trainings | equal | mbtl | mbtl as good or better |\n|---|---|---|---|")
    for budget in options.budgets:
        earned = {choose: [score(m, positions, budget, choose) for m in matrices] for choose in CHOICES}
        share = np.mean(np.array(earned["mbtl"]) >= np.array(earned["equal"]) - 1e-12)
        cells = [interval_text(mean_interval(earned[choose]), 3) for choose in CHOICES]
        print(f"| {budget} | {cells[0]} | {cells[1]} | {share:.0%} |", flush=True)


def made_up(positions: np.ndarray, by_source: bool, draw: np.random.Generator) -> np.ndarray:
    """J(i -> j) of a task: [M, M]."""
    count, gaps = len(positions), np.abs(np.subtract.outer(positions, positions))
    factor = np.linalg.cholesky(np.exp(-0.5 * gaps**2 / LENGTH**2) + 1e-6 * np.eye(count))
    top = 1.0 / (1.0 + np.exp(-factor @ draw.standard_normal(count)))
    slopes = np.exp(draw.uniform(*np.log(SLOPES), size=count if by_source else 1))
    return np.maximum(top[:, None] - slopes[:, None] * gaps, 0.0)


def score(matrix: np.ndarray, positions: np.ndarray, budget: int, choose: str) -> float:
    """The mean over the variants of what the best trained policy earns."""
    bank = train_bank(positions, budget, choose, lambda i: matrix[i])
    return float(bank.earned(bank.best).mean())


if __name__ == "__main__":
    main()
