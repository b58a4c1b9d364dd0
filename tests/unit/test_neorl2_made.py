"""NeoRL-2's tasks made again: numbers by hand, episodes of their data, and what records more of them."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from offrl.cli.main import main
from offrl.collect.config import CollectConfig
from offrl.collect.near_real import near_real
from offrl.data import load_dataset
from offrl.envs import neorl2_made
from offrl.envs.neorl2_made import MADE, BarePipeline, Masses, Pipeline
from offrl.settings.dataset import DatasetConfig


def test_the_pipeline_s_outlet_answers_19_steps_later() -> None:
    plant = Pipeline(np.random.default_rng(0), 1)
    plant.flows[:], plant.outlets[:], plant.target[:] = 100.0, 100.0, 110.0
    rewards, outlets = [], []
    for t in range(40):
        plant.target[:] = 110.0
        rewards.append(plant.step(np.full((1, 1), float(t == 0)))[0])
        outlets.append(plant.observe()[0, 0])
    assert outlets == [100.0] * 19 + [101.0] * 21
    np.testing.assert_allclose([rewards[0], rewards[-1]], [0.61, 1.91**2 - 3.0])
    seen = plant.observe()[0]
    assert seen.shape == (52,) and (seen[2:23] == 101.0).sum() == 20 and (seen[22:27] == 100.0).all()
    plant.step(np.full((1, 1), 0.5))
    assert plant.observe()[0, 27] == 0.5


def test_the_masses_by_hand() -> None:
    plant = Masses(np.random.default_rng(0), 1)
    plant.positions, plant.velocities = np.array([[0.1, -0.2]]), np.array([[0.05, 0.0]])
    plant.targets = np.broadcast_to(np.array([[1.0], [-1.0]]), (1, 2, 2))
    reward = plant.step(np.array([[1.0, -0.5]]))
    np.testing.assert_allclose(plant.observe()[0], [0.11, -0.2, 0.338, -0.138, 1.0, -1.0], rtol=1e-6)
    np.testing.assert_allclose(reward, 0.316082, atol=1e-6)
    plant.targets, plant.t = np.array([[[1.0, 0.5], [-1.0, -1.0]]]), 48
    assert plant.observe()[0, 4] == 1.0
    plant.step(np.zeros((1, 2)))
    plant.step(np.zeros((1, 2)))
    assert plant.observe()[0, 4] == 0.5


@pytest.mark.parametrize("name", MADE)
def test_environments_have_the_sizes_of_neorl2(name: str) -> None:
    published, environment, _ = MADE[name]
    env = gym.make(environment)
    observations, actions, steps = neorl2_made.TASKS[published][:3]
    first, _ = env.reset(seed=3)
    assert env.observation_space.shape == first.shape == ((2,) if "bare" in name else (observations,))
    assert env.action_space.shape == (actions,) and env.spec is not None and env.spec.max_episode_steps == steps
    again, _ = env.reset(seed=3)
    np.testing.assert_array_equal(first, again)


def test_the_hopper_s_friction_is_seen_and_used() -> None:
    env = gym.make("offrl/MadeRandomFrictionHopper-v0")
    frictions = [env.reset(seed=seed)[0][-1] for seed in range(5)]
    assert len(set(frictions)) == 5 and all(1.5 <= f <= 2.5 for f in frictions)
    wrapped = env.get_wrapper_attr("env").unwrapped
    assert wrapped.model.geom("foot_geom").friction[0] == round(frictions[-1], 2)
    before = env.reset(seed=0)[0]
    after, reward, *_ = env.step(np.full(3, 0.5, np.float32))
    np.testing.assert_allclose(reward, (after[0] - before[0]) / 0.008 - 0.00075, rtol=1e-6)


def test_a_cheetah_that_is_too_fast_earns_nothing_else() -> None:
    env = gym.make("offrl/MadeSafetyHalfCheetah-v0")
    before = env.reset(seed=0)[0]
    after, reward, *_ = env.step(np.full(6, 0.5, np.float32))
    np.testing.assert_allclose(reward, (after[0] - before[0]) / 0.05 - 0.15, rtol=1e-6)
    env.unwrapped.data.qvel[0] = 6.0  # type: ignore[attr-defined]
    assert env.step(np.zeros(6, np.float32))[1] == -100.0


def test_the_bare_pipeline_s_data_are_the_pipeline_s() -> None:
    tasks = [load_dataset(DatasetConfig(name=f"made-{name}")) for name in ("pipeline", "pipeline-bare")]
    full, bare = (dataset.columns for dataset in tasks)
    np.testing.assert_array_equal(full["observations"][:, :2], bare["observations"])
    np.testing.assert_array_equal(full["actions"], bare["actions"])
    assert tasks[1].spec.task is not None and "no score that NeoRL-2 publishes compares" in tasks[1].spec.task.note
    plant = BarePipeline(np.random.default_rng(0), 3)
    assert plant.observe().shape == (3, 2) and plant.visible().shape == (3, 52)


def test_near_real_records_controllers_or_a_policy_that_was_stopped(tmp_path: Path) -> None:
    config = near_real(CollectConfig(env="Hopper-v5", recipe="near-real"))
    assert (config.recipe, config.datasets, config.medium) == ("d4rl", ["medium"], 0.65)
    command = f"collect env=offrl.envs.neorl2_made:offrl/MadeDMSD-v0 recipe=near-real episodes=3 out={tmp_path}/made"
    assert main([*command.split(), "quiet=true"]) == 0
    assert "skill-0.3" in (tmp_path / "made" / "card.md").read_text()
