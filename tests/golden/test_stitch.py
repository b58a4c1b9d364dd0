"""Stitched goals: clusters, probabilities by hand, who takes part, and a problem that no single trajectory solves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.goals import (
    ACTOR_GOALS,
    HIGH_GOALS,
    HIGH_TARGETS,
    LOW_GOALS,
    SUCCESSES,
    VALUE_GOALS,
    GoalSampler,
    Mix,
)
from offrl.data.samplers.sequences import GoalSequenceSampler
from offrl.data.transforms.apply import apply_transforms
from offrl.data.transforms.stitch import CLUSTERS, add_clusters, clusters, leaving
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.training.setup import check_stitching

AHEAD = Mix(0.0, 1.0, 0.0, geometric=False)


def chain(cluster: list[int], lengths: list[int], probability: float, **columns: np.ndarray) -> Dataset:
    """Trajectories whose rows, the last ones too, hold transitions, with clusters as given; the observation is the
    row's number.
    """
    rows = np.arange(len(cluster))
    ends = np.isin(rows, np.cumsum(lengths) - 1)
    data = from_arrays(
        rows[:, None], np.zeros((len(rows), 1)), np.zeros(len(rows)), ends, action_low=-1.0, action_high=1.0, **columns
    )  # type: ignore[arg-type]
    return Dataset(
        **{**data.__dict__, "columns": {**data.columns, CLUSTERS: torch.tensor(cluster)}, "stitch": probability}
    )


def draws(data: Dataset, sampler: GoalSampler, count: int = 200_000) -> dict[str, Tensor]:
    return sampler(sampler.prepare(data), rng.make_key(7), count)


# ---- probabilities


@pytest.mark.parametrize(
    ("probability", "row", "expected"),
    [
        (1.0, 0, [0.0, 0.0555556, 0.1388889, 0.4722222, 0.0555556, 0.1388889, 0.1388889]),
        (0.5, 0, [0.0, 0.1944444, 0.2361111, 0.4027778, 0.0277778, 0.0694444, 0.0694444]),
        (0.0, 0, [0.0, 1 / 3, 1 / 3, 1 / 3, 0.0, 0.0, 0.0]),
        (1.0, 4, [0.0, 0.0833333, 0.0833333, 0.0833333, 0.0, 0.125, 0.625]),
        (1.0, 2, [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]),
    ],
)
def test_probabilities_by_hand(probability: float, row: int, expected: list[float]) -> None:
    """Rows 0-3 and 4-6 are trajectories, of clusters 0, 1, 2, 3 and 2, 1, 4. From row 0: j is 1, 2 or 3; w any row of
    its cluster, rows 1 or 5, 2 or 4, or 3; the goal any row from w to its trajectory's end."""
    batch = draws(chain([0, 1, 2, 3, 2, 1, 4], [4, 3], probability), GoalSampler(actor=AHEAD))
    goals = batch[ACTOR_GOALS][batch["observations"][:, 0] == row, 0]
    share = torch.bincount(goals.long(), minlength=7) / len(goals)
    assert share.tolist() == pytest.approx(expected, abs=4 * 0.5 / len(goals) ** 0.5)
    assert all((p == 0.0) == (e == 0.0) for p, e in zip(share.tolist(), expected, strict=True))


def test_only_the_actors_goals_that_are_ahead_are_stitched() -> None:
    """Values' goals stay in the trajectory or are random; "reached" stays the row itself. Current and random goals are
    not replaced.
    """
    data = chain([0, 1, 2, 3, 2, 1, 4], [4, 3], 1.0)
    batch = draws(data, GoalSampler(value=AHEAD, actor=Mix(0.5, 0.5, 0.0, geometric=False)), 20_000)
    rows = batch["observations"][:, 0]
    ours = rows < 4
    assert bool((batch[VALUE_GOALS][ours] < 4).all()) and bool((batch[VALUE_GOALS][~ours] > 3).all())
    last = (rows == 3) | (rows == 6)
    assert torch.equal(batch[SUCCESSES] == 1.0, last)
    goals = batch[ACTOR_GOALS][:, 0]
    # none of the stitched ones is row 0
    assert float((goals == rows)[rows == 0].float().mean()) == pytest.approx(0.5, abs=0.05)
    plain, unstitched = draws(chain([0] * 7, [4, 3], 0.0), GoalSampler(actor=AHEAD), 100), GoalSampler(actor=AHEAD)
    bare = chain([0] * 7, [4, 3], 0.0)
    bare.columns.pop(CLUSTERS)
    assert torch.equal(plain[ACTOR_GOALS], draws(bare, unstitched, 100)[ACTOR_GOALS])


