"""BCQ-Lagrangian: drawn actions and each loss in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from tests.support.golden import KEY, A, B, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import mlp as ref

DISCOUNT, SAMPLES = 0.9, 3
G = np.random.default_rng(7)
BATCH = transitions(G) | {"costs": torch.tensor(G.uniform(0, 1, B), dtype=torch.float32)}
X = double(BATCH)
NOISE = G.normal(size=(SAMPLES, B, 2 * A))  # of latents; most are beyond the clip at 0.5


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is that of NOISE, whatever the key."""
    noise = torch.tensor(NOISE, dtype=torch.float32)
    monkeypatch.setattr(rng, "normal", lambda key, shape: noise if len(shape) == 3 else noise[0])


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "bcq_lag")
    defaults = {"hidden": [5], "autoencoder_hidden": [5], "discount": DISCOUNT, "candidates": SAMPLES}
    defaults |= {"cost_limit": 4.0, "cost_horizon": 2, "cost_discount": 0.5, "perturbation": 0.3}
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec())
    state, g = algorithm.init(3), torch.Generator().manual_seed(5)
    for params in (*state.params.values(), *state.target.values()):
        redraw(params, g)
    return algorithm, state


def drawn(state: TrainState, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
    decoder, xi = ref.net(state.params["autoencoder"], "decoder."), state.params["actor"]
    a = np.tanh(ref.forward(decoder, np.concatenate([observations, np.clip(noise, -0.5, 0.5)], 1))[0])
    (w, b), (head, offset) = ref.net(xi)
    change = np.tanh(np.tanh(np.concatenate([observations, a], 1) @ w + b) @ head + offset)
    return np.clip(a + 0.3 * change, -1, 1)


def q(params: dict[str, torch.Tensor], observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return q_values(critics(params), observations, actions)


def test_targets_take_the_best_action_and_the_dearest() -> None:
    """0.75 of the smaller Q and 0.25 of the larger; of costs the larger of both."""
    algorithm, state = make()
    following = np.stack([drawn(state, X["next_observations"], noise) for noise in NOISE])
    actions = algorithm.candidates(state.params["actor"], state, BATCH["next_observations"], KEY)
    np.testing.assert_allclose(actions.numpy(), following, atol=1e-5)
    values = q(state.target["critic"], X["next_observations"], following)
    y = X["rewards"] + DISCOUNT * X["masks"] * (0.75 * values.min(0) + 0.25 * values.max(0)).max(0)
    expected = ((q(state.params["critic"], X["observations"], X["actions"]) - y) ** 2).mean(1).sum()
    loss, _ = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY, actions)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    costs = np.maximum(q(state.target["cost_critic"], X["next_observations"], following).max(0), 0).max(0)
    found = algorithm.constraint.cost(state.target["cost_critic"], BATCH["next_observations"], actions)
    np.testing.assert_allclose(found.numpy(), costs, rtol=1e-4, atol=1e-6)


def test_targets_are_of_the_target_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state = make()
    policies, candidates = [], algorithm.candidates
    monkeypatch.setattr(algorithm, "candidates", lambda actor, *x: policies.append(actor) or candidates(actor, *x))
    algorithm.update(state, BATCH, KEY, phase=0)
    assert [policy is state.target["actor"] for policy in policies] == [True, True]  # of values, of costs


def test_actor_loss() -> None:
    """(-E Q + 2 E|Q| E (Q_c - 3) / 3) / 3 with the multiplier 2 and the threshold 4 * 0.75."""
    algorithm, state = make()
    state = state.with_extra(multiplier={**state.extra["multiplier"], "value": torch.tensor(2.0)})
    actions = drawn(state, X["observations"], NOISE[0])
    values = q(state.params["critic"], X["observations"], actions).min(0)
    excess = (np.maximum(q(state.params["cost_critic"], X["observations"], actions).max(0), 0) - 3) / 3
    expected = (-values.mean() + 2 * np.abs(values).mean() * excess.mean()) / 3
    loss, _ = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_without_a_limit_there_are_no_costs() -> None:
    algorithm, state = make(cost_limit=None)
    assert sorted(state.params) == ["actor", "autoencoder", "critic"] and algorithm.sampler().extra == ()
