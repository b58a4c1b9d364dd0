"""ReCOIL: fixed targets, terminals, V by either implicit maximum, whole updates; that rewards are never read and the
expert is imitated.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.algorithm import TrainState, select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.evaluation.policy import TrainedPolicy
from offrl.training.step import Step
from tests.support.golden import KEY, OBS, A, B, double, redraw, single, spec, transitions
from tests.support.reference import mlp as ref
from tests.support.reference.losses import gumbel

DISCOUNT, POLYAK, BETA, CLIP, GAP, BEST, TAU, WEIGHT = 0.9, 0.1, 0.8, 1.5, 0.3, 4.0, 0.8, 0.25
LR = 0.01
G = np.random.default_rng(2)
BATCH = transitions(G) | single(  # and the expert's half
    {
        "expert_observations": G.normal(size=(B, OBS)),
        "expert_actions": G.uniform(-1, 1, (B, A)),
        "expert_next_observations": G.normal(size=(B, OBS)),
        "expert_masks": np.ones(B),
    }
)
del BATCH["rewards"]
Y = double(BATCH)


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "recoil")
    own = {
        "hidden": [6, 5],
        "learning_rate": LR,
        "discount": DISCOUNT,
        "polyak": POLYAK,
        "init": "torch",
        "actor_schedule": "constant",
    }
    fixed = {
        "reward_gap": GAP,
        "value_gap": BEST,
        "gumbel_temperature": BETA,
        "gumbel_clip": CLIP,
        "value_layer_norm": False,
    }
    config = kind.Config(**{**own, **fixed, "temperature": 0.5, "expectile": TAU, "expert_weight": WEIGHT, **settings})
    algorithm = kind(config, spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(7)
    for params in (state.params["critic"], state.params["value"], state.params["actor"], state.target["critic"]):
        redraw(params, g)
    return algorithm, state


def targets(value: ref.Net) -> np.ndarray:
    """A step costs the gap; what comes after a terminal is worth as little as the expert's data are worth much."""
    v = ref.forward(value, Y["next_observations"])[0][:, 0]
    return np.array([-GAP + DISCOUNT * (x if alive else -BEST) for x, alive in zip(v, Y["masks"], strict=True)])


def pairs(side: str = "") -> np.ndarray:
    return np.concatenate([Y[side + "observations"], Y[side + "actions"]], 1)


def test_critic_loss() -> None:
    algorithm, state = make()
    y = targets(ref.net(state.params["value"]))
    expected = expert = 0.0
    for e in range(2):
        net = ref.net(state.params["critic"], member=e)
        expected += (0.5 * (ref.forward(net, pairs())[0][:, 0] - y) ** 2).mean()
        expert += (0.5 * (ref.forward(net, pairs("expert_"))[0][:, 0] - BEST) ** 2).mean()
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(expected + expert, rel=1e-5)
    assert float(metrics["critic/loss"]) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["critic/expert_loss"]) == pytest.approx(expert, rel=1e-5)


def test_the_expert_counts_in_the_scale_of_the_value_loss() -> None:
    """By hand: beta 2, V = 0 everywhere, Q - V = 2, -2 in the data and 4 at the expert's, so z = 1, -1 and m = 2 (1
    without the expert).

    e^(z-m) - (z + 1) e^(-m) = e^-1 - 2 e^-2 = 0.09720887, and e^-3 - 0 = 0.04978707; their mean is 0.07349797
    (0.19978820 without)."""
    algorithm, state = make(gumbel_temperature=2.0, gumbel_clip=7.0)
    zero = {k: torch.zeros_like(v) for k, v in state.params["value"].items()}
    batch = {k: v[:2] for k, v in BATCH.items()}
    loss, _ = algorithm.value_loss(
        zero, state, {**batch, "expert_q": torch.tensor([4.0, -30.0])}, torch.tensor([2.0, -2.0])
    )
    assert float(loss) == pytest.approx(0.07349797, rel=1e-5)
    loss, _ = algorithm.value_loss(
        zero, state, {**batch, "expert_q": torch.tensor([2.0, -30.0])}, torch.tensor([2.0, -2.0])
    )
    assert float(loss) == pytest.approx(0.19978820, rel=1e-5)