def test_subgoals_stop_at_the_goal_of_their_own_trajectory() -> None:
    """k = 2: the high target is min(row + 2, j), j the goal before it was stitched, so from row 0 it is row 1 (j = 1, a
    third) or 2.
    """
    batch = draws(chain([0, 1, 2, 3, 2, 1, 4], [4, 3], 1.0), GoalSampler(actor=AHEAD, subgoal_steps=2), 60_000)
    first = batch["observations"][:, 0] == 0
    targets, goals, low = (batch[name][first, 0] for name in (HIGH_TARGETS, HIGH_GOALS, LOW_GOALS))
    assert float((targets == 1).float().mean()) == pytest.approx(1 / 3, abs=0.02) and set(targets.tolist()) == {
        1.0,
        2.0,
    }
    assert set(low.tolist()) == {2.0}
    share = torch.bincount(goals.long(), minlength=7) / len(goals)
    assert share.tolist() == pytest.approx(
        [0.0, 0.0555556, 0.1388889, 0.4722222, 0.0555556, 0.1388889, 0.1388889], abs=0.025
    )
    # where the target is row 1 the goal is of the future of rows 1 or 5, so never row 4
    assert 4.0 not in goals[targets == 1].tolist()


# ---- the smallest problem: right actions for goals that no trajectory from there reaches

# states, and the action all along: 0 right, 1 up
PATHS = [([0, 1, 2], 0), ([0, 5, 6], 1), ([2, 3, 4], 0), ([6, 7, 8], 1)]


def crossing(probability: float) -> Dataset:
    states = np.concatenate([p for p, _ in PATHS])
    actions = np.repeat([a for _, a in PATHS], 3)
    one_hot = np.eye(9)[states]
    data = from_arrays(one_hot, actions, np.zeros(12), np.arange(12) % 3 == 2, num_actions=2)
    settings = DatasetConfig(
        augment="stitch", augment_probability=probability, augment_clusters=9, augment_on="observations"
    )
    return add_clusters(data, settings) if probability else data


def counted(data: Dataset) -> Tensor:
    """How often action a goes with (state, goal): [9, 9, 2]."""
    batch = draws(data, GoalSampler(actor=AHEAD))
    state, goal = batch["observations"].argmax(1), batch[ACTOR_GOALS].argmax(1)
    return torch.bincount(state * 18 + goal * 2 + batch["actions"], minlength=162).reshape(9, 9, 2)


def test_stitching_solves_what_no_trajectory_does() -> None:
    plain = counted(crossing(0.0))
    assert int(plain[0, 4].sum()) == int(plain[0, 8].sum()) == 0  # chance
    stitched = counted(crossing(1.0))
    assert int(stitched[0, 4, 1]) == int(stitched[0, 8, 0]) == 0 < min(int(stitched[0, 4, 0]), int(stitched[0, 8, 1]))
    # from the first trajectory's row 0: j = 2 (1/2), the row 2 of the other one (1/2), its last row of three (1/3)
    assert float(stitched[0, 4, 0]) / 200_000 == pytest.approx(1 / 12 / 12, rel=0.15)


# ---- windows of sequence models


def window_draws(data: Dataset, length: int, count: int = 60_000, left: bool = False) -> dict[str, Tensor]:
    sampler = GoalSequenceSampler(length, left_padded=left)
    return sampler(sampler.prepare(data), rng.make_key(5), count)


