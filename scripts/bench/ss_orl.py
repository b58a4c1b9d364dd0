"""Semi-supervised data (SS-ORL, arXiv 2210.06518): few labelled episodes against all of them, and against those few
alone.

python scripts/bench/ss_orl.py --steps 100000 --seeds 3 /data/hopper_medium.hdf5 /data/hopper_medium_expert.hdf5

For each file four runs of one algorithm (TD3+BC): every action known; a tenth of the episodes, drawn from the half with
the lowest returns, labels the others by inverse dynamics; the same tenth alone; and, with --bc, behaviour cloning of
the tenth. An interrupted script goes on where it was; runs and labels that are there already are not made again.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import offrl  # noqa: E402
from offrl.runs.tables import final_table, print_table  # noqa: E402


def arms(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name -> settings of each run."""
    few = {
        "dataset.labelled_fraction": args.fraction,
        "dataset.labelled_quantile": args.quantile,
        "dataset.labelled_seed": args.split,
    }
    labels = {
        "dataset.action_free_members": args.members,
        "dataset.action_free_updates": args.updates,
        "dataset.action_free_hidden": args.hidden,
    }
    settings: dict[str, dict[str, Any]] = {
        "all labelled": {},
        "few + inverse dynamics": {**few, **labels},
        "few alone": {**few, "dataset.action_free_members": 0},
    }
    if args.bc:
        settings["few alone, BC"] = {**settings["few alone"], "algo": "bc"}
    return settings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="datasets with all actions")
    parser.add_argument("--algo", default="td3_bc")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--episodes", type=int, default=10, help="of each evaluation")
    parser.add_argument("--fraction", type=float, default=0.1, help="of the episodes that are labelled")
    parser.add_argument(
        "--quantile", type=float, default=0.5, help="the share with the lowest returns that they are drawn from"
    )
    parser.add_argument("--split", type=int, default=0, help="seed of that draw")
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--updates", type=int, default=10_000, help="of the inverse dynamics, at most")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 256], help="the paper has 1024 1024")
    parser.add_argument("--bc", action="store_true", help="behaviour cloning of the few, too")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/ss_orl"))
    args = parser.parse_args()
    for path in args.files:
        results, seconds, notes = [], {}, []
        for label, settings in arms(args).items():
            began = time.monotonic()
            values = {
                "algo": args.algo,
                **settings,
                "label": label,
                "name": f"{path.stem}-{label.replace(' + ', '-').replace(', ', '-').replace(' ', '-')}",
                "runs_dir": str(args.runs_dir),
                "eval.episodes": args.episodes,
            }
            run = offrl.train(dataset=path, seeds=args.seeds, steps=args.steps, settings=values)
            results += run.results()
            seconds[label] = time.monotonic() - began
            notes += [n for n in run.record["data"]["notes"] if "labelled by" in n]
        final_table(results, f"{path.stem}: {args.algo}, {args.steps:,} updates")
        reference = next((r.score or r.returns for r in results if r.algorithm == "all labelled"), None)
        if reference is not None and reference[0]:
            shares = [
                (r.algorithm, f"{100 * (r.score or r.returns)[0] / reference[0]:.0f}%", f"{seconds[r.algorithm]:.0f}")
                for r in results
            ]
            print_table(["data", "of all labelled", "seconds"], shares)
        for note in dict.fromkeys(notes):
            print(note)


if __name__ == "__main__":
    main()
