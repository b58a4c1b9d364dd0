"""Advantage-weighted matching by hand: its weights, its losses over actions and chunks, the order of its updates; what
weights are for.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import select, stack
from offrl.algorithms.awm import AWM, AWMConfig
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.settings.compose import compose
from offrl.settings.field import check
from offrl.training.step import Step
from tests.support.golden import KEY, double
from tests.support.reference import generative as ref

SMALL = {"hidden": [16, 16], "flow_steps": 3}
ADVANTAGES, ERRORS = torch.tensor([2.0, -1.0, 0.5, -0.5]), torch.tensor([0.2, 0.4, 0.1, 0.3])


def dataset() -> Dataset:
    """Episodes of ten steps, some of which end by a termination, some by a time-out."""
    g = np.random.default_rng(0)
    s, a, n = g.normal(size=(60, 3)), g.uniform(-1, 1, (60, 2)), np.arange(60)
    ends = n % 10 == 9
    return from_arrays(s, a, g.normal(size=60), ends & (n < 30), ends & (n >= 30), action_low=-1.0, action_high=1.0)


def problem(**settings: object) -> tuple[AWM, dict[str, Tensor]]:
    data = dataset()
    algorithm = AWM(AWMConfig(**{**SMALL, **settings}), data.spec)  # type: ignore[arg-type]
    sampler = algorithm.sampler()
    return algorithm, sampler(sampler.prepare(data), rng.make_key(1), 32)


# ---- weights


def test_linear_weights_by_hand() -> None:
    """1 + 5 clip(A / sigma, -5, 5) / 5; sigma is the standard deviation of A around its own mean, though A is not
    centred.
    """
    weight, sigma = problem()[0].weigh(ADVANTAGES, ADVANTAGES)
    assert float(sigma) == pytest.approx(1.1457439237, rel=1e-6)
    torch.testing.assert_close(weight, torch.tensor([2.7455907, 0.1272046, 1.4363977, 0.5636023]))
    assert float(weight.mean()) == pytest.approx(1.2181988, rel=1e-6)
    assert float((weight * ERRORS).mean()) == pytest.approx(0.2281801156, rel=1e-6)


def test_weights_have_a_floor_and_a_ceiling() -> None:
    many = torch.cat([torch.tensor([30.0, -30.0]), torch.zeros(998)])  # twenty standard deviations away
    weight, _ = problem()[0].weigh(many, many)
    assert weight[:3].tolist() == [6.0, 0.0, 1.0]
    weight, _ = problem(strength=2.0, advantage_clip=1.0)[0].weigh(ADVANTAGES, ADVANTAGES)
    expected = np.maximum(0.0, 1.0 + 2.0 * (ADVANTAGES.numpy() / 1.1457439237).clip(-1.0, 1.0))
    np.testing.assert_allclose(weight, expected, rtol=1e-6)
    assert expected[0] == 3.0 and expected[1] == 0.0


def test_exponential_weights_by_hand() -> None:
    weight, _ = problem(weights="exp")[0].weigh(ADVANTAGES, ADVANTAGES)
    torch.testing.assert_close(weight, torch.tensor([100.0, 0.0497871, 4.4816891, 0.2231302]))
    assert float((weight * ERRORS).mean()) == pytest.approx(5.1337556956, rel=1e-6)
    assert problem(weights="one")[0].weigh(ADVANTAGES, ADVANTAGES)[0].tolist() == [1.0] * 4


def test_advantages_that_are_rounding_count_nothing() -> None:
    linear = problem()[0]
    assert linear.weigh(1e-6 * ADVANTAGES, torch.full((4,), 0.5))[0].tolist() == [1.0] * 4
    # beside such values 1.1 is small
    assert linear.weigh(ADVANTAGES, torch.full((4,), -2000.0))[0].tolist() == [1.0] * 4
    assert linear.weigh(ADVANTAGES, torch.full((4,), -1000.0))[0].tolist() != [1.0] * 4


# ---- losses


@pytest.mark.parametrize("length", [1, 3])
def test_losses(length: int) -> None:
    algorithm, batch = problem(length=length, expectile=0.8, discount=0.9, strength=3.0)
    state = algorithm.init(5)
    g = torch.Generator().manual_seed(0)
    target = {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in state.params["critic"].items()}
    state = state._replace(target={"critic": target})
    batch = {**batch, "actions": batch["actions"].flatten(1)}
    x = double(batch)
    s, a, width = x["observations"], x["actions"], 2 * length
    complete, valid, rewards, discount = np.ones(32), np.ones((32, 1)), x["rewards"], np.full(32, 0.9)
    if length > 1:
        complete, valid = x["whole"], x["valid"].astype(float)
        rewards = (x["step_rewards"] * 0.9 ** np.arange(3)).sum(1)
        discount = 0.9 ** x["span"]
        # cut by a time-out, and ended by a termination
        assert set(complete) == {0.0, 1.0} and (valid[complete == 1.0] == 0.0).any()
    v, critic, field, targets = (
        ref.arrays(p) for p in (*(state.params[k] for k in ("value", "critic", "actor")), target)
    )

    q = ref.critics(targets, s, a).min(0)
    advantage = q - ref.value(v, s)
    ours = algorithm.critic.min_q(target, batch["observations"], batch["actions"])
    loss, _ = algorithm.value_loss(state.params["value"], state, batch, ours)
    assert float(loss) == pytest.approx((complete * ref.expectile(advantage, 0.8)).mean(), rel=1e-4)

    y = rewards + discount * x["masks"] * ref.value(v, x["next_observations"])
    loss, _ = algorithm.critic_loss(state.params["critic"], state, batch, KEY)
    assert float(loss) == pytest.approx((complete * (ref.critics(critic, s, a) - y) ** 2).mean(1).sum(), rel=1e-4)

    sigma = advantage.std() + 1e-4
    weight = np.maximum(0.0, 1.0 + 3.0 * (advantage / sigma).clip(-5.0, 5.0) / 5.0)
    noise_key, time_key = rng.split(KEY)
    x0, t = (v.double().numpy() for v in (rng.normal(noise_key, (32, width)), rng.uniform(time_key, (32, 1))))
    error = (ref.field(field, s, (1 - t) * x0 + t * a, t) - (a - x0)) ** 2
    error = (error.reshape(32, length, 2) * valid[..., None]).mean((1, 2))
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, batch, ours.mean, KEY)
    assert float(loss) == pytest.approx((weight * error).mean(), rel=1e-4)
    assert float(metrics["actor/flow_loss"]) == pytest.approx(error.mean(), rel=1e-4)
    assert float(metrics["actor/weight"]) == pytest.approx(weight.mean(), rel=1e-4)
    assert float(metrics["actor/dropped"]) == (weight == 0.0).mean()
    assert float(metrics["actor/effective_share"]) == pytest.approx(
        weight.sum() ** 2 / (32 * (weight**2).sum()), rel=1e-4
    )
    assert float(metrics["actor/advantage"]) == pytest.approx(advantage.mean(), rel=1e-4)
    assert float(metrics["actor/sigma"]) == pytest.approx(sigma, rel=1e-4)


def test_v_then_the_flow_and_q_with_the_new_v() -> None:
    algorithm, batch = problem(polyak=0.25)
    state = algorithm.init(0)
    after, _ = algorithm.update(state, batch, KEY, phase=0)
    q = algorithm.critic.min_q(state.target["critic"], batch["observations"], batch["actions"])
    with_v, _ = algorithm.descend(state, "value", algorithm.value_loss, batch, q)
    with_actor, _ = algorithm.descend(with_v, "actor", algorithm.actor_loss, batch, q.mean, KEY)
    with_q, _ = algorithm.descend(with_actor, "critic", algorithm.critic_loss, batch, KEY)
    for name in ("value", "actor", "critic"):
        for k, v in with_q.params[name].items():
            assert torch.equal(after.params[name][k], v)
    for k, v in after.target["critic"].items():
        torch.testing.assert_close(v, 0.75 * state.target["critic"][k] + 0.25 * with_q.params["critic"][k])
    for name, losses in (
        ("actor", (algorithm.actor_loss, batch, q.mean, KEY)),
        ("critic", (algorithm.critic_loss, batch, KEY)),
    ):
        old, _ = algorithm.descend(state, name, *losses)  # with the V of before it moves elsewhere
        assert any(not torch.equal(v, after.params[name][k]) for k, v in old.params[name].items())


# ---- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strength": -1.0}, "strength=-1.0 is out of range: the smallest allowed value is 0.0"),
        ({"advantage_clip": 0.0}, "advantage_clip=0.0 is out of range: the smallest allowed value is 1e-06"),
        ({"candidates": 0}, "candidates=0 is out of range: the smallest allowed value is 1"),
        ({"weights": "square"}, "weights=square is not allowed; choose one of linear, exp, one"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(AWMConfig(**settings))  # type: ignore[arg-type]


def test_a_setting_that_does_nothing_is_named() -> None:
    with pytest.raises(
        UserError,
        match=r"algo.strength=10.0 does nothing with algo.weights=exp; leave it out, or set algo.weights=linear",
    ):
        compose({"algo": "awm", "algo.weights": "exp", "algo.strength": 10.0})
    with pytest.raises(UserError, match=r"algo.strength=\[1.0,5.0\] does nothing with algo.weights=exp"):
        compose({"algo": "awm", "algo.weights": "exp", "grid.strength": [1.0, 5.0]})
    with pytest.raises(
        UserError, match=r"algo.temperature=1.0 does nothing with algo.weights=linear; .* algo.weights=exp"
    ):
        compose({"algo": "awm", "algo.temperature": 1.0})
    for values in ({}, {"strength": 10.0}, {"weights": "exp", "temperature": 1.0}, {"weights": "exp", "strength": 5.0}):
        compose({"algo": "awm"} | {f"algo.{name}": value for name, value in values.items()})
    with pytest.raises(
        UserError, match=r"algo.n_step=2: a target of algo.length=3 sums a chunk's rewards; leave n_step at 1"
    ):
        AWM.fit_config(AWMConfig(n_step=2, length=3), dataset())


# ---- what weights are for: a bandit with one state and four modes

MODES = np.array([[-0.6, -0.6], [-0.6, 0.6], [0.6, -0.6], [0.6, 0.6]])
DATA_SHARES, REWARDS = np.array([0.4, 0.3, 0.2, 0.1]), np.array([0.0, 0.3, 0.6, 1.0])


def bandit() -> Dataset:
    g, n = np.random.default_rng(0), 4000
    mode = g.choice(4, n, p=DATA_SHARES)
    a = MODES[mode] + 0.05 * g.normal(size=(n, 2))
    return from_arrays(np.zeros((n, 1)), a, REWARDS[mode], np.ones(n, bool), action_low=-1.0, action_high=1.0)


def expected_shares(weights: str) -> np.ndarray:
    """The data's shares times each mode's weight, with Q the rewards and V their expectile 0.7."""
    v = 0.0
    for _ in range(200):
        tau = np.where(v > REWARDS, 0.3, 0.7) * DATA_SHARES
        v = (tau * REWARDS).sum() / tau.sum()
    advantage = REWARDS - v
    sigma = np.sqrt((DATA_SHARES * (advantage - (DATA_SHARES * advantage).sum()) ** 2).sum()) + 1e-4
    weight = {"linear": np.maximum(0.0, 1.0 + advantage / sigma), "exp": np.exp(3.0 * advantage), "one": np.ones(4)}[
        weights
    ]
    return DATA_SHARES * weight / (DATA_SHARES * weight).sum()


def drawn(algorithm: AWM, updates: int) -> Tensor:
    """Actions [2000, 2] after so many updates, before they are cut off."""
    step = Step(algorithm, algorithm.sampler().prepare(bandit()), batch_size=256, replicas=1)
    state, _ = step.run(stack([algorithm.init(0)]), {}, 0, updates)
    return algorithm.actor(select(state, 0)).act(None, torch.zeros(2000, 1), rng.make_key(5), explore=False)[0]


@pytest.mark.nightly
@pytest.mark.parametrize("weights", ["linear", "exp", "one"])
def test_the_weights_decide_how_often_each_mode_is_played(weights: str) -> None:
    config = AWMConfig(hidden=[64, 64], weights=weights, learning_rate=1e-3, polyak=0.05)
    actions = drawn(AWM(config, bandit().spec), 3000).numpy()
    shares = np.bincount(np.linalg.norm(actions[:, None] - MODES, axis=-1).argmin(1), minlength=4) / len(actions)
    expected = expected_shares(weights)
    assert shares == pytest.approx(expected, abs=0.07), expected
    if weights == "linear":
        assert (shares * REWARDS).sum() > (DATA_SHARES * REWARDS).sum() + 0.25  # the weights are what raises the reward


@pytest.mark.nightly
def test_without_the_floor_nothing_is_learnt() -> None:
    """Weights below 0 push the flow away from bad actions without end: why the setting does not exist."""

    class Signed(AWM):
        def weigh(self, advantage: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
            sigma = (advantage - advantage.mean()).square().mean().sqrt() + 1e-4
            return advantage / sigma, sigma

    config = AWMConfig(hidden=[64, 64], learning_rate=1e-3, polyak=0.05)
    near = {}
    for kind in (AWM, Signed):
        actions = drawn(kind(dataclasses.replace(config), bandit().spec), 1500)
        near[kind] = float(((actions.abs() - 0.6).abs().amax(-1) < 0.25).float().mean())
    assert near[AWM] > 0.4 and near[Signed] < 0.05
