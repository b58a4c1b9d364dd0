"""DTQL: the denoiser of all noise levels, the losses, the order of updates and the warm-up, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import TrainState, select, stack
from offrl.algorithms.dtql import DTQL, DTQLConfig
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.families.generative import edm
from offrl.settings.train import TrainConfig
from offrl.training.step import Step

B, OBS, A = 16, 3, 2
Arrays = dict[str, np.ndarray]


def numbers(params: dict[str, Tensor]) -> Arrays:
    return {k: v.double().numpy() for k, v in params.items()}


def data() -> Dataset:
    g = np.random.default_rng(0)
    s, a = g.normal(size=(40, OBS)), g.uniform(-1, 1, (40, A))
    return from_arrays(s, a, g.normal(size=40), np.arange(40) % 10 == 9, action_low=-1.0, action_high=1.0)


def problem(step: int = 0, **settings: Any) -> tuple[DTQL, dict[str, Tensor], TrainState]:
    """With parameters and targets that differ, and large enough to count."""
    algorithm = DTQL(DTQLConfig(**{"hidden": [16, 16], "embedding": 8, "warm_up": 0, **settings}), data().spec)
    sampler = algorithm.sampler()
    batch, n = sampler(sampler.prepare(data()), rng.make_key(1), B), torch.Generator().manual_seed(2)
    state = algorithm.init(5)

    def moved(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v + 0.1 * torch.randn(v.shape, generator=n) for k, v in params.items()}

    params = {name: moved(p) for name, p in state.params.items()}
    target = moved(params["critic"])
    return (
        algorithm,
        batch,
        state._replace(
            params=params, target={"critic": target}, extra={"target": dict(target)}, step=torch.tensor(step)
        ),
    )


def mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(np.log1p(np.exp(x)))


def layers(p: Arrays, x: np.ndarray, activation: Any, prefix: str = "") -> np.ndarray:
    """Two hidden layers and an output layer."""
    for i in range(2):
        x = activation(x @ p[f"{prefix}layers.{i}.weight"].T + p[f"{prefix}layers.{i}.bias"])
    return x @ p[f"{prefix}head.weight"].T + p[f"{prefix}head.bias"]


def critics(p: Arrays, s: np.ndarray, a: np.ndarray) -> np.ndarray:
    """[E, B]: LayerNorm, then Mish, after each hidden layer."""
    y = np.broadcast_to(np.concatenate([s, a], 1), (2, len(s), OBS + A))
    for i in range(2):
        y = y @ p[f"layers.{i}.weight"] + p[f"layers.{i}.bias"]
        y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
        y = mish(y * p[f"scales.{i}"] + p[f"shifts.{i}"])
    return (y @ p["head.weight"] + p["head.bias"])[..., 0]


def denoising(p: Arrays, s: np.ndarray, a: np.ndarray, key: Tensor) -> float:
    """The denoiser's loss, with sigma_data 0.5: its first layer has no activation."""
    level_key, noise_key = rng.split(key)
    # the log-logistic's shares below, its shape 1 / 0.5
    low, high = (1 / (1 + (edge / 0.5) ** -2.0) for edge in (0.002, 80.0))
    share = low + (high - low) * rng.uniform(level_key, (B,)).double().numpy()
    sigma = 0.5 * (share / (1 - share)) ** 0.5
    x, c = a + sigma[:, None] * rng.normal(noise_key, (B, A)).double().numpy(), (sigma**2 + 0.25)[:, None]
    angle = (np.log(sigma) / 4)[:, None] * 10_000.0 ** -(np.arange(4) / 3.0)
    time = (
        mish(np.concatenate([np.sin(angle), np.cos(angle)], 1) @ p["up.weight"].T + p["up.bias"]) @ p["down.weight"].T
        + p["down.bias"]
    )
    first = np.concatenate([x / np.sqrt(c), s, time], 1) @ p["first.weight"].T + p["first.bias"]
    out = sigma[:, None] * 0.5 / np.sqrt(c)
    clean = (out * layers(p, first, mish, "net.") + 0.25 / c * x).clip(-1, 1)
    return float((((clean - a) / out) ** 2).mean())


# ---- noise levels


def test_scalings_by_hand() -> None:
    skip, out, into = edm.scalings(torch.tensor([0.5]), 0.5)
    assert [float(x) for x in (skip, out, into)] == pytest.approx([0.5, 0.353553, 1.414214], rel=1e-5)
    seen: list[Tensor] = []

    def network(x: Tensor, level: Tensor) -> Tensor:
        seen.extend((x, level))
        return torch.full_like(x, 0.2)

    clean = edm.denoised(network, torch.tensor([[0.4, 3.0]]), torch.tensor([0.5]), 0.5)
    torch.testing.assert_close(seen[0], torch.tensor([[0.565685, 4.242641]]))
    assert float(seen[1]) == pytest.approx(-0.173287, rel=1e-5)
    # 0.2 * 0.353553 + 0.5 * 0.4; and what is cut off
    torch.testing.assert_close(clean, torch.tensor([[0.270711, 1.0]]))


