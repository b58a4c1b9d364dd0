"""The environment in which only stitched episodes reach the best return, and its data."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from offrl.data import load_dataset
from offrl.data.fit import check_fit
from offrl.envs import stitch
from offrl.tasks.environments import make_env
from offrl.tasks.task import lookup
from offrl.world_models.known import terminations
from tests.support.known_functions import raw_transitions


def follow(way: str) -> tuple[float, str, int]:
    """The return of walking from place to place without noise, where it ends, and after how many steps."""
    position, total, steps, left = np.array(stitch.PLACES[way[0]]), 0.0, 0, list(way[1:])
    while steps < stitch.LIMIT:
        to = np.array(stitch.PLACES[left[0]]) - position
        if len(left) > 1 and np.linalg.norm(to) < stitch.STEP:
            left.pop(0)
            continue
        position, reward, ended = stitch.move(position, to / stitch.STEP)
        total, steps = total + reward, steps + 1
        if ended:
            break
    near = min(stitch.PLACES, key=lambda name: float(np.linalg.norm(position - np.array(stitch.PLACES[name]))))
    return total, near, steps


@pytest.mark.parametrize(("way", "earned"), [("AMX", 1.0), ("AD", 1.5), ("BMG", 2.0), ("AMG", 3.0), ("ADAMG", 1.5)])
def test_what_each_way_earns(way: str, earned: float) -> None:
    total, end, _ = follow(way)
    assert total == pytest.approx(earned) and end == ("D" if way == "ADAMG" else way[-1])


def test_nothing_earns_more_than_the_stitched_route_nor_by_going_round() -> None:
    x, y = np.meshgrid(
        np.linspace(-stitch.EDGE[0], stitch.EDGE[0], 400), np.linspace(-stitch.EDGE[1], stitch.EDGE[1], 400)
    )
    assert stitch.height(x, y).max() == pytest.approx(stitch.BEST) and stitch.height(0.0 * x, 0.0 * y).max() == 0.0
    draw, position, total = np.random.default_rng(0), np.array([0.3, 0.1]), 0.0
    for _ in range(300):  # rewards are differences of heights
        following, reward, _ = stitch.move(position, draw.uniform(-1, 1, 2))
        total, position = total + reward, following
    assert total == pytest.approx(stitch.height(*position) - stitch.height(0.3 + np.zeros(()), np.array(0.1)))


def test_data() -> None:
    dataset = load_dataset("point-stitch")
    assert (
        dataset.num_episodes == 300
        and bool(dataset.complete.all())
        and bool(dataset.columns["terminations"].sum() == 300)
    )
    np.testing.assert_allclose(np.unique(dataset.raw_returns.round(decimals=4)), [1.0, 1.5, 2.0])
    starts = dataset.columns["observations"][dataset.episode_start]
    at_a = (starts - torch.tensor(stitch.PLACES["A"])).abs().amax(1) <= stitch.SPREAD + 1e-6
    assert (
        float(dataset.raw_returns[at_a].max()) == pytest.approx(stitch.DECOY)
        and float(dataset.raw_returns[~at_a].min()) > 1.9
    )
    assert dataset.fingerprint == load_dataset("point-stitch").fingerprint
    assert torch.equal(load_dataset("point-stitch").columns["actions"], dataset.columns["actions"])
    assert not np.array_equal(stitch.generate(1, 20).columns["actions"], stitch.generate(0, 20).columns["actions"])


def test_time_tells_nothing() -> None:
    """Episodes from A and from B pass M after as many steps."""
    dataset = load_dataset("point-stitch")
    near = (dataset.columns["observations"] - torch.tensor(stitch.PLACES["M"])).norm(dim=1) < 0.15
    when: dict[bool, list[int]] = {True: [], False: []}
    for e, (start, end) in enumerate(zip(dataset.episode_start.tolist(), dataset.episode_end.tolist(), strict=True)):
        passed = torch.nonzero(near[start:end]).flatten()
        if len(passed):
            when[bool(dataset.raw_returns[e] > 1.9)].append(int(passed[0]))
    from_b, from_a = (np.array(when[k]) for k in (True, False))
    assert len(from_b) == 75 and len(from_a) == 135
    assert abs(from_a.mean() - from_b.mean()) < 0.3 * from_a.std() and 0.7 < from_a.std() / from_b.std() < 1.4


def test_environment() -> None:
    task = lookup("point-stitch")
    assert task is not None and task.normalise(np.array([1.5, 3.0])).tolist() == [0.0, 100.0]
    dataset = load_dataset("point-stitch")
    check_fit(dataset.spec, task)
    env = make_env(task)
    first, _ = env.reset(seed=3)
    assert (
        np.array_equal(env.reset(seed=3)[0], first)
        and (np.abs(first) <= stitch.SPREAD).all()
        and env.observation_space.contains(first)
    )
    total, steps = 0.0, 0
    for to in ("M", "G"):
        while True:
            away = np.array(stitch.PLACES[to]) - env.unwrapped.position  # type: ignore[attr-defined]
            if to == "M" and np.linalg.norm(away) < 0.1:
                break
            _, reward, ended, cut, info = env.step(np.clip(away / stitch.STEP, -1, 1).astype(np.float32))
            total, steps = total + reward, steps + 1
            assert not cut
            if ended:
                break
    assert total == pytest.approx(3.0) and info["success"] and 20 < steps < 40
    env.reset(seed=0)
    flags = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(stitch.LIMIT)]
    assert flags == [(False, False)] * (stitch.LIMIT - 1) + [(False, True)]
    shown = gym.make("offrl.envs.point:offrl/PointStitch-v0", render_mode="rgb_array")
    shown.reset(seed=0)
    picture = shown.render()
    assert (
        isinstance(picture, np.ndarray)
        and picture.shape == (200, 350, 3)
        and len(np.unique(picture.reshape(-1, 3), axis=0)) >= 5
    )


def test_models_know_its_rules() -> None:
    dataset = load_dataset("point-stitch")
    assert terminations.find(dataset.spec) == terminations.find(dataset.spec, "reward") == stitch.ENV
    o, a, after = (x.double() for x in raw_transitions(dataset, torch.arange(len(dataset))))
    assert torch.equal(stitch.ends(o, a, after), dataset.columns["terminations"])
    torch.testing.assert_close(stitch.pays(o, a, after).float(), dataset.columns["rewards"], rtol=0, atol=1e-5)
