"""Images on their way from files and arrays into a dataset, through transforms, caches and the tools of data."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from offrl.data.loading.load import load_dataset
from offrl.settings.dataset import DatasetConfig
from tests.support.data_files import minari_streams

ENTRIES = {"front": ("uint8", (6, 4, 3)), "state": ("float32", (3,)), "top": ("uint8", (5, 4))}


def shown(data, name: str) -> tuple[np.ndarray, np.ndarray]:
    """What each row, and its successor, show."""
    rows = torch.arange(len(data))
    return data.stores[name].frames(rows, 1).numpy(), data.stores[name].frames(rows, 1, following=True).numpy()


# ------------------------------------------------------------------------------------------------------------- Minari


def test_images_of_a_dict_are_used_where_they_are_asked_for(tmp_path: Path) -> None:
    folder, recorded = minari_streams(tmp_path, ENTRIES)
    plain = load_dataset(str(folder))
    assert plain.spec.observation_shape == (3,) and not plain.stores and plain.spec.task is not None
    assert plain.spec.task.observation_keys == ("state",)
    (note,) = plain.notes
    assert "front, top" in note and "dataset.observation_keys=[state,front,top]" in note
    data = load_dataset(DatasetConfig(name=str(folder), observation_keys=["state", "front", "top"]))
    assert [s.name for s in data.spec.streams] == ["front", "top"] and not data.notes
    assert torch.equal(data.columns["observations"], plain.columns["observations"])
    for name in ("front", "top"):
        images = [episode[name].reshape(len(episode[name]), 6 - (name == "top"), 4, -1) for episode in recorded]
        now, following = shown(data, name)
        np.testing.assert_array_equal(now, np.concatenate([i[:-1] for i in images]))
        np.testing.assert_array_equal(following, np.concatenate([i[1:] for i in images]))
    assert data.columns["successor_known"].all()
    assert load_dataset(DatasetConfig(name=str(folder), observation_keys=["front"])).spec.observation_shape == (0,)


def test_images_of_a_dict_are_used_where_there_is_no_vector(tmp_path: Path) -> None:
    folder, recorded = minari_streams(tmp_path, {"front": ENTRIES["front"]})
    data = load_dataset(str(folder))
    assert data.spec.observation_shape == (0,) and data.columns["successor_known"].all() and not data.notes
    np.testing.assert_array_equal(shown(data, "front")[1][-1], recorded[-1]["front"][-1])


def test_episodes_that_the_metadata_do_not_count_are_read(tmp_path: Path) -> None:
    folder, recorded = minari_streams(tmp_path, {"front": ENTRIES["front"]})
    path = folder / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"total_episodes": 1}))
    data = load_dataset(str(folder))
    np.testing.assert_array_equal(shown(data, "front")[1][-1], recorded[-1]["front"][-1])


def test_jpeg_images_are_named_by_their_bytes(tmp_path: Path) -> None:
    entries = {"front": ("uint8", (32, 40, 3)), "state": ("float32", (3,))}
    folder, _ = minari_streams(tmp_path, entries, jpeg="front")
    config = DatasetConfig(name=str(folder), observation_keys=["front"])
    data = load_dataset(config)
    assert shown(data, "front")[0].shape == (12, 32, 40, 3)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:  # padded otherwise
        frames = file["episode_0/observations/front"][()]
        del file["episode_0/observations/front"]
        file["episode_0/observations/front"] = np.pad(frames, ((0, 0), (0, 9)))
    assert load_dataset(config).fingerprint == data.fingerprint
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        frames[[1, 2]] = frames[[2, 1]]
        file["episode_0/observations/front"][..., :-9] = frames
    assert load_dataset(config).fingerprint != data.fingerprint


@pytest.mark.parametrize("shape", [(3, 6, 8), (6, 4, 9)])
def test_what_is_no_image_is_refused_where_it_is_asked_for(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from offrl.errors import UserError

    folder, _ = minari_streams(tmp_path, {"front": ("uint8", shape), "state": ("float32", (3,))})
    load_dataset(str(folder))
    with pytest.raises(UserError, match=r"set-v0: 'front': images of shape"):
        load_dataset(DatasetConfig(name=str(folder), observation_keys=["front"]))