def test_goals_are_after_the_window() -> None:
    """Rows 0-4, windows of 2: from row 0 the goal is 2, 3 or 4, from row 2 it is 4; one that reaches the end has the
    last row.
    """
    batch = window_draws(chain([0] * 5, [5], 0.0), 2)
    first, goals = batch["observations"][:, 0, 0], batch[ACTOR_GOALS][:, 0]
    for row, expected in {0: {2, 3, 4}, 1: {3, 4}, 2: {4}, 3: {4}, 4: {4}}.items():
        share = [float((goals[first == row] == goal).float().mean()) for goal in expected]
        assert share == pytest.approx([1 / len(expected)] * len(expected), abs=0.03)
    assert torch.equal(batch["valid"].sum(1) == 1, first == 4)
    left = window_draws(chain([0] * 5, [5], 0.0), 2, 1000, left=True)
    assert bool((left[ACTOR_GOALS][~left["valid"][:, 0]] == 4).all())


def test_windows_go_on_in_another_trajectory() -> None:
    """K = 3. Rows 0-3 and 4-8; row 2 and row 5 are one cluster, every other row is its own. From row 0: j = 1 goes on
    at 1; j = 3 is the end, after which nothing follows within the window (3 - 0 < 3 is false, so the window stays and
    the goal is 3); j = 2 goes on at 2 (after it one more row is needed, row 3: window 0, 1, 2, goal 3) or at 5: window
    0, 1, 5, and the goal 6, 7 or 8."""
    batch = window_draws(chain([0, 1, 2, 3, 4, 2, 6, 7, 8], [4, 5], 1.0), 3)
    of_first = batch["observations"][:, 0, 0] == 0
    windows, goals = batch["observations"][of_first, :, 0], batch[ACTOR_GOALS][of_first, 0]
    crossing = windows[:, 2] == 5
    assert bool((windows[crossing] == torch.tensor([0.0, 1.0, 5.0])).all()) and bool(
        (windows[~crossing] == torch.tensor([0.0, 1.0, 2.0])).all()
    )
    assert float(crossing.float().mean()) == pytest.approx(1 / 6, abs=0.02)  # j is 1, 2 or 3, then 2 or 5
    assert bool((goals[~crossing] == 3).all())
    assert [float((goals[crossing] == g).float().mean()) for g in (6, 7, 8)] == pytest.approx([1 / 3] * 3, abs=0.05)
    assert bool(batch["valid"][of_first].all())
    # row 8 is a last row, with nothing ahead: its window stays as it is
    at_end = batch["observations"][:, 0, 0] == 8
    assert batch["valid"][at_end].sum(1).unique().tolist() == [1] and bool((batch[ACTOR_GOALS][at_end] == 8).all())


def test_a_window_with_nothing_to_follow_is_drawn_anew() -> None:
    """K = 3, rows 0-3 and 4-5, cluster of rows 2 and 5: (j, w) = (2, 5) leaves no row for a goal and is drawn again;
    (2, 2), (1, 1) and (3, 3) stay. Their windows are 0, 1, 2 with goal 3."""
    batch = window_draws(chain([0, 1, 2, 3, 4, 2], [4, 2], 1.0), 3)
    of_first = batch["observations"][:, 0, 0] == 0
    assert bool((batch["observations"][of_first, :, 0] == torch.tensor([0.0, 1.0, 2.0])).all())
    assert bool((batch[ACTOR_GOALS][of_first] == 3).all())


