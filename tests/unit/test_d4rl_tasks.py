"""D4RL's names: reference scores against spec E.1, the environments behind them, and the guesses made from file
names.
"""

from __future__ import annotations

import numpy as np
import pytest

from offrl.envs import d4rl
from offrl.evaluation.evaluator import Evaluator
from offrl.settings.evaluation import EvalConfig
from offrl.tasks import task as tasks
from offrl.tasks.environments import action_kind, flattener, make_env, time_limit

GYM = [
    (robot, f"{level}-{v}")
    for robot in ("halfcheetah", "hopper", "walker2d", "ant")
    for v in ("v0", "v1", "v2")
    for level in ("random", "medium", "expert", "medium-replay", "medium-expert")
]
GYM += [(r, f"full-replay-{v}") for r in ("halfcheetah", "hopper", "walker2d", "ant") for v in ("v1", "v2")]
GYM_SCORES = {
    "halfcheetah": (-280.178953, 12135.0),
    "hopper": (-20.272305, 3234.3),
    "walker2d": (1.629008, 4592.3),
    "ant": (-325.6, 3879.7),
}
ADROIT_SCORES = {
    "pen": (96.262799, 3076.8331017826877, 100),
    "hammer": (-274.856578, 12794.134825156867, 200),
    "door": (-56.512833, 2880.5693087298737, 200),
    "relocate": (-6.425911, 4233.877797728884, 200),
}
BULLET = {
    "halfcheetah": (-1275.766996, 2381.6725),
    "hopper": (20.058972, 1441.8059623430963),
    "ant": (373.705955, 2650.495),
    "walker2d": (16.523877, 1623.6476303317536),
}
ROWS = {f"{r}-{rest}": (*GYM_SCORES[r], 1000) for r, rest in GYM}
ROWS |= {
    f"{h}-{d}-{v}": s for h, s in ADROIT_SCORES.items() for d in ("human", "cloned", "expert") for v in ("v0", "v1")
}
ROWS |= {
    f"antmaze-{m}-{v}": (0.0, 1.0, 700 if "umaze" in m else 1000)
    for m in ("umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse")
    for v in ("v0", "v1", "v2")
}
ROWS |= {f"kitchen-{k}-v0": (0.0, 4.0, 280) for k in ("complete", "partial", "mixed")}
ROWS |= {
    f"bullet-{r}-{d}-v0": (*s, 1000)
    for r, s in BULLET.items()
    for d in ("random", "medium", "expert", "medium-expert", "medium-replay")
}
ROWS |= {
    "maze2d-open-v0": (0.01, 20.66, 150),
    "maze2d-umaze-v1": (23.85, 161.86, 300),
    "maze2d-medium-v1": (13.13, 277.39, 600),
    "maze2d-large-v1": (6.7, 273.99, 800),
    "maze2d-eval-umaze-v1": (36.63, 141.4, 300),
    "maze2d-eval-medium-v1": (13.07, 204.93, 600),
    "maze2d-eval-large-v1": (16.4, 302.22, 800),
    "maze2d-open-dense-v0": (11.17817, 27.166538620695782, 150),
    "maze2d-umaze-dense-v1": (68.537689, 193.66285642381482, 300),
    "maze2d-medium-dense-v1": (44.264742, 297.4552547777125, 600),
    "maze2d-large-dense-v1": (30.569041, 303.4857382709002, 800),
    "maze2d-umaze-v0": (0.94, 62.6, 150),
    "maze2d-medium-v0": (5.77, 85.14, 250),
    "maze2d-large-v0": (4.83, 191.99, 600),
    "minigrid-fourrooms-v0": (0.01442, 2.89685, 50),
    "minigrid-fourrooms-random-v0": (0.01442, 2.89685, 50),
    "flow-ring-random-v0": (-165.22, 24.42, None),
    "flow-ring-controller-v0": (-165.22, 24.42, None),
    "flow-merge-random-v0": (118.67993, 330.03179, None),
    "flow-merge-controller-v0": (118.67993, 330.03179, None),
    "carla-lane-v0": (-0.8503839912088142, 1023.5784385429523, 250),
    "carla-town-v0": (-114.81579500772153, 2440.1772022247314, 1000),
    "carla-town-full-v0": (-114.81579500772153, 2440.1772022247314, 1000),
    "bullet-maze2d-open-v0": (8.75, 64.15, 150),
    "bullet-maze2d-umaze-v0": (32.46, 153.99, 300),
    "bullet-maze2d-medium-v0": (14.87, 238.05, 600),
    "bullet-maze2d-large-v0": (1.82, 285.92, 800),
}


