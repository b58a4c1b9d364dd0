"""Known terminations and rewards: what the real environments say, and which dataset they are found for."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry
from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.transforms.columns import normalize_observations
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task, lookup
from offrl.world_models.known import environments as known
from offrl.world_models.known import rewards, terminations
from tests.support.known_functions import disagreement, raw_transitions

SHARED = Path(os.environ.get("OFFRL_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
COUNT = 5_000  # states in each comparison
TERMINATIONS, REWARDS = registry.names("termination"), registry.names("reward")
Place = Callable[[Any, np.random.Generator], None]


def coordinate(index: int, *bounds: float, spread: float = 0.05, speed: float = 0.5) -> Place:
    """Puts one number of the position near one of the bounds, and stirs the velocities."""

    def place(env: Any, rng: np.random.Generator) -> None:
        env.data.qpos[:] = env.init_qpos
        env.data.qpos[index] = rng.choice(bounds) + rng.uniform(-spread, spread)
        env.data.qvel[:] = speed * rng.standard_normal(env.model.nv)

    return place


def state(low: list[float], high: list[float]) -> Place:
    """Gives a classic environment a state from a box."""

    def place(env: Any, rng: np.random.Generator) -> None:
        env.state = rng.uniform(low, high)
        env.steps_beyond_terminated = None

    return place


def anywhere(env: Any, rng: np.random.Generator) -> None:
    env.data.qpos[:] = env.init_qpos + 0.2 * rng.standard_normal(env.model.nq)
    env.data.qvel[:] = 3.0 * rng.standard_normal(env.model.nv)


def rolled(env: Any, rng: np.random.Generator) -> None:
    """A cheetah after many somersaults."""
    anywhere(env, rng)
    env.data.qpos[2] += 150.0 * rng.uniform(-1, 1)


def hanging(env: Any, rng: np.random.Generator) -> None:
    """A double pendulum whose tip is near a height of 1."""
    first = rng.uniform(-0.8, 0.8)
    second = (
        math.acos(np.clip((1.0 + rng.uniform(-0.1, 0.1)) / 0.6 - math.cos(first), -1, 1)) * rng.choice([-1, 1]) - first
    )
    env.data.qpos[:], env.data.qvel[:] = (rng.uniform(-0.5, 0.5), first, second), rng.standard_normal(3)


def held(env: Any, rng: np.random.Generator) -> None:
    """A pen near the place and direction that are wanted, or near the height at which it counts as dropped."""
    env.model.body_quat[env.target_obj_body_id] = [math.sqrt(0.5), 0.0, math.sqrt(0.5), 0.0]
    env.data.qpos[-6:] = 0.02 * rng.standard_normal(6)
    env.data.qpos[-3:] = 0.4 * rng.standard_normal(3)
    env.data.qpos[-6] = rng.choice([0.0, 0.175]) + rng.uniform(-0.05, 0.05)  # downwards from a height of 0.25
    env.data.qvel[-6:] = 0.0


@functools.cache
def visited(
    env_id: str, place: Place, count: int = COUNT, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Transitions of the real environment: (observations, actions, next observations, ends, rewards), float64 where it
    has float64.

    Half of the steps go on from where the last one led, the others start where `place` puts the state. The first 200
    take the environment's own step, the rest of a robot's one step of its physics: its rule is the same, and a
    humanoid's 10,000 take 2 s, not 10."""
    env = make_env(Task(env_id, env_id=env_id, env_kwargs=kwargs))
    env.reset(seed=0)
    env.action_space.seed(0)
    base: Any = env.unwrapped
    stepped: Any = env  # below the wrappers that would stop after an end
    while isinstance(stepped, (gym.wrappers.TimeLimit, gym.wrappers.OrderEnforcing)):
        stepped = stepped.env
    rng = np.random.default_rng(0)
    discrete = isinstance(env.action_space, gym.spaces.Discrete)
    if discrete:
        actions = rng.integers(env.action_space.n, size=count)
    else:
        box: Any = env.action_space
        actions = rng.uniform(box.low, box.high, (count, *box.shape)).astype(box.dtype)
    own, rows, ended, before = getattr(base, "frame_skip", 1), [], True, None
    for i, action in enumerate(actions):
        if ended or i % 2:
            place(base, rng)
            if hasattr(base, "model"):
                base.set_state(base.data.qpos.copy(), base.data.qvel.copy())
            before = None
        if before is None:
            before = observe(stepped, base)
        if hasattr(base, "frame_skip"):
            base.frame_skip = own if i < 200 else 1
        after, reward, ended, _, _ = stepped.step(int(action) if discrete else action)
        rows.append((before, after, ended, reward))
        before = after
    env.close()
    first, then, ends, pay = (torch.from_numpy(np.array(c)) for c in zip(*rows, strict=True))
    return first, torch.from_numpy(actions)[..., None] if discrete else torch.from_numpy(actions), then, ends, pay


