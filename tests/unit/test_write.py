"""`write_data`: what offrl reads back is what was written, bit for bit, and other programs find their layout."""

from __future__ import annotations

import copy
import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.containers import hdf5_sink as sink
from offrl.data.containers.hdf5_sink import Sink
from offrl.data.loading.assemble import assemble
from offrl.data.loading.read import read_raw
from offrl.data.memory import Memory
from offrl.data.raw import RawData
from offrl.data.tools.convert import read_whole
from offrl.data.writing.write import write_data
from offrl.errors import UserError
from offrl.tasks.task import Task
from tests.support.tiers import nightly_but

FORMS = ("d4rl", "minari")


def load(path: Path, **settings: Any) -> Dataset:
    return load_dataset(DatasetConfig(name=str(path), cache="never", **settings))


def same(a: Dataset, b: Dataset) -> None:
    """Everything that training and scoring use, bit for bit."""
    assert list(a.columns) == list(b.columns)
    for name, column in a.columns.items():
        other = b.columns[name]
        assert (column.dtype, column.shape) == (other.dtype, other.shape), name
        assert column.numpy().tobytes() == other.numpy().tobytes(), name
    for part in ("episode_start", "episode_end", "raw_returns", "complete"):
        assert getattr(a, part).equal(getattr(b, part)), part
    assert a.fingerprint == b.fingerprint
    for part in ("observation_shape", "action_dim", "discrete", "num_actions", "action_low", "action_high", "task"):
        assert getattr(a.spec, part) == getattr(b.spec, part), part


def example(case: str, seed: int = 0) -> RawData:
    """Random columns whose episodes have 1 to 9 rows, with one property of recorded data each."""
    rng = np.random.default_rng(seed)
    rows = 60
    ends = rng.random(rows) < 0.2
    ends[[10, 11, rows - 1]] = True
    terminations = ends & (rng.random(rows) < 0.5)
    columns: dict[str, Any] = {
        "observations": rng.normal(size=(rows, 3)).astype(np.float32),
        "actions": rng.uniform(-1, 1, (rows, 2)).astype(np.float32),
        "rewards": rng.normal(size=rows).astype(np.float32),
        "terminations": terminations,
        "truncations": ends & ~terminations,
    }
    raw = RawData(columns, name="example", action_low=-1.0, action_high=1.0)
    last = np.flatnonzero(ends)
    finals = rng.normal(size=(len(last), 3)).astype(np.float32)
    successors = np.concatenate([columns["observations"][1:], finals[-1:]])
    successors[last] = finals
    if case == "finals":
        raw.final_observations = finals
    elif case == "some finals":
        raw.final_observations, raw.final_known = finals, rng.random(len(last)) < 0.5
        raw.final_observations[~raw.final_known] = columns["observations"][last[~raw.final_known]]
    elif case == "next observations":
        columns["next_observations"] = successors
    elif (
        case == "shifted next observations"
    ):  # at a time-out the next episode's start, which nobody may take for the successor
        columns["next_observations"] = np.roll(columns["observations"], -1, 0)
    elif case == "rounded next observations":
        columns["next_observations"] = successors + np.where(
            rng.random((rows, 1)) < 0.5, np.float32(1e-7), np.float32(0)
        )
    elif case == "jump":
        columns["next_observations"] = successors
        columns["terminations"][last[2]] = columns["truncations"][last[2]] = False
    elif case == "cut":
        columns["terminations"][-1] = columns["truncations"][-1] = False
    elif case == "both flags":
        columns["truncations"] = ends.copy()
    elif case == "terminations only":
        del columns["truncations"]
        columns["next_observations"] = successors
    elif case == "ends only":
        del columns["truncations"], columns["terminations"]
        raw.episode_ends = ends
    elif case == "discrete":
        columns["actions"] = rng.integers(0, 4, rows)
        raw.action_low = raw.action_high = None
        raw.num_actions = 7
    elif case == "images":
        columns["observations"] = rng.integers(0, 255, (rows, 40, 36, 3), dtype=np.uint8)
        raw.final_observations = rng.integers(0, 255, (len(last), 40, 36, 3), dtype=np.uint8)
    elif case == "odd range":
        raw.action_low, raw.action_high = [-1.0, -3.3], [1.5, 1.1]
    elif case == "unknown range":
        raw.action_low = raw.action_high = None
        columns["actions"] *= np.float32(2.7)
    elif case == "more columns":
        columns["wear"] = rng.normal(size=rows).astype(np.float32)
        columns["achieved_goals"] = rng.normal(size=(rows, 2)).astype(np.float32)
        columns["labels"] = rng.integers(0, 9, (rows, 1))
        columns["infos/qpos"] = rng.normal(size=(rows, 4)).astype(np.float32)
        columns["infos/deep/flag"] = rng.random(rows) < 0.5
        raw.final_columns["infos/qpos"] = rng.normal(size=(len(last), 4)).astype(np.float32)
    elif case == "float64":
        for name in ("observations", "actions", "rewards"):
            columns[name] = columns[name].astype(np.float64) / 3
        columns["rewards"] = columns["rewards"][:, None]
        columns["terminations"] = columns["terminations"].astype(np.int8)
    elif case == "task":
        raw.task = Task(
            "mine", "Hopper-v5", {"reset_noise_scale": 0.1}, None, 77, 1.5, 2.5, "ours", ("a", "b"), note="x"
        )
    elif case == "one row":
        raw.columns = {k: v[:1] for k, v in columns.items()}
    else:
        assert case == "plain"
    return raw


