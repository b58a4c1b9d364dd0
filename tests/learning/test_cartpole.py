"""Discrete actions on a real problem: CartPole data of a poor policy, which every algorithm must surpass."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium
import numpy as np
import pytest

from offrl import registry
from offrl.algorithm import select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.evaluation.policy import TrainedPolicy
from offrl.training.step import Step

pytestmark = pytest.mark.nightly
COMMON: dict[str, Any] = {"hidden": [64, 64], "learning_rate": 1e-3, "batch_size": 128}
SETTINGS: dict[str, dict[str, Any]] = {
    "bc": {},
    "iql": {"polyak": 0.02, "actor_schedule": "constant"},
    "cql": {"polyak": 0.02, "actor_learning_rate": 1e-3, "conservative_weight": 1.0},
    "sac_n": {"polyak": 0.02, "critics": 5},
}


def episode(env: Any, seed: int, act: Any) -> tuple[list[Any], list[int], list[float], bool]:
    """Observations, actions and rewards of one episode, and whether the pole fell (else it was cut off)."""
    observation, _ = env.reset(seed=seed)
    observations, actions, rewards, over, fallen = [], [], [], False, False
    while not over:
        action = act(observation)
        observations.append(observation)
        actions.append(action)
        observation, reward, fallen, cut, _ = env.step(action)
        rewards.append(float(reward))
        over = fallen or cut
    return observations, actions, rewards, fallen


@functools.lru_cache
def behaviour() -> tuple[Dataset, float]:
    """Episodes of a policy that pushes towards where the pole leans, three times in four at random; and its mean
    return.
    """
    g, env = np.random.default_rng(0), gymnasium.make("CartPole-v1")

    def act(observation: np.ndarray) -> int:
        return int(g.integers(2)) if g.random() < 0.75 else int(observation[2] + 0.2 * observation[3] > 0)

    found = [episode(env, seed, act) for seed in range(150)]
    flags = [[(last, fell) for last in (i == len(r) - 1 for i in range(len(r)))] for _, _, r, fell in found]
    ends = np.array([(last and fell, last and not fell) for episode_flags in flags for last, fell in episode_flags])
    columns = [np.concatenate([np.asarray(e[i]) for e in found]) for i in range(3)]
    return from_arrays(*columns, ends[:, 0], ends[:, 1], num_actions=2), float(np.mean([sum(e[2]) for e in found]))


@pytest.mark.parametrize("name", [n for n in SETTINGS if n in registry.names("algo")])
def test_learns_more_than_the_behaviour_shows(name: str) -> None:
    dataset, shown = behaviour()
    kind = registry.get("algo", name)
    algorithm = kind(kind.fit_config(kind.Config(**COMMON, **SETTINGS[name]), dataset), dataset.spec)
    step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=COMMON["batch_size"], replicas=1)
    state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 3000)
    policy, env = TrainedPolicy(algorithm, select(state, 0), 0), gymnasium.make("CartPole-v1")
    returns = [sum(episode(env, 1000 + i, lambda s: int(policy.act(s)))[2]) for i in range(10)]
    print(f"{name}: behaviour {shown:.1f}, learnt {np.mean(returns):.1f}")
    assert shown < 150 and np.mean(returns) > 1.5 * shown, (name, shown, returns)
