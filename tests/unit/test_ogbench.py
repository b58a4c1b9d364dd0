"""OGBench's names, rewards and environments; goals of evaluations and of policies."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import yaml
from gymnasium import spaces

from offrl import registry
from offrl.algorithm import TrainState
from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.formats.minari import _observation_leaves
from offrl.data.formats.minari_episodes import Buffers
from offrl.data.memory import Memory
from offrl.envs import ogbench
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings import presets as experiments
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import EvalConfig
from offrl.settings.train import TrainConfig
from offrl.tasks.environments import make_env, resolve_task
from offrl.tasks.episodes import goal_of
from offrl.tasks.task import Task
from offrl.training.setup import make_algorithm
from tests.support.evaluation import evaluate

SHARED = Path(__file__).parents[3] / "shared" / "data" / "ogbench"
needs_package = pytest.mark.skipif(importlib.util.find_spec("ogbench") is None, reason="needs the extra `ogbench`")

# ------------------------------------------------------------------------------------------------------------ names


def test_names_and_tasks() -> None:
    task = ogbench.lookup("antmaze-large-stitch-v0")
    assert task is not None and task.scored_by == "success" and [s["task_id"] for s in task.starts] == [1, 2, 3, 4, 5]
    single = ogbench.lookup("cube-double-play-singletask-task2-v0")
    assert single is not None and single.starts == () and single.scored_by == "success"
    if importlib.util.find_spec("ogbench") is not None:
        assert task.env_id == "offrl.envs.ogbench_env:offrl/antmaze-large-v0"
        assert single.env_id == "offrl.envs.ogbench_env:offrl/cube-double-singletask-task2-v0"
    for name in (
        "antmaze-large-v0",
        "antmaze-large-stitch-v0-val",
        "antmaze-large-stitch",
        "antmaze-umaze-v2",
        "hopper-medium-v2",
    ):
        assert ogbench.lookup(name) is None


@needs_package
def test_every_data_set_of_the_suite_has_an_environment() -> None:
    import offrl.envs.ogbench_env  # noqa: F401 - registers them

    suite = yaml.safe_load((experiments.config_folder() / "suite" / "ogbench.yaml").read_text())
    for name in suite["datasets"]:
        for one in (name, name.replace("-v0", "-singletask-v0"), name.replace("-v0", "-singletask-task3-v0")):
            task = ogbench.lookup(one)
            assert task is not None and task.env_id is not None and task.env_id.rpartition(":")[2] in gym.registry, one


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "ogbench" else find(name, *a))
    monkeypatch.setenv("OGBENCH_DATASET_DIR", str(tmp_path))
    task = ogbench.lookup("pointmaze-medium-navigate-v0")
    assert task is not None and task.env_id is None and resolve_task(task, EvalConfig(), goals=True) is None
    with pytest.raises(UserError, match=r"pip install 'offrl\[ogbench\]'"):
        make_env(task)
    write(tmp_path, np.zeros((4, 2)))
    with pytest.raises(UserError, match=r"rewards of a single task .* pip install 'offrl\[ogbench\]'"):
        load_dataset("pointmaze-medium-navigate-singletask-task1-v0")


# ---------------------------------------------------------------------------------------------------------- rewards


def write(folder: Path, places: np.ndarray, ends: tuple[int, ...] = ()) -> None:
    """pointmaze-medium-navigate-v0.npz whose states are these, [R, 2]."""
    stop = np.zeros(len(places), bool)
    stop[[*ends, -1]] = True
    columns = {
        "observations": places.astype(np.float32),
        "actions": np.zeros((len(places), 2), np.float32),
        "terminals": stop,
    }
    np.savez(folder / "pointmaze-medium-navigate-v0.npz", **columns)


@needs_package
def test_rewards_of_a_single_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Task 1 of the medium maze ends in cell (6, 6), at x = y = 4 * 6 - 4; being there is to be within 1 of it."""
    monkeypatch.setenv("OGBENCH_DATASET_DIR", str(tmp_path))
    places = np.array([[0, 0], [20, 18.9], [20, 19.1], [20, 20], [0, 0], [19.2, 19.2], [19.4, 19.4], [0, 20]])
    write(tmp_path, places, ends=(3,))
    data = load_dataset("pointmaze-medium-navigate-singletask-task1-v0")
    there = np.linalg.norm(places - 20.0, axis=1) <= 1.0
    assert there.tolist() == [False, False, True, True, False, False, True, False]
    np.testing.assert_array_equal(data.columns["rewards"].numpy(), there - 1.0)
    np.testing.assert_array_equal(data.columns["terminations"].numpy(), there)
    assert data.columns["truncations"].tolist() == [False] * 7 + [True]  # an end is one or the other
    assert data.spec.task is not None and data.spec.task.starts == ()
    plain = load_dataset("pointmaze-medium-navigate-v0")
    assert not plain.columns["rewards"].any() and not plain.columns["terminations"].any()