@pytest.mark.parametrize("name", ROWS)
def test_reference_scores_of_spec_e1(name: str) -> None:
    task = tasks.lookup(name)
    assert task is not None
    assert (task.ref_min, task.ref_max, task.max_episode_steps) == ROWS[name]
    assert task.ref_label == "D4RL" and task.note
    assert task.url is not None and task.url.startswith("https://rail.eecs.berkeley.edu/datasets/offline_rl/")


@pytest.mark.parametrize(
    ("name", "achieved", "score"),
    [
        ("hopper-medium-v2", 3234.3, 100.0),
        ("halfcheetah-medium-v2", 5000.0, 42.53),
        ("walker2d-medium-replay-v2", 3000.0, 65.31),
        ("antmaze-large-play-v2", 0.57, 57.0),
        ("kitchen-mixed-v0", 2.0, 50.0),
        ("pen-human-v1", 2000.0, 63.87),
        ("maze2d-large-v1", 100.0, 34.91),
    ],
)
def test_worked_scores(name: str, achieved: float, score: float) -> None:
    task = tasks.lookup(name)
    assert task is not None
    assert task.normalise(achieved) == pytest.approx(score, abs=0.005)
    assert task.normalise(np.array([achieved, task.ref_min]))[1] == 0.0


def test_unknown_names() -> None:
    assert tasks.lookup("hopper") is None and tasks.lookup("hopper-medium-v9") is None and tasks.lookup("") is None
    assert tasks.Task(name="own").normalise(1.0) is None


def test_guesses_from_file_names() -> None:
    hopper = d4rl.guess("hopper_medium_expert.hdf5")
    assert hopper is not None and hopper.name == "hopper-medium-expert" and hopper.url is None
    assert (hopper.env_id, hopper.ref_min, hopper.ref_max) == ("Hopper-v4", -20.272305, 3234.3)
    mixed = d4rl.guess("hopper_mixed")  # not the name of any D4RL dataset
    assert mixed is not None and mixed.name == "hopper-mixed" and mixed.ref_max == 3234.3
    ant = d4rl.guess("Ant_maze_hardest-maze_noisy_multistart_True_multigoal_False_sparse_fixed.hdf5")
    assert ant is not None and ant.env_kwargs == {"maze": "large"} and ant.ref_max == 1.0
    kitchen = d4rl.guess("mini_kitchen_microwave_kettle_light_slider-v0")
    assert kitchen is not None and kitchen.env_kwargs["tasks"] == [
        "microwave",
        "kettle",
        "light switch",
        "slide cabinet",
    ]
    maze = d4rl.guess("maze2d-large-dense-more-of-it")
    assert maze is not None and maze.env_kwargs == {"maze": "large", "dense": True} and maze.max_episode_steps == 800
    for other in ("pendulum_v1.1.0", "my_robot", "antenna-1", "maze", ""):
        assert d4rl.guess(other) is None, other