def observe(stepped: Any, base: Any) -> np.ndarray:
    """What the environment shows of the state that was put into it."""
    for name in ("_get_obs", "_get_ob"):
        if hasattr(base, name):
            shown = getattr(base, name)()
            return stepped.observation(shown) if hasattr(stepped, "observation") else shown
    return np.array(base.state, np.float32)


CASES: dict[str, list[tuple[str, Place, dict[str, Any]]]] = {
    "hopper": [("Hopper-v4", coordinate(1, 0.7), {}), ("Hopper-v5", coordinate(2, -0.2, 0.2), {})],
    "walker2d": [("Walker2d-v4", coordinate(1, 0.8, 2.0), {}), ("Walker2d-v5", coordinate(2, -1.0, 1.0), {})],
    "ant": [(f"{n}", coordinate(2, 0.2, 1.0), {}) for n in ("Ant-v4", "Ant-v5", "offrl.envs.compat:offrl/D4RL-Ant-v0")],
    "humanoid": [("Humanoid-v4", coordinate(2, 1.0, 2.0), {}), ("Humanoid-v5", coordinate(2, 1.0, 2.0), {})],
    "inverted_pendulum": [(f"InvertedPendulum-{v}", coordinate(1, -0.2, 0.2), {}) for v in ("v4", "v5")],
    "cartpole": [("CartPole-v1", state([-2.5, -1, -0.25, -1], [2.5, 1, 0.25, 1]), {})],
    "mountain_car": [("MountainCar-v0", state([0.4, -0.07], [0.6, 0.07]), {})],
    "mountain_car_continuous": [("MountainCarContinuous-v0", state([0.35, -0.07], [0.6, 0.07]), {})],
    "acrobot": [("Acrobot-v1", state([-math.pi, -math.pi, -4, -9], [math.pi, math.pi, 4, 9]), {})],
    "pen": [("offrl.envs.compat:offrl/D4RL-Adroit-v0", held, {"hand": "pen"})],
}
TWINS = ("Ant-v4", "Humanoid-v4", "InvertedPendulum-v4")  # that end as their v5 does
ENDING = [
    pytest.param(name, *case, id=case[0].rpartition("/")[2], marks=pytest.mark.nightly if case[0] in TWINS else ())
    for name, cases in CASES.items()
    for case in cases
]
NEVER: list[tuple[str, str, Place, int]] = [  # function, environment, states, how many
    ("halfcheetah", "HalfCheetah-v4", anywhere, COUNT // 2),
    ("halfcheetah", "HalfCheetah-v5", rolled, COUNT // 2),
    ("pendulum", "Pendulum-v1", state([-math.pi, -8], [math.pi, 8]), COUNT),
    ("swimmer", "Swimmer-v5", anywhere, COUNT // 10),
    ("humanoid_standup", "HumanoidStandup-v5", anywhere, COUNT // 50),
    ("reacher", "Reacher-v4", anywhere, COUNT // 10),
    ("reacher", "Reacher-v5", anywhere, COUNT // 10),
    ("pusher", "Pusher-v5", anywhere, COUNT // 10),
]


@pytest.mark.parametrize(("name", "env_id", "place", "kwargs"), ENDING)
def test_agrees_with_the_environment(name: str, env_id: str, place: Place, kwargs: dict[str, Any]) -> None:
    """On 10,000 states about the bounds, in the environment's precision and in the float32 in which data are kept."""
    if "hand" in kwargs:
        pytest.importorskip("gymnasium_robotics")
    count = COUNT // len(CASES[name])
    observations, actions, after, ends, _ = visited(env_id, place, count, **kwargs)
    assert len(ends) == count and count / 10 < int(ends.sum()) < count * 0.9
    assert terminations.find(Task(env_id, env_id=env_id, env_kwargs=kwargs, observation_dim=after.shape[-1])) == name
    for dtype in (torch.float64, torch.float32):
        seen = TERMINATIONS[name](observations.to(dtype), actions.to(dtype), after.to(dtype))
        assert seen.dtype == torch.bool and seen.shape == ends.shape
        assert int((seen != ends).sum()) == 0


@pytest.mark.parametrize(("name", "env_id", "place", "count"), NEVER)
def test_agrees_with_an_environment_that_never_ends(name: str, env_id: str, place: Place, count: int) -> None:
    observations, actions, after, ends, _ = visited(env_id, place, count)
    assert terminations.find(env_id) == name and not ends.any()
    assert not TERMINATIONS[name](observations, actions, after).any()
    if place is rolled:
        assert int((after[:, 1].abs() > 100).sum()) > count / 4  # beyond the bound of the other numbers


@pytest.mark.parametrize("version", ["v4", "v5"])
def test_double_pendulum_agrees_but_within_a_hair_of_its_bound(version: str) -> None:
    observations, actions, after, ends, _ = visited(f"InvertedDoublePendulum-{version}", hanging, COUNT)
    seen = terminations.inverted_double_pendulum(observations, actions, after)
    assert 1000 < int(ends.sum()) < len(ends) - 1000
    height = 0.6 * after[:, 3] + 0.6 * (after[:, 3] * after[:, 4] - after[:, 1] * after[:, 2])
    hair = (height - 1.0).abs() < 1e-3
    assert torch.equal(seen[~hair], ends[~hair]) and int((seen != ends).sum()) <= 5
    assert terminations.find(f"InvertedDoublePendulum-{version}") == "inverted_double_pendulum"


def test_neorl2_hopper_is_the_hopper_between_its_position_and_the_friction() -> None:
    settings = {"exclude_current_positions_from_observation": False}
    observations, actions, after, ends, _ = visited("Hopper-v5", coordinate(1, 0.7), 1000, **settings)
    friction = torch.full((1000, 1), 2.0, dtype=torch.float64)
    far = after + 500.0 * torch.eye(12, dtype=torch.float64)[0]  # a long way down the track
    seen = terminations.random_friction_hopper(
        torch.cat([observations, friction], 1), actions, torch.cat([far, friction], 1)
    )
    assert ends.any() and torch.equal(seen, ends)


def test_bounds() -> None:
    """What no real state shows: numbers that a model made up."""

    def ends(name: str, size: int, **entries: float) -> bool:
        values = torch.zeros(size)
        for key, value in entries.items():
            values[int(key[1:])] = value
        return bool(TERMINATIONS[name](torch.zeros(size), torch.zeros(1), values))

    nan, inf = math.nan, math.inf
    assert [ends("halfcheetah", 17, _16=v) for v in (99.9, 100, -100, inf, nan)] == [False, True, True, True, True]
    assert [ends("halfcheetah", 17, _1=v) for v in (1e4, inf, nan)] == [False, True, True]
    assert [ends("hopper", 11, _0=v) for v in (0.69, 0.71, 500, inf, nan)] == [True, False, False, True, True]
    assert [ends("hopper", 11, _0=1.2, _10=v) for v in (99, 100, -100, nan)] == [False, True, True, True]
    assert [ends("hopper", 11, _0=1.2, _1=v) for v in (-0.21, -0.19, 0.19, 0.21)] == [True, False, False, True]
    assert [ends("walker2d", 17, _0=1.2, _16=v) for v in (99, -100, nan)] == [False, True, True]
    assert [ends("ant", 27, _0=v) for v in (0.19, 0.21, 1.0, 1.01, nan)] == [True, False, False, True, True]
    assert [ends("ant", 27, _0=0.5, _26=v) for v in (1e9, inf, nan)] == [False, True, True]
    assert [ends("humanoid", 376, _0=v, _9=w) for v, w in ((0.99, 0), (1.5, 1e9), (2.01, 0), (1.5, nan))] == [
        True,
        False,
        True,
        True,
    ]
    assert [ends("inverted_pendulum", 4, _1=v) for v in (0.19, 0.21, nan)] == [False, True, True]
    assert [ends("rocket_recovery", 7, _1=v) for v in (-0.06, -0.05, 0.05, 0.06)] == [False, True, True, False]
    assert [ends("pen", 45, _26=v) for v in (0.074, 0.076)] == [True, False]


def everything(observations: Tensor, actions: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    ended = torch.stack([f(observations, actions, after) for f in TERMINATIONS.values()])
    return ended, torch.stack([f(observations, actions, after) for f in REWARDS.values()])


@pytest.mark.parametrize("mode", ["vmap", "compile", "vmap and compile"])
def test_pure_tensor_code(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    arguments = [torch.randn(3, 50, size, generator=generator) for size in (45, 24, 45)]
    arguments[2][0, :, 0] = 1.3 + 0.0 * arguments[2][0, :, 0]
    want = everything(*arguments)
    function: Any = torch.vmap(everything, out_dims=1) if "vmap" in mode else everything
    if "compile" in mode:
        function = torch.compile(function, backend="eager", fullgraph=True, dynamic=False)
    ended, paid = function(*arguments)
    assert torch.equal(ended, want[0]) and ended.any() and not ended.all()
    torch.testing.assert_close(paid, want[1])


FOUND = {
    "Hopper-v2": "hopper",
    "Hopper-v3": "hopper",
    "Hopper-v4": "hopper",
    "Hopper-v5": "hopper",
    "gymnasium:Walker2d-v4": "walker2d",
    "hopper-medium-v2": "hopper",
    "hopper-expert-v0": "hopper",
    "walker2d-medium-replay-v2": "walker2d",
    "ant-random-v2": "ant",
    "halfcheetah-full-replay-v2": "halfcheetah",
    "pen-cloned-v1": "pen",
    "door-human-v1": "door",
    "hammer-expert-v1": "hammer",
    "relocate-cloned-v1": "relocate",
    "maze2d-umaze-v1": "maze2d",
    "maze2d-large-dense-v1": "maze2d",
    "mujoco/hopper/expert-v0": "hopper",
    "mujoco/inverteddoublependulum/medium-v0": "inverted_double_pendulum",
    "mujoco/halfcheetah/simple-v0": "halfcheetah",
    "mujoco/humanoidstandup/simple-v0": "humanoid_standup",
    "RandomFrictionHopper": "random_friction_hopper",
    "Pipeline": "never",
    "RocketRecovery": "rocket_recovery",
    "DMSD": "never",
    "Fusion": "never",
    "PointMaze_UMaze-v3": "never",
    "AntMaze_Large-v4": "never",
    "FetchReach-v4": "never",
    "AdroitHandDoor-v1": "door",
    "CartPole-v0": "cartpole",
    "Pendulum-v1": "pendulum",
}
UNKNOWN = (
    "Hopper-v6",
    "Hopper",
    "hopper",
    "ant",
    "never",
    "mine:Hopper-v4",
    "antmaze-umaze-v2",
    "antmaze-large-diverse-v2",
    "kitchen-mixed-v0",
    "AdroitHandPen-v1",
    "FrankaKitchen-v1",
    "LunarLander-v3",
    "BipedalWalker-v3",
    "minigrid-fourrooms-v0",
    "Simglucose",
    "my data.hdf5",
    "SafetyHalfCheetah",
    "phys2d/CartPole-v1",
    "ALE/Pong-v5",
    "pointmaze-medium-navigate-v0",
    "dm_control/hopper-hop-v0",
    "",
)


def test_found_by_name() -> None:
    assert {name: terminations.find(name) for name in FOUND} == FOUND
    assert {name: terminations.find(name) for name in UNKNOWN} == dict.fromkeys(UNKNOWN)
    assert terminations.find(None) is None
    assert set(FOUND.values()) <= set(TERMINATIONS)
    names = {f.termination for f in known.FAMILIES} | {f.reward for f in known.FAMILIES if f.reward}
    assert names <= set(TERMINATIONS) | set(REWARDS)


def test_every_d4rl_name_is_its_robots() -> None:
    for name in registry.names("task_names")["d4rl"]():
        robot = name.partition("-")[0]
        assert terminations.find(lookup(name)) == (
            None if robot in ("antmaze", "kitchen", "minigrid", "flow", "carla", "bullet") else robot
        )


MINARI = Task("mujoco/hopper/expert-v0", env_id="Hopper-v5")
SETTINGS: list[tuple[dict[str, Any], str | None]] = [
    ({}, "hopper"),
    ({"healthy_reward": 2.0, "render_mode": "rgb_array", "reset_noise_scale": 0.1}, "hopper"),
    (
        {"healthy_z_range": [0.7, math.inf], "healthy_angle_range": (-0.2, 0.2), "terminate_when_unhealthy": True},
        "hopper",
    ),
    ({"healthy_z_range": [0.5, math.inf]}, None),
    ({"terminate_when_unhealthy": False}, "never"),
    ({"terminate_when_unhealthy": False, "healthy_z_range": [0.5, 9]}, "never"),
    ({"exclude_current_positions_from_observation": False}, None),
    ({"exclude_current_positions_from_observation": True, "xml_file": "hopper.xml"}, "hopper"),
    ({"xml_file": "/home/me/hopper.xml"}, None),
    ({"something_new": 1}, None),
]


@pytest.mark.parametrize(("settings", "name"), SETTINGS)
def test_settings_of_the_environment(settings: dict[str, Any], name: str | None) -> None:
    assert terminations.find(replace(MINARI, env_kwargs=settings)) == name


def test_what_does_not_fit_has_no_function() -> None:
    spec = DataSpec((11,), 3, task=lookup("hopper-medium-v2"))
    assert terminations.find(spec) == "hopper"
    assert terminations.find(replace(spec, task=MINARI)) == "hopper"
    for other in (
        {"observation_shape": (12,)},
        {"observation_shape": (4, 11)},
        {"action_dim": 4},
        {"discrete": True},
        {"task": None},
    ):
        assert terminations.find(replace(spec, **other)) is None
    note = "the recorded wrappers {} are left out"
    for wrapper, name in (
        ("NormalizeObservation", None),
        ("ClipAction, TransformObservation", None),
        ("FlattenObservation, ClipAction", "hopper"),
    ):
        assert terminations.find(replace(MINARI, note=note.format(wrapper))) == name
    assert terminations.find(replace(MINARI, env_factory=lambda: None)) is None
    assert terminations.find(replace(MINARI, name="Hopper-v4", env_id=None)) is None
    for size, name in ((27, "ant"), (105, "ant"), (29, None), (107, None), (113, None)):
        assert terminations.find(DataSpec((size,), 8, task=Task("a", env_id="Ant-v5"))) == name
    pole = DataSpec((4,), 1, True, 2, task=Task("c", env_id="CartPole-v1"))
    assert terminations.find(pole) == "cartpole" and known.find(pole, "reward") == "cartpole"
    assert (
        terminations.find(replace(pole, num_actions=3)) is None
        and terminations.find(replace(pole, discrete=False)) is None
    )
    maze = Task("m", env_id="PointMaze_UMaze-v3", env_kwargs={"continuing_task": False, "reward_type": "sparse"})
    assert terminations.find(maze) is None
    assert terminations.find(replace(maze, env_kwargs={"continuing_task": True, "maze_map": [[1]]})) == "never"


def test_a_users_own_function_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("termination", "reward"):
        registry.names(kind)
        monkeypatch.setitem(registry._table, kind, dict(registry._table[kind]))

    def low(observations: Tensor, actions: Tensor, after: Tensor) -> Tensor:
        return after[..., 0] < 0.0

    for name in ("Hopper-v5", "my-data", "mine/Robot-v0"):
        registry.register("termination", name)(low)
    registry.register("reward", "Hopper-v5")(low)
    assert terminations.find(MINARI) == "Hopper-v5" and terminations.find(lookup("hopper-medium-v2")) == "hopper"
    assert known.find(MINARI, "reward") == "Hopper-v5"
    assert terminations.find(DataSpec((3,), 1, name="my-data")) == "my-data"
    assert terminations.find("mine.package:mine/Robot-v0") == "mine/Robot-v0"


def test_unknown_names_are_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown termination function 'hoper'. Did you mean 'hopper'\?"):
        registry.get("termination", "hoper")
    with pytest.raises(UserError, match=r"unknown reward function 'pendulun'. Did you mean 'pendulum'\?"):
        registry.get("reward", "pendulun")


PAID: list[tuple[str, str, Place, dict[str, Any]]] = [
    ("pendulum", *NEVER[2][1:3], {}),
    *[(name, *CASES[name][0]) for name in ("cartpole", "mountain_car", "mountain_car_continuous", "acrobot", "pen")],
    ("inverted_pendulum_v4", *CASES["inverted_pendulum"][0]),
    ("inverted_pendulum", *CASES["inverted_pendulum"][1]),
    ("reacher_v4", *NEVER[5][1:3], {}),
    ("reacher", *NEVER[6][1:3], {}),
    ("pusher", *NEVER[7][1:3], {}),
]


@pytest.mark.parametrize(("name", "env_id", "place", "kwargs"), PAID, ids=[case[0] for case in PAID])
def test_rewards_are_the_environments(name: str, env_id: str, place: Place, kwargs: dict[str, Any]) -> None:
    if name == "pen":
        pytest.importorskip("gymnasium_robotics")
    ends = name.removesuffix("_v4")
    count = COUNT // len(CASES[ends]) if ends in CASES else next(c for _, e, _, c in NEVER if e == env_id)
    observations, actions, after, _, paid = visited(env_id, place, count, **kwargs)
    assert known.find(Task(env_id, env_id=env_id, env_kwargs=kwargs), "reward") == name
    given = REWARDS[name](observations.double(), actions.double(), after.double())
    assert given.shape == paid.shape
    torch.testing.assert_close(given, paid.double(), atol=1e-5, rtol=0)
    if name == "pen":
        # near the place and the direction
        assert min(int((paid > 40).sum()), int(((paid > 5) & (paid < 20)).sum())) > 20


def test_pusher_v4_is_paid_for_what_was_before_the_step() -> None:
    """MuJoCo 3 cannot make it. Finger at (0, 0, 0), object at (0, 3, 4), goal at (0, 3, 16); action (1, 2, 0...)."""
    state = torch.zeros(23)
    state[17:20], state[20:23] = torch.tensor([0.0, 3.0, 4.0]), torch.tensor([0.0, 3.0, 16.0])
    action = torch.tensor([1.0, 2.0, 0, 0, 0, 0, 0])
    assert float(rewards.pusher_v4(state, action, torch.zeros(23))) == pytest.approx(-12 - 0.5 * 5 - 0.1 * 5)
    assert known.find("Pusher-v4", "reward") == "pusher_v4" and known.find("Pusher-v5", "reward") == "pusher"


def test_rewards_that_are_not_known() -> None:
    for name in (
        "HalfCheetah-v4",
        "hopper-medium-v2",
        "Swimmer-v5",
        "InvertedDoublePendulum-v5",
        "maze2d-umaze-v1",
        "door-human-v1",
        "none",
    ):
        assert known.find(name, "reward") is None
    reacher = Task("r", env_id="Reacher-v5")
    assert known.find(replace(reacher, env_kwargs={"reward_dist_weight": 2}), "reward") is None
    assert known.find(replace(reacher, note="the recorded wrappers NormalizeReward are left out"), "reward") is None
    assert terminations.find(replace(reacher, note="the recorded wrappers NormalizeReward are left out")) == "reacher"
    assert known.find(Task("c", env_id="CartPole-v1", env_kwargs={"sutton_barto_reward": True}), "reward") is None
    assert known.find(Task("p", env_id="Pendulum-v1", env_kwargs={"g": 9.81}), "reward") == "pendulum"


def largest_error(dataset: Dataset, name: str) -> float:
    """The largest difference between the function `name` and the recorded rewards, without the data's scale and
    shift.
    """
    rows = torch.nonzero(dataset.columns["successor_known"]).squeeze(-1)
    recorded = (dataset.columns["rewards"][rows] - dataset.spec.reward_shift) / dataset.spec.reward_scale
    return float((registry.get("reward", name)(*raw_transitions(dataset, rows)) - recorded).abs().max())


def test_compared_with_data_however_they_were_scaled() -> None:
    """Normalised observations, scaled actions and rewards are taken back to the environment's units."""
    observations, actions, after, ends, paid = visited(*CASES["mountain_car_continuous"][0][:2], COUNT)
    columns = {
        "observations": observations,
        "actions": actions,
        "rewards": paid,
        "terminations": ends,
        "next_observations": after,
    }
    arrays = {k: v.numpy() for k, v in columns.items()}
    arrays["terminations"][5] ^= True
    data = from_arrays(**arrays, env="MountainCarContinuous-v0", action_low=-2.0, action_high=3.0)
    assert torch.allclose(raw_transitions(data, torch.arange(9))[1], actions[:9], atol=1e-6)
    changed = normalize_observations(data)
    rewards_ = 2.0 * changed.columns["rewards"] + 1.0
    changed = replace(
        changed,
        columns={**changed.columns, "rewards": rewards_},
        spec=replace(changed.spec, reward_scale=2.0, reward_shift=1.0),
    )
    for dataset in (data, changed):
        assert terminations.find(dataset.spec) == known.find(dataset.spec, "reward") == "mountain_car_continuous"
        found = disagreement(dataset, "mountain_car_continuous", COUNT)
        assert (
            found.rows == COUNT
            and found.missed + found.invented == 1
            and found.ends == int(dataset.columns["terminations"].sum())
        )
        assert disagreement(dataset, "never", 1000).missed > 100
        assert largest_error(dataset, "mountain_car_continuous") < 1e-4
        assert largest_error(dataset, "mountain_car") > 1


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data are not here")
def test_real_data() -> None:
    hopper = load_dataset(DatasetConfig(name=str(SHARED / "d4rl" / "hopper_medium.hdf5")), quiet=True)
    assert terminations.find(hopper.spec) == "hopper" and known.find(hopper.spec, "reward") is None
    assert disagreement(hopper, "hopper", len(hopper))[1:] == (55, 0, 0)
    pendulum = load_dataset(DatasetConfig(name=str(SHARED / "d3rlpy" / "pendulum_random_v1.1.0.h5")), quiet=True)
    assert largest_error(pendulum, "pendulum") < 1e-4
