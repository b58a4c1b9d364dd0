"""The models that label datasets, inverse dynamics and preferences: losses and whole updates against float64 NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data.dataset import DataSpec
from offrl.relabel.inverse_dynamics import InverseDynamics, InverseSettings
from offrl.relabel.preferences import Preferences, PreferenceSettings
from tests.support.reference import mlp as reference
from tests.support.reference.mlp import Net

B, S, A, H = 6, 3, 2, 4  # rows, numbers in a state and in an action, length of a segment
SPEC = DataSpec((S,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
R = np.random.default_rng(0)


def states() -> dict[str, np.ndarray]:
    return {k: R.normal(size=(B, S)).astype(np.float32) for k in ("previous", "observations", "next_observations")}


def torch_batch(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(v) for k, v in batch.items()}


def gaussian_loss(
    mean: Net, log_std: Net, batch: dict[str, np.ndarray]
) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
    """-mean log p(0.95 a), p the density of tanh(u), u ~ N(mean, exp(log_std)^2); and its gradients."""
    x = np.concatenate([batch[k] for k in ("previous", "observations", "next_observations")], 1).astype(np.float64)
    (m, m_in), (s, s_in) = reference.forward(mean, x), reference.forward(log_std, x)
    inside = (s > -5.0) & (s < 2.0)
    s = np.clip(s, -5.0, 2.0)
    a = 0.95 * batch["actions"].astype(np.float64)
    z = (np.arctanh(a) - m) / np.exp(s)
    log_p = (-0.5 * z**2 - s - 0.5 * np.log(2 * np.pi) - np.log(1 - a**2)).sum(1)
    grads = (-z / np.exp(s) / B, (1.0 - z**2) * inside / B)
    return -log_p.mean(), reference.backward(mean, m_in, grads[0])[0], reference.backward(log_std, s_in, grads[1])[0]


def test_inverse_dynamics_update() -> None:
    algorithm = InverseDynamics(InverseSettings(hidden=[8, 8], dropout=0.0, learning_rate=1e-2), SPEC)
    state = algorithm.init(0)
    params = state.params["inverse"]
    mean, log_std = reference.net(params, "mean."), reference.net(params, "log_std.")
    # one beyond its bound, where it has no gradient
    log_std[-1][1][:] = params["log_std.head.bias"][:] = torch.tensor([3.0, 0.1])
    adam = reference.Adam(lambda t: 1e-2)
    for i in range(3):
        batch = {**states(), "actions": np.clip(R.normal(size=(B, A)), -1, 1).astype(np.float32)}
        loss, *grads = gaussian_loss(mean, log_std, batch)
        state, metrics = algorithm.update(state, torch_batch(batch), rng.make_key(i), phase=0)
        assert float(metrics["inverse/loss"]) == pytest.approx(loss, rel=1e-4)
        values = adam.step(reference.flat(mean) + reference.flat(log_std), grads[0] + grads[1])
        mean, log_std = reference.unflat(values[: len(values) // 2]), reference.unflat(values[len(values) // 2 :])
    reference.close(mean, state.params["inverse"], "mean.")
    reference.close(log_std, state.params["inverse"], "log_std.")
    means = [torch.tensor([[0.2, -9.0]]), torch.tensor([[-0.3, -9.0]])]
    joint = algorithm.joint_action([(m, torch.zeros_like(m)) for m in means])
    # the edge itself is reached
    np.testing.assert_allclose(joint, [[np.tanh([0.2, -0.3]).mean() / 0.95, -1.0]], atol=2e-6)


def test_inverse_dynamics_of_discrete_actions() -> None:
    spec = DataSpec((S,), 1, discrete=True, num_actions=4)
    algorithm = InverseDynamics(InverseSettings(hidden=[8], dropout=0.0), spec)
    state = algorithm.init(0)
    batch = {**states(), "actions": R.integers(0, 4, B)}
    x = np.concatenate([batch[k] for k in ("previous", "observations", "next_observations")], 1).astype(np.float64)
    logits, _ = reference.forward(reference.net(state.params["inverse"], "net."), x)
    expected = -(logits - np.log(np.exp(logits).sum(1, keepdims=True)))[np.arange(B), batch["actions"]].mean()
    assert float(algorithm.loss(state.params["inverse"], state, torch_batch(batch), None)[0]) == pytest.approx(
        expected, rel=1e-5
    )


def test_dropout_is_on_in_updates_only() -> None:
    algorithm = InverseDynamics(InverseSettings(hidden=[64], dropout=0.5), SPEC)
    params = algorithm.init(0).params["inverse"]
    x = torch.randn(2, 3 * S, generator=torch.Generator().manual_seed(0))
    a, b, c = (
        algorithm.apply("inverse", params, x, key) for key in (rng.make_key(0), rng.make_key(0), rng.make_key(1))
    )
    assert (
        torch.equal(a[0], b[0])
        and not torch.equal(a[0], c[0])
        and not torch.equal(a[0], algorithm.apply("inverse", params, x)[0])
    )


def test_preference_update() -> None:
    algorithm = Preferences(PreferenceSettings(hidden=[8], learning_rate=1e-2), SPEC)
    state, width = algorithm.init(0), S + A
    net = reference.net(state.params["reward"])
    adam = reference.Adam(lambda t: 1e-2)
    for i in range(3):
        first, second = (R.normal(size=(B, H, width)).astype(np.float32) for _ in range(2))
        label = np.array([0, 1, 0.5, 1, 0, 0.5], np.float32)
        (f, f_in), (s, s_in) = (
            reference.forward(net, x.reshape(-1, width).astype(np.float64)) for x in (first, second)
        )
        logit = np.tanh(s).reshape(B, H).sum(1) - np.tanh(f).reshape(B, H).sum(1)
        p = 1 / (1 + np.exp(-logit))
        loss = -(label * np.log(p) + (1 - label) * np.log(1 - p)).mean()
        step = np.repeat((p - label) / B, H)[:, None]
        ours = [
            a + b
            for a, b in zip(
                reference.backward(net, s_in, step * (1 - np.tanh(s) ** 2))[0],
                reference.backward(net, f_in, -step * (1 - np.tanh(f) ** 2))[0],
                strict=True,
            )
        ]
        batch = torch_batch({"first": first, "second": second, "label": label})
        state, metrics = algorithm.update(state, batch, rng.make_key(i), phase=0)
        assert float(metrics["reward/loss"]) == pytest.approx(loss, rel=1e-4)
        net = reference.unflat(adam.step(reference.flat(net), ours))
    reference.close(net, state.params["reward"])
