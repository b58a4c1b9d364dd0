"""ReCOIL on a point that walks to a goal: one marked expert episode, 19 unmarked, 2,000 of random actions; at 10x the
updates too.

    python scripts/bench/recoil_point.py             # a table; some minutes

The smallest problem of the kind that its authors' code has as "Grid". A position in [-1, 1]^2 moves by a quarter of the
action, the expert goes straight to (0.6, 0.6), episodes have 8 steps and begin anywhere. Rewards are 0. Printed is the
mean distance from the goal after 8 steps from 500 starts: of an expert, and of 2 seeds of ReCOIL and of BC on the same
data, mean (smallest to largest).
"""

from __future__ import annotations

import sys

import numpy as np
import torch

from offrl import registry
from offrl.algorithm import select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.evaluation.policy import TrainedPolicy
from offrl.training.step import Step

GOAL, STEPS, SEEDS = np.array([0.6, 0.6]), 8, 2
UPDATES = (500, 5_000)  # ten times as many
SIZES = {"hidden": [64, 64], "batch_size": 128, "learning_rate": 1e-3}
VARIANTS = {
    "BC on the union": ("bc", {}),
    "ReCOIL, published temperatures (5 of V, 3 of the policy)": ("recoil", {"decay_steps": 10**9}),
    "ReCOIL, temperature of the policy 0.2": ("recoil", {"decay_steps": 10**9, "temperature": 0.2}),
}


def expert(x: np.ndarray) -> np.ndarray:
    """The expert's actions [B, 2] at positions [B, 2]."""
    return np.clip((GOAL - x) / 0.25, -1.0, 1.0)


def walk(x: np.ndarray, act: object) -> tuple[np.ndarray, np.ndarray]:
    """Positions [T + 1, B, 2] and actions [T, B, 2] of episodes from x [B, 2]."""
    positions, actions = [x], []
    for _ in range(STEPS):
        actions.append(np.asarray(act(positions[-1])))  # type: ignore[operator]
        positions.append(np.clip(positions[-1] + 0.25 * actions[-1], -1.0, 1.0))
    return np.stack(positions), np.stack(actions)


def data() -> Dataset:
    """2,000 random episodes, then 20 of the expert, the first of which is marked."""
    g = np.random.default_rng(0)
    parts = [
        walk(g.uniform(-1, 1, (2000, 2)), lambda x: g.uniform(-1, 1, x.shape)),
        walk(g.uniform(-1, 1, (20, 2)), expert),
    ]
    marks = np.concatenate([np.zeros(2000 * STEPS, bool), np.arange(20 * STEPS) < STEPS])

    def rows(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([a.transpose(1, 0, 2).reshape(-1, 2) for a in arrays]).astype(np.float32)

    observations, actions = rows([p[:-1] for p, _ in parts]), rows([a for _, a in parts]).clip(-1 + 1e-5, 1 - 1e-5)
    following, ends = rows([p[1:] for p, _ in parts]), np.arange(len(marks)) % STEPS == STEPS - 1
    return from_arrays(
        observations,
        actions,
        np.zeros(len(marks), np.float32),
        truncations=ends,
        next_observations=following,
        expert=marks,
        action_low=-1.0,
        action_high=1.0,
    )


def distance(act: object) -> float:
    """Mean distance from the goal where 500 episodes end."""
    positions, _ = walk(np.random.default_rng(1).uniform(-1, 1, (500, 2)), act)
    return float(np.linalg.norm(positions[-1] - GOAL, axis=-1).mean())


def main() -> None:
    torch.set_num_threads(1)
    dataset = data()
    print(f"| policy | {' | '.join(f'{n:,} updates' for n in UPDATES)} |\n|---|{'---|' * len(UPDATES)}")
    print(
        f"| expert; random actions | {distance(expert):.2f}; "
        f"{distance(lambda x: np.random.default_rng(2).uniform(-1, 1, x.shape)):.2f} | |"
    )
    for title, (name, settings) in VARIANTS.items():
        kind = registry.get("algo", name)
        algorithm = kind(kind.fit_config(kind.Config(**SIZES, **settings), dataset), dataset.spec)
        step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=SIZES["batch_size"], replicas=SEEDS)
        state, at, cells = stack([algorithm.init(seed) for seed in range(SEEDS)]), 0, []
        for count in UPDATES:
            state, _ = step.run(state, {}, at, count - at)
            at = count
            policies = [TrainedPolicy(algorithm, select(state, i), 0) for i in range(SEEDS)]
            ends = [distance(lambda x, policy=policy: policy.act(x.astype(np.float32))) for policy in policies]
            cells.append(f"{np.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})")
        print(f"| {title} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