def test_bins_cover_all_targets() -> None:
    algorithm, _ = make(value_head="two_hot", value_range=[-5.0, 5.0])
    config, dataset = dataclasses.replace(algorithm.config, value_range=[]), data()
    assert algorithm.fit_config(config, dataset).value_range == pytest.approx([-1.1 * BEST, 1.1 * BEST])
    assert algorithm.fit_config(config, dataset, {"value_gap": [4.0, 10.0]}).value_range == pytest.approx([-11.0, 11.0])
    # away from the expert for ever: 2 / (1 - 0.9)
    assert algorithm.fit_config(dataclasses.replace(config, reward_gap=2.0), dataset).value_range == pytest.approx(
        [-22.0, 1.1 * BEST]
    )


class Reference:
    """ReCOIL in float64: V and the policy on the data's half alone, then Q on both."""

    def __init__(self, state: TrainState, expectile: bool) -> None:
        self.expectile = expectile
        self.value, self.actor = ref.net(state.params["value"]), ref.net(state.params["actor"], "net.")
        self.log_std = state.params["actor"]["log_std"].numpy().astype(np.float64)
        self.critics, self.targets = (
            [ref.net(p, member=e) for e in range(2)] for p in (state.params["critic"], state.target["critic"])
        )
        self.adam = {k: ref.Adam(lambda t: LR) for k in ("value", "actor", "critic0", "critic1")}

    def update(self) -> None:
        q = np.stack([ref.forward(n, pairs())[0][:, 0] for n in self.targets]).min(0)
        v, inputs = ref.forward(self.value, Y["observations"])
        u = q - v[:, 0]
        expert_q = np.stack([ref.forward(n, pairs("expert_"))[0][:, 0] for n in self.targets]).min(0)
        expert_u = expert_q - ref.forward(self.value, Y["expert_observations"])[0][:, 0]
        slope = (
            -2 * np.where(u < 0, 1 - TAU, TAU) * u + WEIGHT if self.expectile else gumbel(u, BETA, CLIP, expert_u)[1]
        )
        grads, _ = ref.backward(self.value, inputs, (slope / B)[:, None])
        if self.expectile:  # minus the weight times the mean V of the expert's states
            _, inputs = ref.forward(self.value, Y["expert_observations"])
            more, _ = ref.backward(self.value, inputs, np.full((B, 1), -WEIGHT / B))
            grads = [a + b for a, b in zip(grads, more, strict=True)]
        self.value = ref.unflat(self.adam["value"].step(ref.flat(self.value), grads))

        weight = np.minimum(np.exp(0.5 * (q - ref.forward(self.value, Y["observations"])[0][:, 0])), 100.0)[:, None]
        z, inputs = ref.forward(self.actor, Y["observations"])
        mean, std = np.tanh(z), np.exp(self.log_std)
        error = (mean - Y["actions"]) / std
        grads, _ = ref.backward(self.actor, inputs, weight * error / std / B * (1 - mean**2))
        grads.append((weight * (1 - error**2)).sum(0) / B)
        *values, self.log_std = self.adam["actor"].step([*ref.flat(self.actor), self.log_std], grads)
        self.actor = ref.unflat(values)

        y = targets(self.value)
        for e, critic in enumerate(self.critics):
            out, inputs = ref.forward(critic, pairs())
            grads, _ = ref.backward(critic, inputs, (out - y[:, None]) / B)
            out, inputs = ref.forward(critic, pairs("expert_"))
            more, _ = ref.backward(critic, inputs, (out - BEST) / B)
            grads = [a + b for a, b in zip(grads, more, strict=True)]
            self.critics[e] = ref.unflat(self.adam[f"critic{e}"].step(ref.flat(critic), grads))
        self.targets = [ref.polyak(t, o, POLYAK) for t, o in zip(self.targets, self.critics, strict=True)]


