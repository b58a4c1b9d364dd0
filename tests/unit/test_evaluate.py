"""Evaluation: equal to a plain Gymnasium loop, the same whatever runs beside it, and clear about what does not fit."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from offrl import registry
from offrl.data.dataset import DataSpec
from offrl.data.fit import check_fit
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.result import Evaluation
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.environments import flattener, make_env, resolve_task
from offrl.tasks.episodes import reset_seed
from offrl.tasks.provenance import Provenance, provenance
from offrl.tasks.task import Task
from tests.support.evaluation import evaluate

HOPPER = Task("hopper-medium-v2", env_id="Hopper-v4", ref_min=-20.272305, ref_max=3234.3, ref_label="D4RL")


class Linear:
    """A fixed policy with a memory: tanh(W s) plus a share of its previous action, so that a carry that leaks shows."""

    def __init__(self, seed: int, observations: int = 11, actions: int = 3) -> None:
        self.weights = (0.3 * np.random.default_rng(seed).normal(size=(observations, actions))).astype(np.float32)
        self.shapes: set[tuple[int, ...]] = set()

    def start(self, episodes: int) -> np.ndarray:
        return np.zeros((episodes, self.weights.shape[1]), np.float32)

    def step(self, carry: np.ndarray, observations: np.ndarray, t: int) -> tuple[np.ndarray, np.ndarray]:
        self.shapes.add(observations.shape)
        actions = np.tanh(np.einsum("eo,oa->ea", observations, self.weights) + 0.5 * carry)
        return actions, actions


class Corridor(gym.Env):
    """Five steps long. Reward is the action; success at the second step when the first action was above 0.5; a Dict
    observation.
    """

    observation_space = spaces.Dict(
        {"b": spaces.Box(-9, 9, (2,)), "a": spaces.Box(-9, 9, (1,)), "c": spaces.Discrete(3)}
    )
    action_space = spaces.Box(-2.0, 2.0, (1,))

    def __init__(self, key: str = "success", length: int = 5, fail_at: int = -1, nan_at: int = -1) -> None:
        self.key, self.length, self.fail_at, self.nan_at = key, length, fail_at, nan_at

    def observe(self) -> dict[str, Any]:
        return {"b": np.array([self.start, self.t], np.float32), "a": np.array([self.first], np.float32), "c": 2}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.first, self.start = 0, 0.0, float(self.np_random.uniform())
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.t == self.fail_at:
            raise ZeroDivisionError("corridor collapsed")
        if self.t == 0:
            self.first = float(action[0])
        self.t += 1
        info = {self.key: self.t == 2 and self.first > 0.5}
        reward = np.nan if self.t == self.nan_at else float(action[0])
        return self.observe(), reward, False, self.t == self.length, info


class Wordy(Corridor):
    """Rewards of shape [1], a goal and a success in words."""

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        return super().reset(**options)[0], {"goal": "reach red"}

    def step(self, action: np.ndarray) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, _ = super().step(action)
        return observation, np.array([reward]), terminated, truncated, {"success": "yes"}


class Constant:
    """The same action for every episode, or one given per episode."""

    def __init__(self, *values: float) -> None:
        self.values = values

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        values = np.asarray(self.values, np.float32)
        return np.resize(values, len(observations))[:, None], None


def by_hand(policy: Linear, seed: int, config: EvalConfig) -> tuple[list[float], list[int]]:
    """The same evaluation as a person would write it: one plain environment, one episode after the other."""
    env = gym.make("Hopper-v4", disable_env_checker=True)
    returns, lengths = [], []
    for e in range(config.episodes):
        carry = policy.start(config.episodes)
        rows = np.zeros((config.episodes, 11), np.float32)
        rows[e] = env.reset(seed=reset_seed(config.seed, seed, e))[0]
        total, t, done = 0.0, 0, False
        while not done:
            actions, carry = policy.step(carry, rows, t)
            observation, reward, terminated, truncated, _ = env.step(actions[e])
            rows[e] = observation
            total, t, done = total + float(reward), t + 1, terminated or truncated
        returns.append(total)
        lengths.append(t)
    env.close()
    return returns, lengths


def test_equals_a_plain_gymnasium_loop() -> None:
    config = EvalConfig(episodes=4, seed=7)
    policies = [Linear(0), Linear(1)]
    result = evaluate(policies, [5, 9], HOPPER, config)
    for n, seed in enumerate((5, 9)):
        returns, lengths = by_hand(policies[n], seed, config)
        assert np.array_equal(result.returns[n], returns) and np.array_equal(result.lengths[n], lengths)
    assert result.scores is not None
    assert np.array_equal(result.scores, 100 * (result.returns + 20.272305) / (3234.3 + 20.272305))
    assert len(set(result.returns.reshape(-1))) == 8  # every episode starts elsewhere
    for word in ("hopper-medium-v2", "Hopper-v4", gym.__version__, "mujoco", "D4RL"):
        assert word in result.label


def test_a_label_names_the_simulator_in_an_environment_of_another_package() -> None:
    env = gym.make("Pendulum-v1")
    assert "mujoco" not in provenance(Task("pendulum", env_id="Pendulum-v1"), env).versions
    env.unwrapped._env = type("Environment", (), {"__module__": "dm_control.rl.control"})()  # type: ignore[attr-defined]
    assert "mujoco" in provenance(Task("pendulum", env_id="Pendulum-v1"), env).versions


def test_neither_parallel_nor_company_changes_a_bit() -> None:
    whole = evaluate([Linear(s) for s in range(3)], [0, 1, 2], HOPPER, EvalConfig(episodes=5))
    for parallel in (1, 4, 7):
        again = evaluate([Linear(s) for s in range(3)], [0, 1, 2], HOPPER, EvalConfig(episodes=5, parallel=parallel))
        assert np.array_equal(again.returns, whole.returns) and np.array_equal(again.lengths, whole.lengths)
    policy = Linear(2)
    alone = evaluate([policy], [2], HOPPER, EvalConfig(episodes=5, parallel=2))
    assert np.array_equal(alone.returns[0], whole.returns[2])
    assert policy.shapes == {(5, 11)}  # the policy always sees all its rows
    other = evaluate([Linear(2)], [3], HOPPER, EvalConfig(episodes=5))
    assert not np.array_equal(other.returns[0], whole.returns[2])


def test_environments_that_were_used_before_give_the_same() -> None:
    with Evaluator(HOPPER, EvalConfig(episodes=3)) as evaluator:
        first = evaluator([Linear(0)], [0])
        evaluator([Linear(1)], [4])
        again = evaluator([Linear(0)], [0])
    assert np.array_equal(first.returns, again.returns)


def test_idle_rows_hold_zeros_and_progress_counts_episodes() -> None:
    seen: list[np.ndarray] = []

    class Watching(Constant):
        def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
            seen.append(observations.copy())
            return super().step(carry, observations, t)

    calls: list[tuple[int, int]] = []
    task = Task("corridor", env_factory=Corridor)
    evaluate(
        [Watching(0.0)],
        [0],
        task,
        EvalConfig(episodes=3, parallel=2),
        progress=lambda done, total: calls.append((done, total)),
    )
    assert sorted(calls) == calls and {0, 3} <= {done for done, _ in calls} <= {0, 1, 2, 3}
    assert calls[-1] == (3, 3) and len(calls) == len(seen)
    assert (
        len(seen) == 10 and not seen[0][2].any() and seen[0][:2, 1].all() and not seen[5][:2].any() and seen[5][2].any()
    )
    seen.clear()
    lengths = iter((2, 4))
    evaluate(
        [Watching(0.0)], [0], Task("ragged", env_factory=lambda: Corridor(length=next(lengths))), EvalConfig(episodes=2)
    )
    assert [rows.any(axis=1).tolist() for rows in seen] == [[True, True]] * 2 + [[False, True]] * 2


@pytest.mark.parametrize("key", ["success", "is_success"])
def test_success_at_any_step_counts(key: str) -> None:
    task = Task("corridor", env_factory=functools.partial(Corridor, key), ref_min=0.0, ref_max=10.0)
    result = evaluate([Constant(0.4, 0.6, 1.0, -3.0)], [0], task, EvalConfig(episodes=4))
    assert result.successes is not None
    assert result.successes.tolist() == [[0.0, 1.0, 1.0, 0.0]]
    assert result.returns[0] == pytest.approx([2.0, 3.0, 5.0, -10.0])  # clipped to the environment's -2
    assert result.scores is not None and result.scores[0] == pytest.approx([20.0, 30.0, 50.0, -100.0])
    assert result.lengths.tolist() == [[5, 5, 5, 5]]
    assert (
        evaluate(
            [Constant(0.0)], [0], Task("x", env_factory=functools.partial(Corridor, "word")), EvalConfig(episodes=1)
        ).successes
        is None
    )


def test_what_environments_say_in_other_forms() -> None:
    result = evaluate([Constant(0.5)], [0], Task("w", env_factory=Wordy), EvalConfig(episodes=2))
    assert result.returns.tolist() == [[2.5, 2.5]] and result.successes is None


def test_dict_observations_flatten_in_order() -> None:
    env = Corridor()
    observation, _ = env.reset(seed=0)
    flatten, shape, _ = flattener(env)
    # a, b, c (one of three)
    assert shape == (6,) and flatten(observation) == pytest.approx([0.0, env.start, 0.0, 0, 0, 1])
    flatten, shape, _ = flattener(env, ("b", "a"))
    assert shape == (3,) and flatten(observation) == pytest.approx([env.start, 0.0, 0.0])
    with pytest.raises(UserError, match="no entry 'z'"):
        flattener(env, ("z",))


def test_nan_actions_end_that_episode_only(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(Constant):
        def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
            actions, _ = super().step(carry, observations, t)
            if t >= 2:
                actions[1] = np.nan
            return actions, None

    result = evaluate(
        [Broken(1.0), Constant(1.0)], [0, 1], Task("corridor", env_factory=Corridor), EvalConfig(episodes=3)
    )
    assert result.returns.tolist() == [[5.0, 2.0, 5.0], [5.0, 5.0, 5.0]] and result.lengths.tolist() == [
        [5, 2, 5],
        [5, 5, 5],
    ]
    assert result.faults == 1
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "NaN" in message and "seed 0, episode 1, step 2" in message


def test_environment_trouble_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(
        [Constant(1.0)],
        [0],
        Task("corridor", env_factory=functools.partial(Corridor, nan_at=3)),
        EvalConfig(episodes=2),
    )
    assert result.returns.tolist() == [[2.0, 2.0]] and result.faults == 2
    assert capsys.readouterr().err.count("\n") == 1  # told once
    with pytest.raises(
        UserError, match=r"corridor failed \(seed 8, episode 0, step 4\): ZeroDivisionError: corridor collapsed"
    ):
        evaluate(
            [Constant(1.0)],
            [8],
            Task("corridor", env_factory=functools.partial(Corridor, fail_at=4)),
            EvalConfig(episodes=1),
        )


def test_unstable_physics_end_the_episode(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Explosion(gym.Wrapper):
        def reset(self, **arguments: Any) -> Any:
            self.t = 0
            return self.env.reset(**arguments)

        def step(self, action: Any) -> Any:
            self.t += 1
            if self.t == 4:
                self.unwrapped.data.qvel[:] = 1e12  # type: ignore[attr-defined]
            return self.env.step(action)

    monkeypatch.chdir(tmp_path)
    task = Task("cheetah", env_factory=lambda: Explosion(make_env(Task("c", env_id="HalfCheetah-v4"))))
    result = evaluate([Linear(0, 17, 6)], [0], task, EvalConfig(episodes=2))
    assert (
        result.lengths.tolist() == [[4, 4]] and np.isfinite(result.returns).all() and np.abs(result.returns).max() < 50
    )
    assert "physics became unstable" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # no MUJOCO_LOG.TXT


def test_actions_of_the_wrong_shape_or_choice() -> None:
    with pytest.raises(UserError, match=r"shape \(2, 1\), Hopper-v4 takes \(2, 3\)"):
        evaluate([Constant(0.0)], [0], HOPPER, EvalConfig(episodes=2))

    class Choice(Constant):
        def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
            return np.full(len(observations), int(self.values[0])), None

    pole = Task("pole", env_id="CartPole-v1")
    # one side falls after about ten steps
    assert evaluate([Choice(1)], [0], pole, EvalConfig(episodes=2)).returns.min() >= 8
    with pytest.raises(UserError, match=r"choices 0\.\.1"):
        evaluate([Choice(2)], [0], pole, EvalConfig(episodes=2))


def test_limits_on_steps(capsys: pytest.CaptureFixture[str]) -> None:
    endless = Task("endless", env_factory=functools.partial(Corridor, length=-1))
    assert evaluate([Constant(0.0)], [0], endless, EvalConfig(episodes=1, max_steps=12)).lengths.tolist() == [[12]]
    assert (
        evaluate(
            [Constant(0.0)],
            [0],
            Task("e", env_factory=endless.env_factory, max_episode_steps=7),
            EvalConfig(episodes=1),
        ).lengths
        == 7
    )
    assert capsys.readouterr().err == ""
    assert evaluate([Constant(0.0)], [0], endless, EvalConfig(episodes=1)).lengths.tolist() == [[10_000]]
    assert "eval.max_steps" in capsys.readouterr().err
    short = Task("pendulum", env_id="Pendulum-v1", max_episode_steps=20)
    assert evaluate([Constant(0.0)], [0], short, EvalConfig(episodes=1)).lengths.tolist() == [[20]]
    scored = Task("pendulum", env_id="Pendulum-v1", ref_min=-1_000.0, ref_max=0.0)
    for limit in (5, 200):  # the environment's own is 200
        evaluate([Constant(0.0)], [0], scored, EvalConfig(episodes=1, max_steps=limit))
        said = "max_steps=5 cuts the episodes, and its scores 0 and 100 are returns of episodes of 200 steps"
        assert (said in capsys.readouterr().err) == (limit == 5)


def test_our_environments_need_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes their ids known is imported for them."""
    asked, names = [], registry.names
    monkeypatch.setattr(registry, "names", lambda kind: asked.append(kind) or names(kind))
    make_env(Task("x", env_id="Pendulum-v1"))
    assert not asked
    make_env(Task("x", env_id="offrl/DrawnPendulumState-v0"))
    assert asked == ["task"]


