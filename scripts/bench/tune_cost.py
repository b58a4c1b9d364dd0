"""What a tune costs beside its settings one by one: wall time, and the share of the ideal. For
docs/benchmarks/tuning.md.

    python scripts/bench/tune_cost.py FOLDER

A tune of IQL on the built-in data set and runs of single settings at full length, in turn, each a command of its own as
a user would type it. The ideal trains the tune's updates at the speed that its first rung's program reached, and does
nothing else.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

SETTINGS, UPDATES, SEEDS, SINGLE = 16, 8_000, 2, 3
SHARED = shlex.split(
    'dataset=builtin "algo.hidden=[64,64]" algo.batch_size=128 device=cpu workers=1 compile=compiled group=4 --quiet'
)


def offrl(*words: str) -> float:
    """Seconds of a command."""
    began = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "offrl.cli", *words, *SHARED],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    return time.monotonic() - began


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(words).folder

    def single(number: int) -> float:
        values = [
            f"algo.temperature={1 + number}",
            f"steps={UPDATES}",
            f"seeds={SEEDS}",
            "eval.env=none",
            "eval.estimate=false",
        ]
        return offrl("train", "algo=iql", "logger=none", f"runs_dir={folder}", f"name=single-{number}", *values)

    offrl(
        "train",
        "algo=iql",
        "steps=200",
        "seeds=4",
        "eval.env=none",
        "eval.estimate=false",
        f"runs_dir={folder}",
        "name=warm",
    )
    alone = [single(0)]
    out = folder / "tune"
    tune = offrl(
        "tune",
        "algos=iql",
        f"budget={SETTINGS}x{UPDATES}",
        "proposer=random",
        f"seeds={SEEDS}",
        "retrain=false",
        "env=none",
        "ope.updates=20000",
        f"out={out}",
    )
    alone += [single(n) for n in range(1, SINGLE)]
    stages = {s["stage"]: s["seconds"] for s in map(json.loads, (out / "timing.jsonl").read_text().splitlines())}
    trained = sum(v for k, v in stages.items() if k.startswith("trained"))
    judged = sum(v for k, v in stages.items() if k.startswith("judged"))
    result = json.loads((out / "result.json").read_text())
    speed = json.loads((out / "runs" / "b0-r0-iql" / "timing.jsonl").read_text().splitlines()[-1])["updates_per_second"]
    ideal = result["updates"]["made"] / (speed * SETTINGS * SEEDS)
    one_by_one = SETTINGS * sum(alone) / len(alone)
    updates = result["updates"]
    print(
        f"{SETTINGS} settings x {SEEDS} seeds, {UPDATES:,} updates; the tune makes {updates['made']:,} of "
        f"{updates['full']:,}"
    )
    print(
        f"one by one: {one_by_one:.0f} s ({', '.join(f'{a:.0f}' for a in alone)} s each, times {SETTINGS} / "
        f"{len(alone)})"
    )
    print(
        f"tune: {tune:.0f} s, of which training {trained:.0f}, judging {judged:.0f}; {tune / one_by_one:.2f} of one by "
        "one"
    )
    print(
        f"ideal training: {ideal:.0f} s at {speed:.0f} updates/s of {SETTINGS * SEEDS} policies: {ideal / trained:.0%} "
        "of the tune's"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
