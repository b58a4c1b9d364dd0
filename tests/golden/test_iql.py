"""IQL: each loss in float64 NumPy, and whole updates in the authors' order and OGBench's against an implementation of
its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.algorithm import Algorithm, TrainState
from tests.support.golden import KEY, B, K, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import mlp as ref

LR, DISCOUNT, POLYAK, EXPECTILE, TEMPERATURE = 0.01, 0.9, 0.1, 0.8, 2.0
G = np.random.default_rng(1)
BATCH = transitions(G)
X = double(BATCH)


def make(discrete: bool = False, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "iql")
    defaults = {
        "hidden": [6, 5],
        "learning_rate": LR,
        "discount": DISCOUNT,
        "polyak": POLYAK,
        "init": "torch",
        "decay_steps": 20,
    }
    config = kind.Config(**{**defaults, "expectile": EXPECTILE, "temperature": TEMPERATURE, **settings})
    algorithm = kind(config, spec(K if discrete else 0))
    state = algorithm.init(3)
    # larger than initial weights: advantages of both signs, some of them beyond the cap
    g = torch.Generator().manual_seed(5)
    for params in (state.params["critic"], state.params["value"], state.params["actor"], state.target["critic"]):
        redraw(params, g)
    return algorithm, state


def test_value_loss() -> None:
    algorithm, state = make()
    q = q_values(critics(state.target["critic"]), X["observations"], X["actions"]).min(0)
    v = ref.forward(ref.net(state.params["value"]), X["observations"])[0][:, 0]
    u = q - v
    assert (u < 0).any() and (u > 0).any()
    ours = algorithm.critic.min_q(algorithm.critic.target_critics(state, KEY), BATCH["observations"], BATCH["actions"])
    np.testing.assert_allclose(ours.mean, q, atol=1e-5)
    expected = np.where(u < 0, 1 - EXPECTILE, EXPECTILE) * u**2
    assert float(algorithm.value_loss(state.params["value"], state, BATCH, ours)[0]) == pytest.approx(
        expected.mean(), rel=1e-5
    )


def test_critic_loss_stops_at_terminations_and_sums_the_heads() -> None:
    algorithm, state = make()
    next_v = ref.forward(ref.net(state.params["value"]), X["next_observations"])[0][:, 0]
    y = X["rewards"] + DISCOUNT * X["masks"] * next_v
    q = q_values(critics(state.params["critic"]), X["observations"], X["actions"])  # online, not target
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-5)
    assert float(metrics["critic/q"]) == pytest.approx(q.mean(), rel=1e-4)
    assert float(metrics["critic/td_error"]) == pytest.approx(np.abs(q - y).mean(), rel=1e-4)


@pytest.mark.parametrize(("shift", "capped"), [(-2.0, False), (1.0, True)])
def test_actor_loss_and_the_cap_of_100(shift: float, capped: bool) -> None:
    algorithm, state = make()
    q = shift + q_values(critics(state.target["critic"]), X["observations"], X["actions"]).min(0)
    advantage = q - ref.forward(ref.net(state.params["value"]), X["observations"])[0][:, 0]
    weight = np.minimum(np.exp(TEMPERATURE * advantage), 100.0)
    assert (weight == 100.0).any() == capped and (weight < 100.0).any()
    state.params["actor"]["log_std"] = torch.tensor([0.2, -0.4])
    mean = np.tanh(ref.forward(ref.net(state.params["actor"], "net."), X["observations"])[0])
    std = np.exp([0.2, -0.4])
    log_p = (-0.5 * ((X["actions"] - mean) / std) ** 2 - np.log(std * np.sqrt(2 * np.pi))).sum(1)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH, torch.tensor(q, dtype=torch.float32), KEY)
    assert float(loss) == pytest.approx(-(weight * log_p).mean(), rel=1e-4)
    assert float(metrics["actor/weight"]) == pytest.approx(weight.mean(), rel=1e-4)


def test_deterministic_actor_loss() -> None:
    algorithm, state = make(policy="deterministic")
    q = np.linspace(-1, 1, B)
    weight = np.exp(TEMPERATURE * (q - ref.forward(ref.net(state.params["value"]), X["observations"])[0][:, 0]))
    action = np.tanh(ref.forward(ref.net(state.params["actor"], "net."), X["observations"])[0])
    loss, _ = algorithm.actor_loss(state.params["actor"], state, BATCH, torch.tensor(q, dtype=torch.float32), KEY)
    assert float(loss) == pytest.approx(
        (weight.clip(max=100) * ((action - X["actions"]) ** 2).mean(1)).mean(), rel=1e-4
    )


def test_a_deterministic_policy_explores_with_noise() -> None:
    algorithm, state = make(policy="deterministic")
    observations = torch.zeros(4000, len(BATCH["observations"][0]))
    greedy, _ = algorithm.actor(state).act(None, observations, KEY, explore=False)
    tried, _ = algorithm.actor(state).act(None, observations, KEY, explore=True)
    inside = greedy.abs() < 0.5
    assert bool(inside.any()) and float((tried - greedy)[inside].std()) == pytest.approx(0.1, rel=0.05)
    assert float(tried.abs().max()) <= 1.0


def test_discrete_actions_have_an_output_each() -> None:
    algorithm, state = make(discrete=True)
    actions = torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])
    batch = {**BATCH, "actions": actions}
    every = np.stack([ref.forward(n, X["observations"])[0] for n in critics(state.target["critic"])])  # [2, B, K]
    q = every[:, np.arange(B), actions].min(0)
    np.testing.assert_allclose(
        algorithm.critic.min_q(
            algorithm.critic.target_critics(state, KEY), batch["observations"], batch["actions"]
        ).mean,
        q,
        atol=1e-5,
    )
    v = ref.forward(ref.net(state.params["value"]), X["observations"])[0][:, 0]
    z = ref.forward(ref.net(state.params["actor"], "net."), X["observations"])[0]
    log_p = (z - np.log(np.exp(z).sum(1, keepdims=True)))[np.arange(B), actions]
    loss, _ = algorithm.actor_loss(state.params["actor"], state, batch, torch.tensor(q, dtype=torch.float32), KEY)
    assert float(loss) == pytest.approx(-(np.minimum(np.exp(TEMPERATURE * (q - v)), 100) * log_p).mean(), rel=1e-4)


class Reference:
    """IQL in float64: V, then the actor with the new V, then Q with the new V, then the targets.

    at_once: all with the V of before, the actor with the online critics, and the targets towards the critics of before.
    """

    def __init__(self, state: TrainState, at_once: bool) -> None:
        self.at_once = at_once
        self.value, self.actor = ref.net(state.params["value"]), ref.net(state.params["actor"], "net.")
        self.log_std = state.params["actor"]["log_std"].numpy().astype(np.float64)
        self.critics, self.targets = critics(state.params["critic"]), critics(state.target["critic"])
        self.adam = {k: ref.Adam(lambda t: LR) for k in ("value", "critic0", "critic1")}
        self.adam["actor"] = ref.Adam(lambda t: LR * 0.5 * (1 + np.cos(np.pi * min(t / 20, 1.0))))

    def update(self) -> None:
        q = q_values(self.targets, X["observations"], X["actions"]).min(0)  # of before
        v, inputs = ref.forward(self.value, X["observations"])
        old_v, old_next_v, old_critics = (
            v[:, 0],
            ref.forward(self.value, X["next_observations"])[0][:, 0],
            list(self.critics),
        )
        u = q - v[:, 0]
        grads, _ = ref.backward(self.value, inputs, (-2 * np.where(u < 0, 1 - EXPECTILE, EXPECTILE) * u / B)[:, None])
        self.value = ref.unflat(self.adam["value"].step(ref.flat(self.value), grads))

        advantage = q - ref.forward(self.value, X["observations"])[0][:, 0]
        if self.at_once:
            advantage = q_values(self.critics, X["observations"], X["actions"]).min(0) - old_v
        weight = np.minimum(np.exp(TEMPERATURE * advantage), 100.0)[:, None]
        z, inputs = ref.forward(self.actor, X["observations"])
        mean, std = np.tanh(z), np.exp(self.log_std)
        error = (mean - X["actions"]) / std
        grads, _ = ref.backward(self.actor, inputs, weight * error / std / B * (1 - mean**2))
        grads.append((weight * (1 - error**2)).sum(0) / B)
        *values, self.log_std = self.adam["actor"].step([*ref.flat(self.actor), self.log_std], grads)
        self.actor = ref.unflat(values)

        next_v = ref.forward(self.value, X["next_observations"])[0][:, 0]
        y = X["rewards"] + DISCOUNT * X["masks"] * (old_next_v if self.at_once else next_v)
        both = np.concatenate([X["observations"], X["actions"]], 1)
        for e, critic in enumerate(self.critics):
            out, inputs = ref.forward(critic, both)
            grads, _ = ref.backward(critic, inputs, 2 * (out - y[:, None]) / B)
            self.critics[e] = ref.unflat(self.adam[f"critic{e}"].step(ref.flat(critic), grads))
        followed = old_critics if self.at_once else self.critics
        self.targets = [ref.polyak(t, o, POLYAK) for t, o in zip(self.targets, followed, strict=True)]


@pytest.mark.parametrize("order", ["sequential", "simultaneous"])
def test_updates_in_the_authors_order_and_in_ogbenchs(order: str) -> None:
    algorithm: Algorithm
    algorithm, state = make(update_order=order)
    mine = Reference(state, order == "simultaneous")
    for _ in range(6):
        state, _ = algorithm.update(state, BATCH, KEY, phase=0)
        mine.update()
        ref.close(mine.value, state.params["value"])
        ref.close(mine.actor, state.params["actor"], "net.")
        np.testing.assert_allclose(state.params["actor"]["log_std"], mine.log_std, atol=2e-5)
        for e in range(2):
            ref.close(mine.critics[e], state.params["critic"], member=e)
            ref.close(mine.targets[e], state.target["critic"], member=e)


def test_published_defaults() -> None:
    c = registry.get("algo", "iql").Config()
    published = {
        "learning_rate": 3e-4,
        "batch_size": 256,
        "discount": 0.99,
        "polyak": 0.005,
        "expectile": 0.7,
        "temperature": 3.0,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert c.max_weight == 100.0 and c.hidden == [256, 256] and c.policy == "gaussian" and c.init == "orthogonal"
    assert c.actor_schedule == "cosine" and c.decay_steps == 1_000_000 and c.dropout == 0.0
