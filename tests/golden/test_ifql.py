"""IFQL by hand: its losses, the order of its updates and the action it plays, against float64 NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import select, stack
from offrl.algorithms.ifql import IFQL, IFQLConfig
from offrl.data.arrays import from_arrays
from offrl.evaluation.policy import TrainedPolicy
from offrl.training.step import Step
from tests.support.golden import double
from tests.support.reference import generative as ref

SMALL = {"hidden": [16, 16], "flow_steps": 3}


def problem(**settings: object) -> tuple[IFQL, dict[str, Tensor]]:
    g = np.random.default_rng(0)
    s, a = g.normal(size=(40, 3)), g.uniform(-1, 1, (40, 2))
    data = from_arrays(s, a, g.normal(size=40), np.arange(40) % 10 == 9, action_low=-1.0, action_high=1.0)
    algorithm = IFQL(IFQLConfig(**{**SMALL, **settings}), data.spec)  # type: ignore[arg-type]
    sampler = algorithm.sampler()
    return algorithm, sampler(sampler.prepare(data), rng.make_key(1), 16)


@pytest.mark.parametrize("pessimism", ["min", "std"])
def test_losses(pessimism: str) -> None:
    algorithm, batch = problem(pessimism=pessimism, rho=0.7, discount=0.9, expectile=0.8, critics=3)
    state, key = algorithm.init(5), rng.make_key(9)
    g = torch.Generator().manual_seed(0)  # targets of their own, around V
    target = {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in state.params["critic"].items()}
    state = state._replace(target={"critic": target})
    x = double(batch)
    s, a = x["observations"], x["actions"]
    v, critic, field, targets = (
        ref.arrays(p) for p in (*(state.params[k] for k in ("value", "critic", "actor")), target)
    )

    q = ref.critics(targets, s, a)
    q = q.min(0) if pessimism == "min" else q.mean(0) - 0.7 * q.std(0)
    u = q - ref.value(v, s)
    assert (u < 0).any() and (u > 0).any()
    loss, _ = algorithm.value_loss(state.params["value"], state, batch, key)
    assert float(loss) == pytest.approx(ref.expectile(u, 0.8).mean(), rel=1e-4)

    y = x["rewards"] + 0.9 * x["masks"] * ref.value(v, x["next_observations"])
    loss, _ = algorithm.critic_loss(state.params["critic"], state, batch, key)
    # summed over critics
    assert float(loss) == pytest.approx(((ref.critics(critic, s, a) - y) ** 2).mean(1).sum(), rel=1e-4)

    noise_key, time_key = rng.split(key)
    x0, t = (v.double().numpy() for v in (rng.normal(noise_key, (16, 2)), rng.uniform(time_key, (16, 1))))
    error = ref.field(field, s, (1 - t) * x0 + t * a, t) - (a - x0)
    loss, _ = algorithm.actor_loss(state.params["actor"], state, batch, key)
    assert float(loss) == pytest.approx((error**2).mean(), rel=1e-5)  # no weights


def test_all_losses_of_an_update_read_what_was_before_it() -> None:
    """Each module moves as if it were the only one, and the targets follow the critics of before."""
    algorithm, batch = problem(polyak=0.5)
    state, key = algorithm.init(0), rng.make_key(3)
    state = state._replace(target={"critic": {k: v + 1.0 for k, v in state.params["critic"].items()}})
    after, _ = algorithm.update(state, batch, key, phase=0)
    losses = {"value": algorithm.value_loss, "critic": algorithm.critic_loss, "actor": algorithm.actor_loss}
    for (name, loss), own in zip(losses.items(), rng.split(key, 3), strict=True):
        alone, _ = algorithm.descend(state, name, loss, batch, own)
        for k, v in alone.params[name].items():
            torch.testing.assert_close(after.params[name][k], v, rtol=0.0, atol=0.0)
        assert int(after.opt[name]["count"]) == 1  # type: ignore[call-overload]
    for k, v in after.target["critic"].items():
        torch.testing.assert_close(v, state.params["critic"][k] + 0.5)


def test_the_best_of_the_flow_by_the_smallest_online_critic_is_played() -> None:
    algorithm, batch = problem(candidates=6)
    state = algorithm.init(4)
    g = torch.Generator().manual_seed(0)
    critic = {k: v + 0.5 * torch.randn(v.shape, generator=g) for k, v in state.params["critic"].items()}
    state = state._replace(params={**state.params, "critic": critic})  # the targets are others
    observations, key = batch["observations"], rng.make_key(8)
    actions, _ = algorithm.actor(state).act(None, observations, key, explore=False)
    s = observations.double().numpy()
    z = rng.normal(rng.split(key)[0], (16, 6, 2)).double().numpy()
    field, online, target = ref.arrays(state.params["actor"]), ref.arrays(critic), ref.arrays(state.target["critic"])
    drawn = np.stack([ref.integrate(lambda x, t: ref.field(field, s, x, t), z[:, n], 3) for n in range(6)])
    rows = np.arange(16)
    best = np.stack([ref.critics(online, s, d).min(0) for d in drawn]).argmax(0)
    np.testing.assert_allclose(actions, drawn[best, rows], atol=1e-5)
    by_target = np.stack([ref.critics(target, s, d).min(0) for d in drawn]).argmax(0)
    by_mean = np.stack([ref.critics(online, s, d).mean(0) for d in drawn]).argmax(0)
    assert (by_target != best).any() and (by_mean != best).any()  # they would have played others


@pytest.mark.nightly
def test_candidates_make_a_policy_of_cloning() -> None:
    """Two modes, of which one pays: one candidate clones both, 32 play the better one; a trained policy takes another
    number.
    """
    g = np.random.default_rng(0)
    s, a = g.normal(size=(1000, 2)), np.where(g.random((1000, 1)) < 0.5, -0.8, 0.8) + 0.02 * g.normal(size=(1000, 1))
    data = from_arrays(s, a, (a[:, 0] > 0).astype(np.float32), np.ones(1000, bool), action_low=-1.0, action_high=1.0)
    algorithm = IFQL(IFQLConfig(hidden=[64, 64], learning_rate=3e-3, flow_steps=5, polyak=0.05), data.spec)
    step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=128, replicas=1)
    state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 400)
    policy = TrainedPolicy(algorithm, select(state, 0), 0)
    shares, where = {}, g.normal(size=(300, 2)).astype(np.float32)
    for candidates in (1, 32):
        actions = policy.with_settings({"candidates": candidates}).act(where)
        shares[candidates] = float((actions > 0).mean()), float((np.abs(np.abs(actions) - 0.8) < 0.3).mean())
    assert 0.35 < shares[1][0] < 0.65
    assert shares[32][0] > 0.95
    assert shares[32][1] > 0.8  # and near the data: the flow is not pulled towards Q


def test_the_policy_file_holds_the_critics_that_choose(tmp_path: object) -> None:
    algorithm, batch = problem()
    state = algorithm.init(0)
    policy = TrainedPolicy(algorithm, state, 0)
    policy.save(tmp_path / "policy.safetensors")  # type: ignore[operator]
    loaded = TrainedPolicy.load(tmp_path / "policy.safetensors")  # type: ignore[operator]
    raw = batch["observations"].numpy()
    assert np.array_equal(loaded.act(raw), policy.act(raw))
    assert np.array_equal(
        loaded.own_value(raw, batch["actions"].numpy()), policy.own_value(raw, batch["actions"].numpy())
    )  # type: ignore[arg-type]
    assert dataclasses.asdict(loaded.algorithm.config) == dataclasses.asdict(algorithm.config)