def test_noise_levels_by_hand() -> None:
    """ln(sigma / 0.5) / 0.5 is logistic: a quarter of the levels lie below 0.5 / sqrt(3), half below 0.5, but for what
    the limits cut.
    """
    found = edm.levels(torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0]), 0.5, 0.002, 80.0)
    np.testing.assert_allclose(found, [0.002, 0.288680, 0.499994, 0.865997, 80.0], rtol=2e-3)
    share = rng.uniform(rng.make_key(0), (20000,))
    assert ((edm.levels(share, 0.5, 0.1, 1.0) - 0.55).abs() <= 0.4501).all()


# ---- losses


def test_values_see_the_data_s_actions_and_each_other_of_before() -> None:
    algorithm, batch, state = problem(expectile=0.8, discount=0.9)
    s, a, r, m, s1 = (
        batch[k].double().numpy() for k in ("observations", "actions", "rewards", "masks", "next_observations")
    )
    critic, value = numbers(state.params["critic"]), numbers(state.params["value"])
    q, v, next_v = critics(critic, s, a), layers(value, s, mish)[:, 0], layers(value, s1, mish)[:, 0]
    gap = q.min(0) - v  # of the online critics
    _, metrics = algorithm.update(state, batch, rng.make_key(0), phase=0)
    assert float(metrics["value/loss"]) == pytest.approx((np.where(gap > 0, 0.8, 0.2) * gap**2).mean(), rel=1e-4)
    assert float(metrics["critic/loss"]) == pytest.approx(((q - (r + 0.9 * m * next_v)) ** 2).mean(1).sum(), rel=1e-4)


def test_denoiser_loss() -> None:
    algorithm, batch, state = problem()
    for seed in range(3):
        key = rng.make_key(seed)
        expected = denoising(
            numbers(state.params["denoiser"]),
            batch["observations"].double().numpy(),
            batch["actions"].double().numpy(),
            key,
        )
        loss, _ = algorithm.denoiser_loss(state.params["denoiser"], state, batch, key)
        assert float(loss) == pytest.approx(expected, rel=1e-3)


def test_actor_loss() -> None:
    """The denoiser is asked at the policy's own action, which is noised anew; densities are of before the tanh."""
    algorithm, batch, state = problem(alpha=3.0, bc_weight=0.5)
    key, s = rng.make_key(4), batch["observations"].double().numpy()
    draw_key, trust_key = rng.split(key)
    mean, log_std = np.split(layers(numbers(state.params["actor"]), s, lambda x: np.maximum(x, 0.0), "net."), 2, axis=1)
    log_std = log_std.clip(-5, 2)
    action = np.tanh(mean + np.exp(log_std) * rng.normal(draw_key, (B, A)).double().numpy())
    trust = denoising(numbers(state.params["denoiser"]), s, action, trust_key)
    q = critics(numbers(state.params["critic"]), s, action).min(0).mean()
    z = (np.arctanh(batch["actions"].double().numpy() / 1.001) - mean) / np.exp(log_std)
    likelihood = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(1).mean()
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, batch, key)
    assert float(metrics["actor/trust_region_loss"]) == pytest.approx(trust, rel=1e-3)
    assert float(loss) == pytest.approx(3.0 * trust - q - 0.5 * likelihood, rel=1e-3)


# ---- updates


def test_order_of_an_update() -> None:
    """V and critics by each other of before, then the denoiser, then the policy by the new ones, then the targets."""
    algorithm, batch, state = problem(polyak=0.5)
    after, _ = algorithm.update(state, batch, rng.make_key(3), phase=0)
    keys = rng.split(rng.make_key(3), 3)
    q = algorithm.critic.min_q(state.params["critic"], batch["observations"], batch["actions"])
    next_v = algorithm.value(state.params["value"], batch["next_observations"])
    expected, _ = algorithm.descend(state, "value", algorithm.value_loss, batch, q)
    expected, _ = algorithm.descend(expected, "critic", algorithm.critic_loss, batch, next_v, keys[0])
    expected, _ = algorithm.descend(expected, "denoiser", algorithm.denoiser_loss, batch, keys[1])
    expected, _ = algorithm.descend(expected, "actor", algorithm.actor_loss, batch, keys[2])
    for name, params in after.params.items():
        for k, v in params.items():
            torch.testing.assert_close(v, expected.params[name][k], rtol=0.0, atol=0.0)
    early, _ = algorithm.descend(state, "actor", algorithm.actor_loss, batch, keys[2])
    assert any(not torch.equal(v, early.params["actor"][k]) for k, v in after.params["actor"].items())
    for k, v in after.target["critic"].items():
        torch.testing.assert_close(v, 0.5 * (state.target["critic"][k] + after.params["critic"][k]))
        assert torch.equal(v, after.extra["target"][k])


