"""Files in robomimic's layout: order, masks, observations, ends, what follows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.data import load_dataset
from offrl.data.loading.resolve import resolve
from offrl.data.raw import RawData
from offrl.settings.dataset import DatasetConfig
from tests.support.raw_reading import read, refused
from tests.support.robomimic import DEMOS, IMAGE, ROWS, change, image, state, write


def objects(raw: RawData) -> list[float]:
    """What each demonstration begins with under the key "object", which comes first in the order of names."""
    return raw.columns["observations"][::ROWS, 0].tolist()


def test_demonstrations_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    raw = read(write(tmp_path / "x.hdf5"))
    assert objects(raw) == [100.0 * demo for demo in range(DEMOS)]
    assert np.flatnonzero(raw.episode_ends).tolist() == list(range(ROWS - 1, DEMOS * ROWS, ROWS))
    assert raw.columns["observations"].shape == (DEMOS * ROWS, 3) and raw.columns["observations"].dtype == np.float32
    assert raw.columns["actions"][ROWS + 2].tolist() == pytest.approx([0.07, 0.07])
    assert raw.final_observations is not None and raw.final_observations[11].tolist() == [1103.0, 11.0, 3.0]
    assert not raw.streams and any(f"not used: obs/{IMAGE}" in note for note in raw.notes)


def test_vectors_alone_load_as_a_dataset(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5")
    assert resolve(str(path), DatasetConfig()).kind == "robomimic"
    data = load_dataset(DatasetConfig(name=str(path), cache="never"))
    assert len(data.episode_start) == DEMOS and bool(data.columns["successor_known"].all())
    assert data.columns["next_observations"][ROWS - 1].tolist() == [3.0, 0.0, 3.0]
    assert not data.spec.discrete and (data.spec.action_low, data.spec.action_high) == ((-1.0,) * 2, (1.0,) * 2)


def test_a_mask_chooses_demonstrations(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5")
    assert objects(read(path, mask="train")) == [0.0, 900.0, 1000.0]
    assert "no mask 'trian'" in (text := refused(path, mask="trian")) and "Did you mean 'train'?" in text
    change(path, "mask/train", np.array(["demo_3", "demo_77"], dtype=h5py.string_dtype()))
    assert "names data/demo_77" in refused(path, mask="train")
    change(path, "mask", None)
    assert "leave dataset.mask out" in refused(path, mask="train")
    np.savez(tmp_path / "y.npz", observations=np.zeros((2, 1)), actions=np.zeros((2, 1)), rewards=np.zeros(2))
    assert "dataset.mask=train is for robomimic" in refused(tmp_path / "y.npz", mask="train")


def test_images_are_streams_in_the_order_of_the_keys(tmp_path: Path) -> None:
    raw = read(write(tmp_path / "x.hdf5"), observation_keys=["robot0_eef_pos", IMAGE, "object"])
    stream = raw.streams[IMAGE]
    assert stream.values.shape == (DEMOS * (ROWS + 1), 4, 5, 3) and stream.values.dtype == np.uint8
    assert stream.final is not None
    for row in (0, 4, DEMOS * ROWS - 1):
        demo, step = divmod(row, ROWS)
        assert np.array_equal(stream.values[stream.entries[row]], image(demo, step))
        assert np.array_equal(stream.values[stream.final[demo]], image(demo, ROWS))
        assert raw.columns["observations"][row].tolist() == state(demo, step).tolist()


def test_images_are_taken_where_there_is_no_vector(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5", following=False)
    with h5py.File(path, "a") as file:
        for demo in file["data"].values():
            del demo["obs/object"], demo["obs/robot0_eef_pos"]
            demo["obs/depth"] = np.zeros((ROWS, 4, 5, 1))
    raw = read(path)
    assert raw.columns["observations"].shape == (DEMOS * ROWS, 0) and list(raw.streams) == [IMAGE]
    stream = raw.streams[IMAGE]
    assert stream.final is None and stream.entries.tolist() == list(range(DEMOS * ROWS))
    assert np.array_equal(stream.values[-1], image(DEMOS - 1, ROWS - 1))
    assert any("what followed them is not known" in note for note in raw.notes)


def test_ends_are_terminations_with_a_reward_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5")
    raw = read(path)
    last = np.arange(DEMOS) * ROWS + ROWS - 1
    assert raw.columns["terminations"][last].tolist() == [True, False] * 6
    assert raw.columns["truncations"][last].tolist() == [False, True] * 6
    assert any("6 of 12 demonstrations end with dones without a reward above 0" in note for note in raw.notes)
    assert read(path, fields={"terminations": "dones"}).columns["terminations"][last].all()


def test_a_success_before_the_last_row_ends_nothing(tmp_path: Path) -> None:
    path = change(write(tmp_path / "x.hdf5"), "data/demo_2/dones", np.ones(ROWS))
    change(path, "data/demo_2/rewards", np.ones(ROWS))
    raw = read(path)
    assert np.flatnonzero(raw.columns["terminations"])[1] == 2 * ROWS + 2
    assert any("2 rows before the last of their demonstration are successes" in note for note in raw.notes)


def test_dense_rewards_do_not_say_what_is_a_success(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5")
    for demo in range(DEMOS):
        change(path, f"data/demo_{demo}/rewards", np.linspace(0.1, 0.5, ROWS))
    raw = read(path)
    assert not raw.columns["terminations"].any()
    assert any("12 of 12 demonstrations end with dones and rewards are dense" in note for note in raw.notes)


def test_a_last_observation_that_is_repeated_is_no_successor(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5")
    with h5py.File(path, "a") as file:
        for demo in file["data"].values():
            for key in demo["obs"]:
                demo[f"next_obs/{key}"][-1] = demo[f"obs/{key}"][-1]
    raw = read(path, observation_keys=["object", IMAGE])
    assert raw.final_observations is None and raw.streams[IMAGE].final is None
    assert any("end with the last observation again" in note for note in raw.notes)


def test_further_columns_and_the_texts_of_the_environment(tmp_path: Path) -> None:
    raw = read(write(tmp_path / "x.hdf5"), fields={"physics": "states", "actions": "states"})
    assert raw.columns["physics"][4].tolist() == (2 * state(1, 1)).tolist()
    assert raw.columns["actions"].shape == (DEMOS * ROWS, 3)
    assert raw.metadata["env_args"] == '{ "env_name": "no_such_module:Lift", "env_kwargs": { "a": 1 } }'
    assert raw.task is None


def gone(key: str) -> Callable[[Path], Any]:
    return lambda path: change(path, key, None)


def values(key: str, value: Any, **options: Any) -> Callable[[Path], Any]:
    return lambda path: change(path, key, value, **options)


def raw_file(path: Path) -> None:
    with h5py.File(path, "a") as file:
        for demo in file["data"].values():
            del demo["obs"], demo["next_obs"]


def linked(path: Path) -> None:
    change(path, f"data/demo_1/obs/{IMAGE}", None)
    (path.parent / "secret").write_bytes(bytes(180))
    with h5py.File(path, "a") as file:
        outside = [(str(path.parent / "secret"), 0, 180)]
        file.create_dataset(f"data/demo_1/obs/{IMAGE}", (ROWS, 4, 5, 3), np.uint8, external=outside)


def many_times(path: Path) -> None:
    """Frames of zeros that are packed to almost nothing, under many names."""
    with h5py.File(path, "w") as file:
        zeros = np.zeros((8, 256, 256, 3), np.uint8)
        frames = file.create_dataset("frames", data=zeros, chunks=zeros.shape, compression="gzip")
        numbers = file.create_dataset("numbers", data=np.zeros((8, 1)))
        for number in range(300):
            demo = file.create_group(f"data/demo_{number}")
            demo["obs/a"], demo["actions"], demo["rewards"], demo["dones"] = frames, numbers, numbers, numbers


PIXELS = f"data/demo_1/obs/{IMAGE}"
FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "raw": (raw_file, "extract observations first: python -m robomimic.scripts.dataset_states_to_obs"),
    "no actions": (gone("data/demo_4/actions"), "data/demo_4 has no 'actions'"),
    "single": (values("data/demo_4/actions", 1.0), "'data/demo_4/actions' has shape [], expected [1, 2]"),
    "no dones": (gone("data/demo_4/dones"), "data/demo_4 has no 'dones'"),
    "key": (gone("data/demo_5/obs/object"), "data/demo_5 has no 'obs/object'"),
    "rows": (values("data/demo_5/obs/object", np.zeros((2, 1))), "has shape [2, 1], expected [3, 1]"),
    "rewards": (values("data/demo_5/rewards", np.zeros(4)), "'data/demo_5/rewards' has shape [4], expected [3]"),
    "width": (values("data/demo_5/obs/object", np.zeros((3, 2))), "has shape [3, 2], expected [3, 1]"),
    "texts": (values("data/demo_5/obs/object", [[b"a"]] * 3), "not numbers"),
    "objects": (values("data/demo_5/actions", [b"a"] * 3, dtype=h5py.string_dtype()), "'data/demo_5/actions'"),
    "size": (values(PIXELS, np.zeros((3, 8, 8, 3), np.uint8)), "has shape [3, 8, 8, 3], expected [3, 4, 5, 3]"),
    "type": (values(PIXELS, np.zeros((3, 4, 5, 3), np.int16)), "holds int16 values; uint8 is due"),
    "0 to 1": (values(PIXELS.replace("1", "0"), np.ones((3, 4, 5, 3), "f4")), "numpy.rint(255 * x)"),
    "0 to 255": (values(PIXELS.replace("1", "0"), np.full((3, 4, 5, 3), 9.0)), "numpy.rint(x)"),
    "channels": (values(PIXELS.replace("1", "0"), np.ones((3, 3, 8, 8), "u1")), "their channels first"),
    "wide": (
        values(PIXELS.replace("1", "0"), np.ones((3, 1, 5000, 3), "u1"), compression="gzip"),
        "at most 4096 an edge",
    ),
    "next": (values("data/demo_5/next_obs/object", np.zeros((3, 1))), "next_obs/object' of row 0 is not the"),
    "next image": (
        values(f"data/demo_0/next_obs/{IMAGE}", np.zeros((3, 4, 5, 3), "u1")),
        f"next_obs/{IMAGE}' of row 0 is not the observation of row 1",
    ),
    "outside": (linked, "out of the file"),
    "packed": (many_times, "300 demonstrations would take"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.hdf5")
    put, text = FAULTS[name]
    put(path)
    keys = [] if name in ("raw", "packed") else ["object", IMAGE]
    assert text in refused(path, observation_keys=keys)


def test_what_was_never_written_is_refused(tmp_path: Path) -> None:
    path = change(write(tmp_path / "x.hdf5"), PIXELS, None)
    with h5py.File(path, "a") as file:
        file.create_dataset(PIXELS, (ROWS, 4, 5, 3), np.uint8, chunks=(1, 4, 5, 3))
    assert "never written" in refused(path, observation_keys=[IMAGE])


def test_names_are_told(tmp_path: Path) -> None:
    path = write(tmp_path / "x.hdf5")
    assert f"Did you mean '{IMAGE}'?" in refused(path, observation_keys=["agentview"])
    assert "dataset.observation_keys chooses" in refused(path, fields={"observations": "obs/object"})
