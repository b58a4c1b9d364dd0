"""The estimates that offrl prints where no simulator scores a run, beside the truth: do the intervals hold it?

python scripts/bench/estimates.py --out FOLDER                    # all of it: 15 minutes of one core
python scripts/bench/estimates.py --out FOLDER --names "heated tank"

What was trained, played and estimated is kept in the folder. Ten data sets: five files of D4RL's layout
(`../shared/data`, played in MuJoCo) and five plants (`plants.py`). On each, small networks are trained briefly by
several algorithms, with `--seeds` policies each, so that they differ in quality. Values are discounted by 0.99.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "bench")]

import numpy as np  # noqa: E402
import plants  # noqa: E402

import offrl  # noqa: E402
from offrl.data import load_dataset  # noqa: E402
from offrl.ope import unscored  # noqa: E402
from offrl.runs.run import SavedRun  # noqa: E402
from offrl.runs.settings import run_settings  # noqa: E402

DISCOUNT = 0.99
FILES = {
    name: f"{name}.hdf5"
    for name in (
        "hopper_medium",
        "hopper_medium_replay",
        "hopper_medium_expert",
        "hopper_mixed",
        "halfcheetah_medium_replay",
    )
}
PLANTS = {kind.name: kind for kind in plants.PLANTS}
ALGORITHMS = {False: ("bc", "td3_bc", "iql"), True: ("bc", "iql", "cql")}  # of a discrete plant
SMALL = {
    "algo.hidden": [64, 64],
    "algo.batch_size": 128,
    "compile": "eager",
    "eval.estimate": False,
    "quiet": True,
    "workers": 1,
    "logger": "none",
}


def data_of(name: str, args: argparse.Namespace) -> offrl.Dataset:
    if name in PLANTS:
        return plants.logged(PLANTS[name], args.seed)
    return load_dataset(str(args.data / "d4rl" / FILES[name]))


def train(name: str, args: argparse.Namespace) -> list[Path]:
    """The runs of a data set: those that are there already, and the others now."""
    data, runs = data_of(name, args), []
    for algo in ALGORITHMS[data.spec.discrete]:
        run = f"{algo}-{name.replace(' ', '_')}"
        runs.append(args.out / "runs" / run)
        if not (runs[-1] / "policies").exists():
            began = time.monotonic()
            seeds = [10 * args.seed + k for k in range(args.seeds)]
            settings = SMALL | {"runs_dir": str(args.out / "runs"), "name": run, "experiment": "none"}
            offrl.train(algo, data, steps=args.steps, seeds=seeds, env="none", settings=settings)
            print(f"{run}: trained {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return runs


def hopper(env_id: str, policy: Any, episodes: int) -> tuple[float, float]:
    """As `plants.play`, in MuJoCo, episodes side by side."""
    import gymnasium

    envs = [gymnasium.make(env_id).unwrapped for _ in range(episodes)]
    seen = np.stack([env.reset(seed=1_000 + i)[0] for i, env in enumerate(envs)])
    alive, total, carry = np.ones(episodes, bool), np.zeros(episodes), policy.start(episodes)
    for t in range(700):
        actions, carry = policy.step(carry, seen.astype(np.float32), t)
        for i in np.flatnonzero(alive):
            seen[i], reward, over, _, _ = envs[i].step(actions[i])
            total[i] += DISCOUNT**t * reward
            alive[i] = not over
        if not alive.any():
            break
    return float(total.mean()), float(total.std(ddof=1) / np.sqrt(episodes))


def truth(name: str, run: Path, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """{replica: (mean discounted return, standard error)}, kept in the run's folder."""
    path = run / "truth.json"
    if not path.exists():
        saved, values = SavedRun(run), {}
        for replica in saved.replicas:
            policy = saved.load_policy(replica, "cpu")
            if name in PLANTS:
                values[replica.name] = plants.play(PLANTS[name], policy, DISCOUNT)
            else:
                values[replica.name] = hopper(
                    "HalfCheetah-v4" if "cheetah" in name else "Hopper-v4", policy, args.episodes
                )
        path.write_text(json.dumps(values))
    return {k: tuple(v) for k, v in json.loads(path.read_text()).items()}


def estimate(name: str, run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What `offrl train` keeps in estimate.json, and says, of a run that nothing scored."""
    path = run / unscored.FILE
    if not path.exists():
        path.write_text(json.dumps(unscored.estimate(SavedRun(run), run_settings(run), data_of(name, args))))
    return dict(json.loads(path.read_text()))


def row(name: str, run: Path, replica: str, found: dict[str, Any], known: tuple[float, float]) -> list[str]:
    """A line of the table."""
    policy, (truth, error) = found["policies"][replica], known
    interval, inside = f"none: {(reason := unscored.doubt(found, policy)).partition(':')[0]}", ""
    if not reason:
        interval = f"[{policy['value_low']:.4g}, {policy['value_high']:.4g}]"
        inside = "yes" if policy["value_low"] <= truth <= policy["value_high"] else "no"
    who = f"{run.name.split('-')[0]}, {replica.replace('_', ' ')}"
    return [name, who, f"{policy['value']:.4g}", interval, f"{truth:.4g} ± {1.96 * error:.2g}", inside]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--names", nargs="*", default=[*PLANTS, *FILES])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the plants' logs and, times ten, of the policies")
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--episodes", type=int, default=10)
    args = parser.parse_args()
    rows = []
    for name in args.names:
        for run in train(name, args):
            began = time.monotonic()
            values = truth(name, run, args)
            played, found = time.monotonic(), estimate(name, run, args)
            print(
                f"{run.name}: played {played - began:.0f} s, estimated {time.monotonic() - played:.0f} s",
                file=sys.stderr,
                flush=True,
            )
            rows += [row(name, run, replica, found, known) for replica, known in values.items()]
    print("| data set | policy | estimate | 95% interval | truth | inside |\n|---|---|---|---|---|---|")
    print("\n".join(f"| {' | '.join(cells)} |" for cells in rows))
    guesses = [cells for cells in rows if not cells[-1]]
    high = sum(float(cells[2]) > float(cells[4].partition(" ")[0]) for cells in guesses)
    held, given = (sum(cells[-1] in ends for cells in rows) for ends in (("yes",), ("yes", "no")))
    print(
        f"\n{len(rows)} policies: {given} have an interval, {held} of which hold the truth; {len(guesses)} have none, "
        f"and of these guesses {high} are too high."
    )


if __name__ == "__main__":
    main()
