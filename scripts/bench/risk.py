"""A chain whose short cut is better in the mean and worse in the tail: what actors of the mean and of CVaR do, and the
worst tenth of their returns beside the one that their critics predict.

    python scripts/bench/risk.py [EPISODES]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import gymnasium as gym
import numpy as np
import torch

import offrl
from offrl.data.dataset import Dataset

LEVELS = [1.0, 0.1]
LENGTH = 3  # steps of the long way, each of which earns 1
GAIN, LOSS, CHANCE = 6.0, -6.0, 0.2  # of the short cut, and how often it fails: 3.6 in the mean, -6 in the worst tenth


class RiskyChain(gym.Env):
    """At the start action 1 takes the short cut; action 0 walks on, as both do later."""

    observation_space = gym.spaces.Box(0.0, 1.0, (LENGTH,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        if self.at == 0 and int(action) == 1:
            return self._observation(), LOSS if self.np_random.random() < CHANCE else GAIN, True, False, {}
        self.at += 1
        return self._observation(), 1.0, self.at == LENGTH, False, {}

    def _observation(self) -> np.ndarray:
        return np.eye(LENGTH, dtype=np.float32)[min(self.at, LENGTH - 1)]


def chain(episodes: int = 600) -> Dataset:
    """Episodes of random actions."""
    env, draw = RiskyChain(), np.random.default_rng(0)
    rows: list[tuple[np.ndarray, int, float, bool]] = []
    for episode in range(episodes):
        observation, end = env.reset(seed=episode)[0], False
        while not end:
            action = int(draw.integers(2))
            following, reward, end, _, _ = env.step(action)
            rows.append((observation, action, reward, end))
            observation = following
    return offrl.from_arrays(*(np.array(x) for x in zip(*rows, strict=True)))


def train(folder: str, seeds: int = 2, steps: int = 1_000) -> offrl.Run:
    """Actors of all levels, as replicas of one program."""
    settings: dict[str, Any] = {
        "grid": {"risk": LEVELS},
        "algo.value_head": "c51",
        "algo.critics": 2,
        "algo.hidden": [64],
        "algo.polyak": 0.05,
        "algo.learning_rate": 3e-3,
        "algo.entropy_weight": 0.01,
        "algo.discount": 1.0,
        "compare": [],
        "device": "cpu",
        "quiet": True,
        "runs_dir": folder,
        "eval.every": 0,
        "workers": 1,
    }
    return offrl.train("sac_n", chain(), seeds=seeds, steps=steps, env=RiskyChain, settings=settings)


def worst(returns: np.ndarray, level: float = 0.1) -> float:
    """The mean of the worst share `level` of the returns."""
    return float(np.sort(returns)[: max(1, round(level * len(returns)))].mean())


def predicted(run: offrl.Run, seed: int, risk: float) -> tuple[float, float]:
    """Mean and worst tenth of the return from the start, by the critic whose mean is smaller."""
    policy = run.policy(seed, risk=risk)
    observation = RiskyChain().reset(seed=0)[0]
    assert policy.find_critic is not None
    params = policy.find_critic(policy)["critic"]
    critic: Any = policy.algorithm.critic  # type: ignore[attr-defined]
    logits = critic.logits(params, torch.as_tensor(observation)[None], torch.as_tensor([int(policy.act(observation))]))
    smaller = int(critic.head.mean(logits)[:, 0].argmin())
    return float(critic.head.mean(logits)[smaller, 0]), float(critic.head.cvar(logits, 0.1)[smaller, 0])


def main(episodes: int = 200) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = train(folder)
        evaluation = run.evaluate(episodes=episodes)
        print("| `algo.risk` | seed | at the start | mean return | predicted | worst tenth | predicted |")
        print("|---|---|---|---|---|---|---|")
        for replica, returns in zip(run.replicas, evaluation.returns, strict=True):
            risk = dict(replica.values)["risk"]
            action = int(run.policy(replica.seed, risk=risk).act(RiskyChain().reset(seed=0)[0]))
            mean, tail = predicted(run, replica.seed, risk)
            way = "short cut" if action else "long way"
            cells = [
                f"{risk:g}",
                replica.seed,
                way,
                *(f"{x:.2f}" for x in (returns.mean(), mean, worst(returns), tail)),
            ]
            print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
