"""A cart that is pushed, observed once in 8 steps: a sequence of actions must steer it where held actions cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.algorithm import select
from offrl.algorithms.sequence_rl import WINDOW_OBSERVATIONS, RecallSampler
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms.columns import normalize_observations
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.sweeps import HeldPolicy
from tests.support.cases import start

pytestmark = pytest.mark.nightly
STEPS, SEEDS, SLOW = 40, [0, 1], 8


def push(states: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Next states (place, velocity) and rewards. A full push changes the velocity by 0.5: held for 8 steps it is 4."""
    velocity = states[:, 1] + 0.5 * actions[:, 0]
    following = np.stack([np.clip(states[:, 0] + 0.2 * velocity, -6, 6), np.clip(velocity, -6, 6)], 1)
    return following, -(following[:, 0] ** 2) - 0.1 * following[:, 1] ** 2


def starts(g: np.random.Generator, count: int) -> np.ndarray:
    return np.stack([g.uniform(-2, 2, count), g.uniform(-1, 1, count)], 1)


def recorded() -> Dataset:
    """400 episodes of springs with dampers, of very different strengths, and noise."""
    g, count = np.random.default_rng(0), 400
    gains, states, rows = g.uniform([0.0, 0.0], [1.5, 1.5], (count, 2)), starts(g, count), []
    for _ in range(STEPS):
        actions = np.clip(-(gains * states).sum(1, keepdims=True) + 0.4 * g.normal(size=(count, 1)), -1, 1)
        following, rewards = push(states, actions)
        rows.append((states, actions, rewards, following))
        states = following
    observations, actions, rewards, following = (
        np.stack(column, 1).reshape(count * STEPS, -1) for column in zip(*rows, strict=True)
    )
    ends = np.arange(count * STEPS) % STEPS == STEPS - 1
    return normalize_observations(
        from_arrays(
            observations,
            actions,
            rewards[:, 0],
            truncations=ends,
            next_observations=following,
            action_low=-1.0,
            action_high=1.0,
        )
    )


def played(policy: TrainedPolicy, every: int) -> float:
    """Mean return of 200 episodes."""
    held, states = HeldPolicy(policy, every), starts(np.random.default_rng(7), 200)
    carry, total = held.start(200), np.zeros(200)
    for t in range(STEPS):
        actions, carry = held.step(carry, states.astype(np.float32), t)
        states, rewards = push(states, actions)
        total += rewards
    return float(total.mean())


def learnt(dataset: Dataset, kind: Any = None, **settings: Any) -> list[TrainedPolicy]:
    kind = kind or registry.get("algo", "sequence_rl")
    config = kind.Config(
        hidden=[64, 64],
        recurrent_width=48,
        discount=0.95,
        learning_rate=1e-3,
        sequence_decay_steps=4000,
        batch_size=128,
        **settings,
    )
    algorithm = kind(config, dataset.spec)
    state, step = start(algorithm, SEEDS, dataset, batch_size=128)
    state, _ = step.run(state, {}, 0, 4000)
    return [TrainedPolicy(algorithm, select(state, i), seed) for i, seed in enumerate(SEEDS)]


class Unrecalled(registry.get("algo", "sequence_rl")):  # type: ignore[misc]
    """Judges every action of a sequence in the state that it begins in."""

    def sampler(self) -> Any:
        class FirstStates(RecallSampler):
            def __call__(self, source: Any, key: torch.Tensor, batch_size: int) -> Any:
                batch = super().__call__(source, key, batch_size)
                return {
                    **batch,
                    WINDOW_OBSERVATIONS: batch["observations"].unsqueeze(1).expand_as(batch[WINDOW_OBSERVATIONS]),
                }

        return FirstStates(self.config.length)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return recorded()


@pytest.fixture(scope="module")
def policies(dataset: Dataset) -> list[TrainedPolicy]:
    return learnt(dataset)


def test_a_sequence_loses_nothing_where_held_actions_fail(policies: list[TrainedPolicy]) -> None:
    for policy in policies:
        single = policy.with_settings({"action_steps": 0})
        fast, held, sequence = played(single, 1), played(single, SLOW), played(policy, SLOW)
        assert sequence > fast - 2.0 and held < fast - 100.0, (fast, held, sequence)
        assert played(policy, 12) > fast - 4.0  # further than it was trained to unroll


def test_it_is_more_than_cloning(dataset: Dataset, policies: list[TrainedPolicy]) -> None:
    for policy, clone in zip(policies, learnt(dataset, alpha=0.0), strict=True):
        assert played(policy, SLOW) > played(clone, SLOW) + 2.0


def test_each_action_must_be_judged_where_it_is_done(dataset: Dataset, policies: list[TrainedPolicy]) -> None:
    for policy, ablated in zip(policies, learnt(dataset, Unrecalled), strict=True):
        assert played(policy, SLOW) > played(ablated, SLOW) + 50.0
