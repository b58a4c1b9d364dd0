"""TD3-AWR: what it adds to ReBRAC in float64 NumPy, the order of its steps, and ReBRAC as its limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from tests.support.golden import KEY, A, B, critics, double, q_values, redraw, single, spec, transitions
from tests.support.reference import layer_norm as norm
from tests.support.reference import mlp as ref

LR, EXPECTILE, TEMPERATURE, ACTOR_BC = 0.01, 0.8, 2.0, 0.3
G = np.random.default_rng(8)
BATCH = transitions(G) | single({"next_actions": G.uniform(-1, 1, (B, A))})
X = double(BATCH)


def make(name: str = "td3_awr", **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    if name == "td3_awr":
        settings = {"expectile": EXPECTILE, "temperature": TEMPERATURE, **settings}
    config = kind.Config(
        **{"hidden": [6, 5], "learning_rate": LR, "actor_bc": ACTOR_BC, "actor_layer_norm": True, **settings}
    )
    algorithm = kind(config, spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)  # larger than initial weights: advantages of both signs
    for params in (state.params["critic"], state.params["actor"], state.target["critic"], state.target["actor"]):
        redraw(params, g)
    if name == "td3_awr":
        redraw(state.params["value"], g)
        q, _ = advantage(state)  # V passes through the middle of Q
        state.params["value"]["head.bias"] += float(np.median(q - v(state)))
    return algorithm, state


def least_q(state: TrainState, actions: np.ndarray) -> np.ndarray:
    """The smaller of the online critics."""
    return q_values(critics(state.params["critic"], norm), X["observations"], actions, norm).min(0)


def v(state: TrainState) -> np.ndarray:
    return norm.forward(norm.net(state.params["value"]), X["observations"])[0][:, 0]


def advantage(state: TrainState) -> tuple[np.ndarray, np.ndarray]:
    q = least_q(state, X["actions"])
    return q, q - v(state)


def test_value_loss() -> None:
    algorithm, state = make()
    _, u = advantage(state)
    assert (u < 0).any() and (u > 0).any()
    expected = (np.where(u < 0, 1 - EXPECTILE, EXPECTILE) * u**2).mean()
    assert float(algorithm.value_loss(state.params["value"], state, BATCH)[0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("temperature", "capped", "actor_q"), [(TEMPERATURE, False, 1.0), (10.0, True, 1.0), (TEMPERATURE, False, 0.0)]
)
def test_actor_loss_weighs_the_distance_alone(temperature: float, capped: bool, actor_q: float) -> None:
    algorithm, state = make(temperature=temperature, actor_q=actor_q)
    _, u = advantage(state)
    cap = 100.0 if not capped else float(np.exp(temperature * u.max()) / 2)
    algorithm.config.max_weight = cap
    weight = np.minimum(np.exp(temperature * u), cap)
    assert (weight == cap).any() == capped and (weight < cap).any()
    action = np.tanh(norm.forward(norm.net(state.params["actor"], "net."), X["observations"])[0])
    distance, q = ((action - X["actions"]) ** 2).sum(1), least_q(state, action)
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, BATCH)
    assert float(loss) == pytest.approx(
        (ACTOR_BC * weight * distance - actor_q * q / np.abs(q).mean()).mean(), rel=1e-4
    )
    assert float(metrics["actor/weight"]) == pytest.approx(weight.mean(), rel=1e-4)


def test_without_temperature_it_is_rebrac() -> None:
    algorithm, state = make(temperature=0.0)
    other, _ = make("rebrac")
    for t in range(4):
        state, ours = algorithm.update(state, BATCH, rng.fold_in(KEY, t), phase=t % 2)
        if t == 0:
            theirs = make("rebrac")[1]
        theirs, metrics = other.update(theirs, BATCH, rng.fold_in(KEY, t), phase=t % 2)
        assert set(metrics) <= set(ours)
    for name in ("actor", "critic"):
        for k, value in theirs.params[name].items():
            torch.testing.assert_close(state.params[name][k], value)
            torch.testing.assert_close(state.target[name][k], theirs.target[name][k])


def test_order_of_an_update() -> None:
    """V moves once the critics have, and the actor looks at both as they are then."""
    algorithm, state = make()
    state, _ = algorithm.update(state, BATCH, KEY, phase=0)
    before, adam = state, ref.Adam(lambda t: LR)
    state, metrics = algorithm.update(state, BATCH, KEY, phase=1)
    between = before._replace(params={**before.params, "critic": state.params["critic"]})  # new critics, old V
    _, u = advantage(between)
    net = norm.net(before.params["value"])
    _, seen = norm.forward(net, X["observations"])
    grads, _ = norm.backward(net, seen, (-2 * np.where(u < 0, 1 - EXPECTILE, EXPECTILE) * u / B)[:, None])
    norm.close(norm.unflat(adam.step(norm.flat(net), grads)), state.params["value"])
    _, u = advantage(state)  # new critics, new V
    assert float(metrics["actor/advantage"]) == pytest.approx(u.mean(), rel=1e-3, abs=1e-5)
    assert "value" not in state.target and set(state.target) == {"critic", "actor"}


def test_phase_0_moves_the_critics_alone() -> None:
    algorithm, before = make()
    state, metrics = algorithm.update(before, BATCH, KEY, phase=0)
    assert (
        all(state.params[name] is before.params[name] for name in ("actor", "value")) and state.target is before.target
    )
    assert not any(k.startswith(("actor/", "value/")) for k in metrics)
