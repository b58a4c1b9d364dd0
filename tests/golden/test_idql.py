"""IDQL by hand: its denoiser, losses, the order of its updates and the action it plays, against float64 NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad

from offrl import rng
from offrl.algorithm import TrainState
from offrl.algorithms.idql import IDQL, IDQLConfig
from offrl.evaluation.policy import TrainedPolicy
from tests.golden.test_best_of_n import plain_ddpm
from tests.support.golden import KEY, A, B, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import generative, mlp

T, TAU = 5, 0.8
BETAS = 1.0 - np.exp(-0.1 / T - 0.5 * 9.9 * (2 * np.arange(1, T + 1) - 1) / T**2)
ABAR = np.cumprod(1.0 - BETAS)
BATCH = transitions(np.random.default_rng(1))
X = double(BATCH)


def make(**settings: object) -> tuple[IDQL, TrainState]:
    small = {
        "hidden": [6, 5],
        "width": 8,
        "blocks": 2,
        "embedding": 6,
        "expectile": TAU,
        "discount": 0.9,
        "polyak": 0.1,
    }
    algorithm = IDQL(IDQLConfig(**{**small, "learning_rate": 0.01, **settings}), spec())  # type: ignore[arg-type]
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for params in (state.params["critic"], state.params["value"], state.target["critic"], state.extra["target"]):
        redraw(params, g)
    return algorithm, state


def mish(x: np.ndarray) -> np.ndarray:
    return x * np.tanh(np.log1p(np.exp(x)))


def denoiser(
    p: dict[str, np.ndarray], x: np.ndarray, step: np.ndarray, s: np.ndarray, masks: list[np.ndarray] | None = None
) -> np.ndarray:
    def linear(name: str, x: np.ndarray) -> np.ndarray:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    angle = 2.0 * np.pi * step[:, None] * p["waves"]
    time = linear("down", mish(linear("up", np.concatenate([np.cos(angle), np.sin(angle)], 1))))
    h = linear("first", np.concatenate([x, s, time], 1))
    for i in range(2):
        y = h if masks is None else np.where(masks[i], h / 0.9, 0.0)
        y = generative.normed(y, p[f"blocks.{i}.scale"], p[f"blocks.{i}.shift"])
        h = h + linear(f"blocks.{i}.narrow", mish(linear(f"blocks.{i}.wide", y)))
    return linear("head", mish(h))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_actor_loss(dropout: float) -> None:
    """Noise at the step that was drawn, squared errors summed over an action's entries, dropout before each block's
    LayerNorm.
    """
    algorithm, state = make(dropout=dropout)
    params = {
        k: v + 0.1 * torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
        for k, v in state.params["actor"].items()
    }
    step_key, noise_key, dropout_key = rng.split(KEY, 3)
    step, noise = rng.randint(step_key, (B,), T).numpy(), rng.normal(noise_key, (B, A)).double().numpy()
    assert len(set(step.tolist())) > 2
    masks = [rng.uniform(rng.fold_in(dropout_key, i), (B, 8)).numpy() >= 0.1 for i in range(2)] if dropout else None
    noisy = np.sqrt(ABAR[step])[:, None] * X["actions"] + np.sqrt(1.0 - ABAR[step])[:, None] * noise
    error = denoiser(generative.arrays(params), noisy, step, X["observations"], masks) - noise
    loss, _ = algorithm.actor_loss(params, state, BATCH, KEY)
    assert float(loss) == pytest.approx((error**2).sum(1).mean(), rel=1e-4)


def test_the_denoiser_begins_as_flax_begins() -> None:
    network = make(width=64)[0].networks["actor"]
    wide = network.blocks[0].wide.weight.detach()  # type: ignore[union-attr, index]
    assert float(wide.std()) == pytest.approx(64**-0.5, rel=0.03)  # of the numbers that are left
    assert float(wide.abs().max()) <= 2.0 * 64**-0.5 / 0.8796 + 1e-6
    first = network.first.weight.detach()  # type: ignore[union-attr]
    assert float(first.abs().max()) <= np.sqrt(6.0 / (first.shape[0] + first.shape[1]))  # type: ignore[union-attr, index, operator]


def test_value_and_critic_losses() -> None:
    algorithm, state = make()
    q = q_values(critics(state.target["critic"]), X["observations"], X["actions"]).min(0)
    u = q - mlp.forward(mlp.net(state.params["value"]), X["observations"])[0][:, 0]
    assert (u < 0).any() and (u > 0).any()
    ours = algorithm.critic.min_q(state.target["critic"], BATCH["observations"], BATCH["actions"])
    loss, _ = algorithm.value_loss(state.params["value"], state, BATCH, ours)
    assert float(loss) == pytest.approx(generative.expectile(u, TAU).mean(), rel=1e-4)
    y = X["rewards"] + 0.9 * X["masks"] * mlp.forward(mlp.net(state.params["value"]), X["next_observations"])[0][:, 0]
    error = q_values(critics(state.params["critic"]), X["observations"], X["actions"]) - y
    loss, _ = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx((error**2).mean(), rel=1e-4)  # the mean over critics


def test_actor_then_v_then_q_with_the_new_v() -> None:
    algorithm, state = make(average=0.25)
    keys = rng.split(KEY, 3)
    after, _ = algorithm.update(state, BATCH, KEY, phase=0)
    q = algorithm.critic.min_q(state.target["critic"], BATCH["observations"], BATCH["actions"])
    with_v, _ = algorithm.descend(state, "value", algorithm.value_loss, BATCH, q)
    with_q, _ = algorithm.descend(with_v, "critic", algorithm.critic_loss, BATCH, keys[2])
    without, _ = algorithm.descend(state, "critic", algorithm.critic_loss, BATCH, keys[2])
    for k, v in with_q.params["critic"].items():
        assert torch.equal(after.params["critic"][k], v)
        torch.testing.assert_close(after.target["critic"][k], 0.9 * state.target["critic"][k] + 0.1 * v)
        assert torch.equal(after.extra["target"][k], after.target["critic"][k])
    assert any(not torch.equal(v, without.params["critic"][k]) for k, v in with_q.params["critic"].items())
    for k, v in after.extra["average"].items():
        torch.testing.assert_close(v, 0.75 * state.extra["average"][k] + 0.25 * after.params["actor"][k])


def test_the_denoisers_rate_falls_and_its_parameters_decay() -> None:
    """AdamW by hand: the first step is the learning rate against the gradient's sign, the second at a cosine's half."""
    algorithm, state = make(weight_decay=0.5, decay_steps=2, dropout=0.0)
    key = rng.split(KEY, 3)[0]

    def loss(params: dict[str, Tensor]) -> Tensor:
        return algorithm.actor_loss(params, state, BATCH, key)[0]

    before, gradient = state.params["actor"], grad(loss)(state.params["actor"])
    once, _ = algorithm.update(state, BATCH, KEY, phase=0)
    for k, v in before.items():
        g = gradient[k]
        torch.testing.assert_close(
            once.params["actor"][k], v * (1.0 - 0.01 * 0.5) - 0.01 * g / (g.abs() + 1e-8), atol=1e-5, rtol=1e-4
        )
    assert float(algorithm.optimizer("actor").rate(torch.tensor(1.0))) == pytest.approx(0.005)
    assert float(algorithm.optimizer("critic").rate(torch.tensor(1.0))) == pytest.approx(0.01)
    assert algorithm.optimizer("critic").weight_decay == 0.0


def drawn(algorithm: IDQL, state: TrainState, count: int) -> np.ndarray:
    """Candidates [N, B, A] of the averaged denoiser in NumPy."""
    p, keys = generative.arrays(state.extra["average"]), rng.split(rng.split(KEY)[0], T + 1)
    noise = np.stack([rng.normal(k, (B, count, A)).double().numpy() for k in keys])

    def one(n: int) -> np.ndarray:
        def eps(x: np.ndarray, t: int) -> np.ndarray:
            return denoiser(p, x, np.full(B, t), X["observations"])

        return plain_ddpm(eps, noise[T, :, n], noise[:T, :, n], BETAS)

    return np.stack([one(n) for n in range(count)])


def test_the_best_by_the_smallest_target_critic_is_played() -> None:
    algorithm, state = make(candidates=7)
    candidates = drawn(algorithm, state, 7)
    q = q_values(critics(state.extra["target"]), X["observations"], candidates).min(0)
    online = q_values(critics(state.params["critic"]), X["observations"], candidates).min(0)
    best = q.argmax(0)
    assert (online.argmax(0) != best).any()
    actions, _ = algorithm.actor(state).act(None, BATCH["observations"], KEY, explore=False)
    np.testing.assert_allclose(actions, candidates[best, np.arange(B)], atol=1e-4)
    other = state._replace(params={**state.params, "actor": {k: v + 1.0 for k, v in state.params["actor"].items()}})
    # the average acts
    assert torch.equal(algorithm.actor(other).act(None, BATCH["observations"], KEY, explore=False)[0], actions)


def test_choice_by_the_weights_of_v() -> None:
    """A candidate is played with probability proportional to tau where Q is above V, and 1 - tau below."""
    algorithm, state = make(choice="expectile", candidates=3)
    candidates = torch.tensor(drawn(algorithm, state, 3)[:, :1], dtype=torch.float32)
    observations = BATCH["observations"][:1]
    v = mlp.forward(mlp.net(state.params["value"]), X["observations"][:1])[0][0, 0]
    q = q_values(critics(state.extra["target"]), X["observations"][:1], candidates.double().numpy()).min(0)[:, 0]
    # V between the candidates
    state.params["value"]["head.bias"] = state.params["value"]["head.bias"] - float(v - np.median(q)) - 1e-3
    weights = np.where(q - np.median(q) + 1e-3 < 0, 1.0 - TAU, TAU)
    assert sorted(weights.tolist()) == pytest.approx([1.0 - TAU, TAU, TAU])
    actor: Any = algorithm.actor(state)
    plays = torch.stack([actor.choose_of(observations, candidates, rng.make_key(i))[0] for i in range(3000)])
    shares = [float((plays == candidates[n, 0]).all(-1).float().mean()) for n in range(3)]
    assert shares == pytest.approx((weights / weights.sum()).tolist(), abs=0.04)


def test_a_policy_file_acts_with_other_candidates_and_choice(tmp_path: Path) -> None:
    algorithm, state = make(candidates=4)
    policy = TrainedPolicy(algorithm, state, 0)
    policy.save(tmp_path / "policy.safetensors")
    loaded = TrainedPolicy.load(tmp_path / "policy.safetensors")
    raw = BATCH["observations"].numpy()
    assert np.array_equal(loaded.act(raw), policy.act(raw))
    for settings in ({"candidates": 16}, {"choice": "expectile"}):
        actions = [p.with_settings(settings).act(raw) for p in (policy, loaded)]
        assert np.array_equal(*actions) and not np.array_equal(actions[0], policy.act(raw))
