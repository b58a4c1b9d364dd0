"""BEAR-Lagrangian: the discrepancy by hand, each loss in float64 NumPy, and its weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import losses, registry, rng
from offrl.algorithm import TrainState
from tests.support.cases import Case, train
from tests.support.golden import KEY, A, B, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import mlp as ref

DISCOUNT, SAMPLES = 0.9, 3
G = np.random.default_rng(7)
BATCH = transitions(G) | {"costs": torch.tensor(G.uniform(0, 1, B), dtype=torch.float32)}
X = double(BATCH)
OWN, DATA = G.normal(size=(SAMPLES, B, A)), G.normal(size=(SAMPLES, B, 2 * A))  # noise of actions, of latents


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is that of OWN and DATA, whatever the key."""

    def normal(key: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.tensor(OWN if shape[-1] == A else DATA, dtype=torch.float32)

    monkeypatch.setattr(rng, "normal", normal)


def make(**settings: Any) -> tuple[Any, TrainState]:
    """With the threshold 4 * 0.75 = 3."""
    kind = registry.get("algo", "bear_lag")
    defaults = {"hidden": [5], "autoencoder_hidden": [5], "discount": DISCOUNT, "candidates": SAMPLES}
    defaults |= {"cost_limit": 4.0, "cost_horizon": 2, "cost_discount": 0.5, "mmd_samples": SAMPLES, "mmd_sigma": 2.0}
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec())
    state, g = algorithm.init(3), torch.Generator().manual_seed(5)
    for params in (*state.params.values(), *state.target.values()):
        redraw(params, g)
    return algorithm, state


def sampled(params: dict[str, torch.Tensor], observations: np.ndarray) -> np.ndarray:
    """Actions of a policy before their tanh: [SAMPLES, B, A]."""
    out = ref.forward(ref.net(params, "net."), observations)[0]
    return out[:, :A] + np.exp(np.clip(out[:, A:], -5, 2)) * OWN


def discrepancy(x: np.ndarray, y: np.ndarray, laplacian: bool) -> np.ndarray:
    """Of samples [M, B, A], row by row and pair by pair, with the width 2."""

    def mean(a: np.ndarray, b: np.ndarray) -> float:
        sizes = [np.abs(p - q).sum() if laplacian else ((p - q) ** 2).sum() for p in a for q in b]
        return float(np.mean([np.exp(-size / 4) for size in sizes]))

    rows = [(x[:, i], y[:, i]) for i in range(B)]
    return np.array([np.sqrt(mean(p, p) + mean(q, q) - 2 * mean(p, q) + 1e-6) for p, q in rows])


def q(params: dict[str, torch.Tensor], observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return q_values(critics(params), observations, actions)


@pytest.mark.parametrize(("kernel", "near", "far"), [("gaussian", 1.0, 4.0), ("laplacian", 1.0, 2.0)])
def test_discrepancy_by_hand(kernel: str, near: float, far: float) -> None:
    """Of {0, 2} from {1}, and of {(0, 0)} from {(1, 1)}: with the width 1/2 the kernel is exp(-distance)."""
    x, y = torch.tensor([[[0.0]], [[2.0]]]), torch.tensor([[[1.0]]])
    expected = np.sqrt((1 + np.exp(-far)) / 2 + 1 - 2 * np.exp(-near) + 1e-6)
    assert float(losses.mmd(x, y, 0.5, kernel)) == pytest.approx(expected, rel=1e-6)
    origin = torch.zeros(1, 1, 2)
    expected = np.sqrt(2 - 2 * np.exp(-2.0) + 1e-6)
    assert float(losses.mmd(origin, origin + 1, 0.5, kernel)) == pytest.approx(expected, rel=1e-6)
    assert float(losses.mmd(x, x.flip(0), 0.5, kernel)) == pytest.approx(1e-3, rel=1e-3)  # of the same samples
    samples = torch.from_numpy(np.random.default_rng(0).normal(0.0, 0.02, (2, 10, 64, 1)))  # a kernel of 1 - 1e-5, say
    exact = losses.mmd(samples[0], samples[1], 50.0, kernel)
    np.testing.assert_allclose(losses.mmd(*samples.float(), 50.0, kernel), exact, rtol=1e-4)


def test_targets_take_the_best_action_and_the_dearest() -> None:
    algorithm, state = make()
    following = np.tanh(sampled(state.target["actor"], X["next_observations"]))
    actions = algorithm.candidates(state.target["actor"], state, BATCH["next_observations"], KEY)
    np.testing.assert_allclose(actions.numpy(), following, atol=1e-5)
    values = q(state.target["critic"], X["next_observations"], following)
    y = X["rewards"] + DISCOUNT * X["masks"] * (0.75 * values.min(0) + 0.25 * values.max(0)).max(0)
    expected = ((q(state.params["critic"], X["observations"], X["actions"]) - y) ** 2).mean(1).sum()
    loss, _ = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY, actions)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("kernel", ["gaussian", "laplacian"])
