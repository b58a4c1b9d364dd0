"""Data of several tasks: the column that says so, builtin sets and their environments, contexts made on the fly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.fit import check_fit
from offrl.data.samplers.contexts import ContextSampler, FreshContexts, episode_tasks, optimal_actions
from offrl.data.transforms.columns import normalize_observations, scale_rewards
from offrl.envs import bandits, darkroom, point_robot
from offrl.errors import UserError
from offrl.tasks.environments import make_env
from offrl.tasks.task import lookup


def small(**columns: Any) -> Dataset:
    rows = 6
    base: dict[str, Any] = {
        "actions": np.arange(rows) % 3,
        "rewards": np.zeros(rows),
        "terminations": np.arange(rows) % 3 == 2,
    }
    return from_arrays(np.eye(rows), num_actions=3, **base, **columns)


# ---- the columns


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "needs the column 'tasks', which task each row belongs to"),
        ({"tasks": [0, 0, 0, 1, 1, 2]}, "episode 1 belongs to two tasks, 1 and in row 5 2"),
        ({"tasks": np.arange(6) + 0.5}, "'tasks' must hold one whole number for each row"),
        ({"tasks": np.zeros((6, 2), int)}, "'tasks' must hold one whole number for each row"),
        ({"taks": np.zeros(6, int)}, "Did you mean 'taks'"),
    ],
)
def test_tasks_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        episode_tasks(small(**columns))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "needs the column 'optimal_actions'"),
        (np.full(6, 3), "holds action 3, and the data have actions 0 to 2"),
        (np.full(6, -1), "no row has an optimal action"),
    ],
)
def test_labels_are_refused(labels: np.ndarray | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        optimal_actions(small(tasks=np.zeros(6, int), **({} if labels is None else {"optimal_actions": labels})))


def test_rows_without_a_label_are_context_only() -> None:
    dataset = small(tasks=np.zeros(6, int), optimal_actions=np.array([-1, 2, -1, -1, 0, -1]))
    sampler = ContextSampler(6)
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 64)
    assert {(tuple(q.tolist()), int(y)) for q, y in zip(batch["queries"], batch["labels"], strict=True)} == {
        (tuple(np.eye(6)[1]), 2),
        (tuple(np.eye(6)[4]), 0),
    }
    assert bool(batch["valid"].all())


@pytest.mark.parametrize("suffix", ["npz", "hdf5"])
def test_a_users_file(tmp_path: Path, suffix: str) -> None:
    """D4RL's layout with one more column, or one that is called otherwise."""
    rows = 8
    arrays = {"observations": np.eye(rows, dtype=np.float32), "actions": np.zeros((rows, 2), np.float32)}
    arrays |= {
        "rewards": np.zeros(rows, np.float32),
        "terminals": np.arange(rows) % 2 == 1,
        "task_id": np.repeat([5, 9], 4),
    }
    path = tmp_path / f"mine.{suffix}"
    if suffix == "npz":
        np.savez(path, **arrays)
    else:
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                file[name] = values
    dataset = load_dataset(DatasetConfig(name=str(path), format="columns", fields={"tasks": "task_id"}, cache="never"))
    assert episode_tasks(dataset).tolist() == [5, 5, 9, 9]


# ---- builtin sets and their environments


@pytest.mark.parametrize("module", [bandits, darkroom, point_robot])
def test_the_data_are_of_the_environment(module: Any) -> None:
    """The tasks' numbers mean the same in both, and what is held out is not in the data."""
    dataset = load_dataset(module.NAME)
    task = dataset.spec.task
    assert task == module.TASK and lookup("other") is None
    check_fit(dataset.spec, task)
    tasks = episode_tasks(dataset)
    env = make_env(task)
    assert not set(tasks.tolist()) & set(env.unwrapped.held_out)  # type: ignore[attr-defined]
    drawn = {env.reset(seed=s)[1]["task"] for s in range(20)}
    assert len(drawn) > 8 and drawn <= set(env.unwrapped.held_out)  # type: ignore[attr-defined]
    assert dataset.fingerprint == load_dataset(module.NAME).fingerprint


def test_bandits() -> None:
    data = bandits.generate(3, 40, 400)
    env = bandits.Bandit(task=7)
    env.reset(seed=0)
    rows = data.columns["tasks"] == 7
    actions, rewards = data.columns["actions"][rows], data.columns["rewards"][rows]
    for arm in np.unique(actions):
        own = rewards[actions == arm]
        assert abs(own.mean() - env.means[arm]) < 4 * env.std / np.sqrt(len(own))
    assert (data.columns["optimal_actions"][rows] == env.means.argmax()).all()
    _, _, terminated, truncated, info = env.step(2)
    assert info["regret"] == pytest.approx(env.means.max() - env.means[2]) and not terminated and not truncated
    gained = [env.step(2)[1] for _ in range(4000)]
    assert np.mean(gained) == pytest.approx(env.means[2], abs=0.02) and np.std(gained) == pytest.approx(0.3, abs=0.02)
    linear = bandits.Bandit(arms=10, features=2, task=3)
    assert np.linalg.matrix_rank(np.stack([linear.means_of(n) for n in range(20)])) == 2
    assert bandits.generate(0, 3, 5, arms=10, features=2).task.env_kwargs["features"] == 2  # type: ignore[union-attr]


