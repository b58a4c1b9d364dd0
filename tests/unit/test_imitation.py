"""Demonstrations: appended and marked as the settings say, drawn beside everything else, and errors that name the
cure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms.demonstrations import ExpertSampler, append_expert
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig


def episodes(count: int, at: float, steps: int = 5, **more: Any) -> dict[str, Any]:
    """Observations that tell which row of which dataset they are; the later an episode, the worse its return."""
    rows = count * steps
    ends = np.arange(rows) % steps == steps - 1
    return {
        "observations": (at + np.arange(rows, dtype=np.float32))[:, None].repeat(2, 1),
        "actions": np.linspace(-1, 1, rows, dtype=np.float32)[:, None],
        "rewards": np.repeat(np.arange(count, dtype=np.float32), steps),
        "terminations": ends & (np.arange(rows) // steps % 2 == 0),
        "truncations": ends & (np.arange(rows) // steps % 2 == 1),
        **more,
    }


def dataset(count: int, at: float, **more: Any) -> Dataset:
    return from_arrays(**episodes(count, at, **more), action_low=-1.0, action_high=1.0, name=f"d{at:g}")


def firsts(data: Dataset) -> list[float]:
    return data.columns["observations"][data.episode_start, 0].tolist()


def test_the_first_or_the_best_episodes_are_marked_and_the_next_ones_not() -> None:
    ours, expert = dataset(2, 0.0), dataset(4, 100.0)
    joined = append_expert(ours, expert, 2, "first", 1)
    assert firsts(joined) == [0.0, 5.0, 100.0, 105.0, 110.0]
    assert joined.columns["expert"].tolist() == [False] * 10 + [True] * 10 + [False] * 5
    assert firsts(append_expert(ours, expert, 1, "best", 2))[2:] == [115.0, 110.0, 105.0]
    every = append_expert(ours, expert, 0)
    assert int(every.columns["expert"].sum()) == 20
    assert "demonstrations: 5 rows" in append_expert(ours, expert).notes[-1]
    assert "expert" not in ours.columns and "expert" not in expert.columns


def test_what_does_not_fit_is_refused() -> None:
    ours, expert = dataset(2, 0.0), dataset(3, 100.0)
    with pytest.raises(UserError, match=r"has 3 episodes; .* ask for 3 \+ 1"):
        append_expert(ours, expert, 3, unmarked=1)
    with pytest.raises(UserError, match="column 'expert' of its own"):
        append_expert(dataset(2, 0.0, expert=np.ones(10, bool)), expert)
    wide = from_arrays(
        np.zeros((5, 3)), np.zeros((5, 1)), np.zeros(5), episode_ends=[4], action_low=-1.0, action_high=1.0
    )
    with pytest.raises(UserError, match="cannot append"):
        append_expert(ours, wide)


def test_batches_hold_everything_and_as_many_of_the_expert() -> None:
    # the second of the expert's episodes ends in a time-out
    joined = append_expert(dataset(3, 0.0), dataset(4, 100.0), 2)
    sampler = ExpertSampler()
    source = sampler.prepare(joined)
    batch = sampler(source, rng.make_key(0), 4000)
    assert "rewards" not in batch and "expert_rewards" not in batch
    assert {k: tuple(v.shape) for k, v in batch.items()} == {
        **dict.fromkeys(
            ("observations", "next_observations", "expert_observations", "expert_next_observations"), (4000, 2)
        ),
        **dict.fromkeys(("actions", "expert_actions"), (4000, 1)),
        **dict.fromkeys(("masks", "expert_masks"), (4000,)),
    }
    drawn = batch["expert_observations"][:, 0]
    assert sorted(drawn.unique().tolist()) == [100.0, 101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 107.0, 108.0]
    assert torch.equal(batch["expert_masks"], (drawn != 104.0).float())
    ordinary = drawn != 104.0
    assert torch.equal(batch["expert_next_observations"][ordinary, 0], drawn[ordinary] + 1)
    share = float((batch["observations"][:, 0] >= 100.0).float().mean())
    assert share == pytest.approx(9 / 23, abs=0.03)  # of 23 transitions 9 are the expert's
    again = sampler(source, rng.make_key(0), 4000)
    assert all(torch.equal(batch[k], again[k]) for k in batch)
    assert not torch.equal(drawn, sampler(source, rng.make_key(1), 4000)["expert_observations"][:, 0])


def test_marks_of_the_users_own_and_data_that_are_not_packed() -> None:
    marks = np.arange(15) % 5 == 1
    plain, images = dataset(3, 0.0, expert=marks), dataset(3, 0.0, expert=marks.astype(np.int64))
    images.columns["observations"] = images.columns["observations"].to(torch.uint8)
    images.columns["next_observations"] = images.columns["next_observations"].to(torch.uint8)
    sampler = ExpertSampler()
    for data in (plain, images):
        batch = sampler(sampler.prepare(data), rng.make_key(0), 500)
        assert sorted(batch["expert_observations"][:, 0].unique().tolist()) == [1, 6, 11]
        assert batch["expert_observations"].dtype == data.columns["observations"].dtype


def test_data_without_marks_name_the_cure() -> None:
    with pytest.raises(UserError, match="name a dataset with dataset"):
        ExpertSampler().prepare(dataset(2, 0.0))
    with pytest.raises(UserError, match="no transition is the expert's"):
        ExpertSampler().prepare(dataset(2, 0.0, expert=np.zeros(10, bool)))


def save(path: Path, values: dict[str, Any]) -> str:
    np.savez(path, **values)
    return str(path)


def test_settings(tmp_path: Path) -> None:
    ours = save(tmp_path / "ours.npz", episodes(3, 0.0))
    expert = save(tmp_path / "expert.npz", episodes(4, 100.0))
    common: dict[str, Any] = {
        "name": ours,
        "action_low": [-1.0],
        "action_high": [1.0],
        "cache": "never",
        "memory": "device",
    }
    joined = load_dataset(DatasetConfig(**common, expert=expert, expert_choice="best", subsample=0.5, reward_scale=2.0))
    # a share of ours, and the whole of what is to be imitated
    assert joined.num_episodes == 2 and firsts(joined)[1] == 115.0
    assert joined.columns["rewards"][-1] == 6.0 and joined.columns["expert"].tolist() == [False] * 5 + [True] * 5
    other = load_dataset(DatasetConfig(**common, expert=expert, subsample=0.5))
    assert other.transforms != joined.transforms
    normal = load_dataset(DatasetConfig(**common, expert=expert, normalize_observations=True))
    assert abs(float(normal.columns["observations"].mean())) < 1e-4  # statistics of all rows, the expert's too
    mapped = load_dataset(
        DatasetConfig(**{**common, "memory": "mmap"}, expert=expert, cache_dir=str(tmp_path / "cache"))
    )
    assert mapped.mapped and mapped.columns["expert"].sum() == 5
    sampler = ExpertSampler()
    a, b = (
        sampler(sampler.prepare(d), rng.make_key(3), 64)
        for d in (mapped, load_dataset(DatasetConfig(**common, expert=expert)))
    )
    assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(UserError, match="no-such"):
        load_dataset(DatasetConfig(**common, expert=str(tmp_path / "no-such.npz")))


def test_rewards_need_not_be_there(tmp_path: Path) -> None:
    bare = [{k: v for k, v in episodes(3, at).items() if k != "rewards"} for at in (0.0, 100.0)]
    ours, expert = (
        save(tmp_path / f"{name}.npz", values) for name, values in zip(("ours", "expert"), bare, strict=True)
    )
    common: dict[str, Any] = {"name": ours, "action_low": [-1.0], "action_high": [1.0], "cache": "never"}
    joined = load_dataset(DatasetConfig(**common, expert=expert, expert_choice="best"))  # of equals the first
    assert firsts(joined) == [0.0, 5.0, 10.0, 100.0] and not joined.columns["rewards"].any()
    with pytest.raises(UserError, match="rewards"):
        load_dataset(DatasetConfig(**common))
