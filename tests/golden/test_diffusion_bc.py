"""Diffusion behaviour cloning: the noise schedule, the network, the loss and the way back from noise, in float64
NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.dataset import DataSpec
from offrl.nn import diffusion

B, OBS, A, T = 6, 3, 2, 5
G = np.random.default_rng(3)
ACTIONS, OBSERVATIONS = G.uniform(-1, 1, (B, A)), G.normal(size=(B, OBS))
BATCH = {
    "actions": torch.tensor(ACTIONS, dtype=torch.float32),
    "observations": torch.tensor(OBSERVATIONS, dtype=torch.float32),
}
KEY = rng.make_key(0)
Params = dict[str, Any]


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "diffusion_bc")
    config = kind.Config(**{"hidden": [7, 7], "embedding": 8, "denoising_steps": T, "learning_rate": 0.01, **settings})
    algorithm = kind(config, DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A))
    state = algorithm.init(0)
    g = torch.Generator().manual_seed(1)
    params = {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in state.params["actor"].items()}
    return algorithm, state._replace(params={"actor": params}, extra={"average": dict(params)})


def betas(steps: int) -> np.ndarray:
    """1 - abar(t + 1) / abar(t), at most 0.999, with abar(t) = cos((t / T + 0.008) / 1.008 * pi / 2)**2 (arXiv
    2102.09672).
    """
    bar = np.cos((np.arange(steps + 1) / steps + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - bar[1:] / bar[:-1], 0.999)


def mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(np.log1p(np.exp(x)))


def network(params: Params, x: np.ndarray, step: np.ndarray, observations: np.ndarray) -> np.ndarray:
    p = {k: v.numpy().astype(np.float64) for k, v in params.items()}

    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def norm(name: str, x: np.ndarray) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}.weight"] + p[f"{name}.bias"]

    angle = step[:, None] * 10_000.0 ** -(np.arange(4) / 3.0)
    time = linear("down", mish(linear("up", np.concatenate([np.sin(angle), np.cos(angle)], 1))))
    condition = np.concatenate([time, observations], 1)
    for i in range(2):
        times, plus = np.split(linear(f"blocks.{i}.film", condition), 2, axis=1)
        y = times * mish(norm(f"blocks.{i}.norm1", linear(f"blocks.{i}.first", x))) + plus
        x = mish(norm(f"blocks.{i}.norm2", linear(f"blocks.{i}.second", y))) + (
            linear("blocks.0.skip", x) if i == 0 else x
        )
    return linear("head", x)


@pytest.mark.parametrize("steps", [1, 2, 5, 10, 100])
def test_noise_schedule(steps: int) -> None:
    expected = np.cumprod(1 - betas(steps))
    np.testing.assert_allclose(diffusion.signal(torch.arange(steps), steps).numpy(), expected, rtol=2e-5)
    for t in range(steps):
        beta, now, before = betas(steps)[t], expected[t], expected[t - 1] if t else 1.0
        found = diffusion.transition(t, steps)
        mean, believed = np.sqrt(1 - beta) * (1 - before) / (1 - now), np.sqrt(before) * beta / (1 - now)
        np.testing.assert_allclose(
            found, [now, mean, believed, np.sqrt(beta * (1 - before) / (1 - now))], rtol=1e-9, atol=1e-12
        )
    # all noise at last; none is added at the end
    assert found[0] < 1.001e-3 and diffusion.transition(0, steps)[3] == pytest.approx(0.0)


def test_loss() -> None:
    algorithm, state = make()
    choose, draw = rng.split(KEY)
    step, noise = rng.randint(choose, (B,), T).numpy(), rng.normal(draw, (B, A)).numpy().astype(np.float64)
    assert len(set(step.tolist())) > 2
    left = np.cumprod(1 - betas(T))[step][:, None]
    found = network(state.params["actor"], np.sqrt(left) * ACTIONS + np.sqrt(1 - left) * noise, step, OBSERVATIONS)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(((found - noise) ** 2).mean(), rel=1e-4) == float(metrics["actor/loss"])


def reverse_process(params: Params, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Algorithm 2 of arXiv 2006.11239 with the action believed in cut off; noise [T + 1, B, A], the last one is where
    it begins.
    """
    beta = betas(T)
    bar = np.cumprod(1 - beta)
    x = noise[T]
    for t in reversed(range(T)):
        eps = network(params, x, np.full(len(x), t), observations)
        action = np.clip((x - np.sqrt(1 - bar[t]) * eps) / np.sqrt(bar[t]), -1, 1)
        before = bar[t - 1] if t else 1.0
        x = (np.sqrt(before) * beta[t] * action + np.sqrt(1 - beta[t]) * (1 - before) * x) / (1 - bar[t])
        x = x + np.sqrt(beta[t] * (1 - before) / (1 - bar[t])) * noise[t]
    return np.clip(x, -1, 1)