@pytest.mark.parametrize(("step", "waits"), [(0, True), (6, True), (7, False), (8, False)])
def test_policy_and_targets_wait_for_the_warm_up(step: int, waits: bool) -> None:
    algorithm, batch, state = problem(step, warm_up=7)
    after, _ = algorithm.update(state, batch, rng.make_key(3), phase=0)
    for name in state.params:
        same = all(torch.equal(v, state.params[name][k]) for k, v in after.params[name].items())
        assert same == (waits and name == "actor"), name
        assert int(after.opt[name]["count"]) == int(not (waits and name == "actor"))  # type: ignore[call-overload]
    assert all(torch.equal(v, state.target["critic"][k]) for k, v in after.target["critic"].items()) == waits


def test_schedules_begin_after_the_warm_up() -> None:
    algorithm, _, _ = problem(warm_up=10, schedule="cosine", decay_steps=4, learning_rate=1.0, actor_learning_rate=0.5)
    rates = {
        name: [float(algorithm.optimizer(name).rate(torch.tensor(float(n)))) for n in (0, 2, 10, 12, 14)]
        for name in ("critic", "denoiser", "actor")
    }
    assert rates["critic"] == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.0], abs=1e-6)
    assert rates["denoiser"] == pytest.approx([0.5, 0.5, 0.5, 0.25, 0.0], abs=1e-6)
    assert rates["actor"][:2] == pytest.approx([0.5, 0.25], abs=1e-6)  # which counts its own steps


def test_the_length_of_the_warm_up() -> None:
    def lengths(steps: int, warm_up: int | None) -> int:
        config = TrainConfig(algo=DTQLConfig(warm_up=warm_up), steps=steps)
        assert DTQL.requires(config, data()) == {}
        return DTQL.adopt(config, data(), {}).algo.warm_up

    assert [lengths(*case) for case in ((1_050_000, None), (2_000, None), (2_000, 10), (4, 0))] == [50_000, 400, 10, 0]
    with pytest.raises(
        UserError, match=r"algo\.warm_up=2000 leaves the policy none of steps=2000: .*, such as algo\.warm_up=400$"
    ):
        lengths(2_000, 2_000)
    with pytest.raises(UserError, match=r"algo\.sigma_min=3 must be below algo\.sigma_max=2$"):
        DTQL.requires(TrainConfig(algo=DTQLConfig(sigma_min=3.0, sigma_max=2.0), steps=10), data())


# ---- acting


def test_the_best_candidate_by_the_target_critics() -> None:
    algorithm, batch, state = problem(candidates=7, choice="best")
    key, s = rng.make_key(4), batch["observations"].double().numpy()
    mean, log_std = np.split(layers(numbers(state.params["actor"]), s, lambda x: np.maximum(x, 0.0), "net."), 2, axis=1)
    noise = rng.normal(rng.split(key)[0], (B, 7, A)).double().numpy()
    candidates = np.stack([np.tanh(mean + np.exp(log_std.clip(-5, 2)) * noise[:, i]) for i in range(7)])
    q = np.stack([critics(numbers(state.extra["target"]), s, a).min(0) for a in candidates])
    found, _ = algorithm.actor(state).act(None, batch["observations"], key, explore=False)
    np.testing.assert_allclose(found, np.take_along_axis(candidates, q.argmax(0)[None, :, None], 0)[0], atol=1e-4)
    still, _ = problem(greedy="zero")[0].actor(state).act(None, batch["observations"], key, explore=False)
    np.testing.assert_allclose(still, np.tanh(mean), atol=1e-4)


@pytest.mark.nightly
def test_the_trust_region_holds_the_policy_where_data_are() -> None:
    """Rewards grow beyond the data, whose actions lie near 0.2: without the trust region the policy leaves them."""
    g = np.random.default_rng(0)
    s, a = g.normal(size=(512, 2)), 0.2 + 0.1 * g.normal(size=(512, 1))
    data = from_arrays(s, a, a[:, 0], np.ones(512, bool), action_low=-1.0, action_high=1.0)
    found = {}
    for alpha in (0.0, 5.0):
        config = DTQLConfig(hidden=[32, 32], alpha=alpha, learning_rate=3e-3, warm_up=50, candidates=1)
        algorithm = DTQL(config, data.spec)
        step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=64, replicas=1)
        state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 200)
        actions, _ = algorithm.actor(select(state, 0)).act(None, torch.randn(256, 2), rng.make_key(7), explore=False)
        found[alpha] = float(actions.mean())
    assert found[0.0] > 0.9 and abs(found[5.0] - 0.2) < 0.2


def test_published_defaults() -> None:
    c = DTQLConfig()
    published = {
        "hidden": [256] * 3,
        "expectile": 0.7,
        "sigma_data": 0.5,
        "sigma_min": 0.002,
        "sigma_max": 80.0,
        "candidates": 1024,
        "learning_rate": 3e-4,
        "batch_size": 256,
        "polyak": 0.005,
        "critics": 2,
        "bc_weight": 0.0,
        "decay_steps": 1_000_000,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert DTQL(c, data().spec).warm_up == 50_000
