"""f-DVL: each divergence's loss of V and its gradient in float64 NumPy, where V ends up, and whole updates of V."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import grad

from offrl import registry
from offrl.algorithm import TrainState
from tests.support.golden import KEY, B, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import mlp as ref
from tests.support.reference.losses import gumbel

U = np.array([-9.0, -4.5, -3.5, -1.0, -0.1, 0.2, 1.0, 6.0])  # Q - V of both signs, on both sides of -4
LR, LAMBDA = 0.01, 0.7
BATCH = transitions(np.random.default_rng(2))
X = double(BATCH)


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "f_dvl")
    own = {
        "hidden": [6, 5],
        "learning_rate": LR,
        "init": "torch",
        "value_layer_norm": False,
        "random_actions": 0,
        "greediness": LAMBDA,
    }
    algorithm = kind(kind.Config(**{**own, **settings}), spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for tree in (state.params["value"], state.target["critic"]):
        redraw(tree, g)
    return algorithm, state


def dual(divergence: str, u: np.ndarray, weight: float) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each row, and its derivative with respect to V: u falls as V rises."""
    if divergence == "total_variation":
        return np.array([weight * max(x, 0.0) - (1 - weight) * x for x in u]), np.where(
            u > 0, 1 - 2 * weight, 1 - weight
        )
    inside = u + u**2 / 4
    return weight * np.maximum(inside, 0.0) - (1 - weight) * u, np.where(
        inside > 0, -weight * (1 + u / 2), 0.0
    ) + 1 - weight


@pytest.mark.parametrize("weight", [0.3, LAMBDA, 1.0])
@pytest.mark.parametrize("divergence", ["total_variation", "chi_square"])
def test_losses_and_their_gradients(divergence: str, weight: float) -> None:
    algorithm, _ = make(divergence=divergence, greediness=weight)
    expected, slope = dual(divergence, U, weight)
    u = torch.tensor(U, dtype=torch.float32)
    np.testing.assert_allclose(algorithm.value_error(u), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        grad(lambda v: algorithm.value_error(u - v).sum())(torch.zeros(8)), slope, rtol=1e-5, atol=1e-6
    )


def test_reverse_kl_is_the_loss_of_xql() -> None:
    algorithm, _ = make(divergence="reverse_kl", gumbel_temperature=1.5, gumbel_clip=2.0)
    np.testing.assert_allclose(
        algorithm.value_error(torch.tensor(U, dtype=torch.float32)), gumbel(U, 1.5, 2.0)[0], rtol=1e-5, atol=1e-6
    )


def test_total_variation_gives_a_quantile() -> None:
    """Where slopes balance, (2 lambda - 1) P(Q > V) = (1 - lambda) P(Q < V): a quarter of Q lies above V for lambda
    0.8.
    """
    algorithm, _ = make(divergence="total_variation", greediness=0.8)
    q, v = torch.arange(100.0), torch.linspace(0, 100, 1001)
    found = float(v[algorithm.value_error(q - v[:, None]).mean(-1).argmin()])
    assert 73.95 < found < 75.05  # all of 74 to 75 are as good, on a grid of 0.1


def test_chi_square_lies_between_the_mean_and_the_largest() -> None:
    q, v = torch.linspace(0.0, 2.0, 101), torch.linspace(0, 3, 3001)
    found = [float(v[make(greediness=w)[0].value_error(q - v[:, None]).mean(-1).argmin()]) for w in (0.6, 0.8, 0.95)]
    assert 0.0 < found[0] < found[1] < found[2] < 2.0


@pytest.mark.parametrize("divergence", ["total_variation", "chi_square"])
def test_updates_of_the_value(divergence: str) -> None:
    algorithm, state = make(divergence=divergence)
    value, adam = ref.net(state.params["value"]), ref.Adam(lambda t: LR)
    q = q_values(critics(state.target["critic"]), X["observations"], X["actions"]).min(0)
    for _ in range(5):
        ours = algorithm.critic.min_q(
            algorithm.critic.target_critics(state, KEY), BATCH["observations"], BATCH["actions"]
        ).mean
        state, metrics = algorithm.descend(state, "value", algorithm.value_loss, BATCH, ours)
        v, inputs = ref.forward(value, X["observations"])
        rows, slope = dual(divergence, q - v[:, 0], LAMBDA)
        assert float(metrics["value/loss"]) == pytest.approx(rows.mean(), rel=1e-3, abs=1e-4)
        grads, _ = ref.backward(value, inputs, (slope / B)[:, None])
        value = ref.unflat(adam.step(ref.flat(value), grads))
        ref.close(value, state.params["value"], atol=5e-5)


def test_published_defaults() -> None:
    c = registry.get("algo", "f_dvl").Config()
    assert (c.divergence, c.batch_size, c.gumbel_clip, c.random_actions, c.huber_delta) == (
        "chi_square",
        1024,
        5.0,
        1,
        20.0,
    )
    assert c.value_layer_norm and c.temperature == 3.0
