"""Limits of a robot's speed: `python scripts/bench/velocity.py --out FOLDER --robot Hopper` (needs offrl[collect]).

Makes the data, unless FOLDER has them: one policy of Stable-Baselines3 that is told the speed to run at (Hopper: PPO,
HalfCheetah: SAC), played at several speeds, in equal shares of the rows. Prints a table of return, cost and the share
of seeds that keep the limit, with 95% intervals over seeds, and what one program of four limits takes beside four runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import offrl
from offrl.data import load_dataset
from offrl.interop.sb3 import Actor, actor_from
from offrl.runs.tables import interval_text

SPEEDS = {"Hopper": (0.2, 0.5, 1.0, 2.0), "HalfCheetah": (1.5, 3.0, 4.5, 6.0)}  # m/s; thresholds 0.7402 and 3.2096
STEPS = {
    "Hopper": 400_000,
    "HalfCheetah": 120_000,
}  # of PPO, and of SAC: PPO broke no limit after 400,000
LIMIT, LIMITS = 20, [10, 20, 40, 80]
SMALL: dict[str, Any] = {"algo.hidden": [64, 64], "algo.batch_size": 256}
TRANSFORMER = {
    "algo.width": 32, "algo.layers": 2, "algo.heads": 4, "algo.context": 5, "algo.batch_size": 64,
    "algo.learning_rate": 1e-3, "algo.warmup_steps": 100,
}  # fmt: skip
# in few updates values are there only where targets follow sooner and look less far
MULTIPLIER = SMALL | {"algo.polyak": 0.02, "algo.cost.discount": 0.97}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "bc": ("bc", SMALL),
    "iql": ("iql", SMALL),
    "BC-Safe": ("bc", SMALL | {"dataset.keep": f"cost <= {LIMIT}"}),
    "cdt": ("cdt", TRANSFORMER | {"algo.cost_limit": LIMIT}),
}


class AtSpeed(gym.Wrapper):
    """A robot that is told a speed v* up to `fastest`, the last number of its observations, and earns v* - |v - v*| in
    place of its speed v."""

    def __init__(self, env: gym.Env, fastest: float) -> None:
        super().__init__(env)
        self.fastest, self.speed = fastest, 0.0
        assert isinstance(env.observation_space, gym.spaces.Box)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (env.observation_space.shape[0] + 1,), np.float32)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        self.speed = self.np_random.uniform(0.0, self.fastest)
        return self.told(observation), info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        speed = info["x_velocity"]
        earned = float(reward) - speed + self.speed - abs(speed - self.speed)
        return self.told(observation), earned, terminated, truncated, info

    def told(self, observation: Any) -> np.ndarray:
        return np.append(observation, self.speed).astype(np.float32)


def runners(robot: str, steps: int) -> list[Actor]:
    """A policy of the robot's own observations for each of SPEEDS, trained together."""
    from stable_baselines3 import PPO, SAC
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    speeds = SPEEDS[robot]
    if robot == "HalfCheetah":
        single = AtSpeed(make(robot), speeds[-1])
        model = SAC("MlpPolicy", single, learning_starts=5_000, device="cpu", seed=0).learn(steps)
        return at_speeds(model, np.zeros(single.observation_space.shape), np.ones(()), speeds)
    env = VecNormalize(make_vec_env(lambda: AtSpeed(make(robot), speeds[-1]), 8, seed=0))
    model = PPO("MlpPolicy", env, n_steps=256, batch_size=256, device="cpu", seed=0)
    model.learn(steps)
    return at_speeds(model, env.obs_rms.mean, np.sqrt(env.obs_rms.var + env.epsilon), speeds)


def at_speeds(model: Any, mean: np.ndarray, std: np.ndarray, speeds: Sequence[float]) -> list[Actor]:
    """The policy of standardised observations, the last of them the speed, as one of raw observations for each speed:
    both are in the first layer.
    """
    box = model.action_space
    actor = actor_from(model.policy.state_dict(), low=box.low, high=box.high, discrete=False, where="PPO")
    (weight, bias), *others = actor.layers
    weight = weight / torch.as_tensor(std).float()
    bias = bias - weight @ torch.as_tensor(mean).float()
    return [
        replace(actor, layers=((weight[:, :-1], bias + speed * weight[:, -1]), *others), seed=i)
        for i, speed in enumerate(speeds)
    ]


def make(robot: str) -> gym.Env:
    return gym.make(f"offrl.envs.velocity:offrl/{robot}Velocity-v0")


