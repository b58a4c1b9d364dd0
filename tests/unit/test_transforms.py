"""Transforms against numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from offrl.data import Dataset, DatasetConfig
from offrl.data.arrays import from_arrays
from offrl.data.transforms.apply import apply_transforms
from offrl.data.transforms.columns import (
    add_returns_to_go,
    clip_to_margin,
    normalize_observations,
    normalize_rewards,
    returns_to_go,
    scale_by_return_range,
    scale_rewards,
)
from offrl.data.transforms.episodes import concatenate, subsample, terminated_only, top_fraction
from offrl.errors import UserError
from offrl.tasks.task import Task


def make(rewards: list[float], ends: list[int], terminals: list[int] = (), **more: object) -> Dataset:  # type: ignore[assignment]
    """Observations of row i are [i]; episodes end at the rows `ends`, by a termination at `terminals`."""
    n = len(rewards)
    terminations, truncations = (
        np.isin(np.arange(n), terminals),
        np.isin(np.arange(n), [e for e in ends if e not in terminals]),
    )
    actions = more.pop("actions", np.linspace(-1, 1, n)[:, None])
    return from_arrays(np.arange(n)[:, None], actions, rewards, terminations, truncations, **more)  # type: ignore[arg-type]


FOUR = make([1, 1, 5, 0, 2, 2, 2, 9], [1, 3, 6, 7], [3])  # returns 2, 5, 6, 9


def test_terminated_only_leaves_out_what_was_cut_off() -> None:
    kept = terminated_only(FOUR)
    assert (
        kept.columns["observations"][:, 0].tolist() == [2, 3]
        and kept.raw_returns.tolist() == [5]
        and kept.num_episodes == 1
    )
    with pytest.raises(UserError, match="no episode of arrays terminates"):
        terminated_only(make([1.0, 2.0], [1]))


def test_top_fraction_keeps_the_best_in_their_order() -> None:
    best = top_fraction(FOUR, 0.5)
    assert best.episode_returns().tolist() == [6, 9] and best.columns["observations"][:, 0].tolist() == [4, 5, 6, 7]
    assert best.episode_start.tolist() == [0, 3] and best.episode_end.tolist() == [3, 4]
    assert top_fraction(FOUR, 0.74).num_episodes == 2  # floor(2.96)
    assert top_fraction(FOUR, 0.75).num_episodes == 3
    assert top_fraction(FOUR, 0.01).raw_returns.tolist() == [9]  # at least one
    hundred = make([float(i) for i in range(100)], list(range(100)))
    # 29 percent of 100, whatever floating point says
    assert 0.29 * 100 < 29 and top_fraction(hundred, 0.29).num_episodes == 29
    equal = make([3.0] * 1000, list(range(1000)))  # many: a sort that is not stable leaves few in their order
    assert top_fraction(equal, 0.1).columns["observations"][:, 0].tolist() == list(range(100))  # of equals the first


def test_subsample_is_a_seeded_choice_of_whole_episodes() -> None:
    data = make([1.0] * 40, list(range(1, 40, 2)))
    a, b, c = subsample(data, 0.5, 0), subsample(data, 0.5, 0), subsample(data, 0.5, 1)
    assert a.num_episodes == 10 and torch.equal(a.columns["observations"], b.columns["observations"])
    assert not torch.equal(a.columns["observations"], c.columns["observations"])
    rows = a.columns["observations"][:, 0].reshape(-1, 2)
    assert (rows[:, 0] % 2 == 0).all() and (rows[:, 1] == rows[:, 0] + 1).all() and (rows[1:, 0] > rows[:-1, 0]).all()


def test_rewards_by_return_range_scale_and_shift() -> None:
    scaled = scale_by_return_range(FOUR, 1000.0)  # largest 9, smallest 2
    np.testing.assert_allclose(scaled.columns["rewards"], np.array([1, 1, 5, 0, 2, 2, 2, 9]) * 1000 / 7, rtol=1e-6)
    assert scaled.raw_returns.tolist() == [2, 5, 6, 9] and FOUR.columns["rewards"].tolist() == [1, 1, 5, 0, 2, 2, 2, 9]
    assert scale_rewards(FOUR, 10.0, -5.0).columns["rewards"].tolist() == [5, 5, 45, -5, 15, 15, 15, 85]
    both = apply_transforms([FOUR], DatasetConfig(reward_by_return_range=7.0, reward_scale=2.0, reward_shift=-1.0))
    assert both.columns["rewards"].tolist() == [1, 1, 9, -1, 3, 3, 3, 17]
    assert len(both.transforms) == 2
    with pytest.raises(UserError, match="same return"):
        scale_by_return_range(make([1, 1], [0, 1]), 1000.0)


def test_normalised_rewards() -> None:
    # mean 4, variance 38 / 3
    data = from_arrays(np.zeros((4, 1)), np.zeros((4, 1)), [1.0, 2.0, 4.0, 9.0], np.array([0, 1, 0, 1]))
    normal = apply_transforms([data], DatasetConfig(normalize_rewards=True))
    std = np.sqrt(38 / 3)
    np.testing.assert_allclose(normal.columns["rewards"], np.array([-3.0, -2.0, 0.0, 5.0]) / std, rtol=1e-6)
    assert (normal.spec.reward_scale, normal.spec.reward_shift) == (pytest.approx(1 / std), pytest.approx(-4 / std))
    assert re.fullmatch(r"rewards \* (\S+) \+ (\S+)", normal.transforms[-1])  # as `offrl select` reads it
    shifted = apply_transforms([data], DatasetConfig(normalize_rewards=True, reward_scale=2.0, reward_shift=1.0))
    np.testing.assert_allclose(shifted.columns["rewards"], 2 * normal.columns["rewards"] + 1, rtol=1e-6)
    with pytest.raises(UserError, match="all rewards are 3"):
        normalize_rewards(from_arrays(np.zeros((2, 1)), np.zeros((2, 1)), [3.0, 3.0], np.array([0, 1])))


def test_an_unfinished_last_episode_does_not_set_the_return_range() -> None:
    data = from_arrays(np.zeros((5, 1)), np.zeros((5, 1)), [4, 4, 10, 10, -50], np.array([0, 1, 0, 1, 0]))
    assert data.complete.tolist() == [True, True, False]
    assert scale_by_return_range(data, 12.0).columns["rewards"].tolist() == [4, 4, 10, 10, -50]  # 12 / (20 - 8) = 1


def test_returns_to_go_by_hand() -> None:
    data = add_returns_to_go(FOUR, 0.5)
    # [1, 1] -> 1.5, 1; [5, 0] -> 5, 0; [2, 2, 2] -> 3.5, 3, 2; [9] -> 9
    assert data.columns["returns_to_go"].tolist() == [1.5, 1, 5, 0, 3.5, 3, 2, 9]
    assert data.columns["returns_to_go"].dtype == torch.float32


def test_returns_to_go_equals_the_plain_loop_and_stops_at_terminations() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 50)
    end = np.cumsum(lengths)
    start, n = end - lengths, int(end[-1])
    rewards, done = rng.normal(size=n), rng.random(n) < 0.05  # terminations in the middle too
    expected = np.zeros(n)
    for s, e in zip(start, end, strict=True):
        g = 0.0
        for t in range(e - 1, s - 1, -1):
            g = rewards[t] + 0.97 * (1 - done[t]) * (g if t < e - 1 else 0.0)
            expected[t] = g
    np.testing.assert_allclose(returns_to_go(rewards, done, start, end, 0.97), expected, rtol=1e-12)


def test_returns_to_go_use_the_transformed_rewards() -> None:
    data = apply_transforms([FOUR], DatasetConfig(reward_scale=2.0, discount_returns=1.0))
    assert data.columns["returns_to_go"].tolist() == [4, 2, 10, 0, 12, 8, 4, 18]


def test_normalisation_by_hand() -> None:
    obs = np.array([[0.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    data = normalize_observations(from_arrays(obs, np.zeros((3, 1)), np.zeros(3), [0, 0, 1]))
    std = np.sqrt(8 / 3)  # population deviation of 0, 2, 4
    np.testing.assert_allclose(data.columns["observations"][:, 0], [-2 / std, 0, 2 / std], rtol=1e-6)
    assert data.columns["observations"][:, 1].tolist() == [0, 0, 0]  # a constant dimension becomes 0, not NaN
    np.testing.assert_allclose(data.columns["next_observations"][:, 0], [0, 2 / std, 2 / std], rtol=1e-6)
    assert data.spec.observation_mean == (2.0, 5.0)
    np.testing.assert_allclose(data.spec.observation_std, [std, 5.0], rtol=1e-6)


def test_normalisation_of_published_data_has_the_published_floor() -> None:
    obs = np.array([[0.0, 5.0], [2.0, 5.0], [4.0, 5.0]])
    for name, source in (("hopper-medium-v2", "d4rl"), ("x", "builtin")):
        data = from_arrays(obs, np.zeros((3, 1)), np.zeros(3), [0, 0, 1], name=name)
        made = normalize_observations(replace(data, spec=replace(data.spec, source=source)))
        np.testing.assert_allclose(made.spec.observation_std, [np.sqrt(8 / 3) + 1e-3, 1e-3], rtol=1e-6)


@pytest.mark.parametrize("unit", [1e-12, 2e-6, 1e-3, 1.0, 1e9])
def test_normalisation_in_any_unit(unit: float) -> None:
    rng = np.random.default_rng(0)
    obs = np.stack([rng.normal(size=500), rng.normal(size=500) * unit, rng.random(500) < 0.01, np.zeros(500)], 1)
    data = normalize_observations(from_arrays(obs, np.zeros((500, 1)), np.zeros(500), episode_ends=[499]))
    np.testing.assert_allclose(data.columns["observations"].numpy().std(0), [1, 1, 1, 0], atol=1e-3)


def test_normalisation_is_exact_for_large_offsets() -> None:
    obs = np.random.default_rng(0).normal(1e4, 1.0, (300_000, 1)).astype(np.float32)
    data = normalize_observations(
        from_arrays(obs, np.zeros((len(obs), 1)), np.zeros(len(obs)), episode_ends=[len(obs) - 1])
    )
    assert abs(float(data.columns["observations"].double().mean())) < 1e-3
    assert abs(float(data.columns["observations"].double().std()) - 1.0) < 2e-3


def test_statistics_come_from_the_kept_episodes() -> None:
    data = apply_transforms([FOUR], DatasetConfig(top_fraction=0.25, normalize_observations=True))
    assert data.spec.observation_mean == (7.0,) and len(data) == 1


def test_images_are_not_normalised() -> None:
    data = from_arrays(np.zeros((3, 8, 8, 3), np.uint8), np.zeros((3, 1)), np.zeros(3), [0, 0, 1])
    assert normalize_observations(data).notes == ("normalize_observations leaves pixels as recorded",)


def test_action_margin() -> None:
    actions = clip_to_margin(make([0, 0, 0], [2], actions=[[-1.0], [0.2], [1.0]]), 0.1).columns["actions"]
    np.testing.assert_allclose(actions[:, 0], [-0.9, 0.2, 0.9], rtol=1e-6)
    discrete = make([0, 0], [1], actions=np.array([0, 1]))  # has no margin and stays as it is
    assert clip_to_margin(discrete, 0.1).columns["actions"].tolist() == [0, 1]


def test_concatenation_joins_rows_and_episodes() -> None:
    both = concatenate([FOUR, make([7, 8, 9], [0, 2], [2])])
    assert len(both) == 11 and both.num_episodes == 6
    assert both.episode_start.tolist() == [0, 2, 4, 7, 8, 9] and both.episode_end.tolist() == [2, 4, 7, 8, 9, 11]
    assert both.raw_returns.tolist() == [2, 5, 6, 9, 7, 17] and both.columns["terminations"].nonzero().tolist() == [
        [3],
        [10],
    ]
    assert both.fingerprint not in ("", FOUR.fingerprint)


def test_concatenation_holds_entries_of_dict_observations_against_each_other() -> None:
    def joined(name: str, *keys: str) -> Dataset:
        task = Task(name=name, observation_keys=keys)
        return replace(FOUR, spec=replace(FOUR.spec, name=name, task=task))

    a, b, flat = joined("a", "x", "y"), joined("b", "y", "x"), joined("flat")
    with pytest.raises(UserError, match="cannot append b to a: its observations are joined of y,x instead of x,y"):
        concatenate([a, b])
    both = concatenate([a, flat, joined("c", "x", "y")])
    assert both.notes[-1] == "the observations of flat are taken to be joined of x,y in this order, as c is"
    assert not concatenate([flat, joined("d")]).notes


def test_concatenation_rescales_actions_to_a_common_range(capsys: pytest.CaptureFixture[str]) -> None:
    small = make([0, 0], [1], actions=[[-2.0], [2.0]])
    large = make([0, 0], [1], actions=[[0.0], [4.0]])
    both = concatenate([small, large])
    assert both.spec.action_low == (-2.0,) and both.spec.action_high == (4.0,)
    np.testing.assert_allclose(both.columns["actions"][:, 0], [-1, 1 / 3, -1 / 3, 1], atol=1e-6)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (from_arrays(np.zeros((2, 2)), np.zeros((2, 1)), np.zeros(2), [0, 1]), "shape"),
        (from_arrays(np.zeros((2, 1)), np.zeros((2, 2)), np.zeros(2), [0, 1]), "actions 2 instead of 1"),
        (from_arrays(np.zeros((2, 1)), np.zeros(2, int), np.zeros(2), [0, 1]), "discrete"),
        (from_arrays(np.zeros((2, 1)), np.zeros((2, 1)), np.zeros(2), [0, 1], cost=np.zeros(2)), "columns"),
    ],
)
def test_data_that_do_not_go_together(other: Dataset, message: str) -> None:
    with pytest.raises(UserError, match=message):
        concatenate([FOUR, other])


def test_inputs_are_left_alone() -> None:
    before = {k: v.clone() for k, v in FOUR.columns.items()}
    config = DatasetConfig(
        subsample=0.9,
        top_fraction=0.5,
        reward_by_return_range=3.0,
        discount_returns=0.9,
        action_margin=0.1,
        normalize_observations=True,
    )
    apply_transforms([FOUR, FOUR], config)
    assert all(torch.equal(before[k], v) for k, v in FOUR.columns.items())


def test_the_spec_knows_what_was_done_to_rewards() -> None:
    """So that a critic's values can be told in the units of the recorded rewards."""
    data = from_arrays(np.zeros((6, 2), np.float32), np.zeros((6, 1), np.float32), np.arange(6.0), episode_ends=[2, 5])
    # returns 3 and 12: times 2, then times 3 less 1
    twice = scale_rewards(scale_by_return_range(data, 18.0), 3.0, -1.0)
    assert (twice.spec.reward_scale, twice.spec.reward_shift) == (6.0, -1.0)
    assert twice.columns["rewards"].tolist() == [6.0 * r - 1.0 for r in range(6)]
    again = scale_rewards(twice, 0.5, 2.0)
    assert (again.spec.reward_scale, again.spec.reward_shift) == (3.0, 1.5)
    assert again.columns["rewards"].tolist() == [3.0 * r + 1.5 for r in range(6)]
