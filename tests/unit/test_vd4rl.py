"""V-D4RL's two layouts: what arrives with a state goes to the row before it, shards that cut episodes, and what is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.data.loading.read import read_raw
from offrl.data.loading.resolve import resolve
from offrl.data.memory import Memory
from offrl.data.raw import RawData
from offrl.settings.dataset import DatasetConfig
from tests.support.raw_reading import read, refused
from tests.support.vd4rl import STATES, episode, image, write_npz, write_shards

COUNT = sum(STATES)
STEPS = np.concatenate([[0.0, *[1.0] * (count - 2), 2.0] for count in STATES])


def check_rows(raw: RawData, size: int, episodes: int) -> None:
    """Each row has the state, the action taken there, the reward it led to, and the state that followed."""
    stream, row = raw.streams["pixels"], 0
    assert stream.values.dtype == np.uint8 and stream.values.shape[1:] == (size, size, 3) and stream.final is not None
    for number in range(episodes):
        due = episode(number, size)
        for step in range(STATES[number] - 1):
            assert np.array_equal(stream.values[stream.entries[row]], image(number, step, size))
            assert raw.columns["actions"][row].tolist() == due["action"][step + 1].tolist()
            assert raw.columns["rewards"][row] == due["reward"][step + 1]
            row += 1
        assert np.array_equal(stream.values[stream.final[number]], image(number, STATES[number] - 1, size))
    assert row == raw.rows == len(raw.columns["rewards"])


def test_rewards_that_arrive_with_the_state_belong_to_the_row_before(tmp_path: Path) -> None:
    folder = write_npz(tmp_path / "walker_walk" / "random" / "64px")
    assert resolve(str(folder), DatasetConfig()).kind == "vd4rl"
    raw = read(folder)
    assert raw.columns["rewards"].tolist() == [1.0, 2.0, 3.0, 10.0, 20.0]
    assert raw.columns["actions"][:3, 0].tolist() == pytest.approx([0.1, 0.2, 0.3])
    check_rows(raw, 6, 2)
    assert raw.name == "walker_walk-random-64px" and raw.columns["observations"].shape == (5, 0)
    assert not raw.notes


def test_a_discount_of_zero_is_a_termination(tmp_path: Path) -> None:
    raw = read(write_npz(tmp_path / "x"))
    assert np.flatnonzero(raw.columns["terminations"]).tolist() == [4]
    assert np.flatnonzero(raw.columns["truncations"]).tolist() == [2]
    flags = np.array([False, False, True])
    raw = read(write_npz(tmp_path / "y", discount=np.ones(3, np.float32), is_terminal=flags))
    assert np.flatnonzero(raw.columns["terminations"]).tolist() == [4]


def test_states_beside_the_images(tmp_path: Path) -> None:
    folder = write_npz(tmp_path / "x")
    raw = read(folder, observation_keys=["orientations"])
    assert raw.columns["observations"].tolist() == [[0, 0], [1, 0], [2, 0], [0, 1], [1, 1]] and not raw.streams
    assert raw.final_observations is not None and raw.final_observations.tolist() == [[3, 0], [2, 1]]
    raw = read(folder, observation_keys=["pixels", "orientations"], fields={"joints": "orientations"})
    assert raw.columns["joints"][3].tolist() == [0, 1] and raw.final_columns["joints"].tolist() == [[3, 0], [2, 1]]
    check_rows(raw, 6, 2)


@pytest.mark.parametrize("cuts", [(6,), (4, 7), (1, 2, 8, 11)])
def test_episodes_go_on_in_the_next_shard(tmp_path: Path, cuts: tuple[int, ...]) -> None:
    raw = read(write_shards(tmp_path / "x", cuts=cuts))
    assert np.flatnonzero(raw.episode_ends).tolist() == [2, 4, 8]
    check_rows(raw, 7, 3)
    assert np.flatnonzero(raw.columns["terminations"]).tolist() == [4]


def test_one_file_is_read_by_itself(tmp_path: Path) -> None:
    folder = write_npz(tmp_path / "x")
    first = sorted(folder.iterdir())[0]
    check_rows(read(first), 6, 1)
    folder = write_shards(tmp_path / "y", cuts=(4,))
    raw = read(folder / "9.hdf5")
    assert raw.columns["rewards"].tolist() == [1.0, 2.0, 3.0]


def test_enlarged_images_and_episodes_without_an_end_are_noted(tmp_path: Path) -> None:
    raw = read(write_shards(tmp_path / "x", 84, cuts=(4,)))
    check_rows(raw, 84, 3)
    assert any("enlarges images of 64 x 64" in note for note in raw.notes)
    steps = np.where(np.arange(COUNT) == COUNT - 1, 1.0, STEPS)
    assert any(
        "1 of 3 episodes do not end" in note for note in read(write_shards(tmp_path / "y", step_type=steps)).notes
    )


def test_images_go_into_mapped_files_above_the_limit(tmp_path: Path) -> None:
    folder, memory = write_shards(tmp_path / "x", 84), Memory(0.0, tmp_path / "cache")
    raw = read_raw(str(folder), None, memory)
    assert isinstance(raw.streams["pixels"].values, np.memmap)
    check_rows(raw, 84, 3)
    memory.discard()


def big(size: int, dtype: Any = "u1") -> np.ndarray:
    return np.ones((3, size, 8, 3), dtype)


NPZ_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"image": big(8)}, "has images of [8, 8, 3], and"),
    "edge": ({"image": big(5000)}, "at most 4096 an edge"),
    "0 to 1": ({"image": big(6, "f4")}, "numpy.rint(255 * x)"),
    "0 to 255": ({"image": 200 * big(6, "f4")}, "numpy.rint(x)"),
    "channels": ({"image": np.ones((3, 3, 6, 6), "u1")}, "their channels first"),
    "flat": ({"image": np.ones((3, 6), "u1")}, "images [R, H, W, C] of uint8 are due"),
    "objects": ({"action": np.array([None] * 3)}, "holds object values"),
    "images of objects": ({"image": np.array([[[[None]]]] * 3)}, "holds object values"),
    "rows": ({"reward": np.zeros(4)}, "'reward' has shape [4], for 3 images"),
    "width": ({"action": np.zeros((3, 5))}, "'action' has shape [3, 5]; [2] a row"),
    "no action": ({"action": None}, "has no 'action'"),
    "no discount": ({"discount": None}, "'discount' is in 1 of 2 files"),
    "action taken": ({"action": np.ones((3, 2))}, "'action' of an episode's first state is not 0"),
    "reward received": ({"reward": np.ones(3)}, "'reward' of an episode's first state is not 0"),
    "no beginning": ({"is_first": np.zeros(3, bool)}, "goes on with an episode whose states before are missing"),
    "goes on": ({"discount": np.array([1.0, 0.0, 1.0])}, "row 1: discount 0 or is_terminal ends an episode"),
    "a flag of NaN": ({"is_first": np.array([1.0, np.nan, 0.0])}, "'is_first'"),
    "flags": ({"is_first": np.array([1.0, 0.5, 0.0])}, "which is no flag"),
}


@pytest.mark.parametrize("name", NPZ_FAULTS)
def test_faults_of_npz(tmp_path: Path, name: str) -> None:
    changed, text = NPZ_FAULTS[name]
    assert text in refused(write_npz(tmp_path / "x", **changed))


SHARD_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "channels last": ({"observation": np.ones((COUNT, 7, 7, 3), "u1")}, "images [R, C, H, W]"),
    "stacked": ({"observation": np.ones((COUNT, 9, 7, 7), "u1")}, "newest of a stack of frames (x[:, -3:])"),
    "floats": ({"observation": np.ones((COUNT, 3, 7, 7))}, "numpy.rint(255 * x)"),
    "kind": ({"step_type": STEPS * 2}, "9.hdf5: row 3: step_type is 4"),
    "two of each": ({"discount": np.ones((COUNT, 2))}, "'discount' has shape [6, 2], for 6 images"),
    "beginning": ({"step_type": np.maximum(STEPS, 1.0)}, "9.hdf5: row 0 goes on with an episode"),
    "after the last": ({"step_type": np.where(np.arange(COUNT) == 4, 1.0, STEPS)}, "9.hdf5: row 4 goes on"),
    "action taken": ({"action": np.ones((COUNT, 2))}, "'action' of an episode's first state is not 0"),
}


@pytest.mark.parametrize("name", SHARD_FAULTS)
def test_faults_of_shards(tmp_path: Path, name: str) -> None:
    changed, text = SHARD_FAULTS[name]
    assert text in refused(write_shards(tmp_path / "x", **changed))


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x", cuts=(2, 6, 8))
    (folder / "10.hdf5").unlink()
    assert "11.hdf5: row 0 goes on with an episode whose states before are missing" in refused(folder)
    assert "goes on with an episode" in refused(folder / "11.hdf5")


def test_a_folder_of_two_kinds(tmp_path: Path) -> None:
    folder = write_npz(tmp_path / "x")
    write_shards(tmp_path / "y")
    (tmp_path / "y" / "9.hdf5").rename(folder / "9.hdf5")
    assert "and CSV, Parquet or V-D4RL files" in refused(folder)
    (folder / "9.hdf5").unlink()
    np.savez(sorted(folder.iterdir())[1], observations=np.zeros(3))
    assert "has no 'image'" in refused(folder)


def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder = write_npz(tmp_path / "x")
    inside = sorted(folder.iterdir())[1]
    inside.rename(tmp_path / "outside.npz")
    inside.symlink_to(tmp_path / "outside.npz")
    assert "a link that leads out of the data" in refused(folder)
    folder = write_shards(tmp_path / "y")
    with h5py.File(folder / "10.hdf5", "a") as file:
        del file["observation"]
        file["observation"] = h5py.ExternalLink(str(folder / "9.hdf5"), "/observation")
    assert "out of the file" in refused(folder)


def test_images_that_unpack_to_too_much(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "x")
    with h5py.File(folder / "10.hdf5", "a") as file:
        del file["observation"]
        file.create_dataset("observation", (10**7, 3, 84, 84), np.uint8, chunks=(1, 3, 84, 84), compression="gzip")
    assert "its images would take 212 GB" in refused(folder)
    folder = tmp_path / "y"
    for number in range(3):  # each of them may be large, and all together may not
        write_npz(tmp_path / str(number), image=np.zeros((3, 4096, 4096, 2), "u1"))
        moved = sorted((tmp_path / str(number)).iterdir())[1]
        folder.mkdir(exist_ok=True)
        moved.rename(folder / f"{number}.npz")
    assert "its images would take" in refused(folder)


def test_names_are_told(tmp_path: Path) -> None:
    folder = write_npz(tmp_path / "x")
    assert "Did you mean 'orientations'?" in refused(folder, observation_keys=["orientation"])
    assert "dataset.observation_keys chooses" in refused(folder, fields={"rewards": "discount"})