def record(robot: str, policies: list[Actor], rows: int, path: Path, parallel: int = 10) -> None:
    """Whole episodes of each actor with its noise, until its share of the rows is there."""
    envs = [make(robot) for _ in range(parallel)]
    episodes: list[dict[str, Any]] = []
    for actor in policies:
        recorded, rng = 0, actor.start(parallel)
        while recorded < rows / len(policies):
            observations = [env.reset(seed=len(episodes) + i)[0] for i, env in enumerate(envs)]
            played: list[list[Any]] = [[] for _ in envs]
            running = list(range(parallel))
            while running:
                actions, _ = actor.act(np.stack([observations[i] for i in running]), rng)
                for i, action in zip(list(running), actions, strict=True):
                    before = observations[i]
                    observations[i], reward, terminated, truncated, info = envs[i].step(action)
                    played[i].append((before, action, reward, terminated, truncated, info["cost"], observations[i]))
                    if terminated or truncated:
                        running.remove(i)
            names = ("observations", "actions", "rewards", "terminations", "truncations", "costs", "next_observations")
            episodes += [dict(zip(names, map(np.array, zip(*p, strict=True)), strict=True)) for p in played]
            recorded += sum(map(len, played))
        last = episodes[-parallel:]
        means = (np.mean([e[name].sum() for e in last]) for name in ("rewards", "costs"))
        print("a part's last episodes: mean return {:.1f}, mean cost {:.1f}".format(*means), flush=True)
    np.savez_compressed(path, **{name: np.concatenate([e[name] for e in episodes]) for name in episodes[0]})


def describe(path: Path) -> None:
    """Print what the data's episodes earn and cost."""
    dataset = load_dataset(str(path))
    costs, returns = dataset.episode_costs(), dataset.episode_returns()
    safe = float((costs <= LIMIT).float().mean())
    print(
        f"{len(dataset):,} rows, {len(costs):,} episodes: mean return {float(returns.mean()):.0f}, mean cost "
        f"{float(costs.mean()):.0f}, the cheapest {float(costs.min()):.0f}; {safe:.0%} cost at most {LIMIT}"
    )


def train(algo: str, data: Path, options: argparse.Namespace, **more: Any) -> tuple[Any, float]:
    """The rows of a run's table, and the CPU minutes that it took."""
    start = time.process_time()
    steps = options.transformer_steps if algo == "cdt" else options.steps
    settings = {
        "seeds": options.seeds, "steps": steps, "eval.every": steps, "eval.episodes": 20, "eval.cost_limit": LIMIT,
        "eval.env": f"offrl.envs.velocity:offrl/{options.robot}Velocity-v0", "runs_dir": str(options.out / "runs"),
        "quiet": True, "eval.workers": 0, **more,
    }  # fmt: skip
    run = offrl.train(algo, dataset=str(data), settings=settings)
    return run.results(), (time.process_time() - start) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--robot", choices=list(SPEEDS), default="Hopper")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--learning-steps", type=int, help="environment steps that the policy learns from")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--transformer-steps", type=int, default=2_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = options.out / f"{options.robot.lower()}-velocity.npz"
    if not data.exists():
        options.out.mkdir(parents=True, exist_ok=True)
        steps = options.learning_steps or STEPS[options.robot]
        record(options.robot, runners(options.robot, steps), options.rows, data)
    describe(data)
    print("| | limit | return | cost | safe seeds | CPU minutes |\n|---|---|---|---|---|---|")

    def line(name: str, limit: float, result: Any, minutes: float) -> None:
        cells = (interval_text(result.returns), interval_text(result.cost), interval_text(result.safe, 2))
        print(f"| {name} | {limit:g} | {' | '.join(cells)} | {minutes:.1f} |", flush=True)

    for name, (algo, settings) in ROWS.items():
        (result,), minutes = train(algo, data, options, **settings)
        line(name, LIMIT, result, minutes)
    several = {"grid.cost_limit": LIMITS, "eval.cost_limit": None}
    results, minutes = train("td3_bc", data, options, **MULTIPLIER, **several)
    for limit, result in zip(LIMITS, results, strict=True):
        line("td3_bc, one program", limit, result, minutes)
    separate = 0.0
    for limit in LIMITS:
        single = {"algo.cost_limit": limit, "eval.cost_limit": limit}
        (result,), each = train("td3_bc", data, options, **MULTIPLIER, **single)
        line("td3_bc, a run each", limit, result, each)
        separate += each
    print(f"\nfour limits: {minutes:.1f} CPU minutes as one program, {separate:.1f} as four runs")


if __name__ == "__main__":
    main()