def test_darkroom() -> None:
    assert len({tuple(g) for g in darkroom.goals()}) == 100
    for number in (0, 57, 99):
        env = darkroom.Darkroom(task=number)
        obs, _ = env.reset(seed=0)
        assert obs.tolist() == [0, 0]
        total = 0.0
        for _ in range(darkroom.LIMIT):
            obs, reward, _, _, info = env.step(int(darkroom.best(obs, env.goal)))
            total += reward
        assert info["success"] and total == min(darkroom.LIMIT + 1 - env.goal.sum(), darkroom.LIMIT)
    with pytest.raises(ValueError, match="tasks 0 to 99"):
        darkroom.Darkroom(task=100)
    labels = darkroom.best(np.array([[3, 0], [0, 9], [5, 1], [5, 2]]), np.array([5, 2]))
    assert labels.tolist() == [0, 0, 2, 4]


def test_point_robot() -> None:
    data = point_robot.generate(0, 3, 2, quality=(0.0,))
    env = point_robot.PointRobot(task=2)
    obs, _ = env.reset(seed=0)
    for row in np.flatnonzero(data.columns["tasks"] == 2)[:20]:
        np.testing.assert_allclose(obs, data.columns["observations"][row], atol=1e-6)
        obs, reward, _, _, _ = env.step(data.columns["actions"][row])
        assert reward == pytest.approx(float(data.columns["rewards"][row]), abs=1e-5)
    assert reward > -0.15


# ---- contexts of new tasks


def test_contexts_of_bandits() -> None:
    """The arm that pays most on average is the label, and the noise is the environment's."""
    batch = bandits.Bandit().contexts(rng.make_key(0), 200, 400)
    onehot = torch.nn.functional.one_hot(batch["actions"], 5).float()
    pulls = onehot.sum(1)
    means = (onehot * batch["rewards"].unsqueeze(-1)).sum(1) / pulls.clamp(min=1)
    seen = (pulls >= 12).all(1)
    assert int(seen.sum()) > 30
    assert float((means.argmax(1) == batch["labels"])[seen].float().mean()) > 0.8
    noise = batch["rewards"] - means.gather(1, batch["actions"])
    assert float(noise.std()) == pytest.approx(0.3, abs=0.01)
    shares = (pulls / 400).amax(1)
    assert float((shares == 1.0).float().mean()) == pytest.approx(1 / 11, abs=0.07), "some pull one arm only"
    linear = bandits.Bandit(arms=4, features=2).contexts(rng.make_key(0), 8, 6)
    assert linear["labels"].max() < 4 and linear["rewards"].shape == (8, 6)


def test_contexts_of_darkrooms() -> None:
    env = darkroom.Darkroom()
    batch = env.contexts(rng.make_key(0), 64, 50)
    moved = batch["observations"].numpy() + darkroom.MOVES[batch["actions"].numpy()]
    np.testing.assert_array_equal(batch["next_observations"].numpy(), np.clip(moved, 0, 9))
    found = 0
    for b in range(64):
        hits = batch["next_observations"][b][batch["rewards"][b] == 1.0].numpy()
        if len(hits):
            assert (hits == hits[0]).all()
            number = int(np.flatnonzero((env.goals == hits[0]).all(1))[0])
            assert number < env.held_out.start, "held-out goals are not trained on"
            assert int(batch["labels"][b]) == int(darkroom.best(batch["queries"][b].numpy(), env.goals[number]))
            found += 1
    assert found > 10


def test_fresh_contexts_are_treated_like_the_data() -> None:
    dataset = scale_rewards(normalize_observations(load_dataset("darkroom")), 3.0, 1.0)
    sampler = FreshContexts(dataset.spec, 5)
    batch = sampler(sampler.prepare(dataset), rng.make_key(1), 4)
    raw = darkroom.Darkroom().contexts(rng.make_key(1), 4, 5)
    mean, std = torch.tensor(dataset.spec.observation_mean), torch.tensor(dataset.spec.observation_std)
    for name in ("observations", "next_observations", "queries"):
        torch.testing.assert_close(batch[name], (raw[name] - mean) / std)
    torch.testing.assert_close(batch["rewards"], 3.0 * raw["rewards"] + 1.0)
    with pytest.raises(UserError, match="makes no contexts"):
        robots = load_dataset("point-robot")
        FreshContexts(robots.spec, 5).prepare(robots)
    with pytest.raises(UserError, match="has no environment"):
        FreshContexts(small().spec, 5).prepare(small())
