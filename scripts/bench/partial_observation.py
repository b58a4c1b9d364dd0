"""Scores of what sees single observations beside what sees windows, where a plant answers late or hides its state:
`python scripts/bench/partial_observation.py --out FOLDER --dataset delayed-pendulum`.

Trains each algorithm with the same settings otherwise, and prints a table of scores at the last update with 95%
intervals over seeds.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import offrl
from offrl.statistics.intervals import mean_interval

SETTINGS = {"eval.episodes": 20, "compile": "eager", "quiet": True}
GRU = {"dataset.history": 4, "dataset.history_actions": 3, "encoder.name": "gru"}
SCALE = {"dataset.reward_scale": 0.05}  # steps cost up to 30, which is much for advantages times 3
NORMAL = {"dataset.normalize_observations": True, "eval.episodes": 10}
# dataset -> what is seen -> settings
VIEWS: dict[str, dict[str, dict[str, Any]]] = {
    "delayed-pendulum": {
        "single observations": SCALE,
        "`action_delay=auto`": {**SCALE, "dataset.action_delay": "auto"},
        "`history=4`": {**SCALE, "dataset.history": 4},
        "`history=4 history_actions=3 encoder=gru`": {**SCALE, **GRU},
    },
    "made-pipeline-bare": {
        "single observations": NORMAL,
        "`history=25`": {**NORMAL, "dataset.history": 25},
        "`history=25 history_actions=25`": {**NORMAL, "dataset.history": 25, "dataset.history_actions": 25},
        "its own history (`made-pipeline`)": {**NORMAL, "dataset.name": "made-pipeline"},
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dataset", choices=list(VIEWS), required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--algorithms", nargs="+", default=["iql"])
    options = parser.parse_args()
    print(f"{options.dataset}: {options.steps:,} updates, {options.seeds} seeds\n")
    print("| algorithm | seen | score | minutes |\n|---|---|---|---|")
    for algorithm in options.algorithms:
        for name, view in VIEWS[options.dataset].items():
            start, runs = time.monotonic(), str(options.out / "runs")
            settings = {
                "algo.hidden": [options.width] * 2,
                "algo.batch_size": options.batch_size,
                "seeds": options.seeds,
                "steps": options.steps,
                "eval.every": options.steps,
                "runs_dir": runs,
            }
            run = offrl.train(algorithm, settings={"dataset.name": options.dataset, **SETTINGS, **settings, **view})
            mean, low, high = mean_interval([float(row["score"]) for row in run.final_scores])
            minutes = (time.monotonic() - start) / 60
            print(f"| {algorithm} | {name} | {mean:.1f} [{low:.1f}, {high:.1f}] | {minutes:.1f} |", flush=True)


if __name__ == "__main__":
    main()
