"""Reward labels: functions, their errors, and preference models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offrl.data import Dataset, DatasetConfig, label_rewards, load_dataset
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.relabel import PreferenceModel, PreferenceSettings
from offrl.relabel.preferences import preferred_by_return, segment_pairs
from offrl.settings.encoder import EncoderConfig

N = 12
R = np.random.default_rng(0)
VALUES = {
    "observations": R.normal(size=(N, 2)).astype(np.float32),
    "actions": R.uniform(-3, 3, size=(N, 1)),
    "rewards": np.arange(N, dtype=float),
    "truncations": np.isin(np.arange(N), [4, 11]),
}
CODE = """
import numpy as np
def energy(columns):
    assert set(columns) == {"observations", "actions", "rewards", "terminations", "truncations", "next_observations"}, sorted(columns)
    columns["observations"][:] *= 1.0
    return -np.square(columns["actions"]).sum(1)
def half(columns):
    return 0.5 * columns["rewards"]
def short(columns):
    return columns["rewards"][1:]
def nan(columns):
    return np.where(columns["rewards"] == 7, np.nan, 1.0)
def words(columns):
    return ["a"] * len(columns["rewards"])
def broken(columns):
    return columns["reward"]
seven = 7
"""  # noqa: E501


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(CODE)
    np.savez(tmp_path / "data.npz", **VALUES)  # type: ignore[arg-type]
    return tmp_path


def config(place: Path, function: str | None, **more: object) -> DatasetConfig:
    labels = None if function is None else f"{place}/mine.py:{function}"
    return DatasetConfig(
        name=str(place / "data.npz"),
        action_low=[-3.0],
        action_high=[3.0],
        cache_dir=str(place),
        reward_labels=labels,
        **more,
    )  # type: ignore[arg-type]


def test_a_function_of_an_episodes_columns(place: Path) -> None:
    plain, found = load_dataset(config(place, None)), load_dataset(config(place, "energy"))
    # actions in the environment's units
    np.testing.assert_allclose(found.columns["rewards"], -(VALUES["actions"][:, 0] ** 2), rtol=1e-5)
    assert torch.equal(found.columns["observations"], plain.columns["observations"])
    assert found.raw_returns.tolist() == plain.raw_returns.tolist() == [10.0, 56.0]
    np.testing.assert_allclose(
        found.episode_returns(), np.add.reduceat(-(VALUES["actions"][:, 0] ** 2), [0, 5]), rtol=1e-5
    )
    assert found.fingerprint != plain.fingerprint and found.transforms[-1].startswith("reward_labels ")
    assert "rewards are those of" in found.notes[-1]


def test_labels_come_before_what_is_done_to_rewards(place: Path) -> None:
    found = load_dataset(config(place, "half", reward_scale=4.0, discount_returns=0.0, top_fraction=0.5))
    assert found.columns["rewards"].tolist() == [2.0 * r for r in range(5, 12)]
    assert found.columns["returns_to_go"].tolist() == found.columns["rewards"].tolist()
    weighted = load_dataset(config(place, "energy", weighting="return"))
    assert int(weighted.weights.argmax()) == int(weighted.episode_returns().argmax()) == 1  # type: ignore[union-attr]


def test_a_function_that_changes_makes_other_data(place: Path) -> None:
    first = load_dataset(config(place, "half", memory="mmap"))
    (place / "mine.py").write_text(CODE.replace("0.5 *", "0.25 *"))
    second = load_dataset(config(place, "half", memory="mmap"))
    assert (
        torch.equal(second.columns["rewards"], first.columns["rewards"] / 2) and second.fingerprint != first.fingerprint
    )


def test_files_without_rewards(place: Path) -> None:
    np.savez(place / "data.npz", **{k: v for k, v in VALUES.items() if k != "rewards"})  # type: ignore[arg-type]
    found = load_dataset(config(place, "energy", cache="always"))
    assert float(found.columns["rewards"].max()) < 0.0 and found.raw_returns.tolist() == [0.0, 0.0]
    with pytest.raises(UserError, match="which of them are rewards is not clear"):
        load_dataset(config(place, None, cache="always"))


def test_what_goes_wrong_is_one_line(place: Path) -> None:
    for function, match in (
        ("short", r"mine\.py:short, episode 0: it gave rewards of shape \[4\]; \[5\] is due"),
        ("nan", r"episode 1: the reward of its step 2 \(row 7\) is nan"),
        ("words", "episode 0: it gave .* not numbers"),
        ("broken", r"episode 0 failed at .*mine\.py:\d+: KeyError: 'reward'"),
        ("seven", "is a int, not a function"),
        ("enrgy", "has no 'enrgy'.*energy"),
    ):
        with pytest.raises(UserError, match=match) as error:
            load_dataset(config(place, function))
        assert "\n" not in str(error.value)
    for text, match in (
        (f"{place}/mine.py", "names no function"),
        (f"{place}/nine.py:energy", "no file"),
        ("no_such_package.rewards:f", "no Python module"),
        (f"{place}/none.safetensors", "does not exist"),
    ):
        with pytest.raises(UserError, match=match):
            load_dataset(replace(config(place, None), reward_labels=text))


def walk(seed: int = 0, discrete: bool = False) -> Dataset:
    """20 episodes of 30 rows; the reward is large where the observation's first number is, and the action small."""
    rng = np.random.default_rng(seed)
    observations = rng.normal(size=(600, 2)) * [1.0, 20.0]
    actions = rng.integers(0, 3, 600) if discrete else rng.uniform(-2, 2, (600, 1))
    rewards = observations[:, 0] - (actions if discrete else np.abs(actions[:, 0]))
    more = {"num_actions": 3} if discrete else {"action_low": -2.0, "action_high": 2.0}
    return from_arrays(observations, actions, rewards, truncations=np.arange(600) % 30 == 29, **more)  # type: ignore[arg-type]


