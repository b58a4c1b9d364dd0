"""Scores from pixels beside scores from states, on the drawn toys: `python scripts/bench/pixels.py --out FOLDER`.

Makes the data (scripts/bench/drawn.py), trains each algorithm from the states and from two stacked frames with the same
settings otherwise, and prints a table of scores at the last update with 95% intervals over seeds.
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

ALGORITHMS = ("bc", "td3_bc", "iql", "fql")
SETTINGS = {"algo.hidden": [128, 128], "algo.batch_size": 128, "eval.episodes": 20, "compile": "eager", "quiet": True}
PIXELS: dict[str, Any] = {"dataset.frames": 2, "encoder.name": "drq", "encoder.shift": 2}


def score(algorithm: str, data: Path, seeds: int, steps: int, runs: Path, **more: Any) -> tuple[str, float]:
    """(mean score with its interval, seconds) of a run's last evaluation."""
    start = time.monotonic()
    settings = {**SETTINGS, "seeds": seeds, "steps": steps, "eval.every": steps, "runs_dir": str(runs), **more}
    run = offrl.train(algorithm, dataset=str(data), settings=settings)
    values = [float(row["score"]) for row in run.final_scores]
    mean, low, high = mean_interval(values)
    return f"{mean:.1f} [{low:.1f}, {high:.1f}]", time.monotonic() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--worlds", nargs="+", default=["pendulum", "point-mass"])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    options = parser.parse_args()
    script = Path(__file__).with_name("drawn.py")
    if not (options.out / "drawn-pendulum.npz").exists():
        arguments = ["--out", str(options.out), "--rows", str(options.rows)]
        subprocess.run([sys.executable, str(script), *arguments], check=True)
    print(
        f"{options.rows:,} rows, {options.steps:,} updates, {options.seeds} seeds; score 0: random, 100: controller\n"
    )
    print("| world | algorithm | states | pixels | pixels, no shift | minutes from states | from pixels |")
    print("|---|---|---|---|---|---|---|")
    for world in options.worlds:
        state, pixels = options.out / f"drawn-{world}-state.npz", options.out / f"drawn-{world}.npz"
        for algorithm in options.algorithms:
            common = (options.seeds, options.steps, options.out / "runs")
            vector, fast = score(algorithm, state, *common)
            shown, slow = score(algorithm, pixels, *common, **PIXELS)
            still, _ = score(algorithm, pixels, *common, **PIXELS | {"encoder.shift": 0})
            print(
                f"| {world} | {algorithm} | {vector} | {shown} | {still} | {fast / 60:.1f} | {slow / 60:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
