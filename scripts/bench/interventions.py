"""SAC on Reacher-v5 with and without a script that corrects one action in ten.

python scripts/bench/interventions.py --out FOLDER

Success is within 2 cm of the target, the only reward; half of each batch are rows of five scripted demonstrations, and
with the script its corrections too. Prints the success, in %, along environment steps. What is in --out is not run
again.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from residual import HERE as REACHER
from residual import controller, demonstrations

import offrl
from offrl.runs.tables import interval_text
from offrl.statistics.intervals import mean_interval

DEMONSTRATIONS = 5
SETTINGS: dict[str, Any] = {
    "algo.critics": 2,
    "algo.hidden": [128, 128],
    "algo.batch_size": 128,
    "eval.episodes": 50,
    "eval.workers": 0,
    "mixing": 0.5,
    "compile": "eager",
}


def correct(observation: np.ndarray, action: np.ndarray) -> np.ndarray | None:
    """What the demonstrations' controller does, in one state of ten, whichever these are."""
    if zlib.crc32(observation.tobytes()) % 10:
        return None
    cosines, sines, target, speed = np.split(observation[:8].astype(float), 4)
    return controller(np.arctan2(sines, cosines), speed, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    data = args.out / "demonstrations.npz"
    if not data.exists():
        args.out.mkdir(parents=True, exist_ok=True)
        columns = demonstrations()
        last = np.flatnonzero(columns["terminals"] + columns["timeouts"])[DEMONSTRATIONS - 1]
        np.savez(data, **{name: column[: last + 1] for name, column in columns.items()})  # type: ignore[arg-type]
    every = args.steps // 5
    print(f"| success, % | {' | '.join(f'{step:,} steps' for step in range(every, args.steps + 1, every))} |")
    for name, who in {"alone": None, "corrected": f"{Path(__file__).resolve()}:correct"}.items():
        run = offrl.finetune(
            algo="sac_n",
            dataset=str(data),
            env=f"{REACHER}:Reacher",
            seeds=args.seeds,
            steps=args.steps,
            settings={**SETTINGS, "eval.every": every, "interventions": who},
            runs_dir=str(args.out),
            name=name,
            quiet=True,
        )
        rates: dict[int, list[float]] = {}
        for row in run.score_rows:
            rates.setdefault(int(row["step"]), []).append(100.0 * float(row["success"]))
        cells = [interval_text(mean_interval(values)) for step, values in sorted(rates.items()) if step]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