def test_unknown_environments_name_the_nearest() -> None:
    with pytest.raises(UserError, match=r"unknown environment 'Hoper-v4'\. Did you mean 'Hopper-v"):
        make_env(Task("x", env_id="Hoper-v4"))
    with pytest.raises(UserError, match="no environment to evaluate in"):
        make_env(Task("x"))
    with pytest.raises(UserError, match=r"could not be made with \{'nonsense': 1\}: TypeError"):
        make_env(Task("x", env_id="Hopper-v4", env_kwargs={"nonsense": 1}))
    with pytest.raises(UserError, match="not a Gymnasium environment"):
        make_env(Task("x", env_factory=lambda: 3))
    with pytest.raises(UserError, match="not installed"):
        make_env(Task("x", env_id="no_such_package.envs:Thing-v0"))


def test_resolving_the_environment() -> None:
    assert resolve_task(HOPPER, EvalConfig()) is HOPPER
    assert resolve_task(HOPPER, EvalConfig(env="none")) is None and resolve_task(None, EvalConfig()) is None
    assert resolve_task(Task("x"), EvalConfig()) is None
    other = resolve_task(HOPPER, EvalConfig(env="Hopper-v5"))
    assert other is not None and other.env_id == "Hopper-v5" and other.ref_max is None and "Hopper-v5" in other.note
    fresh = resolve_task(None, EvalConfig(env="Pendulum-v1"))
    assert fresh is not None and fresh.env_id == "Pendulum-v1" and fresh.ref_max is None


