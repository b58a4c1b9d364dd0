"""PPO or SAC of stable-baselines3 trained inside a learned model, and scored in the real environment before and after.

    offrl train algo=dynamics dataset=DATA name=model seeds=1
    python scripts/bench/sb3_in_model.py runs/model --algo sac --steps 10000 --env Pendulum-v1 --dataset DATA

The agent never sees the real environment while it trains. Returns are undiscounted means over --episodes episodes of
the greedy policy."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import offrl  # noqa: E402
from offrl.errors import UserError  # noqa: E402
from offrl.runs.tables import print_table  # noqa: E402
from offrl.system.progress import duration  # noqa: E402

# SB3's own defaults but for these, which are those of its zoo for Pendulum-v1, with the batch size for many
# environments at once
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"learning_rate": 1e-3, "gamma": 0.9, "n_epochs": 10, "gae_lambda": 0.95, "n_steps": 200, "batch_size": 400},
    "sac": {"learning_rate": 1e-3, "learning_starts": 500, "gradient_steps": -1},
}
ENVS = {"ppo": 16, "sac": 2}


def score(agent: Any, env: Any, episodes: int) -> tuple[float, float]:
    """Mean and standard deviation of the greedy agent's returns."""
    from stable_baselines3.common.evaluation import evaluate_policy

    returns, _ = evaluate_policy(
        agent, env, n_eval_episodes=episodes, deterministic=True, return_episode_rewards=True, warn=False
    )
    return float(np.mean(returns)), float(np.std(returns))


def train(args: argparse.Namespace, seed: int) -> list[list[str]]:
    """One agent; rows of the table."""
    import stable_baselines3

    from offrl.tasks.environments import make_env
    from offrl.tasks.task import Task

    settings = {"horizon": args.horizon, "penalty": args.penalty, "start": args.start, "seed": seed, "device": "cpu"}
    envs = offrl.ModelVectorEnv(args.model, num_envs=args.num_envs or ENVS[args.algo], **settings)
    kind = getattr(stable_baselines3, args.algo.upper())
    agent = kind("MlpPolicy", envs.for_sb3(), seed=seed, device="cpu", verbose=0, **SETTINGS[args.algo])
    inside = offrl.ModelVectorEnv(
        args.model, num_envs=args.episodes, **{**settings, "penalty": 0.0, "start": "initial"}
    ).for_sb3()

    def look() -> tuple[tuple[float, float], tuple[float, float]]:
        real = make_env(Task(name=args.env, env_id=args.env))
        real.reset(seed=10_000 + seed)
        inside.seed(10_000 + seed)
        return score(agent, inside, args.episodes), score(agent, real, args.episodes)

    rows, began = [], time.monotonic()
    for name in ("untrained", f"{args.steps:,} steps in the model"):
        if rows:
            agent.learn(args.steps)
        model, real = look()
        scores = [f"{mean:,.1f} ± {std:,.1f}" for mean, std in (model, real)]
        rows.append([f"{args.algo}, seed {seed}, {name}", *scores, duration(time.monotonic() - began)])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a run of algo=dynamics, or a file of its models/")
    parser.add_argument("--algo", default="ppo", choices=tuple(SETTINGS))
    parser.add_argument("--steps", type=int, default=100_000, help="of all environments together")
    parser.add_argument("--env", default="Pendulum-v1", help="the real environment")
    parser.add_argument("--dataset", help="the data of the model, whose mean return is shown beside")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--num-envs", type=int)
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--horizon", type=int)
    parser.add_argument("--penalty", type=float, default=0.0)
    parser.add_argument("--start", default="data", choices=("data", "initial"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        rows = [row for seed in args.seeds for row in train(args, seed)]
        if args.dataset:
            returns = offrl.load_dataset(args.dataset).raw_returns.numpy()
            rows.insert(0, ["the data's episodes", "", f"{returns.mean():,.1f} ± {returns.std():,.1f}", ""])
    except UserError as error:
        print(f"sb3_in_model: {error}", file=sys.stderr)
        return 2
    print_table(
        ["agent", "return in the model", f"return in {args.env}", "time"],
        rows,
        f"trained in {args.model}, scored greedily",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
