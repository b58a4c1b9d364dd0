"""A model as an environment: against dynamics worked out by hand, and under the checkers of Gymnasium and
stable-baselines3.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import offrl
from offrl.errors import UserError
from offrl.tasks.task import Task
from offrl.world_models import starts
from offrl.world_models.model import load
from tests.support import linear_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_model.write(tmp_path_factory.mktemp("model") / "two.safetensors")


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return linear_model.write(tmp_path_factory.mktemp("model") / "one.safetensors", members=linear_model.MEMBERS[:1])


def test_steps_are_those_of_the_model_in_the_environments_units(single: Path) -> None:
    env = offrl.ModelEnv(single, horizon=20)
    assert isinstance(env.action_space, gym.spaces.Box) and (env.action_space.low[0], env.action_space.high[0]) == (
        -2.0,
        4.0,
    )
    s, _ = env.reset(seed=0)
    rng = np.random.default_rng(0)
    for t in range(20):
        action = rng.uniform(-3.0, 5.0, 1)  # beyond the range: cut off
        expected, reward = linear_model.step(0, s.astype(float), float(action[0]))
        s, r, terminated, truncated, info = env.step(action)
        np.testing.assert_allclose(s, expected, atol=1e-5)
        assert r == pytest.approx(reward, abs=1e-5)
        assert not terminated and truncated == (t == 19) and not info["clipped"]
    assert info["truncation"] == "horizon"


def test_normalised_observations_and_transformed_rewards_are_undone(tmp_path: Path) -> None:
    plain = linear_model.rows()
    other = {"observation_mean": (1.0, -2.0), "observation_std": (2.0, 0.5), "reward_scale": 0.1, "reward_shift": -1.0}
    spec = dataclasses.replace(plain.spec, **other)
    path = linear_model.write(tmp_path / "m.safetensors", plain, linear_model.MEMBERS[:1], spec=spec)
    env = offrl.ModelEnv(path, horizon=5)
    s, _ = env.reset(options={"observation": np.array([0.4, -2.2], np.float32)})
    np.testing.assert_allclose(s, [0.4, -2.2], rtol=1e-6)
    mean, std = np.array(other["observation_mean"]), np.array(other["observation_std"])
    expected, reward = linear_model.step(0, (s - mean) / std, 1.5)
    s, r, *_ = env.step(np.array([1.5]))
    np.testing.assert_allclose(s, expected * std + mean, rtol=1e-5)
    assert r == pytest.approx((reward + 1.0) / 0.1, rel=1e-5)
    lost = linear_model.write(
        tmp_path / "lost.safetensors", plain, spec=dataclasses.replace(plain.spec, reward_scale=0.0)
    )
    with pytest.raises(UserError, match="rewards multiplied by 0"):
        offrl.ModelEnv(lost)


def test_penalty_is_the_uncertainty_in_recorded_units(tmp_path: Path) -> None:
    path = linear_model.write(
        tmp_path / "m.safetensors", spec=dataclasses.replace(linear_model.rows().spec, reward_scale=0.5)
    )
    at = np.array([0.3, -0.4], np.float32)
    rewards = []
    for penalty in (0.0, 2.0):
        env = offrl.ModelEnv(path, penalty=penalty, uncertainty="disagreement")
        env.reset(seed=1, options={"observation": at})
        _, r, _, _, info = env.step(np.array([4.0]))
        rewards.append(r)
    one, two = (linear_model.step(m, at.astype(float), 4.0)[0] for m in (0, 1))
    assert info["uncertainty"] == pytest.approx(np.linalg.norm(one - two), rel=1e-4)
    assert rewards[0] - rewards[1] == pytest.approx(2.0 * info["uncertainty"], rel=1e-4)


def test_leaving_the_range_truncates_or_clips(single: Path, tmp_path: Path) -> None:
    runaway = [(np.array([[4.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), np.zeros(3))]
    path = linear_model.write(tmp_path / "m.safetensors", members=runaway)
    at = np.array([10.0, 0.0], np.float32)
    env = offrl.ModelEnv(path, horizon=3)  # the range is -20 to 20, widened to -60 to 60
    env.reset(options={"observation": at})
    s, _, _, truncated, info = env.step(np.array([0.0]))
    assert s[0] == pytest.approx(50.0) and not truncated and not info["clipped"]
    s, _, terminated, truncated, info = env.step(np.array([0.0]))
    assert truncated and not terminated and info["clipped"] and info["truncation"] == "out of range"
    assert env.observation_space.contains(s) and s[0] == pytest.approx(60.0)
    env = offrl.ModelEnv(path, horizon=3, out_of_range="clip", range_margin=0.0)
    env.reset(options={"observation": at})
    _, _, _, truncated, info = env.step(np.array([0.0]))
    assert info["clipped"] and not truncated and env.observation_space.high[0] == 20.0
    with pytest.raises(UserError, match="not in the environment's space"):
        env.reset(options={"observation": np.array([21.0, 0.0])})


def test_known_terminations_end_episodes(tmp_path: Path) -> None:
    # entry 1 beyond 0.2
    path = linear_model.write(tmp_path / "m.safetensors", settings={"termination": "inverted_pendulum"})
    env = offrl.ModelEnv(path, horizon=1)
    env.reset(options={"observation": np.array([0.0, 5.0], np.float32)})
    _, _, terminated, truncated, info = env.step(np.array([0.0]))
    assert terminated and not truncated and "truncation" not in info


def test_checkers_accept_it(model: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(offrl.ModelEnv(model), skip_render_check=True)
        made = gym.make("offrl.world_models.environment:offrl/Model-v0", model=str(model), horizon=9)
        check_env(made.unwrapped, skip_render_check=True)
    assert made.unwrapped.simulator.horizon == 9  # type: ignore[attr-defined]


def test_same_seed_same_episode(model: Path) -> None:
    def play(seed: int) -> list[np.ndarray]:
        env = offrl.ModelEnv(model, horizon=50)
        seen = [env.reset(seed=seed)[0]]
        seen += [env.step(np.array([1.0]))[0] for _ in range(10)]
        return [*seen, env.reset()[0]]

    first, again, other = play(0), play(0), play(1)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other) and not np.array_equal(first[0], first[-1])


def test_elites_are_all_asked(model: Path) -> None:
    env, at = offrl.ModelEnv(model, horizon=50), np.array([0.3, -0.4], np.float32)
    seen = set()
    for seed in range(20):
        env.reset(seed=seed, options={"observation": at})
        seen.add(round(float(env.step(np.array([4.0]))[0][1]), 4))
    assert seen == {round(float(linear_model.step(m, at.astype(float), 4.0)[0][1]), 4) for m in (0, 1)}


def test_starts_are_the_datas_and_come_with_the_model(tmp_path: Path) -> None:
    data = linear_model.rows(episodes=4)
    path = linear_model.write(tmp_path / "m.safetensors", data)
    initial = data.columns["observations"][data.episode_start].numpy()
    for kind, allowed in (("initial", initial), ("data", data.columns["observations"].numpy())):
        env = offrl.ModelEnv(path, start=kind)
        found = np.stack([env.reset(seed=i)[0] for i in range(400)])
        assert {tuple(x) for x in found} == {tuple(x) for x in allowed}
    bare = linear_model.write(tmp_path / "bare.safetensors", data, with_starts=False)
    with pytest.raises(UserError, match="does not say how long an episode is"):
        offrl.ModelEnv(bare)
    with pytest.raises(UserError, match="holds no states to start from"):
        offrl.ModelEnv(bare, horizon=5)
    assert offrl.ModelEnv(bare, data).simulator.horizon == 7
    with pytest.raises(UserError, match="observations"):
        offrl.ModelEnv(bare, offrl.from_arrays(np.zeros((4, 3), np.float32), np.zeros((4, 1), np.float32), np.zeros(4)))


def test_many_states_are_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "MOST", 5)
    data = linear_model.rows(episodes=8)
    trained = load(linear_model.write(tmp_path / "m.safetensors", data, settings={"history": 3}))
    observations, past = starts.of(trained, None, "data")
    assert (
        observations.shape == (5, 2)
        and past.shape == (5, 2, 3)
        and starts.of(trained, None, "initial")[1].shape == (5, 2, 3)
    )
    everything = data.columns["observations"]
    for o, before in zip(observations, past, strict=True):
        (row,) = np.flatnonzero((everything == o).all(-1).numpy())
        start = row - row % 7
        np.testing.assert_array_equal(before[-1, :2], everything[max(start, row - 1)])
    env = offrl.ModelEnv(trained, horizon=4)
    seen = [env.reset(seed=0)[0], *(env.step(np.array([a]))[0] for a in (1.0, 4.0))]  # which are 0 and 1 for the model
    np.testing.assert_allclose(env.simulator.past[0], [[*seen[0], 0.0], [*seen[1], 1.0]], rtol=1e-6)


def test_horizon_is_the_tasks(tmp_path: Path) -> None:
    for task, expected in (
        (Task("x", env_id="Pendulum-v1"), 200),
        (Task("x", env_id="Pendulum-v1", max_episode_steps=33), 33),
        (None, 7),
    ):
        data = linear_model.rows(task=task)
        assert offrl.ModelEnv(linear_model.write(tmp_path / "m.safetensors", data)).simulator.horizon == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": "initail"}, "Did you mean 'initial'"),
        ({"out_of_range": "stop"}, "Known: truncate, clip"),
        ({"penalty": -1.0}, "penalty=-1.0 is out of range"),
        ({"penalty": float("nan")}, "penalty=nan is out of range"),
        ({"horizon": 0}, "horizon=0 is out of range"),
        ({"uncertainty": "none", "penalty": 1.0}, "uncertainty=none"),
        ({"uncertainty": "aleatroic"}, "Did you mean 'aleatoric'"),
        ({"uncertainty": "density"}, "hand in the dataset"),
    ],
)
def test_settings_that_do_not_fit(model: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        offrl.ModelEnv(model, **settings)


def test_actions_that_do_not_fit(model: Path) -> None:
    env = offrl.ModelEnv(model)
    env.reset(seed=0)
    for action, message in ((np.array([np.nan]), "NaN or infinite"), (np.zeros(2), "shape")):
        with pytest.raises(UserError, match=message):
            env.step(action)
    with pytest.raises(UserError, match=r"no option 'observatoin'.*Did you mean 'observation'"):
        env.reset(options={"observatoin": 0})


# ---- many at once


def test_rows_of_the_batch_are_single_episodes(single: Path) -> None:
    envs = offrl.ModelVectorEnv(single, num_envs=5, horizon=3, device="cpu")
    s, _ = envs.reset(seed=0)
    assert s.shape == (5, 2) and envs.observation_space.contains(s)
    for t in range(3):
        actions = envs.action_space.sample()
        expected = [linear_model.step(0, s[i].astype(float), float(actions[i, 0])) for i in range(5)]
        s, r, terminated, truncated, infos = envs.step(actions)
        np.testing.assert_allclose(s, [e[0] for e in expected], atol=1e-5)
        np.testing.assert_allclose(r, [e[1] for e in expected], atol=1e-5)
        assert not terminated.any() and (truncated == (t == 2)).all()
    assert list(infos["truncation"]) == ["horizon"] * 5 and infos["_truncation"].all()
    fresh, r, _, truncated, infos = envs.step(actions)  # NextStep: this step begins anew
    assert not r.any() and not truncated.any() and not infos["_uncertainty"].any()
    assert {tuple(x) for x in fresh} <= {tuple(x) for x in starts.of(load(single), None, "data")[0].numpy()}


def test_same_step_autoreset_hands_over_the_last_observation(single: Path) -> None:
    envs = offrl.ModelVectorEnv(single, num_envs=3, horizon=2, autoreset_mode="SameStep", device="cpu")
    s, _ = envs.reset(seed=0)
    actions = np.zeros((3, 1), np.float32)
    s, *_ = envs.step(actions)
    expected = [linear_model.step(0, x.astype(float), 0.0) for x in s]
    fresh, r, _, truncated, infos = envs.step(actions)
    assert truncated.all() and infos["_final_obs"].all()
    np.testing.assert_allclose(np.stack(list(infos["final_obs"])), [e[0] for e in expected], atol=1e-5)
    np.testing.assert_allclose(r, [e[1] for e in expected], atol=1e-5)
    assert not np.allclose(fresh, np.stack(list(infos["final_obs"])))
    assert not envs.step(actions)[3].any()


def test_disabled_autoreset_asks_for_a_mask(single: Path) -> None:
    envs = offrl.ModelVectorEnv(single, num_envs=2, horizon=1, autoreset_mode="Disabled", device="cpu")
    envs.reset(seed=0)
    actions = np.zeros((2, 1), np.float32)
    before, *_ = envs.step(actions)
    with pytest.raises(UserError, match="reset_mask"):
        envs.step(actions)
    after, _ = envs.reset(options={"reset_mask": np.array([True, False])})
    assert not np.array_equal(after[0], before[0]) and np.array_equal(after[1], before[1])
    with pytest.raises(UserError, match="2 booleans"):
        envs.reset(options={"reset_mask": np.array([True])})


def test_batches_are_reproducible(model: Path) -> None:
    def play(seed: Any) -> np.ndarray:
        envs = gym.make_vec(
            "offrl.world_models.environment:offrl/Model-v0", num_envs=4, model=str(model), horizon=3, device="cpu"
        )
        return np.stack([envs.reset(seed=seed)[0], *(envs.step(np.ones((4, 1), np.float32))[0] for _ in range(8))])

    np.testing.assert_array_equal(play(3), play(3))
    np.testing.assert_array_equal(play([1, 2, 3, 4]), play([1, 2, 3, 4]))
    assert not np.array_equal(play(3), play(4))


def test_discrete_actions(tmp_path: Path) -> None:
    data = linear_model.rows()
    spec = dataclasses.replace(data.spec, discrete=True, num_actions=2, action_dim=1, action_low=(), action_high=())
    # choice 0 moves right, 1 down
    weights = (np.array([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, -1.0]]), np.array([0.0, 0.0, 2.0, 0.0]))
    columns = {**data.columns, "actions": (data.columns["actions"][:, 0] > 0).long()}
    data = dataclasses.replace(data, spec=spec, columns=columns)
    env = offrl.ModelEnv(linear_model.write(tmp_path / "m.safetensors", data, [weights]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env(env, skip_render_check=True)
    for action, move, reward in ((0, [1.0, 0.0], 3.0), (1, [0.0, -1.0], 1.0)):
        env.reset(options={"observation": np.array([0.5, 0.5], np.float32)})
        s, r, *_ = env.step(action)
        np.testing.assert_allclose(s - 0.5, move, atol=1e-5)
        assert r == pytest.approx(reward, abs=1e-5)
    with pytest.raises(UserError, match="0 to 1"):
        env.step(2)


# ---- stable-baselines3


def test_without_stable_baselines3_it_says_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stable_baselines3.common.vec_env", None)
    monkeypatch.delitem(sys.modules, "offrl.world_models.environment_sb3", raising=False)
    with pytest.raises(UserError, match=r"needs stable-baselines3.*pip install"):
        offrl.ModelVectorEnv(model, device="cpu").for_sb3()


def test_stable_baselines3_takes_it(model: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
    from stable_baselines3.common.env_checker import check_env as check
    from stable_baselines3.common.vec_env import VecMonitor

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(offrl.ModelEnv(model))
    envs = offrl.ModelVectorEnv(model, num_envs=4, horizon=6, device="cpu").for_sb3()
    envs.seed(0)
    s = envs.reset()
    for _ in range(6):
        last = s
        s, r, done, infos = envs.step(np.zeros((4, 1), np.float32))
    assert (
        done.all()
        and r.dtype == np.float32
        and all(i["TimeLimit.truncated"] and i["truncation"] == "horizon" for i in infos)
    )
    ends = np.stack([i["terminal_observation"] for i in infos])
    possible = [[linear_model.step(m, x.astype(float), 0.0)[0] for m in (0, 1)] for x in last]
    assert all(min(np.abs(e - p).max() for p in options) < 1e-5 for e, options in zip(ends, possible, strict=True))
    agent = sb3.PPO("MlpPolicy", VecMonitor(envs), n_steps=8, batch_size=16, n_epochs=1, seed=0, device="cpu")
    agent.learn(64)
    assert agent.num_timesteps == 64 and {round(e["l"]) for e in agent.ep_info_buffer} == {6}
