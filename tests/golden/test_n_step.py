"""n-step targets by hand: the windows of a small dataset, and each algorithm's loss on them beside its loss of one step
on a batch that has these sums for rewards; and the windows of values of goals, which end at the goal."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.goals import GoalSampler, Mix, cut
from offrl.data.samplers.transitions import FOLLOWING, SPAN, TransitionSampler, discounted, windows
from offrl.errors import UserError
from offrl.families.goal_conditioned import goal_target
from offrl.training.step import Step
from tests.support.golden import KEY, OBS, A, redraw
from tests.support.reference import goals as ref

N, DISCOUNT = 3, 0.5
G = np.random.default_rng(7)
OBSERVATIONS, ACTIONS = G.normal(size=(9, OBS)).astype(np.float32), G.uniform(-0.9, 0.9, (9, A)).astype(np.float32)
# an episode of five rows with a terminal, and one of four that was cut off
REWARDS = np.array([1.0, 2, 4, 8, 16, 1, -1, 3, 5])
# by hand, of the rows from which a transition is known, all but 8: sum of 0.5^k r_k, steps, row of the state after
# them, its action
SUMS = [3.0, 6, 12, 16, 16, 1.25, 0.5, 3]
STEPS = [3, 3, 3, 2, 1, 3, 2, 1]
AFTER = [3, 4, None, None, None, 8, 8, 8]
NEXT_ACTION = [3, 4, 4, 4, 4, 8, 8, 8]  # a terminal row repeats its own


def dataset(**extra: Any) -> Dataset:
    rows = np.arange(9)
    limits = {"action_low": [-1.0] * A, "action_high": [1.0] * A}
    return from_arrays(OBSERVATIONS, ACTIONS, REWARDS, rows == 4, rows == 8, **limits, **extra)


def window_batch(extra: tuple[str, ...] = (), data: Dataset | None = None) -> dict[str, Tensor]:
    """The windows of all rows."""
    source = TransitionSampler(extra, N).prepare(data or dataset())
    assert source.count == 8
    return windows(source, torch.arange(8), N)


def by_hand() -> dict[str, Tensor]:
    """Transitions of one step with the sums for rewards; masks stand for 0.5^(m - 1), which multiplies the discount."""
    mask = [0.0 if after is None else DISCOUNT ** (steps - 1) for after, steps in zip(AFTER, STEPS, strict=True)]
    return {
        "observations": torch.tensor(OBSERVATIONS[:8]),
        "actions": torch.tensor(ACTIONS[:8]),
        "rewards": torch.tensor(SUMS),
        "masks": torch.tensor(mask),
        "next_observations": torch.tensor(
            OBSERVATIONS[[0 if after is None else after for after in AFTER]]
        ),  # not read where masked
        "next_actions": torch.tensor(ACTIONS[NEXT_ACTION]),
    }


def test_windows() -> None:
    batch = window_batch(("next_actions",))
    hand = by_hand()
    rewards, following = discounted(batch, DISCOUNT)
    assert rewards.tolist() == SUMS and batch[SPAN].tolist() == STEPS
    assert (following * batch["masks"] / DISCOUNT).tolist() == hand["masks"].tolist()
    assert torch.equal(batch["next_actions"], hand["next_actions"]) and torch.equal(batch["actions"], hand["actions"])
    kept = hand["masks"] > 0
    assert torch.equal(batch["next_observations"][kept], hand["next_observations"][kept])
    assert batch["rewards"].tolist() == REWARDS[:8].tolist()  # of the first step, for whom wants it
    assert torch.equal(batch[FOLLOWING][:4], torch.tensor(OBSERVATIONS[1:5]))  # and the state after the first step
    assert batch["step_rewards"][3].tolist() == [8, 16, 0]
    for discount in (0.0, 1.0):
        sums = [float(sum(discount**k * r for k, r in enumerate(REWARDS[i : i + STEPS[i]]))) for i in range(8)]
        assert discounted(batch, torch.tensor(discount))[0].tolist() == sums


# whose only use of the next state is their target: the penalties of CQL and Cal-QL, which have another, are weighted by
# 0
SETTINGS: dict[str, dict[str, Any]] = {
    "td3_bc": {},
    "rebrac": {"critic_bc": 0.7},
    "td3_awr": {"critic_bc": 0.7},
    "iql": {},
    "xql": {},
    "f_dvl": {},
    "awac": {},
    "cql": {"conservative_weight": 0.0, "entropy_in_target": True},
    "cal_ql": {"conservative_weight": 0.0},
    "sac_n": {},
    "edac": {},
    "fql": {},
}


def make(name: str, **settings: Any) -> tuple[Any, Any]:
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(**{"hidden": [6, 5], "discount": DISCOUNT, "critics": 2, **settings}), dataset().spec)
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for params in (*state.params.values(), *state.target.values()):
        redraw(params, g)
    return algorithm, state


def critic_loss(algorithm: Any, state: Any, batch: dict[str, Tensor]) -> float:
    batch = {**batch, "returns_to_go": torch.zeros(8)}
    return float(algorithm.critic_loss(state.params["critic"], state, batch, KEY)[0])


@pytest.mark.parametrize("head", ["scalar", "c51"])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_targets_of_windows(name: str, head: str) -> None:
    """The loss of n steps is that of one step whose reward is the sum and whose mask is 0.5^(m - 1), in each
    algorithm.
    """
    settings = {
        **SETTINGS[name],
        **({} if head == "scalar" else {"value_head": head, "value_bins": 11, "value_range": [-5.0, 20.0]}),
    }
    one, state = make(name, **settings)
    many, _ = make(name, n_step=N, **settings)
    needed = tuple(x for x in one.sampler().extra if x == "next_actions")
    found = critic_loss(many, state, window_batch(needed))
    assert found == pytest.approx(critic_loss(one, state, by_hand()), rel=1e-5)
    plain = TransitionSampler(needed)
    assert found != pytest.approx(critic_loss(one, state, plain.prepare(dataset()).take(torch.arange(8))), rel=1e-3)


def test_rebrac_compares_with_the_action_at_the_end_of_the_window() -> None:
    algorithm, state = make("rebrac", n_step=N, critic_bc=0.7, policy_noise=0.0)
    batch = window_batch(("next_actions",))
    (action,) = algorithm.apply("actor", state.target["actor"], batch["next_observations"])
    q = algorithm.critic.q(state.target["critic"], batch["next_observations"], action).amin(0)
    mask = torch.tensor([0.0 if after is None else 1.0 for after in AFTER])
    distance = (action - torch.tensor(ACTIONS[NEXT_ACTION])).square().sum(-1)
    y = torch.tensor(SUMS) + DISCOUNT ** torch.tensor(STEPS) * mask * (q - 0.7 * distance)
    error = algorithm.critic.q(state.params["critic"], batch["observations"], batch["actions"]) - y
    assert critic_loss(algorithm, state, batch) == pytest.approx(float(error.square().mean(-1).sum()), rel=1e-5)


@pytest.mark.parametrize("name", ["cql", "cal_ql"])
def test_penalties_try_the_actions_of_the_very_next_state(name: str) -> None:
    one, state = make(name, actions=3)
    many, _ = make(name, actions=3, n_step=N)
    steps = TransitionSampler().prepare(dataset()).take(torch.arange(8))
    inputs = [{**batch, "returns_to_go": torch.arange(8.0)} for batch in (steps, window_batch())]
    first, second = (
        a.penalty(state.params["critic"], state, b, KEY)[0] for a, b in zip((one, many), inputs, strict=True)
    )
    assert torch.equal(first, second) and float(first) != 0.0


def test_the_returns_of_cal_ql_are_those_of_the_first_row() -> None:
    algorithm, _ = make("cal_ql", n_step=N)
    source = algorithm.sampler().prepare(dataset())
    batch = windows(source, torch.arange(8), N)
    # 1 + 0.5 (2 + 0.5 (4 + 0.5 (8 + 0.5 * 16)))
    assert batch["returns_to_go"].tolist() == [5.0, 8.0, 12.0, 16.0, 16.0, 1.875, 1.75, 5.5]


def test_a_grid_over_the_discount() -> None:
    """Replicas with discounts of their own have windows of their own discount: each trains as it does alone."""
    data = dataset()

    def trained(settings: dict[str, Tensor], count: int, **own: Any) -> Any:
        algorithm, _ = make("td3_bc", n_step=N, **own)
        step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=8, replicas=count, hyper=settings)
        return step.run(stack([algorithm.init(0)] * count), {}, 0, 3)[0].params["critic"]

    both = trained({"discount": torch.tensor([0.3, 0.9])}, 2)
    for i, discount in enumerate((0.3, 0.9)):
        alone = trained({}, 1, discount=discount)
        for name, value in alone.items():
            torch.testing.assert_close(both[name][i], value[0], rtol=0, atol=1e-6)
    assert any(not torch.equal(value[0], value[1]) for value in both.values())


# ---- values of goals


@pytest.mark.parametrize(
    ("row", "goal", "beyond", "steps", "success"),
    [  # rows 0 to 9 are an episode, and windows have 4 steps
        (2, 4, 0, 2, True),
        (2, 9, 0, 4, False),
        (2, 6, 0, 4, True),  # the authors' code bootstraps from the goal's own value there
        (8, 30, 0, 1, False),  # cut by the end: a success in the authors' code
        (9, 30, 0, 0, False),  # the same, where any goal would be reached at once
        (2, 2, 0, 0, True),
        (5, 3, 0, 4, False),  # a goal behind
        (8, 30, 1, 2, False),  # with the last row's own step
        (9, 30, 1, 1, False),
        (9, 10, 1, 1, False),  # the first row of the next episode is none of this one's
        (8, 9, 1, 1, True),
    ],
)
def test_where_windows_of_goals_end(row: int, goal: int, beyond: int, steps: int, success: bool) -> None:
    m, reached = cut(torch.tensor([row]), torch.tensor([goal]), torch.tensor([9]), 4, beyond)
    assert (int(m), bool(reached)) == (steps, success)


# the last but two: the first row of the other episode, a goal behind
ROWS, GOALS = ([0, 0, 4, 3, 2, 3, 1], [2, 7, 6, 5, 2, 1, 4])
GOAL_SUMS = [-1.5, -1.75, -1.0, -1.5, 0.0, -1.5, -1.75]  # -1, -1 - 0.5, -1 - 0.5 - 0.25
GOAL_STEPS, GOAL_MASKS = [2, 3, 1, 2, 0, 2, 3], [0.0, 1, 1, 1, 0, 1, 0]
GOAL_AFTER = [None, 3, 5, 5, None, 5, None]  # of rows of `STATES`, whose row 5 is what follows the first episode's last


def goal_batch() -> tuple[dict[str, Tensor], np.ndarray]:
    """A batch of gciql's whose windows are those of `ROWS` and `GOALS`; and the states: of rows 0 to 4, and after the
    last.
    """
    states = np.concatenate([OBSERVATIONS[:5], G.normal(size=(1, OBS)).astype(np.float32)])
    after = np.concatenate([states[1:], OBSERVATIONS[6:], OBSERVATIONS[:1]])
    limits = {"action_low": [-1.0] * A, "action_high": [1.0] * A}
    data = from_arrays(
        np.concatenate([states[:5], OBSERVATIONS[5:]]),
        ACTIONS,
        REWARDS,
        episode_ends=[4, 8],
        next_observations=after,
        **limits,
    )
    sampler = GoalSampler(Mix(0.2, 0.5, 0.3), Mix(0.0, 1.0, 0.0), n_step=N)
    source, rows, goals = sampler.prepare(data), torch.tensor(ROWS), torch.tensor(GOALS)
    batch = {**source.table.take(rows), "value_goals": source.goal(goals), "actor_goals": source.goal(goals)}
    return {**batch, **sampler._window(source, goals, rows)}, states


def test_the_targets_of_windows_of_goals() -> None:
    batch, states = goal_batch()
    kind = registry.get("algo", "gciql")
    step = goal_target(kind.Config(discount=DISCOUNT, n_step=N), batch)
    assert step.rewards.tolist() == GOAL_SUMS and step.masks.tolist() == GOAL_MASKS
    assert step.discount.tolist() == [DISCOUNT**m for m in GOAL_STEPS]
    for i, after in enumerate(GOAL_AFTER):
        assert after is None or np.array_equal(step.observations[i], states[after])


@pytest.mark.parametrize("name", ["gciql", "gcivl"])
def test_losses_of_values_of_goals(name: str) -> None:
    batch, states = goal_batch()
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(hidden=[6, 5], discount=DISCOUNT, n_step=N, expectile=0.8), dataset().spec)
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)
    for params in (*state.params.values(), *state.target.values()):
        redraw(params, g)
    goals = batch["value_goals"].numpy().astype(np.float64)
    after = np.stack([states[0 if row is None else row] for row in GOAL_AFTER]).astype(np.float64)
    following = np.array([DISCOUNT**m for m in GOAL_STEPS]) * GOAL_MASKS
    here = batch["observations"].numpy().astype(np.float64)
    if name == "gciql":
        y = GOAL_SUMS + following * ref.mlp(state.params["value"], np.concatenate([after, goals], 1))[:, 0]
        q = ref.twins(state.params["critic"], np.concatenate([here, goals, batch["actions"].numpy()], 1))[..., 0]
        expected, found = ((q - y) ** 2).mean(1).sum(), algorithm.critic_loss(state.params["critic"], state, batch)[0]
    else:
        value = lambda p, s: ref.twins(p, np.concatenate([s, goals], 1))[..., 0]  # noqa: E731
        now, before, later = (
            value(state.params["value"], here),
            value(state.target["value"], here),
            value(state.target["value"], after),
        )
        advantage = GOAL_SUMS + following * later.min(0) - before.mean(0)
        weight = np.where(advantage < 0, 0.2, 0.8)
        expected = (weight * (GOAL_SUMS + following * later - now) ** 2).mean(1).sum()
        found = algorithm.value_loss(state.params["value"], state, batch)[0]
    assert float(found) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["hiql", "ota"])
def test_hierarchical_values_learn_from_windows(name: str) -> None:
    """Windows of one step give the loss of one step; the actors' advantages are those of one step in either case."""
    kind = registry.get("algo", name)
    config = {"hidden": [6, 5], "discount": DISCOUNT, "representation": 4, "subgoal_steps": 2}
    one, many = (kind(kind.Config(**config, n_step=n), dataset().spec) for n in (1, N))
    state = one.init(3)
    sampler = many.sampler()
    batch = sampler(sampler.prepare(dataset()), rng.make_key(2), 64)
    assert sampler.n_step == N and int(batch[SPAN].max()) == N
    single = {**batch, SPAN: 1 - batch["successes"].long(), "window_states": batch["next_observations"]}
    plain = {k: v for k, v in single.items() if k != SPAN}
    losses = [
        float(a.value_loss(state.params["value"], state, b)[0])
        for a, b in ((one, plain), (many, single), (many, batch))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[2] != pytest.approx(losses[0], rel=1e-3)
    assert torch.equal(
        one.low_loss(state.params["actor"], state, plain)[0], many.low_loss(state.params["actor"], state, batch)[0]
    )


@pytest.mark.parametrize("sampler", [TransitionSampler(n_step=2), GoalSampler(Mix(0.2, 0.5, 0.3), n_step=2)])
def test_data_without_an_order_are_refused(sampler: Any) -> None:
    data = from_arrays(OBSERVATIONS, ACTIONS, REWARDS, np.ones(9, bool), action_low=[-1.0] * A, action_high=[1.0] * A)
    with pytest.raises(
        UserError, match=r"algo\.n_step=2 sums the rewards of steps in a row.*dataset\.fields\.truncations"
    ):
        sampler.prepare(data)


@pytest.mark.parametrize(
    "sampler", [TransitionSampler(("next_actions",), 3), GoalSampler(Mix(0.2, 0.5, 0.3), Mix(0.0, 1.0, 0.0), n_step=3)]
)
def test_columns_left_on_disk_give_the_same_windows(sampler: Any) -> None:
    packed, mapped = (
        sampler(sampler.prepare(d), KEY, 64) for d in (dataset(), dataclasses.replace(dataset(), mapped=True))
    )
    assert set(packed) == set(mapped) and all(torch.equal(packed[k], mapped[k]) for k in packed)