@pytest.mark.slow
@needs_package
@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_sparse_rewards_are_minus_one_until_all_parts_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a puzzle's 9 buttons: one less for each that is wrong, and sparse -1; the environment's rewards are those of
    its data.
    """
    monkeypatch.setenv("OGBENCH_DATASET_DIR", str(tmp_path))
    plain, sparse = (f"puzzle-3x3-play{word}-singletask-task1-v0" for word in ("", "-sparse"))
    task = ogbench.lookup(sparse)
    assert task is not None and ogbench.lookup("puzzle-3x3-play-sparse-v0") is None
    assert task.env_id == "offrl.envs.ogbench_env:offrl/puzzle-3x3-singletask-task1-v0"
    steps = {}
    for name in (plain, sparse):
        found = ogbench.lookup(name)
        assert found is not None
        env = make_env(found)
        env.reset(seed=0)
        steps[name] = [float(env.step(env.action_space.sample())[1]) for _ in range(3)]
        goal = np.asarray(env.unwrapped._target_button_states)  # type: ignore[attr-defined]
        env.close()
    assert steps[plain][0] < -1.0 and steps[sparse] == [-1.0] * 3
    states = np.stack([1 - goal, goal, np.where(np.arange(9) == 4, 1 - goal, goal), 1 - goal])
    columns = {
        "observations": np.zeros((4, 55), np.float32),
        "actions": np.zeros((4, 5), np.float32),
        "terminals": np.arange(4) == 3,
    }
    np.savez(tmp_path / "puzzle-3x3-play-v0.npz", **columns, button_states=states.astype(np.int64))
    assert load_dataset(plain).columns["rewards"].tolist() == [-9.0, 0.0, -1.0, -9.0]
    assert load_dataset(sparse).columns["rewards"].tolist() == [-1.0, 0.0, -1.0, -1.0]
    assert load_dataset(sparse).columns["terminations"].tolist() == [False, True, False, False]


@needs_package
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data in {SHARED}")
def test_rewards_of_the_real_data_are_the_package_s(monkeypatch: pytest.MonkeyPatch) -> None:
    from ogbench.relabel_utils import relabel_dataset

    import offrl.envs.ogbench_env  # noqa: F401 - registers them

    monkeypatch.setenv("OGBENCH_DATASET_DIR", str(SHARED))
    name = "pointmaze-medium-navigate-singletask-task4-v0-val"
    data = load_dataset(name)
    with np.load(SHARED / "pointmaze-medium-navigate-v0-val.npz") as file:
        theirs: dict[str, Any] = {"qpos": file["qpos"] if "qpos" in file else file["observations"]}
    env = gym.make("pointmaze-medium-singletask-task4-v0")
    relabel_dataset("pointmaze-medium", env, theirs)
    np.testing.assert_array_equal(data.columns["rewards"].numpy(), theirs["rewards"])
    assert 0.0 < float((data.columns["rewards"] == 0.0).float().mean()) < 0.2


# ----------------------------------------------------------------------------------------------------- environments


@needs_package
def test_the_seed_of_a_reset_decides_the_episode() -> None:
    task = dataclasses.replace(ogbench.lookup("pointmaze-medium-navigate-v0"), name="x")  # type: ignore[type-var]
    one, two = make_env(task), make_env(task)

    def play(env: gym.Env, seed: int) -> np.ndarray:
        first, info = env.reset(seed=seed, options={"task_id": 2})
        after = env.step(np.array([1.0, 0.3], np.float32))[0]
        return np.concatenate([first, info["goal"], after])

    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    a = play(one, 7)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # NumPy's own generator is left alone
    np.random.seed(99)
    two.reset(seed=3, options={"task_id": 5})
    np.testing.assert_array_equal(play(two, 7), a)
    assert np.abs(play(one, 8) - a).max() > 1e-3
    start, goal = a[:2], a[2:4]
    # cells (6, 1)... in x, y, and noise
    assert np.abs(start - [0, 20]).max() <= 1.001 and np.abs(goal - [20, 0]).max() <= 1.001


class Told(gym.Env):
    """Ends after a step; the goal is the task's number, and success is to act it."""

    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Box(-9.0, 9.0, (1,))
    seen: list[Any] = []  # noqa: RUF012

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.task = (options or {}).get("task_id", 0)
        Told.seen.append(options)
        return np.zeros(2, np.float32), {"goal": np.array([self.task, 0.5])}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), -1.0, True, False, {"success": float(round(float(action[0])) == self.task)}


