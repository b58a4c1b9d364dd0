"""The environment with two ways round an obstacle, and its demonstrations."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from offrl.data import load_dataset
from offrl.data.fit import check_fit
from offrl.data.samplers.chunks import ChunkSampler
from offrl.envs import fork
from offrl.rng import make_key
from offrl.tasks.environments import make_env
from offrl.tasks.task import lookup


def follow(places: list[tuple[float, float]], parts: int) -> tuple[float, float, int, int]:
    """Walk straight from place to place from the middle of S: the return, how far from the goal it ends, the side
    passed, the steps.
    """
    env = fork.PointFork(parts)
    env.reset(seed=0)
    env.position = env.seen = fork.START
    total, steps, over, info = 0.0, 0, False, {"side": 0}
    for place in places:
        while not over and np.linalg.norm(place - env.position) > 1e-6:
            action = np.clip((place - env.position) * parts / fork.STEP, -1.0, 1.0)
            _, reward, over, _, info = env.step(action)
            total, steps = total + reward, steps + 1
    return total, float(np.linalg.norm(env.position - fork.GOAL)), int(info["side"]), steps


@pytest.mark.parametrize("parts", [1, 4])
def test_what_each_way_earns(parts: int) -> None:
    above, below = ([*((x, y * way) for x, y in fork.PLACES), (1.0, 0.0)] for way in (1, -1))
    assert (
        follow(above, parts)[0] == pytest.approx(2.0 - 0.2 * follow(above, parts)[3] / parts)
        and follow(above, parts)[2] == 1
    )
    assert (
        follow(below, parts)[0] == pytest.approx(follow(above, parts)[0] - 5.0 * 0.8) and follow(below, parts)[2] == -1
    )
    total, left, _, steps = follow([(1.0, 0.0)], parts)
    # the mean of both leads into the disc
    assert total == pytest.approx(-0.5 - 0.2 * steps / parts) and left > 0.9 and steps <= 2 * parts


def test_the_disc_cannot_be_jumped_over() -> None:
    inside = np.array([-0.45, 0.1]), np.array([1.0, 0.0])
    assert fork.clearance(*inside) < fork.RADIUS  # though both ends lie outside
    # nearest within the step
    assert fork.clearance(np.array([-0.45, 0.55]), np.array([0.15, 0.55])) == pytest.approx(0.55)
    # nearest at its end
    assert fork.clearance(np.array([-0.8, 0.3]), np.array([-0.5, 0.3])) == pytest.approx(np.hypot(0.5, 0.3))
    # no step at all
    assert fork.clearance(np.array([0.5, 0.5]), np.array([0.5, 0.5])) == pytest.approx(np.hypot(0.5, 0.5))
    _, reward, over = fork.move(np.array([-0.45, 0.0]), np.array([1.0, 0.0]), 1)
    assert over and reward == -0.7
    for y, where in ((0.5, 1), (-0.5, -1)):
        assert (
            fork.side(np.array([-0.1, y]), np.array([0.1, y])) == where
            and fork.side(np.array([0.1, y]), np.array([-0.1, y])) == 0
        )
    # 5 times a depth of 0.5, and the step
    assert fork.move(np.array([-0.2, -0.5]), np.array([1.0, 0.0]), 1)[1:] == (-2.7, False)
    assert fork.side(np.array([-0.1, -0.1]), np.array([0.1, 0.3])) == 1  # above where it passes the middle, at y = 0.1


@pytest.mark.parametrize(
    ("name", "parts"), [pytest.param(n, p, marks=pytest.mark.nightly if p > 1 else ()) for n, p in fork.PARTS.items()]
)
def test_data(name: str, parts: int) -> None:
    dataset = load_dataset(name)
    returns = dataset.raw_returns.round(decimals=4)
    assert dataset.num_episodes == fork.EPISODES and bool(dataset.complete.all())
    ends = dataset.columns["next_observations"][dataset.episode_end - 1][:, :2]
    assert 0.45 < float((returns > 0.0).float().mean()) <= 0.5  # the way above; few crash
    assert float((returns < -1.5).float().mean()) > 0.45
    ended = dataset.columns["terminations"][dataset.episode_end - 1].bool()
    if parts == 1:  # where the last position is seen: who is not at the goal has crashed
        assert bool((returns[ended & ((ends - torch.tensor(fork.GOAL)).norm(dim=1) > 0.5)] < 0.0).all())
    lengths = dataset.episode_end - dataset.episode_start
    assert int(lengths.max()) <= fork.LIMIT * parts and 2 * parts < int(lengths.median())
    starts, first = (
        dataset.columns["observations"][dataset.episode_start],
        dataset.columns["actions"][dataset.episode_start],
    )
    assert float((starts[:, :2] - torch.tensor(fork.START)).abs().max()) <= fork.SPREAD + 1e-6
    # which way is taken does not follow from where it begins, and the mean of both goes straight on
    up = first[:, 1] > 0.0
    assert abs(int(up.sum()) - fork.EPISODES // 2) < 30 and float((first[:, 1].abs() > 0.3).float().mean()) > 0.94
    assert float((starts[up, 1].mean() - starts[~up, 1].mean()).abs()) < 0.015
    assert float(first.mean(0)[1].abs()) < 0.1 < float(first.mean(0)[0])
    assert dataset.fingerprint == load_dataset(name).fingerprint
    assert not np.array_equal(
        fork.generate(name, 1, 20).columns["actions"], fork.generate(name, 0, 20).columns["actions"]
    )
    check_fit(dataset.spec, lookup(name))


@pytest.mark.nightly
def test_a_stale_position_tells_the_way_at_every_fourth_step_only() -> None:
    dataset = load_dataset("stale-fork")
    rows = int(dataset.episode_start[2]) + torch.arange(9)
    seen = dataset.columns["observations"][rows]
    assert seen[:, 2].tolist() == [0.0, 0.25, 0.5, 0.75] * 2 + [0.0]
    assert torch.equal(seen[:4, :2], seen[:1, :2].expand(4, 2)) and torch.equal(
        seen[4:8, :2], seen[4:5, :2].expand(4, 2)
    )
    moved = fork.STEP / 4 * dataset.columns["actions"][rows[:4]].sum(0)
    torch.testing.assert_close(seen[4, :2] - seen[0, :2], moved, atol=1e-5, rtol=0.0)
    assert dataset.columns["next_observations"][rows[3]].tolist() == seen[4].tolist()
    # a chunk of four that begins with a fresh position keeps to one way
    sampler = ChunkSampler(4)
    batch = sampler(sampler.prepare(dataset), make_key(0), 512)
    fork_rows = (batch["observations"][:, 2] == 0.0) & (batch["observations"][:, 0] < -0.7)
    lateral = batch["actions"][fork_rows][:, :, 1]
    assert int(fork_rows.sum()) > 10 and float((lateral.sign() == lateral[:, :1].sign()).float().mean()) > 0.95


@pytest.mark.parametrize(("name", "parts"), fork.PARTS.items())
def test_environment(name: str, parts: int) -> None:
    task = lookup(name)
    assert task is not None and task.normalise(np.array([-2.8, -0.8, 1.2])) == pytest.approx([0.0, 50.0, 100.0])
    env = make_env(task)
    first, _ = env.reset(seed=3)
    assert np.array_equal(env.reset(seed=3)[0], first) and env.observation_space.contains(first)
    flags = [env.step(np.zeros(2, np.float32))[2:4] for _ in range(fork.LIMIT * parts)]
    assert flags == [(False, False)] * (len(flags) - 1) + [(False, True)]
    shown = gym.make("offrl.envs.fork:offrl/PointFork-v0", render_mode="rgb_array", parts=parts)
    shown.reset(seed=0)
    picture = shown.render()
    assert (
        isinstance(picture, np.ndarray)
        and picture.shape == (220, 260, 3)
        and len(np.unique(picture.reshape(-1, 3), axis=0)) == 4
    )
