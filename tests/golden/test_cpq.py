"""CPQ: each loss in float64 NumPy, in the paper's form and in that of OSRL's code."""

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
NOISE = G.normal(size=(SAMPLES, B, 2 * A))  # of actions and of latents


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is the first numbers of NOISE, whatever the key."""

    def normal(key: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        noise = NOISE if len(shape) == 3 else NOISE[0]
        return torch.tensor(noise[..., : shape[-1]], dtype=torch.float32)

    monkeypatch.setattr(rng, "normal", normal)


def make(**settings: Any) -> tuple[Any, TrainState]:
    """With the threshold 0.2 * (1 - 0.9^3) / 0.1 / 3 = 0.1807."""
    kind = registry.get("algo", "cpq")
    defaults = {"hidden": [6, 5], "autoencoder_hidden": [5], "discount": DISCOUNT, "cost_discount": DISCOUNT}
    defaults |= {"cost_limit": 0.2, "cost_horizon": 3, "ood_samples": SAMPLES}
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec())
    state, g = algorithm.init(3), torch.Generator().manual_seed(17)  # costs lie on both sides of the threshold
    for params in (*state.params.values(), *state.target.values()):
        redraw(params, g)
    return algorithm, state


KAPPA = 0.2 * (1 - 0.9**3) / 0.1 / 3


def sampled(state: TrainState, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Actions of the policy before their tanh."""
    out = ref.forward(ref.net(state.params["actor"], "net."), observations)[0]
    return out[:, :A] + np.exp(np.clip(out[:, A:], -5, 2)) * noise[..., :A]


def encoded(state: TrainState, observations: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    net = ref.net(state.params["autoencoder"], "encoder.")
    out = ref.forward(net, np.concatenate([observations, actions], 1))[0]
    return out[:, : 2 * A], np.clip(out[:, 2 * A :], -4, 15)


def kl(mean: np.ndarray, log_std: np.ndarray) -> np.ndarray:
    return -0.5 * (1 + 2 * log_std - mean**2 - np.exp(2 * log_std))


def q(params: dict[str, torch.Tensor], observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
    return q_values(critics(params), observations, actions)


def test_autoencoder_loss() -> None:
    algorithm, state = make()
    mean, log_std = encoded(state, X["observations"], X["actions"])
    z = mean + np.exp(log_std) * NOISE[0]
    decoder = ref.net(state.params["autoencoder"], "decoder.")
    decoded = np.tanh(ref.forward(decoder, np.concatenate([X["observations"], z], 1))[0])
    expected = ((decoded - X["actions"]) ** 2).mean() + 0.5 * kl(mean, log_std).mean()
    loss, _ = algorithm.autoencoder.loss(state.params["autoencoder"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("pessimism", ["max", "min"])
def test_critic_loss(pessimism: str) -> None:
    algorithm, state = make(cost_pessimism=pessimism)
    following = np.tanh(sampled(state, X["next_observations"], NOISE[0]))
    costs = getattr(q(state.target["cost_critic"], X["next_observations"], following), pessimism)(0)
    safe = np.maximum(costs, 0) <= KAPPA
    assert 0 < safe.sum() < B
    values = q(state.target["critic"], X["next_observations"], following).min(0)
    y = X["rewards"] + DISCOUNT * X["masks"] * safe * values
    expected = ((q(state.params["critic"], X["observations"], X["actions"]) - y) ** 2).mean(1).sum()
    actions = torch.tensor(following, dtype=torch.float32)
    loss, _ = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY, actions)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("ood", "pessimism"), [("paper", "max"), ("osrl", "min")])
def test_cost_critic_loss(ood: str, pessimism: str) -> None:
    """OSRL's term has no gradient, and takes the target critics and actions before their tanh."""
    algorithm, state = make(ood=ood, cost_pessimism=pessimism)
    state = state.with_extra(log_alpha=torch.tensor(0.3))
    actions = sampled(state, X["observations"], NOISE)
    actions = actions if ood == "osrl" else np.tanh(actions)
    rows = np.tile(X["observations"], (SAMPLES, 1))
    divergences = kl(*encoded(state, rows, actions.reshape(-1, A))).mean(1)
    outside = divergences >= np.quantile(divergences, 0.75)
    assert outside.sum() == SAMPLES * B // 4
    online, target = (q(p["cost_critic"], rows, actions.reshape(-1, A)) for p in (state.params, state.target))
    cheap = np.maximum(target.min(0), 0) if ood == "osrl" else target.mean(0)
    term = (outside * (cheap if ood == "osrl" else online.mean(0))).mean()
    y = X["costs"] + DISCOUNT * X["masks"] * 0.5
    errors = ((q(state.params["cost_critic"], X["observations"], X["actions"]) - y) ** 2).mean(1).sum()

    found = algorithm.outside(state, BATCH["observations"], KEY)
    np.testing.assert_array_equal(found[1].numpy().ravel(), outside)
    loss = lambda p: algorithm.cost_critic_loss(p, state, BATCH, torch.full((B,), 0.5), *found)[0]  # noqa: E731
    assert float(loss(state.params["cost_critic"])) == pytest.approx(
        errors - np.exp(0.3) * (term - 1.5 * KAPPA), rel=1e-4
    )
    log_alpha = algorithm.with_alpha(state, BATCH, *found).extra["log_alpha"]
    expected = 1e-4 * np.exp(0.3) * (1.5 * KAPPA - (outside * cheap).mean())
    assert float(log_alpha) - 0.3 == pytest.approx(expected, abs=1e-6)
    alone = lambda p: algorithm.cost_critic.cost_loss(p, state, BATCH, torch.full((B,), 0.5))[0]  # noqa: E731
    gradients = [torch.func.grad(f)(state.params["cost_critic"])["head.weight"] for f in (loss, alone)]
    assert torch.equal(*gradients) == (ood == "osrl")


def test_actor_loss() -> None:
    algorithm, state = make()
    actions = np.tanh(sampled(state, X["observations"], NOISE[0]))
    safe = np.maximum(q(state.params["cost_critic"], X["observations"], actions).max(0), 0) <= KAPPA
    assert 0 < safe.sum() < B
    expected = -(safe * q(state.params["critic"], X["observations"], actions).min(0)).mean()
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["actor/safe"]) == pytest.approx(safe.mean())


def test_published_defaults() -> None:
    c = registry.get("algo", "cpq").Config()
    published = {"learning_rate": 1e-3, "actor_learning_rate": 1e-4, "batch_size": 512, "ood_samples": 10}
    assert {k: getattr(c, k) for k in published} == published and c.cost_limit == 10 and c.hidden == [256, 256]