def test_actor_loss(kernel: str) -> None:
    """(alpha E (MMD - 0.05) - E Q + 2 E|Q| E (Q_c - 3) / 3) / 3 with the multiplier 2; Q of the first sample alone."""
    algorithm, state = make(mmd_kernel=kernel)
    state = state.with_extra(
        multiplier={**state.extra["multiplier"], "value": torch.tensor(2.0)}, log_alpha=torch.tensor(0.3)
    )
    samples = sampled(state.params["actor"], X["observations"])
    decoder = ref.net(state.params["autoencoder"], "decoder.")
    rows = np.broadcast_to(X["observations"], (SAMPLES, *X["observations"].shape))
    known = ref.forward(decoder, np.concatenate([rows, np.clip(DATA, -0.5, 0.5)], -1).reshape(-1, 3 + 2 * A))[0]
    excess = (discrepancy(known.reshape(SAMPLES, B, A), samples, kernel == "laplacian") - 0.05).mean()
    actions = np.tanh(samples[0])
    values = q(state.params["critic"], X["observations"], actions).min(0)
    cost = (np.maximum(q(state.params["cost_critic"], X["observations"], actions).max(0), 0) - 3) / 3
    expected = (np.exp(0.3) * excess - values.mean() + 2 * np.abs(values).mean() * cost.mean()) / 3
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["mmd/excess"]) == pytest.approx(excess, rel=1e-4)


@pytest.mark.parametrize(("before", "after"), [(0.3, None), (4.9999, 5.0)])
def test_the_weight_of_the_discrepancy_follows_its_excess(before: float, after: float | None) -> None:
    algorithm, state = make(mmd_rate=0.1)
    new, metrics = algorithm.update(state.with_extra(log_alpha=torch.tensor(before)), BATCH, KEY, phase=0)
    excess = float(metrics["mmd/excess"])
    assert excess > 0.01
    expected = before + 0.1 * np.exp(before) * excess if after is None else after
    assert float(new.extra["log_alpha"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["bear_lag", pytest.param("bcq_lag", marks=pytest.mark.nightly)])
def test_a_limit_that_never_binds_changes_no_policy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    policies = []
    for limit in (None, 1e6):
        state, _ = train(Case(name).make(cost_limit=limit), [0, 1], 10)
        policies.append(state.params["actor"])
    assert all(torch.equal(v, policies[1][k]) for k, v in policies[0].items())


def test_published_defaults() -> None:
    c = registry.get("algo", "bear_lag").Config()
    published = {"learning_rate": 1e-3, "batch_size": 512, "candidates": 10, "min_weight": 0.75, "mmd_sigma": 50}
    published |= {"mmd_limit": 0.05, "mmd_samples": 10, "mmd_rate": 1e-3, "kl_weight": 0.5, "cost_limit": 10}
    assert {k: getattr(c, k) for k in published} == published and c.hidden == [256, 256]
