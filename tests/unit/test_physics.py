"""The fast physics: Gymnasium's numbers in every bit, or not used at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.mujoco import ant_v4, half_cheetah_v4, hopper_v4, mujoco_env, walker2d_v4

from offrl.evaluation import robots
from offrl.evaluation.evaluator import Evaluator
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task, lookup

NAMES = ("Hopper", "HalfCheetah", "Walker2d", "Ant", "Swimmer", "InvertedPendulum")
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("Ant-v4", {"use_contact_forces": True, "terminate_when_unhealthy": False, "healthy_reward": 2}),
    ("Ant-v5", {"main_body": 2, "include_cfrc_ext_in_observation": False, "exclude_current_positions_from_observation": False}),
    ("Ant-v5", {"terminate_when_unhealthy": False, "frame_skip": 2, "contact_force_range": (-0.2, 0.3)}),
    ("Hopper-v4", {"terminate_when_unhealthy": False, "exclude_current_positions_from_observation": False}),
    ("Walker2d-v5", {"terminate_when_unhealthy": False, "healthy_angle_range": (-0.3, 0.1), "ctrl_cost_weight": np.float64(0.3)}),
    ("Swimmer-v4", {"exclude_current_positions_from_observation": False, "forward_reward_weight": 3}),
]


def task_of(env_id: str, **kwargs: Any) -> Task:
    return Task(env_id, env_id=env_id, env_kwargs=kwargs)


def compare(task: Task, count: int, steps: int, scale: float = 1.0) -> int:
    """Steps `count` environments both ways, each from a new start when its episode ends; gives the number of ends."""
    evaluator = Evaluator(task, EvalConfig())
    fast, flatten = evaluator.fast, evaluator.flatten
    assert fast is not None
    ours, theirs = ([make_env(task) for _ in range(count)] for _ in range(2))
    handles = [fast.handle(env) for env in ours]
    space, rng, ends = ours[0].action_space, np.random.default_rng(1), 0
    for k in range(count):
        assert ours[k].reset(seed=k)[0].tobytes() == theirs[k].reset(seed=k)[0].tobytes()
    for t in range(steps):
        actions = (scale * rng.uniform(-1, 1, (count, *space.shape))).astype(space.dtype)  # type: ignore[misc]
        got = fast.step(handles, actions, 0, [])
        for k in range(count):
            observation, reward, terminated, truncated, _ = theirs[k].step(actions[k])
            assert flatten(observation).tobytes() == got.observations[k].tobytes()
            assert np.float64(reward).tobytes() == got.rewards[k].tobytes()
            assert bool(terminated) == got.over[k] and not truncated
            if terminated or rng.random() < 0.01:
                ends += terminated
                seed = 1000 * t + k
                assert ours[k].reset(seed=seed)[0].tobytes() == theirs[k].reset(seed=seed)[0].tobytes()
    return ends


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("name", NAMES)
def test_equals_gymnasium_in_every_bit(name: str, version: int) -> None:
    ends = compare(task_of(f"{name}-v{version}"), 4, 150)
    assert (ends > 0) == (name in ("Hopper", "Walker2d", "InvertedPendulum", "Ant"))


@pytest.mark.parametrize(("env_id", "kwargs"), VARIANTS)
def test_settings_of_the_environment_are_heeded(env_id: str, kwargs: dict[str, Any]) -> None:
    compare(task_of(env_id, **kwargs), 2, 60)


@pytest.mark.parametrize("count", [1, 2, 9, 33])
@pytest.mark.parametrize("env_id", ["HalfCheetah-v4", "Ant-v5"])
def test_the_number_of_environments_changes_no_bit(env_id: str, count: int) -> None:
    compare(task_of(env_id), count, 6, scale=3.0)


class Drunk:
    """Random actions that depend on the step and the row; `before(t)` is called first."""

    def __init__(self, size: int, before: Callable[[int], None] = lambda t: None) -> None:
        self.size, self.before = size, before

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        self.before(t)
        return np.tanh(np.random.default_rng(t).normal(size=(len(observations), self.size)) + observations[:, :1]), None


@pytest.mark.parametrize("limit", [None, 8])
def test_whole_evaluations_agree_to_the_limit_on_steps(limit: int | None) -> None:
    ant = lookup("ant-medium-v2")
    assert ant is not None and ant.env_id is not None and "D4RL-Ant" in ant.env_id
    for task, size in ((ant, 8), (task_of("Hopper-v4"), 3)):
        make = functools.partial(make_env, Task("x", task.env_id, max_episode_steps=limit or 20))
        with Evaluator(Task("t", env_factory=make), EvalConfig(episodes=4, parallel=3)) as evaluator:
            assert evaluator.fast is not None
            fast = evaluator([Drunk(size)], [3])
            evaluator.fast = None
            plain = evaluator([Drunk(size)], [3])
        assert fast.returns.tobytes() == plain.returns.tobytes() and np.array_equal(fast.lengths, plain.lengths)
        assert fast.lengths.max() == (limit or 20) and fast.faults == 0


def test_a_time_limit_inside_counts() -> None:
    """A wrapper's own limit, which no specification mentions."""
    task = Task("t", env_factory=lambda: gym.wrappers.TimeLimit(half_cheetah_v4.HalfCheetahEnv(), 7))
    with Evaluator(task, EvalConfig(episodes=2)) as evaluator:
        assert evaluator.fast is not None and evaluator([Drunk(6)], [0]).lengths.tolist() == [[7, 7]]