def camera(seed: int = 0, numbers: bool = False) -> Dataset:
    """40 episodes of 6 rows, rewarded for bright pictures. numbers: of no use, beside the pictures."""
    draw = np.random.default_rng(seed)
    frames = draw.integers(0, 100, (240, 16, 16, 1)) + (bright := draw.integers(0, 150, 240)).reshape(-1, 1, 1, 1)
    images = {"front": frames.astype(np.uint8)} | ({"state": draw.normal(size=(240, 2))} if numbers else {})
    ends = np.arange(240) % 6 == 5
    actions = draw.uniform(-1.0, 1.0, (240, 1))
    return from_arrays(images, actions, bright, truncations=ends, action_low=-1.0, action_high=1.0)


@pytest.mark.parametrize("numbers", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_preference_model_of_images(tmp_path: Path, numbers: bool) -> None:
    data, encoder = camera(numbers=numbers), EncoderConfig(width=8, shift=0)
    pairs = segment_pairs(data, 80, 2)
    settings = PreferenceSettings(members=2, hidden=[16], updates=25, learning_rate=3e-3, batch_size=16)
    labels = preferred_by_return(data, pairs, 2)
    model = PreferenceModel.fit(data, pairs, labels, 2, settings, encoder=encoder, quiet=True)
    assert len(model.encoders) == 2 and 0.0 <= model.accuracy <= 1.0
    other = camera(1, numbers)
    rewards = label_rewards(other, model).columns["rewards"]
    assert np.corrcoef(rewards, other.columns["rewards"])[0, 1] > 0.75  # 0.89 +- 0.03 over seeds
    model.save(path := tmp_path / "model.safetensors")
    assert torch.equal(label_rewards(other, str(path)).columns["rewards"], rewards)
    assert PreferenceModel.load(path).digest() == model.digest()
    with pytest.raises(UserError, match=r"learnt on images front \[16, 16, 1\], and these data have none: read both"):
        label_rewards(
            walk()
            if numbers
            else from_arrays(
                np.zeros((4, 16, 16, 1), np.uint8), **{k: other.columns[k][:4] for k in ("actions", "rewards")}
            ),
            model,
        )


@pytest.mark.parametrize("discrete", [False, True])
def test_a_preference_model_finds_the_teachers_reward(tmp_path: Path, discrete: bool) -> None:
    data = walk(discrete=discrete)
    pairs = segment_pairs(data, 300, 8)
    settings = PreferenceSettings(members=2, hidden=[32], updates=120, learning_rate=1e-2)
    model = PreferenceModel.fit(data, pairs, preferred_by_return(data, pairs, 8), 8, settings, quiet=True)
    assert model.accuracy > 0.7  # of 29 pairs held out: 0.83 +- 0.03 over seeds
    other = walk(1, discrete)
    labelled = label_rewards(other, model)
    found, true = labelled.columns["rewards"].numpy(), other.columns["rewards"].numpy()
    assert np.corrcoef(found, true)[0, 1] > 0.8 and 0.0 < found.min() < found.max() < 1.0
    model.save(tmp_path / "model.safetensors")
    again = label_rewards(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(again.columns["rewards"], labelled.columns["rewards"])
    assert model.digest() == PreferenceModel.load(tmp_path / "model.safetensors").digest()
    brief = replace(settings, updates=3)
    a, b = (
        PreferenceModel.fit(data, pairs, preferred_by_return(data, pairs, 8), 8, brief, quiet=True) for _ in range(2)
    )
    assert a.digest() == b.digest() != model.digest()
    narrow = from_arrays(np.ones((4, 1)), other.columns["actions"][:4], np.ones(4))
    with pytest.raises(UserError, match="learnt on observations of 2 numbers; these have 1"):
        label_rewards(narrow, model)
    with pytest.raises(UserError, match=r"kept in a \.safetensors"):
        model.save(tmp_path / "model.pt")


def test_segments_lie_in_one_episode_and_labels_are_checked() -> None:
    data = walk()
    pairs = segment_pairs(data, 2_000, 25, seed=1)
    assert (pairs % 30 <= 5).all() and len(np.unique(pairs)) == 20 * 6
    sums = np.array([[data.columns["rewards"][s : s + 25].double().sum() for s in pair] for pair in pairs[:50]])
    assert preferred_by_return(data, pairs[:50], 25).tolist() == (sums[:, 1] > sums[:, 0]).astype(float).tolist()
    assert preferred_by_return(data, np.array([[0, 0]]), 5).tolist() == [0.5]
    for bad, labels, length, match in (
        ([[0, 28], [0, 1]], [1, 0], 5, r"pair 0, first rows \[0, 28\]: 5 rows from there do not lie in one episode"),
        ([[0, 1], [0, 600]], [1, 0], 5, "pair 1"),
        ([[0, 1], [2, 3]], [1, 2], 5, "label of pair 1 is 2"),
        ([[0, 1], [2, 3]], [1], 5, "labels"),
        ([[0.5, 1], [2, 3]], [1, 0], 5, "whole numbers"),
    ):
        with pytest.raises(UserError, match=match):
            PreferenceModel.fit(data, np.array(bad), labels, length)
    with pytest.raises(UserError, match="no episode has 31 rows"):
        segment_pairs(data, 5, 31)
