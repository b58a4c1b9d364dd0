"""Goal-conditioned runs from data to policies: OGBench's file, a Minari dataset with goals."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offrl as package
from offrl.figures import goal_map

from .conftest import Offrl

ENDS = [False] * 11 + [True]
SMALL = "seeds=2 algo.batch_size=16 eval.episodes=5 eval.workers=0 workers=1"


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("STATES", 300), ("CANDIDATES", 100), ("SUBGOALS", 3), ("STEPS", 20)):
        monkeypatch.setattr(goal_map, name, value)


@pytest.mark.skipif(importlib.util.find_spec("ogbench") is None, reason="needs the extra `ogbench`")
def test_ogbench_from_file_to_policy(offrl: Offrl, tmp_path: Path, pictures: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    actions = rng.uniform(-1, 1, (300, 2)).astype(np.float32)
    places = (np.cumsum(0.2 * actions.reshape(3, 100, 2), 1) + 4.0).reshape(300, 2).astype(np.float32)
    np.savez(
        "pointmaze-medium-navigate-v0.npz", observations=places, actions=actions, terminals=np.arange(300) % 100 == 99
    )
    done = offrl(f"train algo=hiql dataset=pointmaze-medium-navigate-v0.npz name=g {SMALL} eval.max_steps=4")
    assert done.status == 0, done.err
    assert (
        "settings hiql/ogbench" in done.out
        and "the score is the share of episodes that succeed" in done.out
        and "goal_map.png" in done.out
    )
    assert Path("runs/g/goal_map.png").exists()
    panels = [axes.get_title(loc="left") for axes in pictures["goal_map.png"].axes][:5]
    assert [title.split(":")[0] for title in panels] == [f"goal {i}" for i in range(1, 6)]
    run = package.Run("runs/g")
    assert run.final_scores[0]["score"] == 0.0 and run.final_scores[0]["success_by_task"] == "0 0 0 0 0"
    again = offrl("evaluate runs/g episodes=5 max_steps=3")
    assert again.status == 0 and "success by task" in again.out and "0 0 0 0 0" in again.out
    policy = run.policy(seed=1)
    action = policy.act(places[0], goal=places[50])
    assert action.shape == (2,) and np.isfinite(action).all()
    with pytest.raises(package.UserError, match="none was given"):
        run.policy(seed=0).act(places[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("env_id", "picture"), [("PointMaze_UMaze-v3", True), ("FetchReach-v4", False)])
def test_minari_s_goals(offrl: Offrl, env_id: str, picture: bool) -> None:
    pytest.importorskip("gymnasium_robotics", reason="needs the extra `robotics`")
    minari = pytest.importorskip("minari")
    import gymnasium as gym
    from minari.data_collector.episode_buffer import EpisodeBuffer

    from offrl.tasks.environments import register_robotics

    register_robotics(env_id)
    env = gym.make(env_id, max_episode_steps=30)
    env.action_space.seed(0)
    buffers = []
    for seed in range(4):
        seen, actions, rewards = [env.reset(seed=seed)[0]], [], []
        for _ in range(12):
            actions.append(env.action_space.sample())
            observation, reward, *_ = env.step(actions[-1])
            seen.append(observation)
            rewards.append(float(reward))
        columns = {key: np.stack([o[key] for o in seen]) for key in seen[0]}
        buffers.append(
            EpisodeBuffer(
                observations=columns, actions=actions, rewards=rewards, terminations=[False] * 12, truncations=ENDS
            )
        )
    name = "test/maze-v0" if picture else "test/fetch-v0"
    minari.create_dataset_from_buffers(name, buffers, env=env)
    train = f"train algo=gcivl dataset={name} name=g {SMALL} eval.max_steps=4"
    refused = offrl(train)
    assert refused.status == 2 and refused.err.count("\n") == 1
    assert (
        "hold the desired goal" in refused.err and "dataset.observation_keys=[achieved_goal,observation]" in refused.err
    )
    done = offrl(f"{train} dataset.observation_keys=[achieved_goal,observation]")
    assert done.status == 0, done.err
    assert env_id in done.out and "the share of episodes that succeed" in done.out
    assert Path("runs/g/goal_map.png").exists() == picture
    policy = package.Run("runs/g").policy(seed=0)
    spec = policy.algorithm.spec
    first = env.reset(seed=1)[0]
    assert spec.goal_dim == len(first["desired_goal"]) and spec.observation_dim == sum(
        first[k].size for k in ("achieved_goal", "observation")
    )
    here = np.concatenate([first["achieved_goal"], first["observation"]])
    assert policy.act(here, goal=first["desired_goal"]).shape == env.action_space.shape