CASES = (
    "plain",
    "finals",
    "some finals",
    "next observations",
    "shifted next observations",
    "rounded next observations",
    "jump",
    "cut",
    "both flags",
    "terminations only",
    "ends only",
    "discrete",
    "images",
    "odd range",
    "unknown range",
    "more columns",
    "float64",
    "task",
    "one row",
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 5), marks=pytest.mark.nightly)], ids=["one", "more"])
def test_round_trip(seeds: range, case: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    for seed in seeds:
        raw = example(case, seed)
        columns = {k: np.array(v, np.float32 if v.dtype == np.float64 else v.dtype) for k, v in raw.columns.items()}
        if case == "float64":
            columns["rewards"], columns["terminations"] = columns["rewards"][:, 0], columns["terminations"].astype(bool)
        plain = copy.deepcopy(raw)
        plain.columns = {k: v for k, v in columns.items() if not k.startswith("infos/")}
        expected = assemble(plain)
        before = {k: v.tobytes() for k, v in raw.columns.items()}
        path = write_data(raw, str(tmp_path / f"x{seed}.hdf5") if form == "d4rl" else f"ns/x-v{seed}", form)
        assert {k: v.tobytes() for k, v in raw.columns.items()} == before  # the caller's arrays are not touched
        same(expected, load(path))
        # and from one form to the other, with everything
        infos = {k: k for k in raw.columns if k.startswith("infos/")}
        again = read_raw(str(path), DatasetConfig(fields=infos))
        other = write_data(
            again, str(tmp_path / f"y{seed}.hdf5") if form == "minari" else f"ns/y-v{seed}", FORMS[form == "d4rl"]
        )
        same(expected, load(other))
        back = read_raw(str(other), DatasetConfig(fields=infos))
        for name in infos:
            np.testing.assert_array_equal(back.columns[name], columns[name])
        for name, values in raw.final_columns.items():
            np.testing.assert_array_equal(back.final_columns[name], values)


# ------------------------------------------------------------------------------------------------ what others find in
# it


def test_d4rl_layout_is_what_d4rls_readers_expect(tmp_path: Path) -> None:
    raw = example("more columns")
    raw.final_observations = example("finals").final_observations
    path = write_data(
        raw,
        tmp_path / "x.hdf5",
        "d4rl",
        {"env_id": "Hopper-v4", "algorithm": "SAC", "ref_min_score": 1, "ref_max_score": 9},
    )
    with h5py.File(path) as file:
        keys: list[str] = []
        file.visititems(lambda name, item: keys.append(name) if isinstance(item, h5py.Dataset) else None)
        loose = [k for k in keys if "metadata" not in k]  # d4rl.sequence_dataset indexes all of them by row
        assert all(file[k].shape[0] == 60 for k in loose)
        assert {
            "observations",
            "actions",
            "rewards",
            "terminals",
            "timeouts",
            "next_observations",
            "infos/qpos",
        } <= set(loose)
        assert file["observations"].dtype == file["rewards"].dtype == np.float32 and file["terminals"].dtype == bool
        assert file["metadata/env_id"][()] == b"Hopper-v4" and file["metadata/algorithm"][()] == b"SAC"
        assert (file.attrs["env_id"], file.attrs["ref_min_score"], file.attrs["ref_max_score"]) == ("Hopper-v4", 1, 9)
        data = {k: file[k][()] for k in loose}
    # d4rl.qlearning_dataset in words: all rows but the last and those with a time-out, followed by the next row's
    # observation
    last = np.flatnonzero(data["terminals"] | data["timeouts"])
    following = np.concatenate([data["observations"][1:], data["observations"][:1]])
    following[last] = raw.final_observations
    rows = np.flatnonzero(~data["timeouts"][:-1])
    np.testing.assert_array_equal(data["next_observations"][rows], following[rows])
    task = load(path).spec.task
    assert task is not None and (task.env_id, task.ref_min, task.ref_max) == ("Hopper-v4", 1.0, 9.0)


def test_an_older_offrl_or_an_edited_record_leaves_a_readable_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_data(example("cut"), tmp_path / "x.hdf5", "d4rl")
    with h5py.File(path, "r+") as file:
        del file["metadata/offrl"]
        file["metadata/offrl"] = "{not json"
    assert load(path).num_episodes == load(path).complete.sum()
    assert "cannot be read" in capsys.readouterr().err
    with h5py.File(path, "r+") as file:
        del file["metadata/offrl"]
    assert load(path).num_episodes > 3


def test_a_record_of_other_rows_is_not_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_data(example("plain"), tmp_path / "x.hdf5", "d4rl")
    with h5py.File(path, "r+") as file:
        for key in ("observations", "actions", "rewards", "terminals", "timeouts"):
            values = file[key][:30]
            del file[key]
            file[key] = values
    assert len(load(path)) == 30
    assert "was changed since" in capsys.readouterr().err


@pytest.mark.parametrize("form", nightly_but(("minari",), FORMS))
def test_a_damaged_record_is_no_traceback(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Any part of the record missing or changed: one line says so, and the layout has to do."""
    raw = example("more columns")
    raw.columns["observations"], raw.columns["actions"] = np.ones((60, 11), np.float32), np.zeros((60, 3), np.float32)
    raw.columns["next_observations"] = np.ones((60, 11), np.float32)
    path = write_data(raw, tmp_path / ("x.hdf5" if form == "d4rl" else "x-v0"), form, {"env_id": "Hopper-v5"})
    file = path if form == "d4rl" else path / "data" / "metadata.json"
    whole = file.read_bytes()

    def record() -> dict[str, Any]:
        if form == "minari":
            return json.loads(file.read_text())["offrl"]
        with h5py.File(file) as h5:
            return json.loads(h5["metadata/offrl"][()])

    original = record()
    for key in (*original, "spec.task", "spec.action_low", "spec.num_actions"):
        for value in (None, 3, "x", [99], {"a": 1}, "missing"):
            file.write_bytes(whole)
            changed = json.loads(json.dumps(original))
            *outer, inner = key.split(".")
            place = changed["spec"] if outer else changed
            if value == "missing":
                del place[inner]
            else:
                place[inner] = value
            if form == "minari":
                file.write_text(json.dumps(json.loads(whole) | {"offrl": changed}))
            else:
                with h5py.File(file, "r+") as h5:
                    del h5["metadata/offrl"]
                    h5["metadata/offrl"] = json.dumps(changed)
            capsys.readouterr()
            data = load(path)
            message = capsys.readouterr().err
            # the layout says so as well
            assert len(data) == 60 and data.spec.task is not None and data.spec.task.env_id == "Hopper-v5"
            assert "read by its layout alone" in message and message.count("\n") <= 3, (key, value, message)


def test_minari_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    raw = example("more columns")
    raw.columns["observations"] = np.random.default_rng(0).normal(size=(60, 11)).astype(np.float32)
    raw.columns["actions"] = np.zeros((60, 3), np.float32)
    about = {"env_id": "Hopper-v5", "author": "A. Person", "email": "a@b.c", "algorithm": "SAC", "description": "d",
             "ref_min_score": 10.0, "ref_max_score": 110.0, "requirements": ["mujoco>=3"], "seeds": [1, 2]}  # fmt: skip
    write_data(raw, "deep/name/hop-v3", "minari", about)
    data = minari.load_dataset("deep/name/hop-v3")
    last = np.flatnonzero(raw.columns["terminations"] | raw.columns["truncations"])
    assert (data.total_steps, data.total_episodes, data.id) == (60, len(last), "deep/name/hop-v3")
    start = 0
    for episode, stop in zip(data.iterate_episodes(), last + 1, strict=True):
        rows = slice(start, stop)
        assert len(episode.observations) == len(episode.rewards) + 1 == stop - start + 1
        np.testing.assert_array_equal(episode.observations[:-1], raw.columns["observations"][rows])
        # unknown: the last one again
        np.testing.assert_array_equal(episode.observations[-1], raw.columns["observations"][stop - 1])
        for key in ("actions", "rewards", "terminations", "truncations"):
            np.testing.assert_array_equal(getattr(episode, key), raw.columns[key][rows])
        np.testing.assert_array_equal(episode.infos["qpos"][:-1], raw.columns["infos/qpos"][rows])
        np.testing.assert_array_equal(episode.infos["deep"]["flag"][:-1], raw.columns["infos/deep/flag"][rows])
        assert episode.observations[0] in data.observation_space and episode.actions[0] in data.action_space
        start = stop
    assert data.env_spec.id == data.recover_environment().spec.id == "Hopper-v5"
    assert minari.get_normalized_score(data, np.array([60.0])).tolist() == [0.5]
    meta = data.storage.metadata
    assert (meta["author"], meta["author_email"], meta["algorithm_name"], meta["seeds"]) == (
        {"A. Person"},
        {"a@b.c"},
        "SAC",
        [1, 2],
    )
    assert meta["minari_version"] == minari.__version__ and meta["requirements"] == ["mujoco>=3"]
    assert list(minari.list_local_datasets()) == ["deep/name/hop-v3"]
    half = data.filter_episodes(lambda e: bool(e.terminations[-1]))
    assert half.total_episodes == int(raw.columns["terminations"].sum())
    # Minari can copy and extend it
    both = minari.combine_datasets([data, minari.load_dataset("deep/name/hop-v3")], "both-v0")
    assert both.total_steps == 120 and len(load(tmp_path / "both-v0")) == 120


def test_a_folder_is_a_minari_data_set_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "other"))
    path = write_data(example("discrete"), tmp_path / "my data", "minari")
    data = minari.MinariDataset(path / "data")
    assert data.id == "my-data-v0" and data.action_space.n == 7 and data[0].actions.dtype == np.int64
    assert not (tmp_path / "namespace_metadata.json").exists()


def test_dict_observations_become_a_dict_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari's own writer, then D4RL, then Minari."""
    minari = pytest.importorskip("minari")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    rng = np.random.default_rng(0)
    widths = {"observation": 4, "achieved_goal": 2, "desired_goal": 2}
    boxes = {k: spaces.Box(-9.0, 9.0, (width,), np.float64) for k, width in widths.items()}
    episodes = [
        EpisodeBuffer(
            observations={k: rng.normal(size=(6, *b.shape)) for k, b in boxes.items()},
            actions=rng.uniform(-1, 1, (5, 2)).astype(np.float32),
            rewards=rng.normal(size=5),
            terminations=np.zeros(5, bool),
            truncations=np.arange(5) == 4,
            infos={"success": rng.random(6) < 0.5, "text": ["a"] * 6},
        )
        for _ in range(3)
    ]
    with pytest.warns(UserWarning):
        minari.create_dataset_from_buffers(
            "goal-v0",
            episodes,
            observation_space=spaces.Dict(boxes),
            action_space=spaces.Box(-1, 1, (2,), np.float32),
            author={"x"},
        )
    first = load(tmp_path / "goal-v0")
    fields = {"infos/success": "infos/success"}
    there = write_data(read_raw("goal-v0", DatasetConfig(fields=fields)), tmp_path / "x.hdf5", "d4rl")
    same(first, load(there))
    back = write_data(read_raw(str(there), DatasetConfig(fields=fields)), "back-v0", "minari")
    same(first, load(back))
    old, new = minari.load_dataset("goal-v0"), minari.load_dataset("back-v0")
    assert sorted(new.observation_space.spaces) == sorted(boxes) and new.storage.metadata["author"] == {"x"}
    for a, b in zip(old.iterate_episodes(), new.iterate_episodes(), strict=True):
        for key in boxes:
            np.testing.assert_array_equal(a.observations[key].astype(np.float32), b.observations[key])
        np.testing.assert_array_equal(a.infos["success"], b.infos["success"])
    assert load(back, observation_keys=["observation"]).spec.observation_shape == (4,)


def test_infos_of_minari_become_columns(tmp_path: Path) -> None:
    path = write_data(example("more columns"), tmp_path / "x", "minari")
    data = load(path, fields={"positions": "infos/qpos"})
    np.testing.assert_array_equal(data.columns["positions"], example("more columns").columns["infos/qpos"])
    with pytest.raises(UserError, match="infos/nothing"):
        load(path, fields={"a": "infos/nothing"})
    with pytest.raises(UserError, match=r"dataset\.fields\.observations=obs: of a Minari dataset only infos"):
        load(path, fields={"observations": "obs"})


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_infos_of_arrow_data_sets_are_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari, _ = pytest.importorskip("minari"), pytest.importorskip("pyarrow")
    from gymnasium import spaces
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    box = spaces.Box(-1, 1, (2,), np.float32)
    success, deep = np.array([0, 1, 0, 1], bool), np.arange(8.0).reshape(4, 2)
    buffers = [
        EpisodeBuffer(
            observations=np.full((4, 2), i, np.float32),
            actions=np.zeros((3, 2), np.float32),
            rewards=np.ones(3),
            terminations=np.zeros(3, bool),
            truncations=np.arange(3) == 2,
            infos={"success": success, "deep": {"x": deep + i}, **({"rare": success} if i else {})},
        )
        for i in range(2)
    ]
    with pytest.warns(UserWarning):
        minari.create_dataset_from_buffers("a-v0", buffers, observation_space=box, action_space=box, data_format=kind)
    raw = read_whole(DatasetConfig(name="a-v0"), Memory())
    assert sorted(k for k in raw.columns if k.startswith("infos")) == ["infos/deep/x", "infos/success"]
    # Arrow datasets keep one number as [T, 1]
    assert raw.columns["infos/success"].reshape(-1).tolist() == [False, True, False] * 2
    assert raw.columns["infos/deep/x"][3].tolist() == [1.0, 2.0] and raw.final_columns["infos/deep/x"].tolist() == [
        [6, 7],
        [7, 8],
    ]


def test_columns_in_files_are_written_block_by_block(tmp_path: Path) -> None:
    memory = Memory(-1.0, tmp_path / "cache")
    raw = example("plain")
    for name, column in list(raw.columns.items()):
        raw.columns[name] = memory.empty(name, (6000, *column.shape[1:]), column.dtype)
        raw.columns[name][:] = np.concatenate([column] * 100)
    shares: list[float] = []
    path = write_data(raw, tmp_path / "x.hdf5", "d4rl", progress=shares.append, memory=memory)
    assert len(load(path)) == 6000 and shares == sorted(shares) and shares[-1] == 1.0
    memory.discard()


# -----------------------------------------------------------------------------------------------------------------
# faults


@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_replaced_unless_asked(form: str, tmp_path: Path) -> None:
    target = tmp_path / ("x.hdf5" if form == "d4rl" else "x-v0")
    write_data(example("plain"), target, form)
    with pytest.raises(UserError, match="exists; give another name, or force=true"):
        write_data(example("cut"), target, form)
    assert load(target).complete.all()
    write_data(example("cut"), target, form, force=True)
    assert not load(target).complete.all()
    assert sorted(p.name for p in tmp_path.iterdir()) == [target.name]


def test_a_folder_of_other_things_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("x")
    for form, name in (("minari", "thesis"), ("d4rl", "thesis.hdf5")):
        (tmp_path / name).mkdir(exist_ok=True)
        with pytest.raises(UserError, match="is not replaced"):
            write_data(example("plain"), tmp_path / name, form, force=True)
    assert (tmp_path / "thesis" / "chapter.txt").read_text() == "x"


def test_bad_targets_and_columns(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a D4RL file ends in \.hdf5"):
        write_data(example("plain"), tmp_path / "x", "d4rl")
    with pytest.raises(UserError, match="not a file"):
        write_data(example("plain"), tmp_path / "x.hdf5", "minari")
    with pytest.raises(UserError, match="data are written as D4RL HDF5"):
        write_data(example("plain"), tmp_path / "x.npz", "minari")
    with pytest.raises(UserError, match="not 'rlds'"):
        write_data(example("plain"), tmp_path / "x", "rlds")
    raw = example("plain")
    raw.columns["rewards"] = raw.columns["rewards"][:-1]
    with pytest.raises(UserError, match="'rewards' has 59 rows but 'observations' has 60"):
        write_data(raw, tmp_path / "x.hdf5", "d4rl")
    raw = example("plain")
    raw.columns["metadata"] = raw.columns["rewards"]
    with pytest.raises(UserError, match="cannot be called 'metadata'"):
        write_data(raw, tmp_path / "x.hdf5", "d4rl")
    with pytest.raises(UserError, match="about holds a object"):
        write_data(example("plain"), tmp_path / "x.hdf5", "d4rl", {"thing": object()})
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file"):
        write_data(example("plain"), tmp_path / "file" / "x.hdf5", "d4rl")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_is_one_message_and_leaves_what_was_there(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "sub" / ("x.hdf5" if form == "d4rl" else "x-v0")
    room = 3000
    write = sink.write_at

    def full(handle: int, data: Any, place: int) -> int:
        if place + len(data) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data, place)

    with monkeypatch.context() as patch:
        patch.setattr(sink, "write_at", full)
        with pytest.raises(UserError, match=r"disk full while writing .*x.*; nothing was left there"):
            write_data(example("plain"), target, form)
    assert not (tmp_path / "sub").exists()
    write_data(example("plain"), target, form)
    with monkeypatch.context() as patch:
        patch.setattr(sink, "write_at", full)
        with pytest.raises(UserError, match=r"what stood there before is untouched"):
            write_data(example("cut"), target, form, force=True)
    assert load(target).complete.all() and [p.name for p in (tmp_path / "sub").iterdir()] == [target.name]


def test_hdf5_survives_a_disk_that_fills_up_at_any_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """HDF5 itself would print a traceback for each object it cannot close, and may crash the process."""
    write = sink.write_at
    for room in (0, 100, 2000, 5000, 20000):

        def full(handle: int, data: Any, place: int, room: int = room) -> int:
            if place + len(data) > room:
                if place >= room:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return write(handle, data[: room - place], place)
            return write(handle, data, place)

        monkeypatch.setattr(sink, "write_at", full)
        held = Sink(tmp_path / "x.h5")
        with h5py.File(held, "w") as file:
            for i in range(50):
                file[f"group_{i}/values"] = np.arange(100.0) + i
            # its memory stands in for the disk
            np.testing.assert_array_equal(file["group_7/values"][()], np.arange(100.0) + 7)
        with pytest.raises(OSError, match="No space left"):
            held.check()
        held.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("form", FORMS)
def test_what_differs_when_read_back_is_not_put_in_place(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = sink.write_at
    marker = np.float32(1234.5).tobytes()

    def flip(handle: int, data: Any, place: int) -> int:
        return write(handle, bytes(data).replace(marker, np.float32(1234.75).tobytes()), place)

    raw = example("plain")
    raw.columns["rewards"][7] = 1234.5
    monkeypatch.setattr(sink, "write_at", flip)
    monkeypatch.setattr("offrl.data.writing.write._blocks", lambda column: (len(column), {}))  # not compressed
    with pytest.raises(UserError, match=r"differs \(columns\): nothing was put there"):
        write_data(raw, tmp_path / ("x.hdf5" if form == "d4rl" else "x"), form)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize("form", FORMS)
def test_ctrl_c_leaves_nothing(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write, calls = sink.write_at, 0

    def stop(*arguments: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return write(*arguments)

    monkeypatch.setattr(sink, "write_at", stop)
    with pytest.raises(KeyboardInterrupt):
        write_data(example("plain"), tmp_path / "sub" / ("x.hdf5" if form == "d4rl" else "x-v0"), form)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr().err == ""


@pytest.mark.slow
def test_kill_leaves_nothing_in_place(tmp_path: Path) -> None:
    code = f"""
        import os, signal, sys
        sys.path[:0] = [{str(Path(__file__).parents[2])!r}]
        from tests.unit.test_write import example, write_data
        from offrl.data.containers import hdf5_sink as sink
        real, calls = sink.write_at, 0
        def stop(*arguments):
            global calls
            calls += 1
            if calls == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)
        sink.write_at = stop
        write_data(example("plain"), {str(tmp_path / "x.hdf5")!r})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [p.name[:13] for p in tmp_path.iterdir()] == [".x.hdf5.part-"]  # hidden, and no dataset's name
    write_data(example("plain"), tmp_path / "x.hdf5")
    assert [p.name for p in tmp_path.iterdir()] == ["x.hdf5"]  # the next one clears it away


def test_what_the_metadata_say(tmp_path: Path) -> None:
    """`about` comes back from either form, and a task's environment, kwargs and reference scores are the file's."""
    about = {
        "author": ["x", "y"],
        "description": "d",
        "recipe": {"steps": 3},
        "env_id": "Pendulum-v1",
        "env_kwargs": {"g": 9.0},
    }
    for form, name in (("d4rl", "x.hdf5"), ("minari", "x-v0")):
        raw = example("plain")
        raw.columns["actions"] = raw.columns["actions"][:, :1].copy()
        path = write_data(raw, tmp_path / name, form, about)
        again = read_raw(str(path))
        assert (
            again.metadata["author"] == ["x", "y"]
            and again.metadata["recipe"] == {"steps": 3}
            and again.metadata["description"] == "d"
        )
        assert again.task is not None and again.task.env_id == "Pendulum-v1" and again.task.env_kwargs == {"g": 9.0}
    spec = json.loads(json.loads((tmp_path / "x-v0" / "data" / "metadata.json").read_text())["env_spec"])
    assert spec["id"] == "Pendulum-v1" and spec["kwargs"] == {"g": 9.0} and spec["max_episode_steps"] == 200