def test_unstable_physics_end_the_episode(capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    results = []
    for fast in (True, False):
        with Evaluator(task_of("HalfCheetah-v4"), EvalConfig(episodes=3, max_steps=9)) as evaluator:
            assert evaluator.fast is not None
            if not fast:
                evaluator.fast = None

            def explode(t: int, evaluator: Evaluator = evaluator) -> None:
                if t == 4:
                    base: Any = evaluator.envs[1].unwrapped
                    base.data.qvel[:] = 1e12

            results.append(evaluator([Drunk(6, explode)], [0]))
        assert "physics became unstable (seed 0, episode 1, step 4)" in capsys.readouterr().err
    assert results[0].lengths.tolist() == [[9, 5, 9]] and results[0].faults == results[1].faults == 1
    assert results[0].returns.tobytes() == results[1].returns.tobytes()
    assert not list(tmp_path.iterdir())  # no MUJOCO_LOG.TXT


def refused(task: Task) -> bool:
    with Evaluator(task, EvalConfig(episodes=1)) as evaluator:
        return evaluator.fast is None


PATCHES: list[tuple[type, str, Callable[..., Any]]] = [
    (half_cheetah_v4.HalfCheetahEnv, "control_cost", lambda self, action: 0.1 * np.sum(np.square(action.astype(np.float64)))),
    (hopper_v4.HopperEnv, "_get_obs", lambda self: np.concatenate((self.data.qpos[1:], np.clip(self.data.qvel, -10, 11)))),
    (walker2d_v4.Walker2dEnv, "is_healthy", property(lambda self: 0.8 <= self.data.qpos[1] < 2.0)),
    (ant_v4.AntEnv, "get_body_com", lambda self, name: self.data.qpos),
    (mujoco_env.MujocoEnv, "do_simulation", lambda self, ctrl, n: self._step_mujoco_simulation(0.999 * ctrl, n)),
]


@pytest.mark.parametrize(("kind", "name", "other"), PATCHES, ids=[p[1] for p in PATCHES])
def test_an_environment_that_computes_something_else_is_stepped_by_itself(
    kind: Any, name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    env_id = {"hopper": "Hopper-v4", "walker2d": "Walker2d-v4", "ant": "Ant-v4"}.get(kind.__module__.split(".")[-1][:-3], "HalfCheetah-v4")
    assert not refused(task_of(env_id))
    monkeypatch.setattr(kind, name, other)
    assert refused(task_of(env_id))


def sides() -> list[tuple[str, str, int]]:
    """(environment, attribute, 0 or 1) of every finite limit."""
    found = []
    for env_id in ("Hopper-v4", "Hopper-v5", "Walker2d-v4", "Ant-v4"):
        base: Any = make_env(task_of(env_id)).unwrapped
        for name in ("_healthy_z_range", "_healthy_angle_range", "_healthy_state_range"):
            bounds = getattr(base, name, (np.inf, np.inf))
            found += [(env_id, name, side) for side in (0, 1) if np.isfinite(bounds[side])]
    return found


def test_each_limit_of_health_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison reaches states beyond every limit: with any one of them forgotten it refuses."""
    limits, original = sides(), robots.Robot.__init__
    assert len(limits) == 5 + 5 + 4 + 2
    for env_id, name, side in limits:

        def forgetful(self: Any, base: Any, version: int, name: str = name, side: int = side) -> None:
            original(self, base, version)
            bounds = list(getattr(self.p, name[1:]))
            bounds[side] = (-np.inf, np.inf)[side]
            setattr(self.p, name[1:], bounds)

        with monkeypatch.context() as patch:
            patch.setattr(robots.Robot, "__init__", forgetful)
            assert refused(task_of(env_id)), (env_id, name, side)


class Faster(hopper_v4.HopperEnv):
    pass


class Halved(gym.RewardWrapper):
    def reward(self, reward: Any) -> float:
        return 0.5 * float(reward)


def test_subclasses_and_strange_wrappers_are_not_trusted() -> None:
    assert refused(Task("t", env_factory=lambda: gym.wrappers.TimeLimit(Faster(), 50)))
    assert refused(Task("t", env_factory=lambda: Halved(make_env(task_of("Hopper-v4")))))
    assert refused(task_of("Humanoid-v4")) and refused(task_of("Pendulum-v1"))
    assert not refused(Task("t", env_factory=lambda: gym.make("Hopper-v4")))  # with Gymnasium's checker


def test_environments_that_differ_among_themselves() -> None:
    weights = iter([1.0, 1.0, 1.0, 2.0])  # three for the comparison; the fourth is another one
    task = Task("t", env_factory=lambda: make_env(task_of("HalfCheetah-v4", forward_reward_weight=next(weights), max_episode_steps=20)))
    with Evaluator(task, EvalConfig(episodes=4)) as evaluator:
        assert evaluator.fast is not None
        result = evaluator([Drunk(6)], [0])
        evaluator.fast = None
        assert evaluator([Drunk(6)], [0]).returns.tobytes() == result.returns.tobytes()