class Obeys:
    """Acts the goal's first number, but 0 in place of 3."""

    def start(self, episodes: int) -> Any:
        return None

    def set_goal(self, carry: Any, goals: np.ndarray | None) -> Any:
        assert goals is not None and goals.dtype == np.float32
        return goals

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        return np.where(carry[:, :1] == 3, 0.0, carry[:, :1]), carry


def test_starts_are_taken_in_turn_and_scores_are_success_rates() -> None:
    Told.seen.clear()
    starts = tuple({"task_id": k} for k in (1, 2, 3))
    task = Task("t", env_factory=Told, starts=starts, scored_by="success", ref_min=0.0, ref_max=1.0)
    found = evaluate([Obeys(), Obeys()], [0, 1], task, EvalConfig(episodes=7, parallel=2))
    assert Told.seen == [starts[e % 3] for _ in range(2) for e in range(7)]
    row = found.rows()[1]
    assert (
        row["success_by_task"] == "1 1 0"
        and row["success"] == pytest.approx(5 / 7)
        and row["score"] == pytest.approx(500 / 7)
    )
    assert found.by_task(0) == [1.0, 1.0, 0.0] and row["return_mean"] == -1.0
    few = evaluate([Obeys()], [0], task, EvalConfig(episodes=2))
    assert np.isnan(few.by_task(0)[2])
    assert task.score(np.zeros(2), None) is None  # an environment that says nothing of success gives no score


def test_goals_of_several_parts_are_joined_in_order() -> None:
    goal = {"kettle": np.array([3.0, 4.0]), "burner": np.array([1.0]), "light": {"b": 6.0, "a": 5.0}}
    assert goal_of({"desired_goal": goal, "observation": 0}, {}).tolist() == [1.0, 3.0, 4.0, 5.0, 6.0]  # type: ignore[union-attr]
    assert goal_of(np.zeros(3), {"goal": np.ones((2, 1))}).tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    assert goal_of({"observation": 0}, {"success": 1}) is None


# ------------------------------------------------------------------------------------------- gymnasium-robotics, Minari


def box(width: int) -> dict[str, Any]:
    return {"type": "Box", "shape": [width], "low": [-9.0] * width, "high": [9.0] * width, "dtype": "float64"}


