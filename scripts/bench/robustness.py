"""Scores of several algorithms of one data set where their environment is perturbed:
`python scripts/bench/robustness.py --out FOLDER --data hopper_medium.hdf5`.

Trains each algorithm with the same networks, scores it at the points of `--robust`, and prints a table with 95%
intervals over seeds and the minutes of training and scoring. Each run's page and heat map lie in FOLDER/runs/NAME-ALGO;
what is there already is not run again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import offrl
from offrl.api import Run
from offrl.report import robust

SETTINGS = {"compile": "eager", "quiet": True, "eval.every": 0, "eval.episodes": 10, "compare": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--robust", default="contact")
    parser.add_argument("--points", default="grid")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--algorithms", nargs="+", default=["bc", "td3_bc", "rebrac", "iql", "awac"])
    options = parser.parse_args()
    print(f"{options.data.stem}, robust={options.robust} points={options.points}: {options.steps:,} updates, ", end="")
    print(f"{options.seeds} seeds, {options.episodes} episodes at each point\n")
    print(f"| algorithm | {' | '.join(robust.HEADERS)} | worst where | minutes, training + scoring |")
    print("|" + "---|" * (len(robust.HEADERS) + 3))
    for algorithm in options.algorithms:
        cells, minutes = measured(algorithm, options)
        print(f"| {algorithm} | {' | '.join(cells)} | {minutes[0]:.1f} + {minutes[1]:.1f} |", flush=True)


def measured(algorithm: str, options: argparse.Namespace) -> tuple[list[str], list[float]]:
    """(cells of the table's row, minutes of training and scoring)."""
    runs, name = options.out / "runs", f"{options.data.stem}-{algorithm}"
    row = runs / name / f"row-{options.robust}.json"
    if row.exists():
        cells, minutes = json.loads(row.read_text())
        return cells, minutes
    start = time.monotonic()
    sizes: dict[str, Any] = {"algo.hidden": [128, 128], "algo.batch_size": 128, "name": name, "runs_dir": str(runs)}
    more = {"dataset.name": str(options.data), "seeds": options.seeds, "steps": options.steps}
    run: Run = offrl.train(algorithm, settings={**SETTINGS, **sizes, **more})
    trained = time.monotonic()
    scores = run.evaluate_robust(options.robust, options.points, episodes=options.episodes)
    robust.write_robust(scores, run.dir, f"{algorithm} on {options.data.stem}")
    minutes = [(trained - start) / 60, (time.monotonic() - trained) / 60]
    cells = robust.rows(scores)[0][1:]
    row.write_text(json.dumps([cells, minutes]))
    return cells, minutes


if __name__ == "__main__":
    main()
