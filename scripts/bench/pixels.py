"""Scores from pixels beside scores from states, on the drawn toys: `python scripts/bench/pixels.py --out FOLDER`.

Makes the data (scripts/bench/drawn.py), trains each algorithm from the states and from two stacked frames with the same
settings otherwise: one encoder for all networks, one in each (own), and without random shifts. Prints a table of scores
at the last update with 95% intervals over seeds, and the minutes that each took.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import offrl
from offrl.statistics.intervals import mean_interval

ALGORITHMS = ("bc", "iql", "td3_bc", "fql", "gciql", "hiql")
SETTINGS = {"algo.hidden": [128, 128], "algo.batch_size": 128, "eval.episodes": 20, "compile": "eager", "quiet": True}
PIXELS: dict[str, Any] = {"dataset.frames": 2, "encoder.name": "drq", "encoder.shift": 2}
COLUMNS: dict[str, dict[str, Any]] = {
    "states": {},
    "pixels": PIXELS,
    "own": PIXELS | {"encoder.trained_by": "own"},
    "no shift": PIXELS | {"encoder.shift": 0},
}


def score(algorithm: str, data: Path, seeds: int, steps: int, runs: Path, **more: Any) -> str:
    """A run's mean score at its last evaluation with the interval, and the minutes that it took."""
    start = time.monotonic()
    settings = {**SETTINGS, "seeds": seeds, "steps": steps, "eval.every": steps, "runs_dir": str(runs), **more}
    run = offrl.train(algorithm, dataset=str(data), settings=settings)
    values = [float(row["score"]) for row in run.final_scores]
    mean, low, high = mean_interval(values)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}], {(time.monotonic() - start) / 60:.1f} min"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--worlds", nargs="+", default=["pendulum", "point-mass"])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--columns", nargs="+", default=list(COLUMNS), choices=list(COLUMNS))
    options = parser.parse_args()
    script = Path(__file__).with_name("drawn.py")
    if not (options.out / "drawn-pendulum.npz").exists():
        arguments = ["--out", str(options.out), "--rows", str(options.rows)]
        subprocess.run([sys.executable, str(script), *arguments], check=True)
    print(
        f"{options.rows:,} rows, {options.steps:,} updates, {options.seeds} seeds; score 0: random, 100: controller\n"
    )
    print(f"| world | algorithm | {' | '.join(options.columns)} |\n|---|---|{'---|' * len(options.columns)}")
    for world in options.worlds:
        for algorithm in options.algorithms:
            print(f"| {world} | {algorithm} |", end="", flush=True)
            for settings in (COLUMNS[column] for column in options.columns):
                data = options.out / f"drawn-{world}{'' if settings else '-state'}.npz"
                text = score(algorithm, data, options.seeds, options.steps, options.out / "runs", **settings)
                print(f" {text} |", end="", flush=True)
            print()


if __name__ == "__main__":
    main()
