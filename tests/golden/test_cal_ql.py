"""Cal-QL: the returns that bound its values, by hand; the bound itself is in test_cql.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from offrl import registry
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.settings.compose import compose
from offrl.settings.presets import finetune_settings
from tests.support.golden import KEY, A, spec


def sampler(discount: float) -> Any:
    kind = registry.get("algo", "cal_ql")
    return kind(kind.Config(hidden=[6, 5], discount=discount), spec()).sampler()


def episodes(**more: Any) -> Dataset:
    """Four of 3 steps: one reaches the goal; one is cut off before; one ends in a terminal elsewhere; one is cut off
    after the goal.
    """
    rewards = np.array([-1, -1, 0, -1, -1, -1, -1, -1, -1, -1, 0, -1.0])
    ends, cuts = np.zeros(12, bool), np.zeros(12, bool)
    ends[[2, 8]], cuts[[5, 11]] = True, True
    observations = np.arange(12.0)[:, None]
    return from_arrays(
        observations, np.zeros((12, A)), rewards, ends, cuts, action_low=[-1.0] * A, action_high=[1.0] * A, **more
    )


def test_returns_to_go_of_episodes_that_never_succeed() -> None:
    following = np.arange(1.0, 13.0)[:, None]
    following[5] = 5.5  # known, and not the first of the next episode
    data = episodes(next_observations=following)
    returns = sampler(discount=0.5)
    batch = returns(returns.prepare(data), KEY, 400)
    found = {int(s): float(g) for s, g in zip(batch["observations"][:, 0], batch["returns_to_go"], strict=True)}
    expected = [-1.5, -1, 0, -2, -2, -2, -1.75, -1.5, -1, -1.25, -0.5, -1]
    assert found == dict(enumerate(expected))
    assert "returns_to_go" not in data.columns  # the dataset is as it was


def test_an_undiscounted_return_has_no_limit() -> None:
    data = episodes()
    flags = (data.columns[k].numpy() for k in ("rewards", "terminations"))
    returns = sampler(discount=1.0).returns(*flags, data.episode_start.numpy(), data.episode_end.numpy())
    assert returns[3:6].tolist() == [-3, -2, -1]


def test_a_grid_of_discounts_is_refused() -> None:
    """Returns are computed once for all replicas."""
    with pytest.raises(UserError, match=r"grid\.discount"):
        compose({"algo": "cal_ql", "grid.discount": [0.9, 0.99]})


def test_published_defaults() -> None:
    kind = registry.get("algo", "cal_ql")
    assert finetune_settings("cal_ql") == {"mixing": 0.5, "update_every": "episode"} and not kind.traits.discrete
    c = kind.Config()
    assert c.actions == 10 and c.discount == 0.99 and c.importance
