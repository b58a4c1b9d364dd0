"""Faulty data are refused in one line that names file, column, episode and row; and every fault is found."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl import registry
from offrl.data import DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.loading.read import read_raw
from offrl.data.raw import RawData
from offrl.data.raw.checks import find_faults
from offrl.errors import UserError

N = 30  # three episodes of ten rows; the second ends in a terminal


def columns() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "observations": rng.normal(size=(N, 11)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (N, 3)).astype(np.float32),
        "rewards": rng.normal(size=N).astype(np.float32),
        "terminals": np.arange(N) == 19,
        "timeouts": (np.arange(N) % 10 == 9) & (np.arange(N) != 19),
    }


def write(path: Path, **changes: Any) -> str:
    with h5py.File(path, "w") as file:
        for key, value in (columns() | changes).items():
            if value is not None:
                file[key] = value
    return str(path)


def refused(name: str, **settings: Any) -> str:
    """The message, which must be one line."""
    with pytest.raises(UserError) as caught:
        load_dataset(DatasetConfig(name=name, **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", ["rewards", "observations", "actions"])
def test_nan_and_infinity(tmp_path: Path, column: str, value: float, capsys: pytest.CaptureFixture[str]) -> None:
    values = columns()[column]
    values[23] = value
    values[27] = value
    name = write(tmp_path / "hopper_x.hdf5", **{column: values})
    text = refused(name)
    assert name in text and f"'{column}' has {'NaN' if np.isnan(value) else 'infinite values'} in 2 rows" in text
    assert "episode 2, row 23" in text
    if column == "rewards":
        assert len(load_dataset(DatasetConfig(name=name, check=False))) == N  # asked for
        assert "'rewards' has" in capsys.readouterr().err


def test_opposite_infinities_do_not_hide_one_another(tmp_path: Path) -> None:
    rewards = columns()["rewards"]
    rewards[3], rewards[4] = np.inf, -np.inf
    assert "episode 0, row 3" in refused(write(tmp_path / "x.hdf5", rewards=rewards))


@pytest.mark.parametrize("column", ["actions", "rewards", "terminals", "timeouts", "next_observations"])
def test_mismatched_lengths(tmp_path: Path, column: str) -> None:
    values = (columns() | {"next_observations": columns()["observations"]})[column][:-2]
    text = refused(write(tmp_path / "x.hdf5", **{column: values}))
    ours = {"terminals": "terminations", "timeouts": "truncations"}.get(column, column)
    assert f"'{ours}' has 28 rows but 'observations' has 30" in text
    assert "28 rows" in refused(str(tmp_path / "x.hdf5"), check=False)  # nothing can be made of it


def test_wrong_shapes(tmp_path: Path) -> None:
    assert "'rewards' has shape [30, 2]" in refused(write(tmp_path / "x.hdf5", rewards=np.zeros((N, 2))))
    text = refused(write(tmp_path / "x.hdf5", next_observations=np.zeros((N, 10), np.float32)))
    assert "'next_observations' has shape [30, 10], 'observations' [30, 11]" in text


def test_actions_outside_the_range(tmp_path: Path) -> None:
    actions = columns()["actions"]
    actions[12, 1] = 1.5
    name = write(tmp_path / "hopper_x.hdf5", actions=actions)
    text = refused(name)
    assert (
        "dimension 1 is 1.5, outside [-1, 1]" in text
        and "episode 1, row 12" in text
        and "dataset.clip_actions=true" in text
    )
    clipped = load_dataset(DatasetConfig(name=name, clip_actions=True))
    assert clipped.columns["actions"][12, 1] == 1.0 and float(clipped.columns["actions"].abs().max()) <= 1.0
    assert (
        load_dataset(DatasetConfig(name=name, action_low=[-2.0], action_high=[2.0])).columns["actions"][12, 1] == 0.75
    )


def test_rounding_of_actions_is_forgiven(tmp_path: Path) -> None:
    actions = columns()["actions"]
    actions[0, 0] = 1.00005
    assert load_dataset(write(tmp_path / "x.hdf5", actions=actions)).columns["actions"][0, 0] == 1.0


def test_a_missing_file_and_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "hopper_medium.hdf5")
    assert "Did you mean 'hopper_medium.hdf5'?" in refused(str(tmp_path / "hoper_medium.hdf5"))
    assert "does not exist" in refused(str(tmp_path / "nowhere" / "x.hdf5"))


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.9])
def test_truncated_hdf5(tmp_path: Path, keep: float) -> None:
    name = write(tmp_path / "x.hdf5")
    data = Path(name).read_bytes()
    Path(name).write_bytes(data[: int(keep * len(data))])
    text = refused(name)
    assert name in text and ("empty" in text if keep == 0.0 else "damaged" in text)


def test_damage_inside_compressed_data(tmp_path: Path) -> None:
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        for key, value in columns().items():
            file.create_dataset(key, data=value, compression="gzip", fletcher32=True)
        start = file["observations"].id.get_chunk_info(0).byte_offset
    data = bytearray(path.read_bytes())
    data[start + 20 : start + 60] = b"\0" * 40
    path.write_bytes(data)
    assert "damaged" in refused(str(path))


@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_truncated_npz_and_parquet(tmp_path: Path, keep: float) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    np.savez(tmp_path / "x.npz", **columns())
    pq.write_table(pa.table({"rewards": columns()["rewards"]}), tmp_path / "x.parquet")
    for name in ("x.npz", "x.parquet"):
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: int(keep * len(data))])
        assert "damaged" in refused(str(tmp_path / name))


def test_other_types_of_file(tmp_path: Path) -> None:
    (tmp_path / "x.hdf5").write_text("<!DOCTYPE html><html>Not found</html>")
    assert "neither HDF5 nor npz nor Parquet" in refused(str(tmp_path / "x.hdf5"))
    np.save(tmp_path / "x.npy", np.zeros(3))
    assert ".npy" in refused(str(tmp_path / "x.npy"))
    assert "no data/metadata.json" in refused(str(tmp_path))
    np.savez(tmp_path / "y.npz", **columns())
    assert "y.npz is npz" in refused(str(tmp_path / "y.npz"), format="d4rl")


def test_missing_keys_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", observation=np.zeros((3, 1)), actions=np.zeros((3, 1)), rewards=np.zeros(3))
    text = refused(str(tmp_path / "x.npz"), fields={"observations": "obsrvation"})
    assert "no column 'obsrvation' (dataset.fields.observations). Did you mean 'observation'?" in text
    assert "It has: observation, actions, rewards" in text
    np.savez(tmp_path / "y.npz", sensors=np.zeros((3, 1)), actions=np.zeros((3, 1)), rewards=np.zeros(3))
    text = refused(str(tmp_path / "y.npz"))
    assert "its columns are sensors, actions, rewards; which of them are observations is not clear" in text
    assert f'offrl data inspect {tmp_path / "y.npz"} "dataset.fields.observations=sensors"' in text
    name = write(tmp_path / "x.hdf5", terminals=None)
    assert (
        load_dataset(DatasetConfig(name=name, format="d4rl")).episode_lengths().tolist()
        == load_dataset(name).episode_lengths().tolist()
    )


def test_columns_that_are_no_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **(columns() | {"rewards": np.array(["a"] * N)}))
    assert "'rewards' holds 'a' in row 0, which is no number" in refused(str(tmp_path / "x.npz"))


def test_no_end_marks_at_all(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{k: v for k, v in columns().items() if k not in ("terminals", "timeouts")})
    assert "nothing marks where episodes end" in refused(str(tmp_path / "x.npz"))
    assert load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), check=False)).num_episodes == 1


def test_no_rows(tmp_path: Path) -> None:
    assert "no rows" in refused(write(tmp_path / "x.hdf5", **{k: v[:0] for k, v in columns().items()}))


def test_unknown_names_get_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._table.setdefault("dataset", {}), "my-logs", lambda config: None)
    assert "Did you mean 'my-logs'?" in refused("my-log")
    assert "Did you mean 'builtin'?" in refused("bultin")
    monkeypatch.setitem(registry._table.setdefault("task_names", {}), "test", lambda: ["walker2d-medium-replay-v2"])
    assert "Did you mean 'walker2d-medium-replay-v2'?" in refused("walker2d-medum-replay-v2")


def test_faulty_arrays() -> None:
    obs, act, rew = np.zeros((4, 2)), np.zeros((4, 1)), np.zeros(4)
    with pytest.raises(UserError, match=r"'rewards' has NaN in 1 row .*episode 1, row 2"):
        from_arrays(obs, act, np.array([0, 0, np.nan, 0]), episode_ends=[1, 3])
    with pytest.raises(UserError, match="row numbers from 0 to 3"):
        from_arrays(obs, act, rew, episode_ends=[1, 4])
    with pytest.raises(UserError, match="'rewards' has 3 rows"):
        from_arrays(obs, act, rew[:3])
    with pytest.raises(UserError, match="'costs' has 2 rows"):
        from_arrays(obs, act, rew, cost=np.zeros(2))
    with pytest.raises(UserError, match="rectangular"):
        from_arrays([[1.0], [1.0, 2.0]], act[:2], rew[:2])
    with pytest.raises(UserError, match=r"range in 1 row.*-3"):
        from_arrays(obs, np.array([[0], [-3.0], [0], [0]]), rew, action_low=-1, action_high=1)
    with pytest.raises(UserError, match="2 values but the actions have 1"):
        from_arrays(obs, act, rew, action_low=[-1, -1], action_high=[1, 1])


def test_read_raw_does_not_judge_and_find_faults_finds_all(tmp_path: Path) -> None:
    changed = columns()
    changed["rewards"][5] = np.nan
    changed["actions"][15, 2] = -7.0
    changed["timeouts"][19] = True  # both flags
    changed["timeouts"][29] = False  # no end mark on the last row
    successors = np.concatenate([changed["observations"][1:], changed["observations"][:1]])
    successors[[9, 19, 29]] += 5.0
    successors[13] += 1.0  # a jump inside episode 1
    raw = read_raw(write(tmp_path / "x.hdf5", **changed, next_observations=successors))
    faults = {f.kind: f for f in find_faults(raw)}
    assert set(faults) == {"nan", "actions", "overlap", "ends", "jump"}
    assert (faults["nan"].severity, faults["nan"].episode, faults["nan"].row) == ("corrupting", 0, 5)
    assert (faults["actions"].severity, faults["actions"].episode, faults["actions"].row) == ("corrupting", 1, 15)
    assert (faults["overlap"].severity, faults["overlap"].episode, faults["overlap"].row) == ("warning", 1, 19)
    assert (faults["jump"].severity, faults["jump"].episode, faults["jump"].row) == ("warning", 1, 13)
    assert (faults["ends"].severity, faults["ends"].episode, faults["ends"].row) == ("warning", 2, 29)
    assert re.search(r"row 13", str(faults["jump"]))
    assert "[and 1 more: offrl data inspect]" in refused(str(tmp_path / "x.hdf5"))


def test_sound_data_have_no_faults(tmp_path: Path) -> None:
    assert find_faults(read_raw(write(tmp_path / "x.hdf5"))) == []


def test_final_observations_must_match_the_episodes() -> None:
    values = {k: v for k, v in columns().items() if k not in ("terminals", "timeouts")}
    raw = RawData(
        values | {"terminations": np.arange(N) % 10 == 9}, name="x", final_observations=np.zeros((2, 11), np.float32)
    )
    assert [f.message for f in find_faults(raw)] == ["'final_observations' has 2 rows but there are 3 episodes"]


def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    values = {k: np.repeat(v, 100, 0) for k, v in columns().items()}
    text = refused(write(tmp_path / "x.hdf5", **values), memory="mmap", cache_dir=str(tmp_path / "cache"))
    assert "No space left" in text and list((tmp_path / "cache" / "mapped").iterdir()) == []
