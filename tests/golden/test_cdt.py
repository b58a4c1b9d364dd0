"""CDT: relabelled episodes by hand, the loss in float64 NumPy, and what the policy is told while it acts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.relabelled import RelabelledSampler, relabelled
from offrl.errors import UserError
from tests.support.golden import KEY


def data() -> Dataset:
    """Three episodes of two steps; returns 2, 5 and 8, costs 1, 0 and 3."""
    rewards, costs = np.array([1.0, 1, 2, 3, 4, 4]), np.array([0.0, 1, 0, 0, 1, 2])
    columns = np.arange(6.0)[:, None], 0.1 * np.arange(6.0)[:, None]
    return from_arrays(*columns, rewards, None, np.arange(6) % 2 == 1, action_low=-1, action_high=1, costs=costs)


def make(**settings: Any) -> Any:
    kind, dataset = registry.get("algo", "cdt"), data()
    small = {"width": 8, "heads": 2, "layers": 1, "context": 2, "dropout": 0.0}
    config = kind.fit_config(kind.Config(**{**small, **settings}), dataset)
    return kind(config, dataset.spec)


def test_copies_are_of_the_best_episode_within_a_cost() -> None:
    """Costs of 0, 1.5 and 3 are asked for: the best episodes that cost no more have returns 5, 5 and 8."""
    numbers, shifts = relabelled(np.array([2.0, 5.0, 8.0]), np.array([1.0, 0.0, 3.0]), 1.0)
    assert numbers.tolist() == [1, 1, 2]
    costs, gains = shifts[:, 1].tolist(), shifts[:, 0].tolist()
    assert costs == [0.0, 1.5, 0.0] and all(0 <= gain <= 3 for gain in gains[:2]) and gains[2] == 0.0
    assert len(relabelled(np.zeros(3), np.zeros(3), 0.0)[0]) == 0


def test_relabelling_shifts_what_is_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """The episode of rewards (1, 1) and costs (0, 1) asked for (5, 0.5) has returns (5, 4) and costs (0.5, 0.5)."""
    shift = torch.tensor([[3.0, -0.5]])
    monkeypatch.setattr("offrl.data.samplers.relabelled.relabelled", lambda *_: (torch.tensor([0]), shift))
    sampler = RelabelledSampler(2, ("costs", "costs_to_go"), share=0.2, drawn_cost=2.0)
    source = sampler.prepare(data())
    assert source.count == 6  # the episode that costs 3, more than 2, is never drawn
    rows = source.table.take(torch.arange(6))
    assert rows["returns_to_go"].tolist() == [2.0, 1.0, 5.0, 3.0, 5.0, 4.0]
    assert rows["costs_to_go"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.5, 0.5]


def test_loss() -> None:
    """Means over steps and dimensions, but the prediction of costs over the padding as well."""
    algorithm = make()
    state = algorithm.init(0)
    source = algorithm.sampler().prepare(data())
    batch = algorithm.sampler()(source, KEY, 16)
    assert not bool(batch["valid"].all())
    dist, logits = algorithm.apply(
        "actor", state.params["actor"], algorithm.tokens(batch), batch["timesteps"], batch["valid"], None, True
    )
    mean, log_std, logits = (x.detach().double().numpy() for x in (*dist, logits))
    valid, actions, costs = (batch[k].numpy() for k in ("valid", "actions", "costs"))
    log_p = -0.5 * ((actions - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
    entropy = (0.5 + 0.5 * np.log(2 * np.pi) + log_std)[valid].mean()
    chosen = np.where(costs > 0, logits[..., 1], logits[..., 0]) - np.log(np.exp(logits).sum(-1))
    expected = -log_p[valid].mean() - 0.1 * entropy + 0.02 * (-chosen * valid).mean()
    loss, metrics = algorithm.actor_loss(state.params["actor"], state, batch, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["actor/entropy"]) == pytest.approx(entropy, rel=1e-4)
    temperature, _ = algorithm.temperature_loss(state.params["temperature"], state, torch.tensor(0.5))
    assert float(temperature) == pytest.approx(0.1 * 1.5)


def test_the_policy_is_told_what_it_may_still_earn_and_spend() -> None:
    algorithm = make(cost_limit=2.0)
    assert algorithm.config.target_return == 5.0  # of the episodes that cost at most 2
    actor = algorithm.actor(algorithm.init(0))
    carry = actor.start(2)
    _, carry = actor.act(carry, torch.zeros(2, 1), KEY, explore=False)
    carry = actor.observe_cost(actor.observe_reward(carry, torch.tensor([1.0, 2.0])), torch.tensor([0.0, 1.5]))
    window = actor.enter(carry, torch.ones(2, 1))
    assert window["costs_to_go"].tolist() == [[2.0, 2.0], [2.0, 0.5]]
    assert window["returns_to_go"].tolist() == [[5.0, 4.0], [5.0, 3.0]]
    tokens = algorithm.tokens(window)
    assert list(tokens) == ["return", "observation", "action", "cost"] and tokens["cost"][1, 1] == 49.5
    assert list(algorithm.sizes()) == ["return", "cost", "observation", "action"]


def test_a_limit_that_no_episode_keeps() -> None:
    dearer = data()
    dearer.columns["costs"] += 1.0
    kind = registry.get("algo", "cdt")
    with pytest.raises(UserError, match=r"algo.cost_limit=1 is below what any episode of arrays costs: the cheapest"):
        kind.fit_config(kind.Config(cost_limit=1.0), dearer)
