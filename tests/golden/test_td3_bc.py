"""TD3+BC: each loss in float64 NumPy, and whole updates, in which actor and targets move at every second only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from tests.support.golden import KEY, OBS, A, B, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import mlp as ref

LR, DISCOUNT, POLYAK, ALPHA = 0.01, 0.9, 0.1, 2.5
G = np.random.default_rng(2)
BATCH = transitions(G, next_scale=3.0)
X = double(BATCH)
NOISE = 4 * G.normal(size=(B, A))  # times 0.2, most of it is beyond the clip at 0.5


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is known, and large."""
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.tensor(NOISE, dtype=torch.float32).reshape(shape))


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "td3_bc")
    defaults = {"hidden": [6, 5], "learning_rate": LR, "discount": DISCOUNT, "polyak": POLYAK, "alpha": ALPHA}
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)  # larger than initial weights: values of both signs, actions beyond the bounds
    for name in ("critic", "actor"):
        for params in (state.params[name], state.target[name]):
            redraw(params, g)
    return algorithm, state


def td_target(target_actor: ref.Net, targets: list[ref.Net], std: float = 0.2, clip: float = 0.5) -> np.ndarray:
    noise = np.clip(std * NOISE, -clip, clip)
    mode = np.tanh(ref.forward(target_actor, X["next_observations"])[0])
    action = np.clip(mode + noise, -1, 1)
    if std:
        assert (
            (np.abs(std * NOISE) > clip).any()
            and (np.abs(std * NOISE) < clip).any()
            and (np.abs(mode + noise) > 1).any()
        )
    next_q = q_values(targets, X["next_observations"], action)
    assert (next_q[0] < next_q[1]).any() and (next_q[0] > next_q[1]).any()
    return X["rewards"] + DISCOUNT * X["masks"] * next_q.min(0)


@pytest.mark.parametrize(("std", "clip"), [(0.2, 0.5), (0.5, 0.3), (0.0, 0.5)])
def test_critic_loss(std: float, clip: float) -> None:
    algorithm, state = make(policy_noise=std, noise_clip=clip)
    y = td_target(ref.net(state.target["actor"], "net."), critics(state.target["critic"]), std, clip)
    q = q_values(critics(state.params["critic"]), X["observations"], X["actions"])
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-5)
    assert float(metrics["critic/td_error"]) == pytest.approx(np.abs(q - y).mean(), rel=1e-4)


@pytest.mark.parametrize("alpha", [2.5, 0.3, 0.0])
def test_actor_loss_is_normalised_by_the_mean_value(alpha: float) -> None:
    algorithm, state = make(alpha=alpha)
    action = np.tanh(ref.forward(ref.net(state.params["actor"], "net."), X["observations"])[0])
    q = q_values(critics(state.params["critic"]), X["observations"], action)[0]  # the first online critic only
    assert (q < 0).any() and (q > 0).any()  # else the mean of |q| is the mean of q
    expected = -alpha / np.abs(q).mean() * q.mean() + ((action - X["actions"]) ** 2).mean()
    loss, _ = algorithm.actor_loss(state.params["actor"], state, BATCH)
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_the_scale_of_values_cancels() -> None:
    """Values 10 times as large give the same gradient."""
    algorithm, state = make()
    gradient = torch.func.grad(lambda p, s: algorithm.actor_loss(p, s, BATCH)[0])
    critic = state.params["critic"]
    scaled = {k: v * 10 if k.startswith("head") else v for k, v in critic.items()}
    a = gradient(state.params["actor"], state)
    b = gradient(state.params["actor"], state._replace(params={**state.params, "critic": scaled}))
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=1e-3, atol=1e-5)


class Reference:
    """TD3+BC in float64."""

    def __init__(self, state: TrainState) -> None:
        self.actor, self.target_actor = ref.net(state.params["actor"], "net."), ref.net(state.target["actor"], "net.")
        self.critics, self.targets = critics(state.params["critic"]), critics(state.target["critic"])
        self.adam = {k: ref.Adam(lambda t: LR) for k in ("actor", "critic0", "critic1")}

    def update(self, t: int) -> None:
        y = td_target(self.target_actor, self.targets)
        both = np.concatenate([X["observations"], X["actions"]], 1)
        for e, critic in enumerate(self.critics):
            out, inputs = ref.forward(critic, both)
            grads, _ = ref.backward(critic, inputs, 2 * (out - y[:, None]) / B)
            self.critics[e] = ref.unflat(self.adam[f"critic{e}"].step(ref.flat(critic), grads))
        if t % 2 == 0:
            return
        z, inputs = ref.forward(self.actor, X["observations"])
        action = np.tanh(z)
        q, critic_inputs = ref.forward(self.critics[0], np.concatenate([X["observations"], action], 1))
        scale = ALPHA / np.abs(q).mean()
        _, into = ref.backward(self.critics[0], critic_inputs, np.full_like(q, -scale / B))
        grad = into[:, OBS:] + 2 * (action - X["actions"]) / (B * A)
        grads, _ = ref.backward(self.actor, inputs, grad * (1 - action**2))
        self.actor = ref.unflat(self.adam["actor"].step(ref.flat(self.actor), grads))
        self.target_actor = ref.polyak(self.target_actor, self.actor, POLYAK)
        self.targets = [ref.polyak(x, o, POLYAK) for x, o in zip(self.targets, self.critics, strict=True)]


def test_updates() -> None:
    algorithm, state = make()
    mine = Reference(state)
    for t in range(8):
        before = state
        state, metrics = algorithm.update(state, BATCH, KEY, phase=t % 2)
        if t % 2 == 0:  # delayed: the very same tensors
            assert state.params["actor"] is before.params["actor"] and state.opt["actor"] is before.opt["actor"]
            assert all(state.target[n] is before.target[n] for n in ("actor", "critic")) and "actor/loss" not in metrics
        else:
            assert "actor/loss" in metrics and "critic/loss" in metrics
        mine.update(t)
        ref.close(mine.actor, state.params["actor"], "net.")
        ref.close(mine.target_actor, state.target["actor"], "net.")
        for e in range(2):
            ref.close(mine.critics[e], state.params["critic"], member=e)
            ref.close(mine.targets[e], state.target["critic"], member=e)


def test_published_defaults() -> None:
    c = registry.get("algo", "td3_bc").Config()
    published = {"learning_rate": 3e-4, "batch_size": 256, "discount": 0.99, "polyak": 0.005, "alpha": 2.5}
    assert {k: getattr(c, k) for k in published} == published
    assert c.policy_noise == 0.2 and c.noise_clip == 0.5 and c.hidden == [256, 256] and c.init == "torch"
