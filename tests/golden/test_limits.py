"""Limits of costs by hand: the threshold, the multipliers, and each loss on two rows with linear networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.algorithm import TrainState
from offrl.data.dataset import DataSpec
from offrl.families.critics.constraint import pid
from tests.support.cases import Case, train
from tests.support.golden import single

BATCH = single(
    {
        "observations": [[1.0], [2.0]],
        "actions": [[0.5], [-0.5]],
        "next_observations": [[0.0], [1.0]],
        "rewards": [0.0, 0.0],
        "masks": [1.0, 0.0],
        "costs": [1.0, 2.0],
    }
)
# Q_c = s + 2 a and 2 s - a: at the rows [2, 1] and [1.5, 4.5], of which the largest are [2, 4.5]
CRITICS = {"head.weight": torch.tensor([[[1.0], [2.0]], [[2.0], [-1.0]]]), "head.bias": torch.zeros(2, 1, 1)}
LIMITED = ("td3_bc", "rebrac", "sac_n", "edac", "cql", "fql", "awac", "iql", "xql")


def make(name: str = "td3_bc", discrete: int = 0, **settings: Any) -> tuple[Any, TrainState]:
    """With the threshold 4 * 0.75 = 3, which is (1 - 0.5^2) / (1 - 0.5) / 2 of the limit, and the multiplier 3."""
    kind = registry.get("algo", name)
    spec = DataSpec((1,), 1, True, discrete) if discrete else DataSpec((1,), 1, action_low=(-1.0,), action_high=(1.0,))
    defaults = {"hidden": [], "cost_limit": 4.0, "cost_horizon": 2, "cost_discount": 0.5}
    algorithm = kind(kind.Config(**{**defaults, **settings}), spec)
    state = algorithm.init(0)
    state.params["cost_critic"].update(CRITICS)
    return algorithm, weighed(state, 3.0)


def weighed(state: TrainState, multiplier: float) -> TrainState:
    return state.with_extra(multiplier={**state.extra["multiplier"], "value": torch.tensor(multiplier)})


@pytest.mark.parametrize(("horizon", "threshold"), [(1000, 1.9999137), (300, 6.3397274)])
def test_the_threshold_spends_the_limit_evenly(horizon: int, threshold: float) -> None:
    constraint = make(cost_limit=20.0, cost_horizon=horizon, cost_discount=0.99)[0].constraint
    assert constraint.threshold == pytest.approx(threshold, abs=5e-8)


def test_an_excess_is_a_multiple_of_the_threshold_or_of_that_of_the_limit_1() -> None:
    costs = torch.tensor([3.0, 6.0])
    assert make()[0].constraint.excess(costs).tolist() == [0.0, 1.0]
    assert make(cost_limit=0.0)[0].constraint.excess(costs).tolist() == [4.0, 8.0]  # of 0.75


def test_pid() -> None:
    state = {name: torch.zeros(()) for name in ("value", "integral", "error")}
    values, integrals = [], []
    for error in (5.0, 3.0, -2.0, -4.0):
        state = pid(state, torch.tensor(error))
        values.append(float(state["value"]))
        integrals.append(float(state["integral"]))
    assert values == pytest.approx([0.52, 0.324, 0.018, 0.006], abs=1e-6) and integrals == [5.0, 8.0, 6.0, 2.0]


def test_a_limit_that_cannot_be_kept_does_not_wind_the_controller_up() -> None:
    state = {name: torch.zeros(()) for name in ("value", "integral", "error")}
    for error in (1e6, 1e6, -1e6):
        state = pid(state, torch.tensor(error))
    assert float(state["value"]) == float(state["integral"]) == 0.0  # one step back is enough


def test_dual_ascent() -> None:
    constraint = make(multiplier="dual", multiplier_rate=0.1)[0].constraint
    state = {name: torch.zeros(()) for name in ("value", "integral", "error")}
    first = constraint.ascent(state, torch.tensor(2.0))
    assert float(first["value"]) == pytest.approx(np.log(1 + np.exp(0.2)))
    second = constraint.ascent(first, torch.tensor(-5.0))
    assert float(second["value"]) == pytest.approx(np.log(1 + np.exp(-0.3)))


@pytest.mark.parametrize(
    ("after_end", "last"),
    # r = 2 - 1 and 2 - 4.5, or 2 + 0.5 * 2 / (1 - 0.5) = 4 for ever
    [("zero", 2.0), ("hold", 4.0)],
)
def test_cost_loss(after_end: str, last: float) -> None:
    algorithm, state = make(cost_after_end=after_end)
    targets = np.array([1 + 0.5 * 3, last])
    expected = sum(((targets - q) ** 2).mean() for q in ([2.0, 1.0], [1.5, 4.5]))
    loss, metrics = algorithm.constraint.cost_loss(
        state.params["cost_critic"], state, BATCH, next_cost=torch.tensor([3.0, 5.0])
    )
    assert float(loss) == pytest.approx(expected) and float(metrics["cost/q"]) == pytest.approx(9 / 4)


def test_windows_have_the_costs_of_their_steps() -> None:
    """Of two steps and, where the episode ends with the first, of one."""
    algorithm, _ = make(n_step=2, cost_after_end="hold")
    windows = {
        "masks": torch.tensor([1.0, 0.0]),
        "span": torch.tensor([2, 1]),
        "step_costs": torch.tensor([[1.0, 4.0], [2.0, 0.0]]),
        "costs": torch.tensor([1.0, 2.0]),
    }
    target = algorithm.constraint.target(windows, torch.tensor([8.0, 8.0]))
    assert target.tolist() == [1 + 0.5 * 4 + 0.25 * 8, 2 + 0.5 * 4]


@pytest.mark.parametrize(("pessimism", "costs"), [("max", [2.0, 4.5]), ("min", [1.5, 1.0])])
def test_the_dearer_of_two_critics_counts(pessimism: str, costs: list[float]) -> None:
    algorithm, state = make(cost_pessimism=pessimism)
    cost = algorithm.constraint.cost(state.params["cost_critic"], BATCH["observations"], BATCH["actions"])
    assert cost.tolist() == costs


def test_the_cost_of_a_discrete_policy_is_its_mean() -> None:
    algorithm, _ = make("cql", discrete=2)
    # critics of observation 1: [1, 2] and [3, 0], of which the largest are [3, 2]
    params = {"head.weight": torch.tensor([[[1.0, 2.0]], [[3.0, 0.0]]]), "head.bias": torch.zeros(2, 1, 2)}
    cost = algorithm.constraint.cost(params, torch.ones(1, 1), torch.tensor([[0.25, 0.75]]).log())
    assert float(cost) == pytest.approx(2.25)


def test_an_actors_loss() -> None:
    """(2 + 3 * 6 * E[-1/3, 1/2]) / 4."""
    algorithm, state = make()
    loss, metrics = algorithm.limited(
        torch.tensor(2.0), {}, state, BATCH["observations"], BATCH["actions"], torch.tensor(6.0)
    )
    assert float(loss) == pytest.approx(3.5 / 4)
    assert float(metrics["cost/excess"]) == pytest.approx(1 / 12) and float(metrics["cost/policy"]) == 3.25


def test_advantages_of_weighted_imitation() -> None:
    """[1, -3], of mean size 2, less 3 * 2 / 3 * ([2, 4.5] - [1, 2])."""
    algorithm, state = make("iql")
    advantage, _ = algorithm.constraint.advantage(
        torch.tensor([1.0, -3.0]), state, BATCH, baseline=torch.tensor([1.0, 2.0])
    )
    assert advantage.tolist() == [-1.0, -8.0]


def test_the_value_of_costs_is_the_mean_under_the_policys_weights() -> None:
    """1 (2 - 1)^2 and 3 (4.5 - 2)^2, over 1 + 3."""
    algorithm, state = make("iql")
    value = {"head.weight": torch.ones(1, 1), "head.bias": torch.zeros(1)}
    loss, _ = algorithm.constraint.value_loss(value, state, BATCH, torch.tensor([2.0, 4.5]), torch.tensor([1.0, 3.0]))
    assert float(loss) == pytest.approx(19.75 / 4)


@pytest.mark.parametrize(
    ("name", "size"), [("td3_bc", 1.0), ("rebrac", 1.0), ("sac_n", 2.0), ("edac", 2.0), ("cql", 2.0), ("fql", 2.0)]
)
def test_each_actor_weighs_costs_by_its_own_values(name: str, size: float) -> None:
    """The loss is (L + 3 size E excess) / 4, where L is the loss with the multiplier 0; Q is -2 everywhere."""
    algorithm, state = make(name)
    state.params["critic"].update(
        {k: torch.full_like(v, -2.0 * ("bias" in k)) for k, v in state.params["critic"].items()}
    )
    keys = () if name in ("td3_bc", "rebrac") else (state.key,)
    (free, _), (limited, metrics) = (
        algorithm.actor_loss(state.params["actor"], x, BATCH, *keys) for x in (weighed(state, 0.0), state)
    )
    assert float(limited) == pytest.approx(float(free + 3 * size * metrics["cost/excess"]) / 4, rel=1e-5)
    assert float(metrics["actor/loss"]) == float(limited)


@pytest.mark.parametrize("name", ["iql", "xql", "awac"])
def test_weights_of_imitation_fall_where_actions_cost_more(name: str) -> None:
    algorithm, state = make(name)
    state.params["critic"].update({k: v * (1.0 + ("weight" in k)) for k, v in state.params["critic"].items()})
    q = torch.tensor([1.0, 2.0])
    arguments = (state.key,) if name == "awac" else (q, state.key)
    (_, free), (_, limited) = (
        algorithm.actor_loss(state.params["actor"], x, BATCH, *arguments) for x in (weighed(state, 0.0), state)
    )
    dearer = 3 * float((limited["cost/policy"] - 3.25) / 3)  # than the data's actions
    assert dearer != 0.0 and (float(limited["actor/advantage"] - free["actor/advantage"]) > 0) == (dearer > 0)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in ("td3_bc", "iql") else pytest.mark.nightly) for n in LIMITED],
)
def test_a_limit_that_never_binds_changes_no_policy(name: str) -> None:
    policies = []
    for settings in ({}, {"cost_limit": 1e6}):
        algorithm = Case(name).make(**settings)
        state, _ = train(algorithm, [0, 1], 10)
        policies.append(state.params["actor"])
    assert all(torch.equal(v, policies[1][k]) for k, v in policies[0].items())