def test_data_and_environment_must_fit(capsys: pytest.CaptureFixture[str]) -> None:
    fits = DataSpec((11,), 3, action_low=(-1.0,) * 3, action_high=(1.0,) * 3, name="mine")
    check_fit(fits, HOPPER)
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match=r"mine has observations of shape \(17,\), Hopper-v4 of \(11,\).* \(env=ID\)\."):
        check_fit(DataSpec((17,), 3, name="mine"), HOPPER)
    with pytest.raises(UserError, match=r"mine has 6 action dimensions, Hopper-v4 has 3"):
        check_fit(DataSpec((11,), 6, name="mine"), HOPPER)
    with pytest.raises(UserError, match=r"mine has discrete actions, Hopper-v4 continuous"):
        check_fit(DataSpec((11,), 1, discrete=True, num_actions=3, name="mine"), HOPPER)
    pole = Task("pole", env_id="CartPole-v1")
    check_fit(DataSpec((4,), 1, discrete=True, num_actions=2), pole)
    with pytest.raises(UserError, match="3 choices of action"):
        check_fit(DataSpec((4,), 1, discrete=True, num_actions=3), pole)
    check_fit(DataSpec((11,), 3, action_low=(-2.0,) * 3, action_high=(2.0,) * 3, name="wide"), HOPPER)
    assert "beyond the range" in capsys.readouterr().err


