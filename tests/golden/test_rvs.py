"""RvS and RCSL: what the network sees, the loss and an update in float64 NumPy, and what is asked for while an episode
goes on.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from tests.support.reference import mlp as ref

LR = 0.01
KEY = rng.make_key(0)
G = np.random.default_rng(4)


def data(scale: float = 1.0, shift: float = 0.0) -> Dataset:
    """Three episodes of 4, 3 and 5 steps; the last one is cut off by the end of the data."""
    n = 12
    ends = np.zeros(n, bool)
    ends[[3, 6]] = True
    dataset = from_arrays(
        G.normal(size=(n, 3)), G.uniform(-1, 1, (n, 2)), np.arange(1.0, n + 1), ends, action_low=-1.0, action_high=1.0
    )
    assert dataset.complete.tolist() == [True, True, False]
    return dataset


def make(dataset: Dataset, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "rvs")
    config = kind.Config(**{"hidden": [6, 5], "learning_rate": LR, "policy": "deterministic", **settings})
    algorithm = kind(kind.fit_config(config, dataset), dataset.spec)
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    state.params["actor"].update({k: 0.7 * torch.randn(v.shape, generator=g) for k, v in state.params["actor"].items()})
    return algorithm, state


def test_found_in_the_data() -> None:
    """Returns are 10, 18 and 50: the last episode goes on beyond the data, so neither its return nor its steps
    count.
    """
    algorithm, _ = make(data())
    assert (
        algorithm.config.target_return == 18.0
        and algorithm.config.return_scale == 18.0
        and algorithm.config.max_length == 4
    )
    source = algorithm.sampler().prepare(data())
    batch = algorithm.sampler()(source, KEY, 200)
    found = {
        (int(t), float(r)) for t, r in zip(batch["timesteps"].flatten(), batch["returns_to_go"].flatten(), strict=True)
    }
    assert found == {(0, 10.0), (1, 9.0), (2, 7.0), (3, 4.0), (0, 18.0), (1, 13.0), (2, 7.0)}


@pytest.mark.parametrize("condition", ["to_go", "average", "goal"])
def test_update(condition: str) -> None:
    dataset = data()
    algorithm, state = make(dataset, condition=condition)
    batch = algorithm.sampler()(algorithm.sampler().prepare(dataset), KEY, 8)
    steps = batch if condition == "goal" else {k: v[:, 0] for k, v in batch.items()}
    x = {k: v.numpy().astype(np.float64) for k, v in steps.items()}
    outcome = x["actor_goals"] if condition == "goal" else (x["returns_to_go"] / 18.0)[:, None]
    if condition == "average":  # the authors' average reward, times 4 steps
        outcome = 4.0 * (x["returns_to_go"] / (4.0 - x["timesteps"]))[:, None] / 18.0
    inputs = np.concatenate([x["observations"], outcome], 1)
    actor = ref.net(state.params["actor"], "net.")
    adam = ref.Adam(lambda t: LR)
    for t in range(3):
        out, kept = ref.forward(actor, inputs)
        action = np.tanh(out)
        loss = ((action - x["actions"]) ** 2).mean()
        grads, _ = ref.backward(actor, kept, 2 * (action - x["actions"]) / action.size * (1 - action**2))
        actor = ref.unflat(adam.step(ref.flat(actor), grads))
        state, metrics = algorithm.update(state, batch, rng.fold_in(KEY, t), phase=0)
        assert float(metrics["actor/loss"]) == pytest.approx(loss, rel=1e-4)
    ref.close(actor, state.params["actor"], "net.")


def test_weight_decay_and_the_gaussian_likelihood() -> None:
    dataset = data()
    algorithm, state = make(dataset, policy="gaussian", weight_decay=0.5)
    batch = algorithm.sampler()(algorithm.sampler().prepare(dataset), KEY, 8)
    steps = {k: v[:, 0] for k, v in batch.items()}
    loss, _ = algorithm.actor_loss(state.params["actor"], state, steps, KEY)
    share = steps["returns_to_go"] / 18.0 * 4.0 / (4.0 - steps["timesteps"])
    x = torch.cat([steps["observations"], share.unsqueeze(1)], 1).numpy().astype(np.float64)
    mean = np.tanh(ref.forward(ref.net(state.params["actor"], "net."), x)[0])
    log_std = np.clip(state.params["actor"]["log_std"].numpy().astype(np.float64), -5, 2)
    z = (steps["actions"].numpy() - mean) / np.exp(log_std)
    assert float(loss) == pytest.approx((0.5 * z**2 + log_std + 0.5 * np.log(2 * np.pi)).sum(1).mean(), rel=1e-4)
    still = make(dataset, policy="gaussian", weight_decay=0.0)[0]
    one, other = (a.update(state, batch, KEY, phase=0)[0].params["actor"] for a in (algorithm, still))
    for k, v in state.params["actor"].items():
        torch.testing.assert_close(one[k], other[k] - LR * 0.5 * v, rtol=1e-4, atol=1e-6)


def test_what_is_asked_for_while_an_episode_goes_on() -> None:
    """RCSL takes off what was earned; RvS asks for the same average all along."""
    for condition, later in (("to_go", 18.0 - 5.0), ("average", 18.0)):
        algorithm, state = make(data(), condition=condition)
        observations = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
        actor, net = algorithm.actor(state), ref.net(state.params["actor"], "net.")
        carry = actor.start(2)
        for asked in (18.0, later):
            action, carry = actor.act(carry, observations, KEY, explore=False)
            x = np.concatenate([observations.numpy().astype(np.float64), np.full((2, 1), asked / 18.0)], 1)
            np.testing.assert_allclose(action.numpy(), np.tanh(ref.forward(net, x)[0]), atol=1e-5)
            carry = actor.observe_reward(carry, torch.tensor([5.0, 5.0]))


def test_rewards_are_counted_as_they_were_recorded() -> None:
    from dataclasses import replace

    algorithm, state = make(data(), condition="to_go", target_return=30.0)
    algorithm.spec = replace(algorithm.spec, reward_scale=0.1, reward_shift=-1.0)
    actor = algorithm.actor(state)
    carry = actor.observe_reward(actor.start(2), torch.tensor([-0.5, 1.0]))  # 5 and 20 as recorded
    np.testing.assert_allclose(carry.numpy(), [25.0, 10.0], rtol=1e-5)


def test_published_defaults() -> None:
    c = registry.get("algo", "rvs").Config()
    published = {
        "learning_rate": 1e-3,
        "hidden": [1024, 1024],
        "dropout": 0.0,
        "policy": "gaussian",
        "condition": "average",
    }
    assert {k: getattr(c, k) for k in published} == published
