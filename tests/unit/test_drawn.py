"""The environments that NumPy draws: pictures and states are of the same episodes, and the data of the same rows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from offrl.data import load_dataset
from offrl.envs import drawn
from offrl.envs.drawn_worlds import PIXEL, X, Y
from offrl.tasks.environments import make_env
from offrl.tasks.task import lookup


def steps(name: str, seed: int, count: int = 30) -> list[tuple[Any, float, dict[str, Any]]]:
    """(observation, reward, info) of some steps with the actions of one seed."""
    env, draw = make_env(drawn.TASKS[name]), np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    result = [(observation, 0.0, info)]
    for _ in range(count):
        action = draw.uniform(-1.0, 1.0, env.action_space.shape or ()).astype(np.float32)
        observation, reward, _, _, info = env.step(action)
        result.append((observation, float(reward), info))
    return result


def middle(shares: np.ndarray) -> tuple[float, float]:
    """x and y of the centroid of a channel [32, 32] of a picture."""
    weights = shares.astype(np.float64) / shares.sum()
    return float((weights * X).sum()), float((weights * Y).sum())


@pytest.mark.parametrize("name", drawn.IDS)
def test_gymnasium_accepts_it(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of observations without bounds
        env = gym.make(drawn.IDS[name][0], render_mode="rgb_array")
        check_env(env.unwrapped)
    env.reset(seed=0)
    picture: Any = env.render()
    assert picture.shape == (256, 256, 3) and picture.dtype == np.uint8 and lookup(name) is drawn.TASKS[name]
    truncated, length = False, 0
    while not truncated:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        length += 1
        assert not terminated
    assert length == drawn.LIMIT


@pytest.mark.parametrize(
    ("pixels", "state"),
    [
        ("drawn-pendulum", "drawn-pendulum-state"),
        ("drawn-pendulum-distractor", "drawn-pendulum-distractor-state"),
        ("drawn-point-mass", "drawn-point-mass-state"),
        ("drawn-point-mass-dict", "drawn-point-mass-state"),
    ],
)
def test_a_seed_leads_through_the_same_states_however_observed(pixels: str, state: str) -> None:
    world = drawn.WORLDS[drawn.IDS[state][1]]
    for (picture, earned, info), (observed, reward, plain) in zip(steps(pixels, 3), steps(state, 3), strict=True):
        np.testing.assert_array_equal(info["state"], observed)
        np.testing.assert_array_equal(plain["state"], observed)
        assert earned == reward and info["success"] == plain["success"]
        if isinstance(picture, dict):
            np.testing.assert_array_equal(picture["state"], observed[2:4])
            picture = picture["pixels"]
        np.testing.assert_array_equal(picture, world.pictures(observed[None])[0])
    again = steps(pixels, 3)[-1][0]
    np.testing.assert_array_equal(again["pixels"] if isinstance(again, dict) else again, picture)
    other = steps(pixels, 4)[-1][0]
    assert not np.array_equal(other["pixels"] if isinstance(other, dict) else other, picture)


@pytest.mark.parametrize("world", ["pendulum", "point-mass"])
def test_a_picture_shows_positions_to_less_than_half_a_pixel(world: str) -> None:
    dynamics, draw = drawn.WORLDS[world], np.random.default_rng(0)
    observations = dynamics.observe(dynamics.start(draw, 200))
    pictures = dynamics.pictures(observations)
    assert pictures.dtype == np.uint8 and pictures.max() == 255
    if world == "pendulum":
        due = {0: 0.8 * observations[:, 1::-1]}
    else:
        due = {0: observations[:, :2], 1: observations[:, 4:]}
    for channel, positions in due.items():
        errors = [np.subtract(middle(p[..., channel]), at) for p, at in zip(pictures, positions, strict=True)]
        assert np.abs(errors).max() < 0.1 * PIXEL
    moving = observations + np.eye(observations.shape[1], dtype=np.float32)[2]  # faster
    np.testing.assert_array_equal(dynamics.pictures(moving), pictures)


def test_discs_swing_behind_the_pendulum_whatever_is_done() -> None:
    world, plain, draw = drawn.WORLDS["pendulum-distractor"], drawn.WORLDS["pendulum"], np.random.default_rng(0)
    first = states = world.start(draw, 100)
    alone = states[:, :2]
    for _ in range(20):
        actions = draw.uniform(-1.0, 1.0, (100, 1))
        (alone, due), (states, rewards) = plain.move(alone, actions), world.move(states, actions)
        np.testing.assert_array_equal(rewards, due)
    np.testing.assert_array_equal(states[:, :2], alone)
    rates = first[:, 8:]
    np.testing.assert_allclose(states[:, 2:8], first[:, 2:8] + 20 * rates)
    assert 0.1 <= rates.min() < 0.15 < 0.35 < rates.max() <= 0.4
    observations = world.observe(states)
    np.testing.assert_allclose(observations[:, 3:], 0.9 * np.sin(states[:, 2:8]), rtol=1e-5, atol=1e-6)
    both, one = world.pictures(observations), plain.pictures(plain.observe(alone))
    assert (both >= one).all() and (both[one > 128] == one[one > 128]).all()
    xs, ys = observations[:, 3:6], observations[:, 6:]
    for picture, x, y in zip(both, xs, ys, strict=True):
        if max(abs(x[1]), abs(y[1])) < 0.65:  # the green disc, which nothing hides, is seen entirely
            assert np.abs(np.subtract(middle(picture[..., 1]), (x[1], y[1]))).max() < 0.1 * PIXEL
        assert picture[..., 1].max() == 128


@pytest.mark.parametrize("world", drawn.WORLDS)
def test_the_controller_scores_100_and_uniform_actions_0(world: str) -> None:
    dynamics, task = drawn.WORLDS[world], drawn.TASKS[f"drawn-{world}-state"]
    for due, controlled in ((0.0, False), (100.0, True)):
        draw = np.random.default_rng(1)
        states, returns, reached = dynamics.start(draw, 400), np.zeros(400), np.zeros(400, bool)
        for _ in range(drawn.LIMIT):
            actions = draw.uniform(-1.0, 1.0, (400, dynamics.dims[1]))
            states, rewards = dynamics.move(
                states, dynamics.control(dynamics.observe(states)) if controlled else actions
            )
            returns, reached = returns + rewards, reached | dynamics.reached(states)
        assert float(task.normalise(returns.mean())) == pytest.approx(due, abs=3.0)
        assert reached.all() if controlled else reached.mean() < 0.3
        assert bool(dynamics.reached(dynamics.goals(states)).all())


@pytest.mark.parametrize("world", drawn.WORLDS)
def test_episodes_side_by_side_are_those_one_by_one(world: str) -> None:
    dynamics, draw = drawn.WORLDS[world], np.random.default_rng(0)
    states, actions = dynamics.start(draw, 5), draw.uniform(-1.0, 1.0, (5, dynamics.dims[1]))
    after, rewards = dynamics.move(states, actions)
    for e in range(5):
        alone, reward = dynamics.move(states[e : e + 1], actions[e : e + 1])
        np.testing.assert_allclose(alone[0], after[e], rtol=1e-12)
        assert float(reward[0]) == pytest.approx(float(rewards[e]), rel=1e-12)


def test_data_of_pictures_and_of_states_have_the_same_rows(tmp_path: Path) -> None:
    from bench.drawn import write

    write("point-mass", tmp_path, rows=450, seed=0)
    with np.load(tmp_path / "drawn-point-mass.npz") as file:
        pixels = dict(file)
    with np.load(tmp_path / "drawn-point-mass-state.npz") as file:
        states = dict(file)
    draw = drawn.WORLDS["point-mass"].pictures
    np.testing.assert_array_equal(pixels["observations"], draw(states["observations"]))
    np.testing.assert_array_equal(pixels["final_observations"], draw(states["final_observations"]))
    np.testing.assert_array_equal(pixels["info_states"], states["observations"])
    for name in ("actions", "rewards", "terminations", "truncations"):
        np.testing.assert_array_equal(pixels[name], states[name])
    read = load_dataset(str(tmp_path / "drawn-point-mass-state.npz"))
    assert (len(read), read.num_episodes, bool(read.complete.all())) == (500, 5, True)
    rewards, finals = states["rewards"].reshape(5, -1), states["final_observations"]
    distance = np.linalg.norm(finals[:, :2] - finals[:, 4:], axis=-1)
    np.testing.assert_allclose(rewards[:, -1], np.exp(-0.5 * (distance / 0.2) ** 2), rtol=1e-4)
    np.testing.assert_array_equal(drawn.generate("point-mass", 0, 450).columns["actions"], states["actions"])


def test_generated_data_are_of_mixed_quality() -> None:
    returns = {w: drawn.generate(w, 0, 20_000).columns["rewards"].reshape(-1, drawn.LIMIT).sum(1) for w in drawn.WORLDS}
    for world, values in returns.items():
        scores = np.asarray(drawn.TASKS[f"drawn-{world}-state"].normalise(values))
        assert np.mean(scores > 80) > 0.2 and np.mean(scores < 30) > 0.2, world