def test_prompted_and_goal_conditioned_policies_see_the_same_goals() -> None:
    """RvS with condition=goal learns by GoalSampler, DT with prompt=goal by windows; at one step they are asked for the
    goal alone.
    """
    data = crossing(0.5)
    for name, settings in (
        ("rvs", {"condition": "goal", "hidden": [8]}),
        ("dt", {"prompt": "goal", "width": 8, "layers": 1, "context": 2}),
    ):
        kind = registry.get("algo", name)
        algorithm = kind(kind.fit_config(kind.Config(**settings), data), data.spec)
        assert algorithm.traits.goal_conditioned and not kind.traits.goal_conditioned
        sampler = algorithm.sampler()
        batch = sampler(sampler.prepare(data), rng.make_key(0), 8)
        assert batch[ACTOR_GOALS].shape == (8, 9)
        state = algorithm.init(0)
        _, metrics = algorithm.update(state, batch, rng.make_key(1), phase=0)
        assert bool(metrics["actor/loss"].isfinite())
        with pytest.raises(UserError, match="acts towards a goal"):
            algorithm.actor(state).act(
                algorithm.actor(state).start(2), torch.eye(9)[:2], rng.make_key(0), explore=False
            )
        check_stitching(algorithm.config, algorithm, data)
        plain = kind(kind.fit_config(kind.Config(), data), data.spec)
        with pytest.raises(UserError, match=f"{name} has none; {name} does with algo.(condition|prompt)=goal"):
            check_stitching(plain.config, plain, data)


def test_dt_acts_on_places_in_the_window_and_the_goal_of_now() -> None:
    """The distribution at the last of three steps is that of a training window with the same goal, though the episode
    is older.
    """
    g = np.random.default_rng(0)
    data = from_arrays(
        g.normal(size=(40, 3)),
        g.uniform(-1, 1, (40, 2)),
        np.zeros(40),
        np.arange(40) % 20 == 19,
        action_low=-1.0,
        action_high=1.0,
    )
    kind = registry.get("algo", "dt")
    algorithm = kind(
        kind.fit_config(kind.Config(prompt="goal", context=2, width=8, layers=1, dropout=0.0), data), data.spec
    )
    state = algorithm.init(0)
    params = {
        k: v + 0.1 * rng.normal(rng.make_key(i), tuple(v.shape))
        for i, (k, v) in enumerate(state.params["actor"].items())
    }
    actor = algorithm.actor(state._replace(params={"actor": params}))
    goal, seen = torch.randn(1, 3), data.columns["observations"][:3]
    carry, actions = actor.set_goal(actor.start(1), torch.zeros(1, 3)), []
    for t in range(3):
        carry = actor.set_goal(carry, goal if t == 2 else torch.zeros(1, 3))
        action, carry = actor.act(carry, seen[t : t + 1], rng.make_key(0), explore=False)
        actions.append(action)
    window = {
        "observations": seen[1:3].unsqueeze(0),
        "actions": torch.stack([actions[1], torch.zeros(1, 2)], 1),
        ACTOR_GOALS: goal,
    }
    dist = algorithm.apply("actor", params, algorithm.tokens(window), torch.tensor([[0, 1]]))
    torch.testing.assert_close(actions[2], algorithm.policy.mode(tuple(x[:, -1] for x in dist)))


def test_others_refuse_it() -> None:
    data = crossing(0.5)
    kind = registry.get("algo", "iql")
    algorithm = kind(kind.Config(hidden=[8]), data.spec)
    with pytest.raises(UserError, match="iql has none; take one that learns towards goals, such as gcbc"):
        check_stitching(algorithm.config, algorithm, data)


# ---- clusters


def test_clusters_are_those_of_lloyd() -> None:
    """Three heaps far apart; a wide but meaningless scale of one number does not decide, for each is divided by its
    deviation.
    """
    g = np.random.default_rng(0)
    heaps = np.repeat([[0.0, 0.0], [0.0, 9.0], [9.0, 0.0]], 50, 0) + g.normal(size=(150, 2)) * 0.1
    count, which = clusters(torch.tensor(heaps * [1.0, 1000.0]), 3)
    assert count == 3 and all(len(which[i : i + 50].unique()) == 1 for i in (0, 50, 100))
    again = clusters(torch.tensor(heaps * [1.0, 1000.0]), 3)[1]
    assert torch.equal(which, again)
    _, one_axis = clusters(torch.tensor(heaps), 2, dims=1)
    # the second number is not looked at
    assert torch.equal(one_axis[:50], one_axis[50:100]) and int(one_axis[100]) != int(one_axis[0])