ENVIRONMENTS = [
    ("hopper-medium-v2", 11, 3, 1000),
    ("halfcheetah-medium-v2", 17, 6, 1000),
    ("walker2d-medium-v2", 17, 6, 1000),
    ("ant-medium-v2", 111, 8, 1000),
    ("maze2d-open-v0", 4, 2, 150),
    ("maze2d-umaze-v1", 4, 2, 300),
    ("maze2d-medium-dense-v1", 4, 2, 600),
    ("maze2d-eval-large-v1", 4, 2, 800),
    ("antmaze-umaze-v2", 29, 8, 700),
    ("antmaze-large-diverse-v2", 29, 8, 1000),
    ("antmaze-eval-medium-play-v0", 29, 8, 1000),
    ("kitchen-complete-v0", 60, 9, 280),
    ("pen-human-v1", 45, 24, 100),
    ("hammer-cloned-v1", 46, 26, 200),
    ("door-expert-v1", 39, 28, 200),
    ("relocate-human-v1", 39, 30, 200),
    ("door-human-longhorizon-v1", 39, 28, 300),
]


@pytest.mark.parametrize(("name", "observations", "actions", "limit"), ENVIRONMENTS)
def test_environments_have_the_dimensions_of_the_data(name: str, observations: int, actions: int, limit: int) -> None:
    task = tasks.lookup(name)
    assert task is not None
    if name.split("-")[0] in ("kitchen", "pen", "hammer", "door", "relocate"):
        pytest.importorskip("gymnasium_robotics")
    env = make_env(task)
    flatten, shape, _ = flattener(env)
    first = flatten(env.reset(seed=3)[0])
    again = flatten(env.reset(seed=3)[0])
    assert shape == (observations,) == first.shape == (task.observation_dim,)
    assert action_kind(env) == (False, actions) and task.action_dim == actions and time_limit(env) == limit
    assert np.array_equal(first, again) and not np.array_equal(first, flatten(env.reset(seed=4)[0]))
    assert np.all(env.action_space.low == -1.0) and np.all(env.action_space.high == 1.0)  # type: ignore[attr-defined]
    observation, reward, *_ = env.step(env.action_space.sample())
    assert flatten(observation).shape == shape and np.isfinite(reward)
    env.close()


class Uniform:
    """Actions drawn uniformly, as D4RL's reference policies for score 0."""

    def __init__(self, actions: int) -> None:
        self.actions = actions

    def start(self, episodes: int) -> np.random.Generator:
        return np.random.default_rng(0)

    def step(
        self, carry: np.random.Generator, observations: np.ndarray, t: int
    ) -> tuple[np.ndarray, np.random.Generator]:
        return carry.uniform(-1, 1, (len(observations), self.actions)), carry


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "episodes", "slack"),
    [
        ("maze2d-umaze-dense-v1", 100, 16.0),
        ("maze2d-large-dense-v1", 50, 30.0),
        ("halfcheetah-medium-v2", 5, 90.0),
        ("door-human-v1", 4, 6.0),
        ("hammer-human-v1", 4, 25.0),
        ("relocate-human-v1", 4, 9.0),
    ],
)
def test_random_actions_score_zero(name: str, episodes: int, slack: float) -> None:
    """D4RL's reference minimum is a random policy's return: here the rebuilt environments and rewards must agree with
    D4RL's.
    """
    task = tasks.lookup(name)
    assert task is not None and task.action_dim is not None and task.ref_min is not None
    if "offrl.envs.compat" in str(task.env_id):
        pytest.importorskip("gymnasium_robotics")
    with Evaluator(task, EvalConfig(episodes=episodes, parallel=25)) as evaluator:
        result = evaluator([Uniform(task.action_dim)], [0])
    assert abs(result.returns.mean() - task.ref_min) < slack, result.returns.mean()


def test_a_dropped_pen_ends_the_episode_as_in_d4rl() -> None:
    pytest.importorskip("gymnasium_robotics")
    task = tasks.lookup("pen-human-v1")
    assert task is not None
    env = make_env(task)
    env.reset(seed=0)
    assert not env.step(np.zeros(24, np.float32))[2]
    env.unwrapped.data.joint("OBJTx").qpos[0] += 0.3  # type: ignore[attr-defined]  # 30 cm down: out of the hand
    _, reward, terminated, _, _ = env.step(np.zeros(24, np.float32))
    assert terminated and reward < -4.0
    env.close()