class Judged(Constant):
    """Expects 10 a0 from an episode, in rewards that are twice the recorded ones plus 1."""

    discount = 0.5

    def own_value(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        return 10.0 * actions[:, 0].astype(np.float64)

    def in_recorded_units(self, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        return (values - (1 - 0.5**lengths) / 0.5) / 2


def test_discounted_returns_and_what_the_critic_expected() -> None:
    task = Task("corridor", env_factory=lambda: Corridor(length=3))
    result = evaluate([Judged(1.0, 2.0), Constant(1.0)], [0, 0], task, EvalConfig(episodes=2, parallel=1))
    assert result.discounted is not None and result.estimates is not None
    # 1 + 1/2 + 1/4, and twice that; then without a discount of its own: 1 + 0.99 + 0.99 ** 2
    np.testing.assert_allclose(result.discounted, [[1.75, 3.5], [2.9701, 2.9701]], rtol=1e-12)
    np.testing.assert_allclose(result.estimates[0], [(10 - 1.75) / 2, (20 - 1.75) / 2])
    rows = result.rows()
    assert (
        rows[0]["q_overestimation"] == pytest.approx((4.125 - 1.75 + 9.125 - 3.5) / 2)
        and rows[1]["q_overestimation"] is None
    )


def test_rows_and_intervals() -> None:
    returns = np.array([[1.0, 3.0], [4.0, 8.0]])
    result = Evaluation(returns, np.full((2, 2), 5), None, 10 * returns, "task", Provenance(), (3, 7))
    assert result.per_seed().tolist() == [20.0, 60.0]
    mean, low, high = result.interval()
    assert (
        mean == 40.0 and low == pytest.approx(40 - 12.7062 * 20, abs=1e-2) and high - mean == pytest.approx(mean - low)
    )
    assert result.rows()[1] == {
        "seed": 7, "episodes": 2, "score": 60.0, "return_mean": 6.0, "return_std": 2.0, "length_mean": 5.0,
        "success": None, "discounted_mean": None, "q_overestimation": None, "success_by_task": None,
    }  # fmt: skip
    assert Evaluation(returns, np.ones((2, 2), int), None, None, "", Provenance()).per_seed().tolist() == [2.0, 6.0]


def test_reset_seeds_are_fixed_and_distinct() -> None:
    seeds = {reset_seed(a, b, c) for a in range(3) for b in range(20) for c in range(50)}
    assert len(seeds) == 3000 and all(0 <= s < 2**31 for s in seeds)
    assert reset_seed(0, 0, 0) == reset_seed(0, 0, 0) == 1341306709


def test_minari_door_and_the_mazes_of_gymnasium_robotics() -> None:
    pytest.importorskip("gymnasium_robotics")
    door = Task(
        "D4RL/door/human-v2", env_id="AdroitHandDoor-v1", env_kwargs={"reward_type": "dense"}, max_episode_steps=200
    )
    check_fit(DataSpec((39,), 28, name="door"), door)
    maze = Task("maze", env_id="PointMaze_UMaze-v3", max_episode_steps=30)
    check_fit(DataSpec((8,), 2, name="maze"), maze)  # achieved_goal, desired_goal, observation
    result = evaluate([Linear(0, 8, 2)], [0], maze, EvalConfig(episodes=2))
    assert result.successes is not None and "gymnasium-robotics" in result.label
    with pytest.raises(UserError, match="PointMaze_UMaze"):
        make_env(Task("x", env_id="PointMaze_UMazes-v3"))
