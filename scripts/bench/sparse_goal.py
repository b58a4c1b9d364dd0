"""Director beside DreamerV3 and SAC where a reward is rare and far away: `python scripts/bench/sparse_goal.py --out
FOLDER`.

A point begins at one end of a winding corridor; the other end pays 1 and ends the episode, and nothing else pays. All
learn from fresh parameters, without data. Prints for each seed the share of ten greedy episodes that reach the end
after the last step, and how many episodes of play did, and when first. What is in --out already is not run again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402

import offrl  # noqa: E402
from offrl.finetuning import episodes  # noqa: E402

STEP, LIMIT = 0.4, 120  # cells, steps of an episode
MAZES = {
    2: ("#######", "#.....#", "#####.#", "#.....#", "#######"),
    4: ("#######", "#.....#", "#####.#", "#.....#", "#.#####", "#.....#", "#######"),
}
LATENT = {
    "algo.batch_size": 8, "algo.length": 16, "algo.recurrent_width": 128, "algo.groups": 8, "algo.classes": 8,
    "algo.width": 64, "algo.learning_rate": 1e-3, "algo.warmup_steps": 100,
}  # fmt: skip
# name -> (algorithm, its settings, settings of offrl finetune)
CURVES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "director": ("director", LATENT, {"utd": 0.125}),
    "dreamerv3": ("dreamerv3", LATENT, {"utd": 0.125}),
    "sac": ("sac_n", {"algo.critics": 2, "algo.hidden": [64, 64]}, {"utd": 1.0}),
}


class PointMaze(gym.Env[Any, Any]):
    """Observation: x and y, halved, from the middle. Action: how far to move along each, in steps of `STEP` cells."""

    observation_space = spaces.Box(-2.0, 2.0, (2,))
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def __init__(self, bends: int = 4) -> None:
        self.free = np.array([[cell == "." for cell in row] for row in MAZES[bends]])
        self.goal = np.array([self.free.shape[0] - 2.0, 5.0 if bends == 4 else 1.0])

    def _get_obs(self) -> np.ndarray:
        return ((self.point - 3.0) / 2.0).astype(np.float32)

    def set_state(self, qpos: np.ndarray, qvel: np.ndarray) -> None:
        self.point = qpos.copy()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.point, self.t = 1.0 + self.np_random.uniform(-0.1, 0.1, 2), 0
        return self._get_obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        for axis in (0, 1):
            after = self.point.copy()
            after[axis] += STEP * float(action[axis])
            if self.free[tuple(np.rint(after).astype(int))]:
                self.point = after
        over = bool(np.abs(self.point - self.goal).max() < 0.5)
        return self._get_obs(), float(over), over, self.t >= LIMIT, {"success": over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=list(CURVES), choices=CURVES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8_000)
    args = parser.parse_args()
    print("| algorithm | greedy episodes that reach the end | episodes of play that do | the first at step |")
    print("|---|---|---|---|")
    for name in args.only:
        algo, settings, online = CURVES[name]
        run = offrl.finetune(
            algo=algo, env=lambda: PointMaze(2), mixing=0, envs=4, steps=args.steps, seeds=args.seeds, warmup=1_000,
            name=name, runs_dir=str(args.out), quiet=True, device="cpu", compile="eager", **online,
            settings={**settings, "eval.episodes": 10, "eval.every": 2_000, "eval.workers": 0},
        )  # fmt: skip
        greedy, shares, first = [f"{row['success']:.0%}" for row in run.final_scores], [], []
        for replica in run.replicas:
            played = [row for row in episodes.read(run.dir) if row["seed"] == replica.seed]
            ended = [row["step"] for row in played if row["success"]]
            shares.append(f"{len(ended)} of {len(played)}")
            first.append(f"{int(ended[0]):,}" if ended else "-")
        print(f"| {name} | {', '.join(greedy)} | {', '.join(shares)} | {', '.join(first)} |", flush=True)


if __name__ == "__main__":
    main()
