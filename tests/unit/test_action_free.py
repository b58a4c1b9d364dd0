"""Semi-supervised data: the split, the labels and their cache, files without actions, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from offrl.data import DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.relabel import InverseSettings, action_free_dataset, label_actions, split_labelled
from offrl.relabel.inverse_dynamics import Inputs

SETTINGS = InverseSettings(members=1, updates=150, hidden=[32], dropout=0.0, learning_rate=1e-2, batch_size=64)
SMALL: dict[str, Any] = {"action_free_members": 1, "action_free_updates": 20, "action_free_hidden": [8]}


def walks(episodes: int = 12, length: int = 20, seed: int = 0, discrete: bool = False) -> dict[str, np.ndarray]:
    """s' = s + a in two dimensions (or the unit vector that a discrete action names); every other episode ends in a
    terminal.
    """
    rng = np.random.default_rng(seed)
    actions = rng.integers(0, 4, (episodes, length)) if discrete else rng.uniform(-1, 1, (episodes, length, 2))
    steps = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])[actions] if discrete else actions
    states = 2.0 + np.cumsum(np.concatenate([rng.normal(size=(episodes, 1, 2)), steps], 1), 1)
    ends = np.arange(episodes * length) % length == length - 1
    terminations = ends & (np.arange(episodes * length) // length % 2 == 0)
    return {
        "observations": states[:, :-1].reshape(-1, 2).astype(np.float32),
        "actions": actions.reshape(-1, *actions.shape[2:]),
        "rewards": np.repeat(np.arange(episodes, dtype=float), length),
        "terminations": terminations,
        "truncations": ends & ~terminations,
        "next_observations": states[:, 1:].reshape(-1, 2).astype(np.float32),
    }


def without(values: dict[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    return {k: v for k, v in values.items() if k not in names}


def test_labels_are_close_to_the_actions_that_were_hidden() -> None:
    known = from_arrays(**walks(), action_low=-2.0, action_high=2.0, name="known")
    there = walks(seed=1)
    other = action_free_dataset(known.spec, **without(there, "actions"), name="watched")
    both = label_actions(known, other, replace(SETTINGS, updates=250), quiet=True)
    assert both.num_episodes == 24 and torch.equal(both.columns["actions"][:240], known.columns["actions"])
    true = torch.tensor(there["actions"] / 2.0).float()  # scaled by the labelled data's range
    error = (both.columns["actions"][240:] - true).square().mean().sqrt()
    assert float(error) < 0.1 < 0.25 < float(true.std())
    assert both.spec == known.spec and torch.equal(
        both.columns["observations"][240:], torch.tensor(there["observations"])
    )
    assert both.raw_returns.tolist() == [20.0 * e for e in range(12)] * 2
    assert (
        "12 episodes (240 rows) are labelled by inverse dynamics learnt from 12 episodes" in both.notes[-1]
        and "RMSE" in both.notes[-1]
    )
    assert len({known.fingerprint, other.fingerprint, both.fingerprint}) == 3
    brief = replace(SETTINGS, members=2, updates=5)
    a, b, c = (label_actions(known, other, s, quiet=True) for s in (brief, brief, replace(brief, seed=7)))
    assert torch.equal(a.columns["actions"], b.columns["actions"]) and a.fingerprint == b.fingerprint
    assert a.fingerprint != c.fingerprint and not torch.equal(a.columns["actions"], c.columns["actions"])


def test_discrete_actions() -> None:
    known = from_arrays(**walks(discrete=True), num_actions=5)
    there = walks(seed=1, discrete=True)
    both = label_actions(known, action_free_dataset(known.spec, **without(there, "actions")), SETTINGS, quiet=True)
    labels = both.columns["actions"][240:]
    assert labels.dtype == torch.int64 and float((labels == torch.tensor(there["actions"])).double().mean()) > 0.95
    assert both.spec.num_actions == 5 and "% of held-out actions are right" in both.notes[-1]


def test_states_before_an_episode_are_zeros_put_in_before_normalising() -> None:
    data = from_arrays(**walks(episodes=3, length=4))
    inputs = Inputs.of([data, data])
    observations = data.columns["observations"].double()
    torch.testing.assert_close(inputs.mean.double(), observations.mean(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs.std.double(), observations.std(0, unbiased=False) + 1e-6, rtol=1e-6, atol=1e-6)
    before, here, after = inputs.states(data, torch.tensor([4, 5]))
    norm = lambda x: (x - inputs.mean) / inputs.std  # noqa: E731
    torch.testing.assert_close(before, norm(torch.stack([torch.zeros(2), data.columns["observations"][4]])))
    torch.testing.assert_close(here, norm(data.columns["observations"][4:6]))
    torch.testing.assert_close(after, norm(data.columns["next_observations"][4:6]))


def test_a_row_without_a_successor_repeats_the_action_before_it() -> None:
    known = from_arrays(**without(walks(), "next_observations"), action_low=-1.0, action_high=1.0)
    both = label_actions(
        known,
        action_free_dataset(known.spec, **without(walks(seed=1), "next_observations", "actions")),
        SETTINGS,
        quiet=True,
    )
    labels = both.columns["actions"][240:]
    last = torch.arange(19, 240, 20)
    assert torch.equal(labels[last], labels[last - 1]) and not torch.equal(labels[last - 1], labels[last - 2])


def test_split_is_the_papers_protocol() -> None:
    data = from_arrays(**walks(episodes=40))  # returns 0, 20, ..., 780
    labelled, rest = split_labelled(data, 0.1, 0.5, seed=3)
    assert labelled.num_episodes == 4 and rest.num_episodes == 36 and float(labelled.raw_returns.max()) < 400
    assert sorted(labelled.raw_returns.tolist() + rest.raw_returns.tolist()) == [20.0 * e for e in range(40)]
    assert labelled.raw_returns.tolist() != split_labelled(data, 0.1, 0.5, seed=4)[0].raw_returns.tolist()
    assert labelled.raw_returns.tolist() == split_labelled(data, 0.1, 0.5, seed=3)[0].raw_returns.tolist()
    seen = {e for s in range(60) for e in split_labelled(data, 0.1, 0.5, s)[0].raw_returns.tolist()}
    assert seen == {20.0 * e for e in range(20)}  # every one of the lower half, and no other
    assert split_labelled(data, 0.99, 1.0)[1].num_episodes == 1
    with pytest.raises(UserError, match=r"24 of 40 episodes are to be labelled.*the 20 with the lowest"):
        split_labelled(data, 0.6, 0.5)
    with pytest.raises(UserError, match="leave episodes on both sides"):
        split_labelled(from_arrays(**walks(episodes=1)), 0.5)


def test_settings_label_the_hidden_episodes_and_the_labels_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "walks.npz", **walks())
    config = DatasetConfig(
        name=str(tmp_path / "walks.npz"),
        cache_dir=str(tmp_path),
        labelled_fraction=0.5,
        labelled_quantile=0.75,
        **SMALL,
    )
    first = load_dataset(config, quiet=True)
    labelled, rest = split_labelled(load_dataset(config.name), 0.5, 0.75)
    assert torch.equal(first.columns["actions"][:120], labelled.columns["actions"])
    assert torch.equal(first.columns["observations"][120:], rest.columns["observations"])
    assert not torch.equal(first.columns["actions"][120:], rest.columns["actions"])
    from offrl.relabel import actions as action_free

    kept = list((tmp_path / "actions").glob("*.safetensors"))
    assert len(kept) == 1
    monkeypatch.setattr(action_free, "learn", lambda *a: pytest.fail("learnt again"))
    again = load_dataset(config, quiet=True)
    assert torch.equal(again.columns["actions"], first.columns["actions"]) and again.notes == first.notes
    mapped = load_dataset(replace(config, memory="mmap"), quiet=True)
    assert (
        mapped.mapped
        and torch.equal(mapped.columns["actions"], first.columns["actions"])
        and mapped.fingerprint == first.fingerprint
    )
    monkeypatch.undo()
    kept[0].write_bytes(kept[0].read_bytes()[:-40] + b"0" * 40)  # damaged: made anew, the same
    anew = load_dataset(config, quiet=True)
    assert torch.equal(anew.columns["actions"], first.columns["actions"])
    none = load_dataset(replace(config, action_free_members=0), quiet=True)
    assert none.num_episodes == 6 and "6 action-free episodes are left out" in none.notes
    assert load_dataset(replace(config, action_free_seed=5), quiet=True).fingerprint != first.fingerprint


@pytest.mark.parametrize("kind", ["npz", "hdf5", "with actions"])
def test_files_without_actions(tmp_path: Path, kind: str) -> None:
    there = walks(seed=1)
    values = there if kind == "with actions" else without(there, "actions")
    path = tmp_path / ("watched.hdf5" if kind == "hdf5" else "watched.npz")
    if kind == "hdf5":
        with h5py.File(path, "w") as file:
            for name, column in values.items():
                file[{"observations": "obs"}.get(name, name)] = column
    else:
        np.savez(path, **{{"observations": "obs"}.get(k, k): v for k, v in values.items()})  # type: ignore[arg-type]
    known = walks()
    np.savez(
        tmp_path / "known.npz", **{{"observations": "obs", "actions": "act"}.get(k, k): v for k, v in known.items()}
    )  # type: ignore[arg-type]
    config = DatasetConfig(
        name=str(tmp_path / "known.npz"),
        cache_dir=str(tmp_path),
        fields={"observations": "obs", "actions": "act"},
        action_free=[str(path)],
        **SMALL,
    )
    both = load_dataset(config, quiet=True)
    assert both.num_episodes == 24 and torch.equal(
        both.columns["observations"][240:], torch.tensor(there["observations"])
    )
    assert both.columns["actions"].abs().max() < 1.0
    plain = load_dataset(replace(config, action_free=[]))
    assert (
        torch.equal(plain.columns["actions"], both.columns["actions"][:240]) and plain.fingerprint != both.fingerprint
    )


def test_minari_without_actions(tmp_path: Path) -> None:
    there = walks(seed=1)
    box = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-9.0, -9.0], "high": [9.0, 9.0]}
    folder = tmp_path / "watched-v0" / "data"
    folder.mkdir(parents=True)
    meta = {
        "total_steps": 240,
        "total_episodes": 12,
        "dataset_id": "watched-v0",
        "data_format": "hdf5",
        "minari_version": "0.5",
        "observation_space": json.dumps(box),
        "action_space": json.dumps({**box, "low": [-1.0, -1.0], "high": [1.0, 1.0]}),
    }
    (folder / "metadata.json").write_text(json.dumps(meta))
    with h5py.File(folder / "main_data.hdf5", "w") as file:
        for e in range(12):
            part, group = slice(20 * e, 20 * e + 20), file.create_group(f"episode_{e}")
            group["observations"] = np.concatenate([there["observations"][part], there["next_observations"][part][-1:]])
            for name in ("rewards", "terminations", "truncations"):
                group[name] = there[name][part]
    np.savez(tmp_path / "known.npz", **walks())
    config = DatasetConfig(
        name=str(tmp_path / "known.npz"), cache_dir=str(tmp_path), action_free=[str(tmp_path / "watched-v0")], **SMALL
    )
    both = load_dataset(config, quiet=True)
    assert both.num_episodes == 24 and torch.equal(
        both.columns["next_observations"][240:], torch.tensor(there["next_observations"])
    )


def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    known = from_arrays(**walks(), name="known")
    other = walks(seed=1)
    wide = action_free_dataset(
        known.spec, **{**without(other, "actions", "next_observations"), "observations": np.ones((240, 5))}, name="wide"
    )
    with pytest.raises(
        UserError, match=r"cannot label wide by known: its observations have shape \[5\] instead of \[2\]"
    ):
        label_actions(known, wide)
    image = from_arrays(np.zeros((4, 2, 2), np.uint8), np.zeros((4, 1)), np.zeros(4), name="image")
    with pytest.raises(UserError, match=r"image: .*these are pixels"):
        label_actions(image, image)
    one = from_arrays(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros(1), name="one")
    with pytest.raises(UserError, match="one has 0 labelled"):
        label_actions(one, known)
    np.savez(tmp_path / "known.npz", **walks())
    np.savez(tmp_path / "bare.npz", **without(other, "actions", "rewards"))
    config = DatasetConfig(
        name=str(tmp_path / "known.npz"), cache_dir=str(tmp_path), action_free=[str(tmp_path / "bare.npz")], **SMALL
    )
    with pytest.raises(UserError, match=r"bare\.npz has no rewards.*dataset\.reward_labels="):
        load_dataset(config)
    with pytest.raises(UserError, match=r"no file .*missing"):
        load_dataset(replace(config, action_free=[str(tmp_path / "missing.npz")]))
    for bad, match in (
        ({"labelled_fraction": 0.5, "labelled_quantile": 0.3}, "labelled_quantile=0.3"),
        ({"labelled_quantile": 0.3}, "needs dataset.labelled_fraction"),
        ({"labelled_fraction": 0.0}, "must be above 0"),
        ({"action_free_hidden": []}, "at least one layer"),
    ):
        with pytest.raises(UserError, match=match):
            DatasetConfig(**bad).validate()  # type: ignore[arg-type]


def test_other_columns(tmp_path: Path) -> None:
    known = from_arrays(**walks(), place=np.arange(240), name="known")
    other = action_free_dataset(known.spec, **without(walks(seed=1), "actions"), more=np.arange(240))
    both = label_actions(known, other, replace(SETTINGS, updates=10), quiet=True)
    assert "place" not in both.columns and "more" not in both.columns
    assert any("lack the column 'place'" in note for note in both.notes)
