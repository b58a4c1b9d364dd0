"""PPO beside Stable-Baselines3's, at the same settings, on Pendulum-v1 or Hopper-v5 without data.

    python scripts/bench/ppo.py --out FOLDER
    python scripts/bench/ppo.py --out FOLDER --env Hopper-v5

16 environments x 128 steps, 10 passes over 32 batches of 64, two layers of 64, tanh, gamma 0.9 (Hopper: 0.99), lambda
0.95, a constant rate of 1e-3 (3e-4), raw rewards and observations; actions of both are scaled to [-1, 1], and both are
scored by our evaluator from the same start states. What is in --out already is not run again. Writes ppo.md and
ppo.png."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import offrl  # noqa: E402
from offrl.figures import curves as plots  # noqa: E402
from offrl.finetuning.summary import picture  # noqa: E402
from offrl.runs.record import SCORES  # noqa: E402
from offrl.runs.tables import interval_text  # noqa: E402
from offrl.settings.evaluation import EvalConfig  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402
from scripts.bench.finetune import score_sb3  # noqa: E402

ENVS, HORIZON = 16, 128
# environment -> discount, learning rate, largest action
TASKS = {"Pendulum-v1": (0.9, 1e-3, 2.0), "Hopper-v5": (0.99, 3e-4, 1.0)}
ITERATION = ENVS * HORIZON
SETTINGS: dict[str, Any] = {
    "algo": "ppo",
    "envs": ENVS,
    "algo.horizon": HORIZON,
    "algo.schedule": "constant",
    "algo.value_weight": 0.5,  # SB3's 0.5 is of the squared error
    "algo.normalise_observations": False,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--env", choices=TASKS, default="Pendulum-v1")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=74, help="of 2,048 environment steps")
    parser.add_argument("--every", type=int, default=12, help="iterations between evaluations")
    parser.add_argument("--episodes", type=int, default=20)
    args = parser.parse_args()
    for name, train in (("ours", ours), ("sb3", sb3)):
        start = time.monotonic()
        train(args)
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    table(args.out, args.env)


def ours(args: argparse.Namespace) -> None:
    """In --out/ours."""
    discount, rate, _ = TASKS[args.env]
    chosen = {"algo.discount": discount, "algo.learning_rate": rate}
    scoring = {"eval.every": args.every * ITERATION, "eval.episodes": args.episodes, "eval.workers": 0}
    common = {"runs_dir": str(args.out), "name": "ours", "quiet": True, "device": "cpu", "seeds": args.seeds}
    steps = args.iterations * ITERATION
    offrl.finetune(env=args.env, steps=steps, settings={**SETTINGS, **chosen, **scoring, **common})


def sb3(args: argparse.Namespace) -> None:
    """In --out/sb3."""
    import torch
    from gymnasium.wrappers import RescaleAction
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    discount, rate, largest = TASKS[args.env]
    limits = {"min_action": -1.0, "max_action": 1.0}

    def model_of(seed: int) -> PPO:
        envs = make_vec_env(args.env, ENVS, seed=seed, wrapper_class=RescaleAction, wrapper_kwargs=limits)
        return PPO("MlpPolicy", envs, n_steps=HORIZON, gamma=discount, learning_rate=rate, seed=seed, device="cpu")

    iterations = dict.fromkeys([*range(0, args.iterations, args.every), args.iterations])
    steps, task = [n * ITERATION for n in iterations], offrl.load(args.out / "ours").spec.task
    scoring = EvalConfig(episodes=args.episodes, env=args.env)
    score_sb3(args.out / "sb3", args.seeds, steps, task, scoring, model_of, scale=largest)


def table(out: Path, env: str) -> None:
    """Write ppo.md and ppo.png of what is in `out`."""
    files = {"offrl": out / "ours" / SCORES, "Stable-Baselines3": out / "sb3" / SCORES}
    lines = []
    for label, path in files.items():
        (curves,) = plots.read_curves(path, "return_mean").values()
        steps = sorted(next(iter(curves.values())))
        if not lines:
            lines = [
                f"| return at step | seeds | {' | '.join(f'{s:,}' for s in steps)} |",
                "|---" * (len(steps) + 2) + "|",
            ]
        cells = [interval_text(mean_interval([c[s] for c in curves.values()]), 0) for s in steps]
        lines.append(f"| {label} | {len(curves)} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    (out / "ppo.md").write_text(text)
    print(text)
    picture(files, out / "ppo.png", title=f"PPO on {env}", column="return_mean")


if __name__ == "__main__":
    main()