@pytest.mark.parametrize("explore", [True, False])
def test_an_action_is_drawn(explore: bool) -> None:
    algorithm, state = make()
    keys = rng.split(KEY, T + 1)
    noise = np.stack([rng.normal(k, (B, A)).numpy() for k in keys]).astype(np.float64) * explore
    expected = reverse_process(state.extra["average"], OBSERVATIONS, noise)
    found, _ = algorithm.actor(state).act(None, BATCH["observations"], KEY, explore=explore)
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-4)
    # the averaged network acts, not the trained one
    other = state._replace(params={"actor": {k: v + 1 for k, v in state.params["actor"].items()}})
    assert torch.equal(algorithm.actor(other).act(None, BATCH["observations"], KEY, explore=explore)[0], found)


def test_greedy_sampling_draws_too() -> None:
    algorithm, state = make(greedy="sample")
    draws = [
        algorithm.actor(state).act(None, BATCH["observations"], KEY, explore=explore)[0] for explore in (True, False)
    ]
    assert torch.equal(*draws)
    assert not torch.equal(
        draws[1], algorithm.actor(state).act(None, BATCH["observations"], rng.make_key(1), explore=False)[0]
    )


@pytest.mark.parametrize(
    ("done", "polyak", "rate"), [(0, 1e-4, 1.0), (1, 1e-4, 9 / 11), (90, 1e-4, 0.09), (90, 0.2, 0.2)]
)
def test_the_average_follows(done: int, polyak: float, rate: float) -> None:
    algorithm, state = make(polyak=polyak)
    state = state._replace(
        step=torch.tensor(done), extra={"average": {k: torch.zeros_like(v) for k, v in state.params["actor"].items()}}
    )
    new, _ = algorithm.update(state, BATCH, KEY, phase=0)
    for name, value in new.params["actor"].items():
        torch.testing.assert_close(new.extra["average"][name], rate * value, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly
def test_two_actions_in_one_state_are_kept_apart() -> None:
    """Behaviour that takes -0.6 or 0.6: what is drawn lies near one of them, where cloning the mean would give 0;
    greedily too.
    """
    algorithm, _ = make(hidden=[32, 32], learning_rate=3e-3, denoising_steps=10)
    state = algorithm.init(0)
    sides = torch.where(torch.arange(256) % 4 == 0, -0.6, 0.6)
    batch = {"observations": torch.zeros(256, OBS), "actions": torch.stack([sides, -sides], 1)}
    update = algorithm.update
    for t in range(300):
        state, _ = update(state, batch, rng.fold_in(KEY, t), phase=0)
        state = state._replace(step=state.step + 1)
    drawn, _ = algorithm.actor(state).act(None, torch.zeros(400, OBS), KEY, explore=True)
    near = (drawn.abs() - 0.6).abs().max(1).values < 0.25
    assert float(near.float().mean()) > 0.85 and float((drawn[:, 0] * drawn[:, 1] < 0).float().mean()) > 0.9
    assert 0.15 < float((drawn[:, 0] < 0).float().mean()) < 0.35
    greedy, _ = algorithm.actor(state).act(None, torch.zeros(1, OBS), KEY, explore=False)
    np.testing.assert_allclose(greedy[0].numpy(), [0.6, -0.6], atol=0.2)


def test_published_defaults() -> None:
    c = registry.get("algo", "diffusion_bc").Config()
    published = {
        "learning_rate": 1e-4,
        "weight_decay": 1e-6,
        "hidden": [512] * 3,
        "denoising_steps": 10,
        "embedding": 256,
    }
    assert {k: getattr(c, k) for k in published} == published
