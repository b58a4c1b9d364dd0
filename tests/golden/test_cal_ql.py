"""Cal-QL: the bound on the policy's values, and the returns that it is made of, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_cql import BATCH, KEY, WEIGHT, A, Actor, B, N, X, critics, logsumexp, make, q_values, tried

from offrl import registry, rng
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.settings.replicas import check_grid
from offrl.settings.train import TrainConfig


@pytest.mark.parametrize("importance", [True, False])
def test_only_the_policys_values_are_bounded_and_before_the_densities(importance: bool) -> None:
    algorithm, state = make("cal_ql", importance=importance)
    nets = critics(state.params["critic"])
    actions, log_p = tried(Actor(state.params["actor"]), KEY)
    q, taken = q_values(nets, X["observations"], actions), q_values(nets, X["observations"], X["actions"])
    floor = X["returns_to_go"]
    below = q[:, N:] < floor
    assert below.any() and (~below).any() and (q[:, :N] < floor).any()
    values = np.concatenate([q[:, :N], np.maximum(q[:, N:], floor)], 1)
    scores = values - log_p if importance else np.concatenate([values, taken[:, None]], 1)
    difference = logsumexp(scores, 1) - taken
    loss, metrics = algorithm.penalty(state.params["critic"], state, BATCH, rng.fold_in(KEY, 102))
    assert float(loss) == pytest.approx(WEIGHT * difference.mean(1).sum(), rel=1e-4)
    assert float(metrics["cal_ql/bounded"]) == pytest.approx(below.mean(), rel=1e-4)
    plain, _ = make("cql", importance=importance)
    assert float(plain.penalty(state.params["critic"], state, BATCH, rng.fold_in(KEY, 102))[0]) < float(loss)


def test_a_value_at_its_bound_is_not_pushed_down() -> None:
    """With returns above all values the penalty's gradient is that of the uniform actions and the data's alone."""
    algorithm, _ = make("cal_ql")
    high = {**BATCH, "returns_to_go": torch.full((B,), 100.0)}
    values = torch.zeros(2, 3 * N, B, requires_grad=True)
    bounded, _ = algorithm.calibrate(values, high)
    bounded.sum().backward()
    assert values.grad is not None and bool((values.grad[:, :N] == 1).all()) and not values.grad[:, N:].any()


def episodes(**more: Any) -> Dataset:
    """Four of 3 steps: one reaches the goal; one is cut off before; one ends in a terminal elsewhere; one is cut off after the goal."""
    rewards = np.array([-1, -1, 0, -1, -1, -1, -1, -1, -1, -1, 0, -1.0])
    ends, cuts = np.zeros(12, bool), np.zeros(12, bool)
    ends[[2, 8]], cuts[[5, 11]] = True, True
    observations = np.arange(12.0)[:, None]
    return Dataset.from_arrays(observations, np.zeros((12, A)), rewards, ends, cuts, action_low=[-1.0] * A, action_high=[1.0] * A, **more)


def test_returns_to_go_of_episodes_that_never_succeed() -> None:
    algorithm, _ = make("cal_ql", discount=0.5)
    sampler = algorithm.sampler()
    following = np.arange(1.0, 13.0)[:, None]
    following[5] = 5.5  # known, and not the first of the next episode
    data = episodes(next_observations=following)
    source = sampler.prepare(data)
    batch = sampler(source, KEY, 400)
    found = {int(s): float(g) for s, g in zip(batch["observations"][:, 0], batch["returns_to_go"], strict=True)}
    expected = [-1.5, -1, 0, -2, -2, -2, -1.75, -1.5, -1, -1.25, -0.5, -1]
    assert found == dict(enumerate(expected))
    assert "returns_to_go" not in data.columns  # the data set is as it was


def test_an_undiscounted_return_has_no_limit() -> None:
    algorithm, _ = make("cal_ql", discount=1.0)
    data = episodes()
    flags = (data.columns[k].numpy() for k in ("rewards", "terminations"))
    returns = algorithm.sampler().returns(*flags, data.episode_start.numpy(), data.episode_end.numpy())
    assert returns[3:6].tolist() == [-3, -2, -1]


def test_a_grid_of_discounts_is_refused() -> None:
    """Returns are computed once for all replicas."""
    config = registry.get("algo", "cal_ql").Config()
    with pytest.raises(UserError, match=r"grid\.discount"):
        check_grid(TrainConfig(algo=config, grid={"discount": [0.9, 0.99]}), episodes().spec)


def test_published_defaults() -> None:
    kind = registry.get("algo", "cal_ql")
    assert kind.online == {"mixing": 0.5, "update_every": "episode"} and not kind.traits.discrete
    c = kind.Config()
    assert c.actions == 10 and c.discount == 0.99 and c.importance