def test_kitchen_like_goals_become_columns(tmp_path: Path) -> None:
    """A Dict of tasks inside a Dict of goals, as FrankaKitchen has it."""
    goals = {"type": "Dict", "subspaces": {"kettle": box(2), "burner": box(1)}}
    space = {"type": "Dict", "subspaces": {"observation": box(3), "achieved_goal": goals, "desired_goal": goals}}
    config = DatasetConfig(name="k", observation_keys=["observation"])
    leaves, found, keys = _observation_leaves(space, config, "k")
    assert keys == ("observation",) and [path for path, _ in leaves] == [("observation",)]
    assert [path for path, _ in found["achieved_goals"]] == [("achieved_goal", "burner"), ("achieved_goal", "kettle")]
    values = {
        ("observation",): np.arange(9.0).reshape(3, 3),
        ("achieved_goal", "kettle"): np.array([[1, 2], [3, 4], [5, 6.0]]),
        ("achieved_goal", "burner"): np.array([[7], [8], [9.0]]),
        ("desired_goal", "kettle"): np.array([[0, 0]] * 3),
        ("desired_goal", "burner"): np.array([[1]] * 3),
    }

    class Episode:
        name, steps = "episode_0", 2

        def where(self, column: str, leaf: tuple[str, ...] = ()) -> str:
            return column

        def read(self, column: str, leaf: tuple[str, ...] = ()) -> np.ndarray:
            return values[leaf] if column == "observations" else np.zeros(2)

    actions = {"type": "Box", "shape": [1]}
    buffers = Buffers(2, leaves, {}, 1, found, actions, Memory(float("inf"), tmp_path), "k", 1 << 20, {})
    buffers.add(Episode())
    columns = buffers.result().columns
    assert (
        columns["achieved_goals"].tolist() == [[7, 1, 2], [8, 3, 4]]
        and columns["desired_goals"].tolist() == [[1, 0, 0]] * 2
    )
    assert columns["observations"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(("name", "width"), [("maze2d-umaze-v1", 4), ("antmaze-umaze-v2", 29)])
def test_d4rl_s_mazes_tell_their_goal(name: str, width: int) -> None:
    """What is seen at the goal: as at the start, in another place."""
    task = registry.get("task", "d4rl")(name)
    assert task is not None
    env: Any = make_env(task)
    first, info = env.reset(seed=0)
    goal = goal_of(first, info)
    assert goal is not None and goal.shape == (width,)
    np.testing.assert_allclose(goal[:2], env.unwrapped.goal, rtol=1e-6)
    np.testing.assert_allclose(goal[2:], first[2:], rtol=1e-6)
    scored = resolve_task(task, EvalConfig(), goals=True)
    assert scored is not None and (scored.scored_by, scored.ref_min) == ("success", None)


def test_an_episode_towards_a_goal_ends_there() -> None:
    """PointMaze goes on after its goal unless it is told otherwise; reference scores are returns of episodes that
    do.
    """
    pytest.importorskip("gymnasium_robotics", reason="needs the extra `robotics`")
    keys = ("achieved_goal", "observation")
    way = ({"reset_cell": np.array([1, 1]), "goal_cell": np.array([1, 2])},)
    recorded = Task(
        "D4RL/pointmaze/umaze-v2",
        env_id="PointMaze_UMaze-v3",
        env_kwargs={"continuing_task": True, "reset_target": True},
        max_episode_steps=150,
        ref_min=1.0,
        ref_max=2.0,
        ref_label="Minari",
        observation_keys=keys,
        starts=way,
    )

    class Right:
        def start(self, episodes: int) -> None:
            return None

        def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
            assert observations.shape[1] == 6
            return np.tile(np.array([[1.0, 0.0]], np.float32), (len(observations), 1)), None

    lengths = {}
    for goals in (False, True):
        task = resolve_task(recorded, EvalConfig(), goals)
        assert task is not None
        with Evaluator(task, EvalConfig(episodes=1)) as evaluator:
            found = evaluator([Right()], [0])
        lengths[goals] = int(found.lengths[0, 0])
        assert found.successes is not None and found.successes[0, 0] == 1.0
        assert (found.scores is not None and found.scores[0, 0] == 100.0) == goals
    assert lengths[False] == 150 and lengths[True] < 100
    other = resolve_task(recorded, EvalConfig(env="FetchReach-v4"), goals=True)
    assert (
        other is not None and other.env_kwargs == {} and other.observation_keys == keys and other.scored_by == "success"
    )
    assert resolve_task(recorded, EvalConfig(env="none"), goals=True) is None


# --------------------------------------------------------------------------------------------------------- policies


def policy(goal_dim: int = 0, **spec: Any) -> TrainedPolicy:
    made = DataSpec((4,), 2, action_low=(-1.0, -1.0), action_high=(1.0, 1.0), name="mine", goal_dim=goal_dim, **spec)
    kind = registry.get("algo", "gcbc")
    algorithm = kind(kind.Config(hidden=[8], batch_size=4), made)
    state: TrainState = algorithm.init(0)
    return TrainedPolicy(algorithm, state, 0)


@pytest.mark.parametrize(
    ("goal_dim", "width", "like"), [(0, 4, "like an observation"), (3, 3, "like achieved_goals in the data")]
)
def test_what_a_policy_says_of_wrong_goals(goal_dim: int, width: int, like: str) -> None:
    one = policy(goal_dim)
    for goal, words in (
        (None, f"none was given.*goal=.*{width} numbers"),
        (np.zeros(width + 1), f"the goal has {width + 1} numbers.*takes {width}, {like}"),
        (np.full(width, np.nan), "NaN or infinity"),
    ):
        with pytest.raises(UserError, match=words) as error:
            one.act(np.zeros(4), goal=goal)
        assert "\n" not in str(error.value)
        one.reset()
    with pytest.raises(UserError, match="told none"):
        one.step(one.start(1), np.zeros((1, 4)), 0)


def test_a_policy_file_is_told_its_goal(tmp_path: Path) -> None:
    task = Task("mine", starts=({"task_id": 1},), scored_by="success")
    one = policy(3, task=task)
    one.save(tmp_path / "p.safetensors")
    other = TrainedPolicy.load(tmp_path / "p.safetensors")
    spec = other.algorithm.spec
    assert (
        spec.goal_dim == 3 and spec.task == task and DataSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    )
    here, near, far = np.ones(4), np.zeros(3), np.full(3, 9.0)
    first = other.act(here, goal=near)
    np.testing.assert_array_equal(first, one.act(here, goal=near))
    np.testing.assert_array_equal(other.act(here), first)  # it remembers
    assert np.abs(other.act(here, goal=far) - first).max() > 1e-6
    many = policy(3).act(np.stack([here, here]), goal=np.stack([near, far]))
    np.testing.assert_allclose(many[0], first, atol=1e-6)
    assert np.abs(many[1] - many[0]).max() > 1e-6


def test_goals_are_normalised_like_observations_where_they_are_some() -> None:
    """A goal of the data's mean is a zero for the network; the numbers of achieved_goals stay as they are."""
    normal = {"observation_mean": (1.0, 2.0, 3.0, 4.0), "observation_std": (2.0, 2.0, 2.0, 2.0)}
    one = policy(**normal)
    carry = one.set_goal(one.start(1), np.array([[3.0, 2.0, 3.0, 0.0]]))
    assert carry.tolist() == [[1.0, 0.0, 0.0, -2.0]]
    two = policy(2, **normal)
    assert torch.equal(two.set_goal(two.start(1), np.array([[3.0, 2.0]])), torch.tensor([[3.0, 2.0]]))


def test_observations_that_hold_the_goal_are_refused() -> None:
    keys = ("achieved_goal", "desired_goal", "observation")
    task = Task("m", env_id="AntMaze_UMaze-v4", observation_keys=keys)
    arrays = np.zeros((4, 3)), np.zeros((4, 1)), np.zeros(4)
    data = from_arrays(*arrays, action_low=-1.0, action_high=1.0, name="m", task=task)
    config = TrainConfig(algo=registry.get("algo", "gcbc").Config(hidden=[8]))
    with pytest.raises(
        UserError, match=r"of m hold the desired goal.*dataset\.observation_keys=\[achieved_goal,observation\]$"
    ):
        make_algorithm(config, data)
    apart = dataclasses.replace(task, observation_keys=("achieved_goal", "observation"))
    make_algorithm(config, dataclasses.replace(data, spec=dataclasses.replace(data.spec, task=apart)))
    # sees what the data show
    make_algorithm(dataclasses.replace(config, algo=registry.get("algo", "bc").Config(hidden=[8])), data)
