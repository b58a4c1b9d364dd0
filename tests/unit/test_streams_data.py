"""Images on their way from files and arrays into a dataset, through transforms, caches and the tools of data."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.loading.load import load_dataset
from offrl.data.memory import arrays_of
from offrl.data.tools.convert import convert, merge, subset
from offrl.data.tools.inspect import inspect_dataset
from offrl.data.tools.subset import Choice
from offrl.data.transforms.apply import apply_transforms
from offrl.data.transforms.demonstrations import append_expert
from offrl.data.transforms.episodes import concatenate
from offrl.data.transforms.imagined import append_imagined
from offrl.data.transforms.reward_labels import label_rewards
from offrl.errors import UserError
from offrl.labelling.prompts import check_labelable
from offrl.relabel.actions import label_actions, split_labelled
from offrl.relabel.bradley_terry import check_pairs
from offrl.relabel.inverse_dynamics import InverseSettings
from offrl.settings.compose import compose, parse
from offrl.settings.dataset import DatasetConfig
from tests.support.data_files import minari, minari_streams
from tests.support.vd4rl import write_npz

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


@pytest.mark.parametrize("text, rows", [("1:3", range(4, 15)), (":1", range(4)), ("-1,0", [*range(4), *range(10, 15)])])
def test_a_part_of_the_episodes_holds_their_images_alone(tmp_path: Path, text: str, rows: range) -> None:
    images = images_file(tmp_path / "x.npz")
    data = load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), episodes=text, frames=2))
    assert data.columns["rewards"].tolist() == list(rows) and data.transforms == (f"episodes {text}",)
    np.testing.assert_array_equal(data.stores["pixels"].values, images[rows])
    whole = load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), frames=2))
    for following in (False, True):
        part = data.stores["pixels"].frames(torch.arange(len(data)), 2, following)
        assert torch.equal(part, whole.stores["pixels"].frames(torch.tensor(rows), 2, following))


def test_a_part_keeps_what_follows_its_episodes(tmp_path: Path) -> None:
    folder, recorded = minari_streams(tmp_path, {"front": ENTRIES["front"]}, (5, 7, 3))
    data = load_dataset(DatasetConfig(name=str(folder), episodes="0,2"))
    expected = np.concatenate([recorded[e]["front"][1:] for e in (0, 2)])
    np.testing.assert_array_equal(shown(data, "front")[1], expected)
    assert len(data.stores["front"].values) == 6 + 4 and data.columns["successor_known"].all()


@pytest.mark.parametrize(
    "text, message",
    [
        ("1:4", "x has the episodes 0 to 2, and not all of these"),
        ("2:2", "none of these"),
        ("0,3", "none is 3"),
        ("0,0", "names an episode twice"),
        ("-4:", "not all of these"),
        ("1:2:3", "must be a range such as"),
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


# --------------------------------------------------------------------------------------------------------- transforms


def arrays(lengths: tuple[int, ...] = (4, 6, 5), vector: bool = True, seed: int = 0, **extra) -> Dataset:
    """Episodes of an image, and a vector beside it; rewards count the rows."""
    rng, rows = np.random.default_rng(seed), sum(lengths)
    observations = {"front": rng.integers(0, 255, (rows, 6, 4, 3), dtype=np.uint8)}
    if vector:
        observations["state"] = rng.normal(size=(rows, 3)).astype(np.float32)
    ends = np.cumsum(lengths) - 1
    values = {"actions": rng.uniform(-1, 1, (rows, 2)), "rewards": np.arange(rows), "episode_ends": ends}
    return from_arrays(observations, **(values | extra), action_low=-1, action_high=1, name="images")


@pytest.mark.parametrize(
    "settings, episodes",
    [
        ({"top_fraction": 0.4}, [2]),
        ({"subsample": 0.7, "subsample_seed": 1}, None),
        ({"split": 0.5, "split_part": "second"}, None),
        ({"terminated_only": True}, [0, 2]),
        ({"weighting": "advantage"}, [0, 1, 2]),
        ({"discount_returns": 0.9, "normalize_rewards": True, "action_margin": 0.1}, [0, 1, 2]),
        ({"augment": "stitch", "augment_clusters": 3}, [0, 1, 2]),
    ],
)
def test_kept_episodes_keep_their_images(settings: dict, episodes: list[int] | None) -> None:
    data = arrays(terminations=np.isin(np.arange(15), [3, 14]))
    kept = apply_transforms([data], DatasetConfig(**settings))
    rows = torch.cat([data.rows_of(torch.tensor([e])) for e in episodes]) if episodes else None
    if rows is None:  # found again by their vectors
        rows = torch.cat(
            [(data.columns["observations"] == x).all(1).nonzero()[0] for x in kept.columns["observations"]]
        )
    for following in (False, True):
        part = kept.stores["front"].frames(torch.arange(len(kept)), 3, following)
        assert len(kept) and torch.equal(part, data.stores["front"].frames(rows, 3, following))


def test_observations_are_normalised_and_images_are_not() -> None:
    data = arrays()
    done = apply_transforms([data], DatasetConfig(normalize_observations=True))
    assert done.stores == data.stores and done.notes[-1] == "normalize_observations leaves front as recorded"
    assert abs(float(done.columns["observations"].mean())) < 1e-6


def test_appended_data_bring_their_images() -> None:
    data, other = arrays(), arrays(seed=1)
    joined = concatenate([data, other])
    stores = [d.stores["front"].frames(torch.arange(15), 2, True) for d in (data, other)]
    assert torch.equal(joined.stores["front"].frames(torch.arange(30), 2, True), torch.cat(stores))
    marked = append_expert(data, other, episodes=2, choice="best")
    assert torch.equal(
        marked.stores["front"].frames(torch.arange(15, 20), 2), other.stores["front"].frames(torch.arange(10, 15), 2)
    )
    assert torch.equal(append_imagined(data, other).stores["front"].values, joined.stores["front"].values)
    with pytest.raises(UserError, match=r"streams \['front \[6, 4, 3\]'\] instead"):
        concatenate([from_arrays(np.zeros((4, 3)), np.zeros((4, 2)), np.zeros(4), episode_ends=[3]), data])


def test_a_function_labels_rewards_by_images() -> None:
    data = arrays()
    labelled = label_rewards(data, lambda columns: columns["front"].reshape(len(columns["rewards"]), -1).sum(1))
    assert torch.equal(labelled.columns["rewards"], data.stores["front"].values.float().flatten(1).sum(1))


def test_actions_are_labelled_from_vectors_beside_images() -> None:
    data = arrays((12, 12, 12))
    settings = InverseSettings(members=1, updates=2, hidden=[4])
    labelled = label_actions(*split_labelled(data, 0.7), settings, quiet=True)
    assert len(labelled.stores["front"].values) == 72 and labelled.num_episodes == 3


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda data: apply_transforms([data], DatasetConfig(weighting="advantage")), "images has front alone: use re"),
        (lambda data: apply_transforms([data], DatasetConfig(augment="stitch")), "images has front alone; leave it"),
        (lambda data: label_actions(data, data), "images: actions can be labelled from .* numbers only; these are fro"),
        (lambda data: check_labelable(data), "images has images alone"),
        (lambda data: check_pairs(data, [], [], 1), "images: preferences are learnt from observations of numbers only"),
    ],
)
def test_what_needs_numbers_is_refused_for_images_alone(function: Callable[[Dataset], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        function(arrays(vector=False))


@pytest.mark.parametrize("settings", [{"frames": 2}, {"image_size": [8, 8]}])
def test_settings_of_images_are_refused_without_any(settings: dict) -> None:
    with pytest.raises(UserError, match=r"is for images, and .* has none"):
        apply_transforms([load_dataset("builtin")], DatasetConfig(**settings))


# ------------------------------------------------------------------------------------------------------------- arrays


def test_arrays_of_a_dict_become_a_vector_and_streams() -> None:
    data = arrays()
    assert [s.name for s in data.spec.streams] == ["front"] and data.spec.observation_shape == (3,)
    assert data.spec.task is not None and data.spec.task.observation_keys == ("front", "state")
    assert not data.columns["successor_known"][data.episode_end - 1].any()
    assert data.columns["successor_known"].sum() == 12


def test_next_images_give_what_follows_an_episode() -> None:
    rng = np.random.default_rng(0)
    now, ends = {"front": rng.integers(0, 255, (10, 6, 4, 3), dtype=np.uint8)}, [4, 9]
    following = {"front": np.roll(now["front"], -1, 0)}
    following["front"][ends] = 7
    values = {"actions": np.zeros((10, 2)), "rewards": np.zeros(10), "episode_ends": ends}
    data = from_arrays(now, next_observations=following, **values)
    assert (shown(data, "front")[1] == following["front"]).all() and data.columns["successor_known"].all()
    following["front"][2] += 1
    with pytest.raises(UserError, match="the image after row 2 is not the next row's"):
        from_arrays(now, next_observations=following, **values)


def test_rows_of_images_are_put_in_the_order_of_time() -> None:
    images = np.arange(6, dtype=np.uint8)[:, None, None, None] * np.ones((1, 6, 4, 3), np.uint8)
    order = np.array([3, 0, 5, 1, 4, 2])
    ids = np.array([0, 0, 0, 1, 1, 1])
    values = {"actions": np.zeros((6, 2)), "rewards": np.arange(6)}
    values = {k: v[order] for k, v in values.items()}
    data = from_arrays({"front": images[order]}, **values, episode_ids=ids[order], time=np.arange(6)[order])
    assert data.columns["rewards"].tolist() == [3, 4, 5, 0, 1, 2]  # the episode of the first row is the first
    assert (shown(data, "front")[0] == images[[3, 4, 5, 0, 1, 2]]).all()


# ------------------------------------------------------------------------------------------------------ tools of data


def test_streams_are_described_once(tmp_path: Path) -> None:
    folder, recorded = minari_streams(tmp_path, ENTRIES)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        file["episode_0/observations/front"][3] = recorded[0]["front"][2]
    report = inspect_dataset(DatasetConfig(name=str(folder), observation_keys=["state", "front", "top"]))
    text = str(report)
    assert "front: 14 images of 6x4x3, of which 10.0% repeat the one before" in text  # of 4 + 6 pairs
    assert "top: 14 images of 5x4x1, of which 0.0% repeat the one before" in text and report.duplicates == 0
    assert {c.name for c in report.columns} >= {"observations", "actions"}
    assert "of which" not in str(inspect_dataset(str(folder)))


def test_rows_are_duplicates_where_their_images_are(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (15, 6, 4, 3), dtype=np.uint8)
    images[[7, 9]] = images[2]
    actions, rewards = np.zeros((15, 2), np.float32), np.zeros(15, np.float32)
    images_file(tmp_path / "x.npz", observations=images, actions=actions, rewards=rewards)
    report = inspect_dataset(str(tmp_path / "x.npz"))
    assert (report.duplicates, report.first_duplicate) == (2, (7, 2))
    assert "pixels" in str(report) and "observations" not in {c.name for c in report.columns}


def test_images_in_another_order_are_faults(tmp_path: Path) -> None:
    images_file(tmp_path / "x.npz", observations=np.zeros((15, 3, 6, 8), np.uint8))
    (fault,) = inspect_dataset(str(tmp_path / "x.npz")).corrupting
    assert "channels first" in str(fault) and "moveaxis" in str(fault)


@pytest.mark.parametrize("out", ["out.hdf5", "out"])
@pytest.mark.parametrize("kind", ["npz", "vd4rl", "minari"])
def test_images_alone_are_written_and_read_back(tmp_path: Path, kind: str, out: str) -> None:
    name = str(tmp_path / "x.npz")
    images_file(tmp_path / "x.npz")
    if kind == "vd4rl":
        name = str(write_npz(tmp_path / "vd4rl"))
    elif kind == "minari":
        name = str(minari(tmp_path, (8, 8, 3), "uint8"))
    data = load_dataset(name)
    written = convert(DatasetConfig(name=name), str(tmp_path / out))
    back = load_dataset(str(written.path))
    assert written.fingerprint == back.fingerprint == data.fingerprint
    assert all(np.array_equal(a, b) for a, b in zip(shown(data, "pixels"), shown(back, "pixels"), strict=True))
    assert torch.equal(data.columns["successor_known"], back.columns["successor_known"])


def test_parts_and_several_data_of_images_are_written(tmp_path: Path) -> None:
    images = images_file(tmp_path / "x.npz")
    config = DatasetConfig(name=str(tmp_path / "x.npz"))
    subset(config, str(tmp_path / "part.hdf5"), Choice(episodes="1:3"))
    part = load_dataset(str(tmp_path / "part.hdf5"))
    np.testing.assert_array_equal(shown(part, "pixels")[0], images[4:])
    merge([config, replace(config, name=str(tmp_path / "part.hdf5"))], str(tmp_path / "both.hdf5"))
    both = load_dataset(str(tmp_path / "both.hdf5"))
    np.testing.assert_array_equal(shown(both, "pixels")[0], np.concatenate([images, images[4:]]))


@pytest.mark.parametrize(
    "keys, message",
    [
        ([], r"the images front, top would be missing .*dataset.observation_keys"),
        (["state", "front"], r"not written with front: .*dataset.episodes.*dataset.concatenate"),
        (["front"], "not written with front"),
    ],
)
def test_no_file_is_written_without_its_images(tmp_path: Path, keys: list[str], message: str) -> None:
    folder, _ = minari_streams(tmp_path, ENTRIES)
    config = DatasetConfig(name=str(folder), observation_keys=keys)
    for write in (
        lambda: convert(config, str(tmp_path / "x.hdf5")),
        lambda: subset(config, str(tmp_path / "x.hdf5"), Choice(episodes="0:1")),
        lambda: merge([config, config], str(tmp_path / "x.hdf5")),
    ):
        with pytest.raises(UserError, match=message):
            write()
    assert not (tmp_path / "x.hdf5").exists()
    convert(replace(config, observation_keys=["state"]), str(tmp_path / "x.hdf5"))


def test_settings_of_loading_are_refused_where_data_are_written(tmp_path: Path) -> None:
    images_file(tmp_path / "x.npz")
    for settings in ({"frames": 2}, {"image_size": [3, 3]}, {"episodes": "0:1"}):
        with pytest.raises(UserError, match=f"dataset.{next(iter(settings))} is for loading data"):
            convert(DatasetConfig(name=str(tmp_path / "x.npz"), **settings), str(tmp_path / "x.hdf5"))


# ------------------------------------------------------------------------------------------------------- other layouts


def test_visual_data_of_ogbench_are_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (12, 64, 64, 3), dtype=np.uint8)
    ends = np.arange(12) % 6 == 5
    path = tmp_path / "visual-cube-single-play-v0.npz"
    np.savez(path, observations=images, actions=rng.uniform(-1, 1, (12, 5)).astype(np.float32), terminals=ends)
    data = load_dataset(str(path))
    assert data.spec.source == "ogbench" and data.spec.streams[0].shape == (64, 64, 3)
    now, following = shown(data, "pixels")
    np.testing.assert_array_equal(now, images)
    np.testing.assert_array_equal(following[~ends], images[1:][~ends[:-1]])
    assert data.columns["successor_known"].tolist() == (~ends).tolist()  # and the last state has no successor


@pytest.mark.parametrize("suffix", [".npz", ".hdf5", ".parquet"])
@pytest.mark.parametrize("finals", [False, True])
def test_columns_of_images_are_streams(tmp_path: Path, suffix: str, finals: bool) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 255, (9, 6, 4, 3), dtype=np.uint8)
    following = np.roll(images, -1, 0)
    following[[4, 8]] = 7
    columns = {
        "obs": images,
        "action": rng.uniform(-1, 1, (9, 2)),
        "reward": np.zeros(9),
        "done": np.isin(range(9), [4, 8]),
    }
    columns |= {"next_obs": following} if finals else {}
    path = tmp_path / f"x{suffix}"
    if suffix == ".npz":
        np.savez(path, **columns)
    elif suffix == ".hdf5":
        with h5py.File(path, "w") as file:
            for name, column in columns.items():
                file[name] = column
    else:
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        types = {n: pa.list_(pa.list_(pa.list_(pa.uint8()))) for n in ("obs", "next_obs")}
        pq.write_table(pa.table({n: pa.array(c.tolist(), types.get(n)) for n, c in columns.items()}), path)
    data = load_dataset(str(path))
    now, after = shown(data, "pixels")
    np.testing.assert_array_equal(now, images)
    np.testing.assert_array_equal(after[:4], images[1:5])
    assert (after[[4, 8]] == (7 if finals else images[[4, 8]])).all()
    assert data.columns["successor_known"].all() == finals


def test_episodes_of_texts(tmp_path: Path) -> None:
    turns = [[{"obs": f"{e}{t}", "action": "a", "reward": 0.0} for t in range(2)] for e in range(3)]
    (tmp_path / "x.jsonl").write_text(
        "\n".join(json.dumps({"turns": t, "terminated": True, "truncated": False, "final_obs": None}) for t in turns)
    )
    whole = load_dataset(str(tmp_path / "x.jsonl"))
    part = load_dataset(DatasetConfig(name=str(tmp_path / "x.jsonl"), episodes="1:"))
    texts = [whole.strings[i] for i in whole.columns["observations"][2:]]
    assert [part.strings[i] for i in part.columns["observations"]] == texts and part.num_episodes == 2