def test_kitchen_observation_and_reward() -> None:
    robotics = pytest.importorskip("gymnasium_robotics")
    assert robotics is not None
    task = tasks.lookup("kitchen-complete-v0")
    assert task is not None
    env = make_env(task)
    observation = env.reset(seed=0)[0]
    data = env.unwrapped.data  # type: ignore[attr-defined]
    assert np.allclose(observation[9:30], data.qpos[9:], atol=0.02) and np.allclose(
        observation[:9], data.qpos[:9], atol=0.02
    )
    goal = np.zeros(30)
    goal[22], goal[19], goal[17:19], goal[23:30] = (
        -0.75,
        0.37,
        (-0.69, -0.05),
        (-0.23, 0.75, 1.62, 0.99, 0.0, 0.0, -0.06),
    )
    assert np.array_equal(observation[30:], goal)
    data.qpos[22] = -0.75  # the microwave's door open
    data.qpos[19] = 0.37  # the cabinet slid
    _, reward, terminated, _, info = env.step(np.zeros(9))
    assert reward == 2.0 and not terminated and info["success"] == 0.5
    assert env.step(np.zeros(9))[1] == 0.0  # each counts once
    env.close()


def test_maze2d_goal_walls_and_rewards() -> None:
    sparse, dense = tasks.lookup("maze2d-umaze-v1"), tasks.lookup("maze2d-umaze-dense-v1")
    assert sparse is not None and dense is not None
    env, other = make_env(sparse), make_env(dense)
    for made in (env, other):
        made.reset(seed=0)
        made.unwrapped.set_state(np.array([1.0, 1.4]), np.zeros(2))  # type: ignore[attr-defined]  # the goal is cell (1, 1)
    observation, reward, terminated, _, info = env.step(np.zeros(2))
    assert reward == 1.0 and info["success"] and not terminated and np.allclose(observation, [1.0, 1.4, 0, 0])
    assert other.step(np.zeros(2))[1] == pytest.approx(np.exp(-0.4))
    for _ in range(100):  # towards smaller x: the outer wall of row 0 stops the ball
        observation, *_ = env.step(np.array([-1.0, 0.0]))
    assert 0.38 < observation[0] < 0.42 and abs(observation[2]) < 0.05
    env.unwrapped.set_state(np.array([3.0, 1.0]), np.array([0.0, 9.0]))  # type: ignore[attr-defined]
    assert env.step(np.zeros(2))[0][3] <= 5.0  # D4RL clips velocities
    env.close()
    other.close()


def test_antmaze_coordinates_goal_and_end() -> None:
    task = tasks.lookup("antmaze-umaze-v2")
    assert task is not None
    env = make_env(task)
    starts, goals = [], []
    for seed in range(20):
        starts.append(env.reset(seed=seed)[0][:2])
        goals.append(env.unwrapped.goal.copy())  # type: ignore[attr-defined]
    assert np.abs(starts).max() <= 0.1 and np.std(starts) > 0.02  # the start cell is the origin
    low, high = np.min(goals, axis=0), np.max(goals, axis=0)
    # two cells down, up to 1.5 m of noise
    assert (low >= [0.0, 8.0]).all() and (high <= [1.5, 9.5]).all() and (high - low > 0.5).all()
    base = env.unwrapped
    qpos = base.data.qpos.copy()  # type: ignore[attr-defined]
    qpos[:2] = goals[-1]
    base.set_state(qpos, np.zeros(14))  # type: ignore[attr-defined]
    _, reward, terminated, _, info = env.step(np.zeros(8))
    assert reward == 1.0 and terminated and info["success"]
    assert base.model.opt.timestep == 0.02 and base.model.actuator_gear[0, 0] == 30.0  # type: ignore[attr-defined]
    env.close()
