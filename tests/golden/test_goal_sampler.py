"""Goals in hindsight: how often each is drawn against exact probabilities, and what never happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.goals import GoalSampler, Mix
from offrl.errors import UserError

LENGTHS = (6, 1, 4, 3)  # rows of the episodes; the last row of each has no successor, so the second has no transition
DRAWS = 200_000


def data(**extra: Any) -> Dataset:
    """Row r observes r; its action is r / 100."""
    rows = sum(LENGTHS)
    ends = np.cumsum(LENGTHS) - 1
    r = np.arange(rows, dtype=np.float32)[:, None]
    limits = {"action_low": [-1.0], "action_high": [1.0]}
    return from_arrays(r, r / 100, np.zeros(rows), episode_ends=ends, **limits, **extra)


TRANSITIONS = [
    r for start, n in zip(np.cumsum((0, *LENGTHS)), LENGTHS, strict=False) for r in range(start, start + n - 1)
]
LAST = {r: max(s for s in TRANSITIONS if s - r == TRANSITIONS.index(s) - TRANSITIONS.index(r)) for r in TRANSITIONS}


def ahead(r: int, geometric: bool, discount: float) -> dict[int, float]:
    """Probabilities of the later states of r's trajectory."""
    last = LAST[r]
    if r == last:
        return {r: 1.0}
    if not geometric:
        return dict.fromkeys(range(r + 1, last + 1), 1.0 / (last - r))
    p = {g: (1 - discount) * discount ** (g - r - 1) for g in range(r + 1, last)}
    return {**p, last: 1.0 - sum(p.values())}


@pytest.mark.parametrize(
    "mix",
    [
        Mix(0.2, 0.5, 0.3, True, 0.7),
        Mix(0.0, 1.0, 0.0, False),
        Mix(0.0, 0.5, 0.5, False),
        Mix(0.0, 0.0, 1.0),
        Mix(1.0, 0.0, 0.0),
    ],
)
def test_value_goals(mix: Mix) -> None:
    sampler = GoalSampler(value=mix)
    batch = sampler(sampler.prepare(data()), rng.make_key(3), DRAWS)
    rows, goals = batch["observations"][:, 0].long().numpy(), batch["value_goals"][:, 0].long().numpy()
    assert (batch["next_observations"][:, 0].long().numpy() == rows + 1).all()
    assert ((batch["successes"].numpy() == 1.0) == (rows == goals)).all()
    for r in TRANSITIONS:
        exact = {g: mix.random / len(TRANSITIONS) for g in TRANSITIONS}
        for g, p in ahead(r, mix.geometric, mix.discount).items():
            exact[g] += mix.trajectory * p
        exact[r] += mix.current
        mine = goals[rows == r]
        for g in range(sum(LENGTHS)):
            p = exact.get(g, 0.0)
            assert abs((mine == g).mean() - p) <= 4.5 * np.sqrt(p * (1 - p) / len(mine)), (r, g, p)


def test_two_levels_and_options() -> None:
    k, n = 2, 3
    sampler = GoalSampler(Mix(0.2, 0.5, 0.3, True, 0.7), Mix(0.0, 0.5, 0.5, False), subgoal_steps=k, option_steps=n)
    batch = {
        name: c[:, 0].long().numpy()
        for name, c in sampler(sampler.prepare(data()), rng.make_key(4), 20_000).items()
        if c.ndim == 2
    }
    success = sampler(sampler.prepare(data()), rng.make_key(4), 20_000)["option_successes"].numpy()
    rows = batch["observations"]
    last = np.array([LAST[r] for r in rows])
    assert (batch["low_goals"] == np.minimum(rows + k, last)).all()
    goal, target = batch["high_goals"], batch["high_targets"]
    assert (target == batch["high_target_states"]).all()
    between = (goal > rows) & (goal <= last)  # may be of the trajectory, or drawn from anywhere
    assert (target[~between] == np.minimum(rows + k, last)[~between]).all()
    bounded = np.minimum(rows + k, goal)
    far = np.minimum(rows + k, last)
    assert ((target == bounded) | (target == far))[between].all() and (target == bounded)[between].mean() > 0.8
    end, aim = batch["option_states"], batch["option_goals"]
    assert ((success == 1.0) == (end == aim)).all()
    assert (end <= np.minimum(rows + n, last)).all() and ((end == np.minimum(rows + n, last)) | (end == aim)).all()
    # success: a current goal (which is where the option ends), one ahead within n steps, and by chance a random one
    expected = []
    for r in rows:
        p = ahead(int(r), True, 0.7)
        near = sum(v for g, v in p.items() if g <= r + n)
        expected.append(0.2 + 0.5 * near + 0.3 / len(TRANSITIONS))
    assert success.mean() == pytest.approx(np.mean(expected), abs=0.015)


def test_an_option_ends_at_its_waypoint_where_the_goal_is_current_too() -> None:
    """OTA's code ends the option first and then takes its end for a current goal: so it may end before its n steps are
    over.
    """
    n, discount = 3, 0.7
    sampler = GoalSampler(Mix(0.5, 0.5, 0.0, True, discount), option_steps=n)
    batch = sampler(sampler.prepare(data()), rng.make_key(4), 20_000)
    rows, end = (batch[name][:, 0].long().numpy() for name in ("observations", "option_states"))
    free = rows + n <= np.array([LAST[r] for r in rows])
    assert free.sum() > 2000 and (end[free] == rows[free] + n).mean() == pytest.approx(discount ** (n - 1), abs=0.05)


def test_goals_of_their_own_and_weights() -> None:
    rows = sum(LENGTHS)
    own = data(achieved_goals=np.arange(rows, dtype=np.float32)[:, None] * np.ones(2) + 50)
    assert own.spec.goal_dim == 2
    sampler = GoalSampler(value=Mix(0.0, 0.5, 0.5), actor=Mix(0.0, 1.0, 0.0, False))
    batch = sampler(sampler.prepare(own), rng.make_key(0), 500)
    assert batch["value_goals"].shape == batch["actor_goals"].shape == (500, 2)
    assert bool((batch["actor_goals"][:, 0] - 50 > batch["observations"][:, 0] - 1e-6).all())

    from dataclasses import replace

    weighted = replace(data(), weights=torch.tensor([0.0, 1.0, 1.0, 4.0], dtype=torch.float64))
    batch = sampler(sampler.prepare(weighted), rng.make_key(0), 20_000)
    drawn, goal = batch["observations"][:, 0].long(), batch["value_goals"][:, 0].long()
    assert set(drawn.tolist()) == {7, 8, 9, 11, 12} and set(goal.tolist()) <= {7, 8, 9, 11, 12}
    assert float((drawn >= 11).float().mean()) == pytest.approx(8 / 11, abs=0.02)


def test_shares_that_are_no_distribution() -> None:
    with pytest.raises(
        UserError, match=r"algo.value_current=0.2 \+ algo.value_trajectory=0.5 \+ algo.value_random=0.5 is 1.2"
    ):
        Mix(0.2, 0.5, 0.5).check("value")
    with pytest.raises(UserError, match="discount factor below 1"):
        Mix(0.0, 1.0, 0.0, True, 1.0).check("actor")
    with pytest.raises(UserError, match="no transition to train on"):
        GoalSampler(value=Mix(0.0, 1.0, 0.0)).prepare(
            from_arrays(np.zeros((3, 1)), np.zeros((3, 1)), np.zeros(3), episode_ends=[0, 1, 2])
        )
