"""Contrastive RL with encoders of growing depth: does it train without diverging, and what does depth buy?

    python scripts/bench/crl_depth.py DATA --depths 4 16 32 --steps 20000 --seeds 3 --out docs/benchmarks/crl-depth.md

DATA is a goal dataset (an OGBench file, say). Each depth is an ordinary run under --runs and goes on where it was
stopped. The table has, over the last tenth of training, the critics' loss and how often a row's own goal is the nearest
of the batch's, the largest loss after the first tenth (a divergence would show), and the score where the data have an
environment.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import offrl
from offrl.runs.tables import interval_text
from offrl.statistics.intervals import mean_interval
from offrl.system.files import write_text

COLUMNS = ("layers", "replicas x updates a second", "critics' loss", "largest loss", "own goal nearest", "score")


def measured(run: Any, seeds: int) -> tuple[list[float], list[float], list[float]]:
    """Per seed: mean loss and accuracy over the last tenth of the lines, and the largest loss after the first tenth."""
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    tenth = max(1, len(lines) // 10)
    loss = [
        [math.inf if line["critic/loss"][s] is None else line["critic/loss"][s] for line in lines] for s in range(seeds)
    ]
    accuracies = [[line["critic/accuracy"][s] or 0.0 for line in lines] for s in range(seeds)]
    mean = [sum(x[-tenth:]) / tenth for x in loss], [sum(x[-tenth:]) / tenth for x in accuracies]
    return mean[0], mean[1], [max(x[tenth:] or x) for x in loss]


def small(interval: Sequence[float], unit: str = "") -> str:
    """Mean and interval to three digits, however small."""
    mean, low, high = interval
    return f"{mean:.3g}{unit}" + (f" [{low:.3g}, {high:.3g}]" if math.isfinite(low) else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], help="more settings, for all depths: algo.width=64")
    parser.add_argument("--runs", default="runs/crl-depth")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    from offrl.settings.compose import parse

    rows = []
    for depth in given.depths:
        settings = {
            "algo.encoder": "residual",
            "algo.depth": depth,
            "eval.every": 0,
            "log_every": max(1, given.steps // 50),
            "compare": [],
        }
        settings |= parse(given.set)
        run = offrl.train(
            "crl",
            given.data,
            seeds=given.seeds,
            steps=given.steps,
            runs_dir=given.runs,
            settings={**settings, "name": f"depth-{depth}"},
        )
        loss, accuracy, largest = measured(run, given.seeds)
        timing = [json.loads(line) for line in (run.dir / "timing.jsonl").read_text().splitlines()]
        rate = [line["updates_per_second"] for line in timing if line.get("updates_per_second")]
        scores = [row["score"] for row in run.final_scores or [] if row["score"] is not None]
        cells = [
            str(depth),
            f"{given.seeds * sum(rate) / len(rate):.0f}" if rate else "",
            *(small(mean_interval(x)) for x in (loss, largest)),
            small([100.0 * x for x in mean_interval(accuracy)], "%"),
        ]
        rows.append([*cells, interval_text(mean_interval(scores)) if scores else ""])
    table = [
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    text = "\n".join(table) + "\n"
    print(text)
    if given.out is not None:
        own = " ".join(given.set)
        depths = " ".join(map(str, given.depths))
        command = (
            f"python scripts/bench/crl_depth.py {Path(given.data).name} --depths {depths} --steps {given.steps} "
            f"--seeds {given.seeds}"
        )
        about = (
            f"Mean over {given.seeds} seeds with the 95% interval; CPU.\n\n    {command}{own and ' --set ' + own}\n\n"
        )
        write_text(given.out, "# Contrastive RL with deep encoders\n\n" + about + text)


if __name__ == "__main__":
    main()
