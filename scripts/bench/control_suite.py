"""MR.Q and SAC on a task of the DeepMind Control Suite, from fresh parameters, each decision held for two steps.

    pip install shimmy dm_control
    MUJOCO_GL=disable python scripts/bench/control_suite.py --out FOLDER

Networks are smaller than published (`CURVES`). Prints the returns along decisions, of which an episode has 500, means
over seeds with their 95% interval. What is in --out already is not run again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium as gym  # noqa: E402

import offrl  # noqa: E402
from offrl.figures import curves as plots  # noqa: E402
from offrl.runs.record import SCORES  # noqa: E402
from offrl.runs.tables import interval_text  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402

REPEAT, DECISIONS = 2, 500
# name -> (algorithm, its settings)
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    "mrq": ("mrq", {"algo.hidden": [64, 64], "algo.latent": 64, "algo.action_latent": 32, "algo.batch_size": 64}),
    "mrq_published": ("mrq", {}),
    "sac": ("sac_n", {"algo.critics": 2, "algo.hidden": [64, 64], "algo.batch_size": 64, "mixing": 0}),
}


class Repeat(gym.Wrapper[Any, Any, Any, Any]):
    """Each action is held for `REPEAT` steps, whose rewards are summed."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        total = 0.0
        for _ in range(REPEAT):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


def make(task: str) -> gym.Env[Any, Any]:
    """The task, its observations in one vector."""
    import shimmy

    gym.register_envs(shimmy)
    return Repeat(gym.wrappers.FlattenObservation(gym.make(f"dm_control/{task}-v0")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="pendulum-swingup")
    parser.add_argument("--only", nargs="*", default=["mrq", "sac"], choices=CURVES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50_000, help="decisions of each seed")
    parser.add_argument("--warmup", type=int, default=10_000, help="the first of them, which are random")
    parser.add_argument("--every", type=int, default=10_000)
    args = parser.parse_args()
    for name in args.only:
        algo, settings = CURVES[name]
        run = offrl.finetune(
            algo=algo, env=lambda: make(args.task), steps=args.steps, seeds=args.seeds, warmup=args.warmup,
            max_steps=DECISIONS, name=name, runs_dir=str(args.out), quiet=True, device="cpu",
            settings={**settings, "eval.episodes": 10, "eval.every": args.every, "eval.workers": 0},
        )  # fmt: skip
        (curves,) = plots.read_curves(run.dir / SCORES, "return_mean").values()
        for step in sorted(next(iter(curves.values()))):
            returns = [curve[step] for curve in curves.values()]
            each = ", ".join(f"{value:.0f}" for value in returns)
            print(f"| {name} | {step:,} | {interval_text(mean_interval(returns), 0)} | {each} |", flush=True)


if __name__ == "__main__":
    main()