@pytest.mark.parametrize("implicit_maximum", ["reverse_kl", "expectile"])
def test_updates(implicit_maximum: str) -> None:
    algorithm, state = make(implicit_maximum=implicit_maximum)
    mine = Reference(state, implicit_maximum == "expectile")
    for _ in range(4):
        state, _ = algorithm.update(state, BATCH, KEY, phase=0)
        mine.update()
        ref.close(mine.value, state.params["value"], atol=5e-5)
        ref.close(mine.actor, state.params["actor"], "net.", atol=5e-5)
        for e in range(2):
            ref.close(mine.critics[e], state.params["critic"], member=e, atol=5e-5)
            ref.close(mine.targets[e], state.target["critic"], member=e, atol=5e-5)


def data(rewards: float = 0.0) -> Dataset:
    """300 episodes of 4 steps; the expert's 15 take a known action, the others any, near the expert's or far from
    it.
    """
    g, episodes, steps = np.random.default_rng(0), 300, 4
    x = g.uniform(-1, 1, (episodes * steps, 2)).astype(np.float32)
    x[:, 1] = np.tile(np.arange(steps) / steps, episodes)
    best = (0.7 * np.sin(2 * x[:, :1])).astype(np.float32)
    expert = np.arange(episodes * steps) >= (episodes - 15) * steps
    near = np.repeat(g.random(episodes) < 0.2, steps)
    actions = np.where(
        (expert | near)[:, None], best + 0.05 * g.normal(size=best.shape), g.uniform(-1, 1, best.shape)
    ).clip(-1, 1)
    ends = np.arange(episodes * steps) % steps == steps - 1
    noise = rewards * g.normal(size=len(x))
    return from_arrays(x, actions, noise, truncations=ends, expert=expert, action_low=-1.0, action_high=1.0)


def train(dataset: Dataset, updates: int, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", settings.pop("algo", "recoil"))
    config = kind.Config(**{"hidden": [32, 32], "learning_rate": 3e-3, **settings})
    algorithm = kind(kind.fit_config(config, dataset), dataset.spec)
    step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=128, replicas=1)
    state, _ = step.run(stack([algorithm.init(0)]), {}, 0, updates)
    return algorithm, select(state, 0)


def test_rewards_are_never_read() -> None:
    for settings in ({}, {"value_head": "hl_gauss"}):
        (_, one), (_, other) = (train(data(scale), 5, **settings) for scale in (0.0, 100.0))
        for name, params in one.params.items():
            assert all(torch.equal(v, other.params[name][k]) for k, v in params.items()), name


@pytest.mark.nightly
def test_imitates_the_expert_and_not_the_data() -> None:
    """One row in twenty is the expert's; cloning all of them gives the mean over good and arbitrary actions."""
    dataset = data()
    x = dataset.columns["observations"].numpy()
    best = 0.7 * np.sin(2 * x[:, :1])
    error = {}
    for algo, settings in (("recoil", {"polyak": 0.05, "gumbel_temperature": 20.0, "temperature": 0.1}), ("bc", {})):
        algorithm, state = train(dataset, 300, algo=algo, **settings)
        error[algo] = float(np.abs(TrainedPolicy(algorithm, state, 0).act(x) - best).mean())
    assert error["recoil"] < 0.6 * error["bc"], error


def test_published_defaults() -> None:
    c = registry.get("algo", "recoil").Config()
    published = {
        "reward_gap": 2.0,
        "value_gap": 200.0,
        "gumbel_clip": 7.0,
        "temperature": 3.0,
        "batch_size": 1024,
        "expectile": 0.7,
    }
    assert {k: getattr(c, k) for k in published} == published and c.huber_delta == 0.0 and c.expert_weight == 0.1
