"""Diffusion-QL: its denoiser, its losses, the order of its updates and its choice of actions, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import TrainState, select, stack
from offrl.algorithms.diffusion_ql import DiffusionQL, DiffusionQLConfig
from offrl.data.arrays import from_arrays
from offrl.families.generative.best_of_n import ValuedActor
from offrl.nn import diffusion
from offrl.training.step import Step

B, OBS, A, T = 16, 3, 2, 5
# of the variance-preserving schedule with 5 steps: 1 - exp(-0.1 / 5 - 0.5 * 9.9 * (2 t - 1) / 25), t = 1, ..., 5
BETAS = [0.195875, 0.458818, 0.635781, 0.754878, 0.835031]
Arrays = dict[str, np.ndarray]


def numbers(params: dict[str, Tensor]) -> Arrays:
    return {k: v.double().numpy() for k, v in params.items()}


def problem(**settings: Any) -> tuple[DiffusionQL, dict[str, Tensor], TrainState]:
    """With parameters, averages and targets that all differ, and large enough to count."""
    g = np.random.default_rng(0)
    s, a = g.normal(size=(40, OBS)), g.uniform(-1, 1, (40, A))
    data = from_arrays(s, a, g.normal(size=40), np.arange(40) % 10 == 9, action_low=-1.0, action_high=1.0)
    algorithm = DiffusionQL(
        DiffusionQLConfig(**{"hidden": [16, 16], "embedding": 8, "clip_norm": 0.0, **settings}), data.spec
    )  # type: ignore[arg-type]
    sampler = algorithm.sampler()
    batch = sampler(sampler.prepare(data), rng.make_key(1), B)
    state, n = algorithm.init(5), torch.Generator().manual_seed(2)

    def moved(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v + 0.1 * torch.randn(v.shape, generator=n) for k, v in params.items()}

    params = {name: moved(p) for name, p in state.params.items()}
    extra = {"average": moved(params["actor"]), "target": moved(params["critic"])}
    return algorithm, batch, state._replace(params=params, target={"critic": dict(extra["target"])}, extra=extra)


def mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(np.log1p(np.exp(x)))


def network(p: Arrays, x: np.ndarray, step: np.ndarray, s: np.ndarray) -> np.ndarray:
    """The denoiser: sines and cosines of 4 wavelengths, two layers, then all side by side through two hidden layers."""
    angle = step[:, None] * 10_000.0 ** -(np.arange(4) / 3.0)
    time = (
        mish(np.concatenate([np.sin(angle), np.cos(angle)], 1) @ p["up.weight"].T + p["up.bias"]) @ p["down.weight"].T
        + p["down.bias"]
    )
    x = np.concatenate([x, s, time], 1)
    for i in range(2):
        x = mish(x @ p[f"net.layers.{i}.weight"].T + p[f"net.layers.{i}.bias"])
    return x @ p["net.head.weight"].T + p["net.head.bias"]


def critics(p: Arrays, s: np.ndarray, a: np.ndarray) -> np.ndarray:
    """[E, B]."""
    y = np.broadcast_to(np.concatenate([s, a], 1), (2, len(s), OBS + A))
    for i in range(2):
        y = mish(y @ p[f"layers.{i}.weight"] + p[f"layers.{i}.bias"])
    return (y @ p["head.weight"] + p["head.bias"])[..., 0]


def denoise(p: Arrays, s: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """From noise [T + 1, B, A], the last of which is where it begins; what each step predicts is cut off."""
    x, betas = noise[T], 1 - np.exp(-0.1 / T - 0.5 * 9.9 * (2 * np.arange(1, T + 1) - 1) / T**2)
    bars = np.cumprod(1 - betas)
    for t in reversed(range(T)):
        before = bars[t - 1] if t else 1.0
        clean = (x - np.sqrt(1 - bars[t]) * network(p, x, np.full(len(x), t), s)) / np.sqrt(bars[t])
        x = (np.sqrt(before) * betas[t] * clean.clip(-1, 1) + np.sqrt(1 - betas[t]) * (1 - before) * x) / (1 - bars[t])
        x = x + np.sqrt(betas[t] * (1 - before) / (1 - bars[t])) * noise[t] * (t > 0)
    return x.clip(-1, 1)


def drawn(key: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    return np.stack([rng.normal(k, shape).double().numpy() for k in rng.split(key, T + 1)])


def test_noise_schedule_by_hand() -> None:
    bars = [0.804125, 0.435178, 0.1585, 0.038852, 0.006409]
    np.testing.assert_allclose(diffusion.signal(torch.arange(T), T, "vp"), bars, atol=1e-6)
    for t in range(T):
        before = bars[t - 1] if t else 1.0
        expected = [
            bars[t],
            np.sqrt(1 - BETAS[t]) * (1 - before) / (1 - bars[t]),
            np.sqrt(before) * BETAS[t] / (1 - bars[t]),
        ]
        np.testing.assert_allclose(diffusion.transition(t, T, "vp")[:3], expected, atol=2e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_critic_loss(count: int) -> None:
    """Targets are of the averaged denoiser and the target critics; of several actions each critic takes its own
    best.
    """
    algorithm, batch, state = problem(max_target_actions=count, discount=0.9)
    key = rng.make_key(9)
    s, a, r, m, s1 = (
        batch[k].double().numpy() for k in ("observations", "actions", "rewards", "masks", "next_observations")
    )
    noise = drawn(key, (B, count, A))
    target, average = numbers(state.target["critic"]), numbers(state.extra["average"])
    values = np.stack([critics(target, s1, denoise(average, s1, noise[:, :, i])) for i in range(count)])  # [M, E, B]
    # each its own: not the best of the smallest
    assert count == 1 or (values.max(0).min(0) > values.min(1).max(0) + 1e-6).any()
    error = critics(numbers(state.params["critic"]), s, a) - (r + 0.9 * m * values.max(0).min(0))
    loss, _ = algorithm.critic_loss(state.params["critic"], state, batch, key)
    assert float(loss) == pytest.approx((error**2).mean(1).sum(), rel=1e-4)  # the sum over critics


@pytest.mark.parametrize("chain", [True, False])
def test_actor_loss(chain: bool) -> None:
    algorithm, batch, state = problem(q_weight=0.7, chain=chain)
    s, a = (batch[k].double().numpy() for k in ("observations", "actions"))
    actor, critic, coins = numbers(state.params["actor"]), numbers(state.params["critic"]), set()
    for seed in range(6):
        step_key, noise_key, chain_key, coin_key = rng.split(rng.make_key(seed), 4)
        step = rng.randint(step_key, (B,), T).numpy()
        bars = np.cumprod(1 - (1 - np.exp(-0.1 / T - 0.5 * 9.9 * (2 * np.arange(1, T + 1) - 1) / T**2)))[step][:, None]
        noise = rng.normal(noise_key, (B, A)).double().numpy()
        noisy = np.sqrt(bars) * a + np.sqrt(1 - bars) * noise
        predicted = network(actor, noisy, step, s)
        cloning = ((predicted - noise) ** 2).mean()
        action = (
            denoise(actor, s, drawn(chain_key, (B, A)))
            if chain
            else ((noisy - np.sqrt(1 - bars) * predicted) / np.sqrt(bars)).clip(-1, 1)
        )
        q, coin = critics(critic, s, action), int(rng.randint(coin_key, (), 2))
        loss, metrics = algorithm.actor_loss(state.params["actor"], state, batch, rng.make_key(seed))
        assert float(loss) == pytest.approx(
            cloning - 0.7 * q[coin].mean() / np.abs(q[1 - coin]).mean(), rel=2e-4, abs=2e-4
        )
        assert float(metrics["actor/cloning"]) == pytest.approx(cloning, rel=1e-4)
        coins.add(coin)
    assert coins == {0, 1}


def test_the_gradient_goes_through_all_steps_of_the_chain() -> None:
    """By finite differences of NumPy's loss, in a direction of the denoiser's parameters."""
    algorithm, batch, state = problem(q_weight=1.0)
    state, key = (
        state._replace(params={**state.params, "actor": {k: 0.3 * v for k, v in state.params["actor"].items()}}),
        rng.make_key(3),
    )
    names, g = sorted(state.params["actor"]), torch.Generator().manual_seed(0)
    direction = {k: torch.randn(state.params["actor"][k].shape, generator=g) for k in names}
    leaves = {k: v.clone().requires_grad_() for k, v in state.params["actor"].items()}
    action = algorithm.denoise(leaves, batch["observations"], key, lambda own: rng.normal(own, (B, A)))
    found = sum(
        (x * direction[k]).sum()
        for k, x in zip(names, torch.autograd.grad(action.sum(), [leaves[k] for k in names]), strict=True)
    )
    s, noise, h = batch["observations"].double().numpy(), drawn(key, (B, A)), 1e-6
    ends = [
        denoise(
            {k: (v.double() + sign * h * direction[k].double()).numpy() for k, v in state.params["actor"].items()},
            s,
            noise,
        ).sum()
        for sign in (1, -1)
    ]
    assert float(found) == pytest.approx((ends[0] - ends[1]) / (2 * h), rel=1e-2)


@pytest.mark.parametrize(("step", "moves"), [(4, False), (5, False), (6, True), (7, False), (9, True)])
def test_order_of_an_update(step: int, moves: bool) -> None:
    """Critics, then the denoiser by the new ones, then the average at its times, then the targets; each gradient with
    its own norm.
    """
    algorithm, batch, state = problem(
        average=0.25, average_every=3, average_from=6, polyak=0.5, clip_norm=0.01, learning_rate=0.1
    )
    state, key = state._replace(step=torch.tensor(step)), rng.make_key(3)
    after, _ = algorithm.update(state, batch, key, phase=0)
    keys = rng.split(key)
    first, _ = algorithm.descend(state, "critic", algorithm.critic_loss, batch, keys[0])
    second, _ = algorithm.descend(first, "actor", algorithm.actor_loss, batch, keys[1])
    for name in ("critic", "actor"):
        for k, v in after.params[name].items():
            torch.testing.assert_close(v, second.params[name][k], rtol=0.0, atol=0.0)
    # by the critics of before: another step
    early, _ = algorithm.descend(state, "actor", algorithm.actor_loss, batch, keys[1])
    assert any(not torch.equal(v, early.params["actor"][k]) for k, v in after.params["actor"].items())
    for k, v in after.extra["average"].items():
        torch.testing.assert_close(v, torch.lerp(state.extra["average"][k], after.params["actor"][k], 0.25 * moves))
    for k, v in after.target["critic"].items():
        torch.testing.assert_close(v, 0.5 * (state.target["critic"][k] + after.params["critic"][k]))
        assert torch.equal(v, after.extra["target"][k])
    # a first moment is a tenth of the gradient that Adam was given
    for name in ("critic", "actor"):
        norm = sum(float(m.square().sum()) for m in after.opt[name]["mu"].values()) ** 0.5 / 0.1  # type: ignore[union-attr]
        assert norm == pytest.approx(0.01, rel=1e-3)


def test_the_best_candidate_by_the_target_critics() -> None:
    algorithm, batch, state = problem(candidates=7, choice="best")
    key, s = rng.make_key(4), batch["observations"].double().numpy()
    noise = drawn(rng.split(key)[0], (B, 7, A))
    # of the trained denoiser
    candidates = np.stack([denoise(numbers(state.params["actor"]), s, noise[:, :, i]) for i in range(7)])
    q = np.stack([critics(numbers(state.extra["target"]), s, a).min(0) for a in candidates])
    found, _ = algorithm.actor(state).act(None, batch["observations"], key, explore=False)
    np.testing.assert_allclose(found, np.take_along_axis(candidates, q.argmax(0)[None, :, None], 0)[0], atol=1e-4)


class _TwoCandidates(ValuedActor):
    """Candidates 0 and 1, the second of which is worth log 3 more."""

    def draw(self, observations: Tensor, key: Tensor, noise: Any) -> Tensor:
        return (torch.arange(len(observations)) >= len(observations) // 2).float().unsqueeze(-1).expand(-1, A)

    def scores(self, observations: Tensor, candidates: Tensor) -> Tensor:
        return candidates[..., 0] * np.log(3.0)


def test_candidates_are_drawn_by_the_softmax_of_their_values() -> None:
    algorithm, _, state = problem(candidates=2)
    actions, _ = _TwoCandidates(algorithm, state).act(None, torch.zeros(8000, OBS), rng.make_key(0), explore=False)
    assert set(actions.unique().tolist()) == {0.0, 1.0}
    assert float(actions[:, 0].mean()) == pytest.approx(0.75, abs=0.02)


@pytest.mark.nightly
def test_q_takes_the_better_of_two_modes() -> None:
    """Actions near -0.6 pay 0 and those near 0.6 pay 1: cloning keeps both, the gradient of Q leaves the first."""
    g = np.random.default_rng(0)
    better = g.random((512, 1)) < 0.5
    s, a = g.normal(size=(512, 2)), np.where(better, 0.6, -0.6) + 0.02 * g.normal(size=(512, 1))
    data = from_arrays(s, a, better[:, 0].astype(float), np.ones(512, bool), action_low=-1.0, action_high=1.0)
    share = {}
    for weight in (0.0, 2.0):
        config = DiffusionQLConfig(hidden=[32, 32], q_weight=weight, learning_rate=5e-3, clip_norm=0.0, candidates=1)
        algorithm = DiffusionQL(config, data.spec)
        step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=64, replicas=1)
        state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 150)
        actions, _ = algorithm.actor(select(state, 0)).act(None, torch.randn(256, 2), rng.make_key(7), explore=False)
        share[weight] = float((actions > 0.0).float().mean())
    assert 0.3 < share[0.0] < 0.7 and share[2.0] > 0.95


def test_published_defaults() -> None:
    c = DiffusionQLConfig()
    published = {
        "hidden": [256] * 3,
        "denoising_steps": 5,
        "embedding": 16,
        "average": 0.005,
        "average_every": 5,
        "average_from": 1000,
        "candidates": 50,
        "choice": "softmax",
        "learning_rate": 3e-4,
        "batch_size": 256,
        "polyak": 0.005,
        "discount": 0.99,
        "critics": 2,
        "layer_norm": False,
    }
    assert {k: getattr(c, k) for k in published} == published
