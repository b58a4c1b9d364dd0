"""The best arm with n episodes: schedules by hand, killed searches."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from offrl.errors import UserError
from offrl.tuning.best_arm import EpisodeSearch, SequentialHalving, TopTwo, schedule

RETURNS = np.random.default_rng(3).normal(np.linspace(0.0, 1.0, 6)[:, None], 0.5, (6, 60))


def play(search: EpisodeSearch, returns: np.ndarray = RETURNS) -> list[tuple[int, int]]:
    record = []
    while todo := search.pulls():
        arm, episode = todo[0]
        search.add(arm, episode, returns[arm, episode])
        record.append((arm, episode))
    return record


def test_schedules_by_hand() -> None:
    assert schedule(8, 16) == [(8, 1, 0), (4, 1, 0), (2, 2, 0)]
    assert schedule(8, 50) == [(8, 2, 0), (4, 4, 0), (2, 9, 0)]  # 50 // 24 = 2, 50 // 12 = 4, 50 - 32
    assert schedule(5, 10) == [(5, 1, 0), (3, 1, 0), (2, 1, 0)]
    assert schedule(2, 5) == [(2, 2, 1)]
    assert schedule(2, 1) == [(2, 0, 1)]
    assert schedule(8, 1000) == [(8, 41, 0), (4, 83, 0), (2, 170, 0)]
    for arms in range(2, 32):
        for episodes in (2 * arms, 2 * arms + 1, 7 * arms + 3):
            plan = schedule(arms, episodes)
            assert all(each >= 1 for size, each, _ in plan if size > 2)
            assert sum(size * each + extra for size, each, extra in plan) == episodes
    # 34 // 15 = 2 for three arms would not do
    assert schedule(17, 34) == [(17, 1, 0), (9, 1, 0), (5, 1, 0), (3, 1, 0), (2, 0, 0)]
    with pytest.raises(
        UserError, match="33 arms needs 67 episodes, to play each once in each round, not 66: play fewer arms"
    ):
        schedule(33, 66)


def test_two_arms_of_known_returns() -> None:
    search = SequentialHalving(2, 2)
    assert search.pulls() == [(0, 0), (1, 0)]
    search.add(0, 0, 0.5)
    search.add(1, 0, 0.9)
    assert search.pulls() == [] and search.best() == 1


def test_halving_by_hand() -> None:
    search = SequentialHalving(4, 10)  # two rounds: 10 // 8 = 1 each, then 6 for two
    assert search.best() == 0  # the data's, before an episode
    assert search.pulls() == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for arm, value in ((2, 7.0), (0, 5.0), (3, 7.0), (1, 7.0)):  # of the three 7s the two that the data prefer go on
        search.add(arm, 0, value)
    assert search.pulls() == [(a, e) for e in (1, 2, 3) for a in (1, 2)]  # episode by episode: the same seeds for both
    for arm, episode in search.pulls():
        search.add(arm, episode, 0.0 if arm == 1 else -0.5)
    assert search.pulls() == [] and search.played == 10
    assert search.means()[[1, 2]].tolist() == [1.75, 1.375]
    assert search.best() == 1  # arm 3 has the mean 7, but is out


def test_a_limit_comes_before_the_return() -> None:
    """Arm 2 earns most and breaks the limit of 10, arms 1 and 3 keep it; at the end both break it, arm 1 by less."""
    search = SequentialHalving(4, 8, 10.0)
    for arm, value, cost in ((0, 8.0, 12.0), (1, 1.0, 10.0), (2, 9.0, 11.0), (3, 2.0, 0.0)):
        search.add(arm, 0, value, cost)
    assert search.best() == 3 and search.pulls() == [(a, e) for e in (1, 2) for a in (3, 1)]
    for arm, episode in search.pulls():
        search.add(arm, episode, 5.0, 40.0 if arm == 3 else 13.0)
    assert search.best() == 1 and search.mean_costs()[[1, 3]].tolist() == [12.0, pytest.approx(80 / 3)]


def test_an_arm_that_is_out_is_not_chosen_for_its_mean() -> None:
    search = SequentialHalving(3, 7)
    for arm, value in ((0, 5.0), (1, 6.0), (2, 4.0)):
        search.add(arm, 0, value)
    assert search.pulls() == [(1, 1), (0, 1), (1, 2), (0, 2)]
    for arm, episode in search.pulls():
        search.add(arm, episode, -9.0 - arm)
    assert search.means().argmax() == 2 and search.best() == 0


MAKERS: dict[str, Callable[[], EpisodeSearch]] = {
    "halving": lambda: SequentialHalving(6, 40),
    "top two": lambda: TopTwo(6, 40, np.zeros(6), prior_sd=1.0, noise=0.5, confidence=0.99, seed=5),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_killed_search_goes_on_as_if_it_had_not_been(kind: str) -> None:
    straight = MAKERS[kind]()
    record = play(straight)
    assert len(record) == 40 or kind == "top two"
    for stop in range(0, len(record) + 1, 1 if kind == "halving" else 4):
        again = MAKERS[kind]()
        for arm, episode in record[:stop]:
            again.add(arm, episode, RETURNS[arm, episode])
        assert play(again) == record[stop:] and again.best() == straight.best()
    with pytest.raises(UserError, match="not asked for: the record is of another search"):
        straight.add(0, 0, 1.0)


def test_rounds_may_be_added_in_any_order() -> None:
    straight, other = SequentialHalving(6, 40), SequentialHalving(6, 40)
    play(straight)
    while todo := other.pulls():
        for arm, episode in reversed(todo):
            other.add(arm, episode, RETURNS[arm, episode])
    assert other.returns == straight.returns and other.best() == straight.best()


def test_the_posterior_by_hand() -> None:
    search = TopTwo(2, 10, [0.0, 10.0], prior_sd=2.0, noise=1.0)
    search.returns[0].update({0: 6.0, 1: 8.0})  # variance (4 * 1 + 2) / (4 + 1) = 1.2, precision 1/4 + 2/1.2 = 1.916667
    mean, sd = search.posterior()
    assert mean == pytest.approx([14.0 / 1.2 / 1.9166667, 10.0]) and sd == pytest.approx([1.9166667**-0.5, 2.0])
    assert search.best() == 1
    z = (10.0 - mean[0]) / math.hypot(*sd)
    assert search.certainty() == pytest.approx(0.5 * math.erfc(-z / math.sqrt(2)), abs=1e-6)
    wide = TopTwo(2, 10, [0.0, 10.0], prior_sd=2.0, noise=1.0, margin=3.0)
    assert wide.certainty() == pytest.approx(0.5 * math.erfc(-13.0 / math.sqrt(8.0) / math.sqrt(2)), abs=1e-6)


def test_it_stops_when_it_knows_enough() -> None:
    returns = np.random.default_rng(0).normal([[0.0], [5.0], [1.0]], 0.5, (3, 100))
    search = TopTwo(3, 100, [0.0, 0.0, 0.0], prior_sd=5.0, noise=0.5, confidence=0.95)
    record = play(search, returns)
    assert search.best() == 1 and search.certainty() >= 0.95 and len(record) < 20
    assert TopTwo(3, 100, [0.0, 99.0, 0.0], prior_sd=5.0, noise=0.5).pulls() == []  # the prior knows already
    equal = TopTwo(3, 100, [0.0, 0.0, 0.0], prior_sd=5.0, noise=0.5, margin=1.0)
    assert len(play(equal, returns[[1, 1, 1]])) < 100  # any of them is within the margin


def test_half_of_the_pulls_are_of_the_challenger() -> None:
    def first(seed: int) -> int:
        return TopTwo(3, 9, [10.0, 9.0, -50.0], prior_sd=0.5, noise=1.0, confidence=0.999, seed=seed).pulls()[0][0]

    counts = np.bincount([first(seed) for seed in range(100)], minlength=3)
    assert 30 <= counts[1] <= 70 and counts[2] == 0  # one half; Thompson sampling alone: P(N(-1, .71) > 0) = 8%


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_return_that_is_not_finite(value: float) -> None:
    with pytest.raises(UserError, match=f"episode 0 of arm 0 is {value}"):
        SequentialHalving(3, 6).add(0, 0, value)
