"""Behaviour cloning: each loss in float64 NumPy, and whole updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import Algorithm, TrainState
from offrl.data.dataset import DataSpec
from offrl.nn.mlp import dropout
from tests.support.reference import mlp as ref

B, OBS, A, K = 7, 3, 2, 4
G = np.random.default_rng(0)
BATCH = {
    "observations": torch.tensor(G.normal(size=(B, OBS)), dtype=torch.float32),
    "actions": torch.tensor(G.uniform(-0.9, 0.9, (B, A)), dtype=torch.float32),
}
X, ACTIONS = BATCH["observations"].numpy().astype(np.float64), BATCH["actions"].numpy().astype(np.float64)
KEY = rng.make_key(0)


def make(discrete: bool = False, **settings: object) -> tuple[Algorithm, TrainState]:
    kind = registry.get("algo", "bc")
    spec = (
        DataSpec((OBS,), 1, True, K)
        if discrete
        else DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
    )
    algorithm = kind(kind.Config(hidden=[6, 5], learning_rate=0.01, **settings), spec)
    return algorithm, algorithm.init(3)


def loss_of(algorithm: Algorithm, state: TrainState, batch: dict[str, torch.Tensor] = BATCH) -> float:
    return float(algorithm.actor_loss(state.params["actor"], state, batch, KEY)[0])  # type: ignore[attr-defined]


def test_squared_error() -> None:
    algorithm, state = make()
    z, _ = ref.forward(ref.net(state.params["actor"], "net."), X)
    assert loss_of(algorithm, state) == pytest.approx(((np.tanh(z) - ACTIONS) ** 2).mean(), rel=1e-5)


def test_gaussian_negative_log_likelihood() -> None:
    algorithm, state = make(policy="gaussian")
    state.params["actor"]["log_std"] += torch.tensor([0.3, -0.7])
    z, _ = ref.forward(ref.net(state.params["actor"], "net."), X)
    std = np.exp([0.3, -0.7])
    density = np.exp(-0.5 * ((ACTIONS - np.tanh(z)) / std) ** 2) / (std * np.sqrt(2 * np.pi))
    assert loss_of(algorithm, state) == pytest.approx(-np.log(density.prod(1)).mean(), rel=1e-5)


def test_tanh_gaussian_negative_log_likelihood() -> None:
    algorithm, state = make(policy="tanh_gaussian")
    z, _ = ref.forward(ref.net(state.params["actor"], "net."), X)
    mean, std = z[:, :A], np.exp(z[:, A:])
    density = np.exp(-0.5 * ((np.arctanh(ACTIONS) - mean) / std) ** 2) / (std * np.sqrt(2 * np.pi)) / (1 - ACTIONS**2)
    assert loss_of(algorithm, state) == pytest.approx(-np.log(density.prod(1)).mean(), rel=1e-4)


def test_squared_error_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state = make(policy="tanh_gaussian", loss="sample_error")
    noise = G.normal(size=(B, A))
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.tensor(noise, dtype=torch.float32))
    z, _ = ref.forward(ref.net(state.params["actor"], "net."), X)
    sample = np.tanh(z[:, :A] + np.exp(np.clip(z[:, A:], -5, 2)) * noise)
    assert loss_of(algorithm, state) == pytest.approx(((sample - ACTIONS) ** 2).mean(), rel=1e-5)


def test_cross_entropy() -> None:
    algorithm, state = make(discrete=True)
    actions = torch.tensor([0, 3, 1, 1, 2, 0, 3])
    z, _ = ref.forward(ref.net(state.params["actor"], "net."), X)
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    expected = -np.log(p[np.arange(B), actions]).mean()
    assert loss_of(algorithm, state, {**BATCH, "actions": actions}) == pytest.approx(expected, rel=1e-5)


def test_dropout_is_on_in_training_and_off_in_acting() -> None:
    algorithm, state = make(dropout=0.5)
    layers = ref.net(state.params["actor"], "net.")
    h = X
    for i, (w, b) in enumerate(layers[:-1]):
        h = np.maximum(h @ w + b, 0.0)
        h = h * dropout(torch.ones(h.shape), 0.5, rng.fold_in(KEY, i)).numpy()
    expected = ((np.tanh(h @ layers[-1][0] + layers[-1][1]) - ACTIONS) ** 2).mean()
    assert loss_of(algorithm, state) == pytest.approx(expected, rel=1e-5)
    acted, _ = algorithm.actor(state).act(None, BATCH["observations"], KEY, explore=False)
    np.testing.assert_allclose(acted, np.tanh(ref.forward(layers, X)[0]), atol=1e-5)


def test_updates() -> None:
    algorithm, state = make()
    net, adam = ref.net(state.params["actor"], "net."), ref.Adam(lambda t: 0.01)
    for _ in range(10):
        z, inputs = ref.forward(net, X)
        a = np.tanh(z)
        grads, _ = ref.backward(net, inputs, 2 * (a - ACTIONS) / (B * A) * (1 - a**2))
        net = ref.unflat(adam.step(ref.flat(net), grads))
        state, metrics = algorithm.update(state, BATCH, KEY, phase=0)
        assert float(metrics["actor/loss"]) == pytest.approx(((a - ACTIONS) ** 2).mean(), rel=1e-3)
    ref.close(net, state.params["actor"], "net.")
