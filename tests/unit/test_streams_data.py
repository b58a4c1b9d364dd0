"""Images on their way from files and arrays into a dataset, through transforms, caches and the tools of data."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from offrl.data.dataset import Dataset
from offrl.data.loading.load import load_dataset
from offrl.data.memory import arrays_of
from offrl.data.tools.inspect import inspect_dataset
from offrl.errors import UserError
from offrl.settings.compose import compose, parse
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
    folder, _ = minari_streams(tmp_path, {"front": ("uint8", shape), "state": ("float32", (3,))})
    load_dataset(str(folder))
    with pytest.raises(UserError, match=r"set-v0: 'front': images of shape"):
        load_dataset(DatasetConfig(name=str(folder), observation_keys=["front"]))


# ----------------------------------------------------------------------------------------------------------- episodes


def images_file(path: Path, lengths: tuple[int, ...] = (4, 6, 5), **extra: np.ndarray) -> np.ndarray:
    """Episodes of images in a layout of columns; the images [R, 6, 4, 3]."""
    rng, rows = np.random.default_rng(0), sum(lengths)
    ends = np.zeros(rows, bool)
    ends[np.cumsum(lengths) - 1] = True
    columns = {
        "observations": rng.integers(0, 255, (rows, 6, 4, 3), dtype=np.uint8),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": np.arange(rows, dtype=np.float32),
        "terminals": ends,
    } | extra
    if path.suffix == ".npz":
        np.savez(path, **columns)
    else:
        with h5py.File(path, "w") as file:
            for name, column in columns.items():
                file[name] = column
    return columns["observations"]


@pytest.mark.parametrize("text, rows", [("1:3", range(4, 15)), (":1", range(4)), ("2,0", [*range(4), *range(10, 15)])])
def test_a_part_of_the_episodes_holds_their_images_alone(tmp_path: Path, text: str, rows: range) -> None:
    images = images_file(tmp_path / "x.npz")
    data = load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), episodes=text, frames=2))
    assert data.columns["rewards"].tolist() == list(rows) and data.transforms == (f"episodes {text}",)
    np.testing.assert_array_equal(data.stores["pixels"].values, images[rows])
    whole = load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), frames=2))
    for following in (False, True):
        part = data.stores["pixels"].frames(torch.arange(len(data)), 2, following)
        assert torch.equal(part, whole.stores["pixels"].frames(torch.tensor(rows), 2, following))


@pytest.mark.parametrize(
    "text, message",
    [
        ("1:4", "x has the episodes 0 to 2, and none is 3"),
        ("2:2", "none are from 2 up to, without it, 2"),
        ("0,3", "none is 3"),
        ("0,0", "names episode 0 twice"),
        ("-1:", "is written 29:32"),
        ("a", "is written 29:32"),
        ("1,", "is written 29:32"),
        (":", ""),
    ],
)
def test_episodes_that_are_not_there_are_refused(tmp_path: Path, text: str, message: str) -> None:
    images_file(tmp_path / "x.npz")
    config = DatasetConfig(name=str(tmp_path / "x.npz"), episodes=text)
    if not message:
        assert load_dataset(config).num_episodes == 3
        return
    with pytest.raises(UserError, match=f"dataset.episodes={text}.*{message}"):
        load_dataset(config)


def test_episodes_are_those_of_the_named_dataset_alone(tmp_path: Path) -> None:
    images_file(tmp_path / "x.npz")
    name = str(tmp_path / "x.npz")
    data = load_dataset(DatasetConfig(name=name, concatenate=[name], expert=name, expert_episodes=2, episodes="1"))
    assert data.episode_lengths().tolist() == [6, 4, 6, 5, 4, 6]
    with pytest.raises(UserError, match="leave it out"):
        inspect_dataset(DatasetConfig(name=name, episodes="1"))


def test_a_command_takes_several_numbers_of_episodes() -> None:
    assert compose({**parse(["dataset.episodes=3,5,9"]), "algo": "bc"}).dataset.episodes == "3,5,9"


def test_a_part_has_a_place_of_its_own_in_the_cache(tmp_path: Path) -> None:
    images_file(tmp_path / "x.npz")
    config = DatasetConfig(name=str(tmp_path / "x.npz"), cache_dir=str(tmp_path), cache="always", memory="mmap")
    sizes = [load_dataset(replace(config, episodes=text)).num_episodes for text in ("", "1", "0:2", "")]
    assert sizes == [3, 1, 2, 3] and len(list((tmp_path / "mapped").iterdir())) == 3


# ------------------------------------------------------------------------------------------------- memory and caches


def same(a: Dataset, b: Dataset) -> bool:
    """Whether two datasets are the same, bit for bit."""
    arrays, others = arrays_of(a), arrays_of(b)
    return (
        (a.spec, a.fingerprint, a.notes) == (b.spec, b.fingerprint, b.notes)
        and arrays.keys() == others.keys()
        and all(x.dtype == others[k].dtype and torch.equal(x, others[k]) for k, x in arrays.items())
    )


@pytest.mark.parametrize("kind", ["minari", "npz", "hdf5", "packed", "grey"])
def test_caches_give_back_the_same_images(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, path = [], tmp_path / ("x.npz" if kind in ("npz", "grey") else "x.hdf5")
    if kind == "minari":
        path, _ = minari_streams(tmp_path, ENTRIES)
        keys = ["top", "state", "front"]
    elif kind == "packed":
        images = images_file(path)
        with h5py.File(path, "a") as file:
            del file["observations"]
            file.create_dataset("observations", data=images, chunks=(4, 6, 4, 3), compression="gzip")
    else:
        images = images_file(path)
        if kind == "grey":  # without a dimension for the channels
            images_file(path, observations=images[..., 0])
    config = DatasetConfig(name=str(path), observation_keys=keys, cache_dir=str(tmp_path / "cache"))
    plain = load_dataset(replace(config, cache="never"))
    kept = load_dataset(replace(config, cache="always"))
    monkeypatch.setattr("offrl.data.loading.read.read_raw", None)  # all that follows comes from the cache
    cached = load_dataset(replace(config, cache="always"))
    monkeypatch.undo()
    monkeypatch.setattr("offrl.data.memory.LEAST", 1)  # files also for arrays as small as these
    mapped = load_dataset(replace(config, cache="never", memory="mmap"))
    again = load_dataset(replace(config, cache="never", memory="mmap"))
    assert mapped.mapped and again.mapped
    assert all(same(plain, other) for other in (kept, cached, mapped, again))
    name = "front" if kind == "minari" else "pixels"
    assert any((tmp_path / "cache" / "mapped").glob(f"*/*{name}*.npy")) or kind != "minari"


@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
def test_mapped_images_are_read_block_by_block(tmp_path: Path, suffix: str) -> None:
    """Of 61 MB of images fewer than 40 MB are in memory at once, beside what lies in files."""
    lengths = (200,) * 4
    shape = (800, 160, 160, 3)
    path = tmp_path / f"x{suffix}"
    images_file(path, lengths, observations=np.broadcast_to(np.arange(800, dtype=np.uint8)[:, None, None, None], shape))
    config = DatasetConfig(name=str(path), memory="mmap", cache_dir=str(tmp_path / "cache"), cache="never")
    load_dataset("builtin")
    tracemalloc.start()
    data = load_dataset(config)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert data.stores["pixels"].values.shape == shape and peak < 40e6, peak
