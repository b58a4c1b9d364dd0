"""The environments that cost: where they say so, and what is known of them by hand."""

from __future__ import annotations

import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from offrl.data import load_dataset
from offrl.envs import dosing, forbidden_disc, point_goal, velocity
from offrl.tasks.environments import make_env, quiet


@pytest.mark.parametrize("name", [dosing.ENV, forbidden_disc.ENV, point_goal.ENV])
def test_gymnasium_accepts_it(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(gym.make(name).unwrapped, skip_render_check=True)


def walk(places: list[tuple[float, float]]) -> tuple[int, float]:
    """(steps, cost) of full steps towards each place in turn."""
    env = gym.make(forbidden_disc.ENV).unwrapped
    env.reset(seed=0)
    env.position = np.array([-0.97, 0.0])
    steps, cost, over = 0, 0.0, False
    for place in places:
        while np.linalg.norm(env.position - place) > 0.1 and not over:
            observation, reward, over, _, info = env.step(10 * (np.array(place) - env.position))
            steps, cost = steps + 1, cost + info["cost"]
            assert reward == -1.0 and observation.shape == (2,) and over == info["success"]
    return steps, cost


def test_the_shortest_ways_to_the_goal() -> None:
    """Straight on: 1.8 in steps of 0.1, and from x = -0.97 those to -0.77, ..., 0.73 in the disc of radius 0.8. Around
    it: two tangents of 0.6 and an arc of 0.8 (pi - 2 acos(0.8)) = 1.484, less the goal's 0.2."""
    fewest = forbidden_disc.fewest_steps
    assert fewest(forbidden_disc.START, False) == 18 and fewest(forbidden_disc.START, True) == 25
    assert walk([(1.0, 0.0)]) == (18, 16.0)
    around = [(0.85 * np.cos(a), 0.85 * np.sin(a)) for a in np.linspace(2.4, 0.7, 18)]
    steps, cost = walk([*around, (1.0, 0.0)])
    assert cost == 0.0 and 25 <= steps <= 27


def test_the_data_of_the_disc_show_both_ways() -> None:
    data = load_dataset("forbidden-disc")
    costs, returns = data.episode_costs(), data.episode_returns()
    assert data.spec.costs and bool(data.columns["terminations"].any())
    assert 0.1 < float((costs == 0).double().mean()) < 0.4 and float(returns[costs == 0].max()) >= -34
    assert float(returns[costs > 10].mean()) > float(returns[costs == 0].mean()) + 5


def test_doses_by_hand() -> None:
    """0.8 * 1 + 0.5 * 0.9 = 1.25 without noise: 1 - 0.25^2, less 20 * 0.1 for the dose above 0.8."""
    dose = np.array([0.9])
    after = dosing.follow(np.ones(1), dose, np.zeros(1))
    assert after.tolist() == [pytest.approx(1.25)]
    assert dosing.reward(dose, after).tolist() == [pytest.approx(1 - 0.0625 - 2.0)]
    env = gym.make(dosing.ENV).unwrapped
    env.reset(seed=0)
    costs = []
    for concentration in (0.5, 2.0):
        env.concentration = np.array([concentration])
        costs.append(env.step(np.array([0.7]))[-1]["cost"])
    assert costs == [0.0, 1.0]


def test_the_data_show_no_harmful_dose() -> None:
    data = load_dataset("dosing")
    doses = 0.5 * (data.columns["actions"] + 1.0)
    assert float(doses.max()) <= dosing.LARGEST < dosing.REACTION and 1 < float(data.episode_costs().mean()) < 10


@pytest.mark.nightly
def test_the_best_treatment_is_what_it_says() -> None:
    """Played in the environment's own dynamics it earns and costs what the grid says; a limit lowers what it earns."""
    from bench.dosing import CONCENTRATIONS, optimum, planned

    gain, cost, doses = planned(0.5)
    draw = np.random.default_rng(0)
    x, gains, costs = draw.uniform(0, dosing.START, 20_000), np.zeros(20_000), np.zeros(20_000)
    for row in doses:
        dose = row[np.abs(x[:, None] - CONCENTRATIONS).argmin(1)]
        x = dosing.follow(x, dose, draw.standard_normal(len(x)))
        gains, costs = gains + dosing.reward(dose, x), costs + (x > dosing.TOXIC)
    assert gains.mean() == pytest.approx(gain, abs=0.1) and costs.mean() == pytest.approx(cost, abs=0.3)
    assert optimum(cost) == pytest.approx(gain, abs=0.1)


def test_speed_above_the_threshold_costs() -> None:
    """0 to 0.0065 in 0.008 s is 0.8125 > 0.7402; the threshold itself costs nothing."""

    class Speeds(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 1, (1,)), gym.spaces.Discrete(1)

        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, float]]:
            return 0, 0.0, False, False, speeds.pop()

    def costs(robot: str) -> list[float]:
        threshold, planar, *_ = velocity.ROBOTS[robot]
        env = velocity.VelocityCost(Speeds(), threshold, planar)
        return [env.step(0)[-1]["cost"] for _ in range(len(speeds))]

    speeds = [{"x_velocity": x} for x in (0.7402, -2.0, 0.0065 / 0.008)]
    assert costs("Hopper") == [1.0, 0.0, 0.0]
    speeds = [{"x_velocity": x, "y_velocity": 2.0} for x in (0.0, -2.0)]
    assert costs("Ant") == [1.0, 0.0]
    with quiet():
        env, plain = make_env(velocity.task_of("Hopper")), gym.make("Hopper-v4")
    for each in (env, plain):
        each.reset(seed=3)
    action = np.full(3, 0.5, np.float32)
    (*ours, info), (*theirs, _) = env.step(action), plain.step(action)
    assert np.array_equal(ours[0], theirs[0]) and ours[1:] == theirs[1:] and info["cost"] in (0.0, 1.0)