def test_centres_are_means_where_lloyd_stops() -> None:
    """Rows 0, 1, 10, 12 in two clusters: the assignment is a fixed point, found by hand."""
    _, which = clusters(torch.tensor([[0.0], [1.0], [10.0], [12.0]]), 2)
    assert bool(which[0] == which[1]) and bool(which[2] == which[3]) and bool(which[0] != which[2])
    count, same = clusters(torch.zeros(6, 2), 3)  # all rows are one place
    assert count == 1 and len(same.unique()) == 1


def test_share_of_draws_that_leave_their_trajectory() -> None:
    """Clusters 0, 0, 1 | 1, 2: rows of cluster 1 leave with probability 1/2, the others never: 2 of 5 rows times
    1/2.
    """
    assert leaving(torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1])) == pytest.approx(0.2)


def test_the_goals_column_is_clustered_where_there_is_one() -> None:
    g = np.random.default_rng(0)
    places = np.repeat([[0.0], [5.0]], 20, 0)
    data = from_arrays(
        g.normal(size=(40, 3)),
        g.uniform(-1, 1, (40, 1)),
        np.zeros(40),
        np.arange(40) % 20 == 19,
        achieved_goals=places,
        action_low=-1.0,
        action_high=1.0,
    )
    config = DatasetConfig(augment="stitch", augment_clusters=2)
    done = apply_transforms([data], config)
    assert done.stitch == 0.5 and len(done.columns[CLUSTERS][:20].unique()) == 1
    assert done.transforms[-1] == "augment stitch 0.5 of 2 clusters of achieved_goals"
    assert "2 of them hold rows, and 0% of the draws" in done.notes[-1]
    other = apply_transforms([data], DatasetConfig(augment="stitch", augment_clusters=2, augment_on="observations"))
    assert len(other.columns[CLUSTERS][:20].unique()) == 2


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment_clusters": 1}, "augment_clusters=1 is out of range: the smallest allowed value is 2"),
        ({"augment_probability": 1.5}, "augment_probability=1.5 is out of range: the largest allowed value is 1.0"),
        ({"augment": "time"}, "augment=time is not allowed; choose one of none, stitch"),
        ({"augment_clusters": 41}, "augment_clusters=41 is more than the 40 rows"),
        ({"augment_dims": 4}, "augment_dims=4 is more than the 3 numbers of a row of observations"),
        ({"augment_on": "goals"}, "has no column achieved_goals"),
    ],
)
def test_mistakes_are_one_line(settings: dict[str, object], message: str) -> None:
    config = DatasetConfig(**{"augment": "stitch", **settings})  # type: ignore[arg-type]
    g = np.random.default_rng(0)
    data = from_arrays(
        g.normal(size=(40, 3)),
        g.uniform(-1, 1, (40, 1)),
        np.zeros(40),
        np.arange(40) % 20 == 19,
        action_low=-1.0,
        action_high=1.0,
    )
    with pytest.raises(UserError, match=message) as raised:
        config.validate()
        add_clusters(data, config)
    assert "\n" not in str(raised.value)


def test_nothing_to_stitch_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    g = np.random.default_rng(0)
    ends = np.arange(40) % 20 == 19
    apart = from_arrays(
        np.repeat([[0.0], [5.0]], 20, 0),
        g.uniform(-1, 1, (40, 1)),
        np.zeros(40),
        ends,
        action_low=-1.0,
        action_high=1.0,
    )
    add_clusters(apart, DatasetConfig(augment="stitch", augment_clusters=2))
    assert "0.0% of the draws from a cluster are of another trajectory" in capsys.readouterr().err
    add_clusters(apart, DatasetConfig(augment="stitch", augment_clusters=21))
    assert "augment_clusters=21 of 40 rows: most clusters hold one row" in capsys.readouterr().err


def test_goals_must_be_ahead_to_be_stitched() -> None:
    with pytest.raises(UserError, match=r"algo.actor_trajectory=0 draws none"):
        GoalSampler(actor=Mix(0.0, 0.0, 1.0)).prepare(chain([0, 1, 0, 1], [2, 2], 0.5))