def test_files_of_dsrl_lead_to_their_robot() -> None:
    task = velocity.guess("SafetyHopperVelocityGymnasium-v1-250-2240")
    assert task is not None and task.env_id == "offrl.envs.velocity:offrl/HopperVelocity-v0"
    assert task.normalise(974.22405) == pytest.approx(50.0)
    assert velocity.guess("SafetyCarGoal1Gymnasium-v0") is None


def test_lidar_by_hand() -> None:
    """A thing 1.5 ahead: half of the range, on the edge of bin 0, so that it spills over wholly to bin 15."""
    seen = point_goal.lidar(np.array([[1.5, 0.0]]))
    assert seen[[0, 1, 15]].tolist() == [0.5, 0.0, 0.5] and seen.sum() == 1.0
    middle = 1.5 * np.array([np.cos(np.pi / 16), np.sin(np.pi / 16)])  # of bin 0
    assert point_goal.lidar(middle[None])[[0, 1, 15]] == pytest.approx([0.5, 0.25, 0.25])
    assert point_goal.lidar(np.array([[4.0, 0.0]])).sum() == 0.0


def test_goals_and_hazards() -> None:
    env = gym.make(point_goal.ENV).unwrapped
    env.reset(seed=0)
    things = np.concatenate([env.hazards, env.goal[None], env.data.qpos[None, :2]])
    gaps = np.linalg.norm(things[:, None] - things, axis=-1) + 9 * np.eye(len(things))
    assert gaps.min() >= 2 * point_goal.APART["hazard"] and np.abs(things).max() < point_goal.EXTENT
    env.hazards[0] = env.data.qpos[:2] + 0.1
    before = env.goal.copy()
    *_, info = env.step(np.zeros(2))
    assert info["cost"] == 1.0 and np.array_equal(env.goal, before)
    env.hazards[0] = 9.0
    env.goal = env.data.qpos[:2] + 0.1
    env.distance = env._distance()
    _, reward, terminated, _, info = env.step(np.zeros(2))
    assert reward == pytest.approx(1.0, abs=0.05) and info["cost"] == 0.0 and not terminated
    assert env._distance() > point_goal.GOAL
