"""Files of strangers: nothing outside them is read, what they name must be there, and what they declare is held against
what they hold.
"""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.data import DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.containers import guard
from offrl.data.containers.hdf5 import open_hdf5
from offrl.data.formats import provenance
from offrl.data.loading.read import read_raw
from offrl.data.raw import RawData
from offrl.errors import UserError
from tests.support.data_files import (
    N,
    columns,
    external,
    external_storage,
    minari,
    minari_arrow,
    soft,
    text_minari,
    through,
    virtual,
)


def all_but(file: Any, key: str, form: str) -> None:
    """Write the columns of a layout into an h5py.File, but for one."""
    for name, value in columns().items():
        if name != key and not (form == "columns" and name == "terminals"):
            file[name] = value.reshape(3, 20, -1) if form == "padded" else value
    if form == "d3rlpy":
        file["version"] = "1.0"
    if form == "padded":
        file["masks"] = np.ones((3, 20))


def write(path: Path, libver: Any = None, left_out: str = "", **options: Any) -> Path:
    with h5py.File(path, "w", libver=libver) as file:
        for key, value in columns().items():
            if key != left_out:
                file.create_dataset(key, data=value, **options)
    return path


def refused(name: Path | str, **settings: Any) -> str:
    """The message, which must be one line with the file's name."""
    with pytest.raises(UserError) as caught:
        load_dataset(DatasetConfig(name=str(name), cache="never", **settings))
    assert "\n" not in str(caught.value) and str(name) in str(caught.value)
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------------- links,
# other files


WAYS = pytest.mark.parametrize("way", [soft, external, through, external_storage, virtual])
Way = Callable[[Any, str, Path], None]


@WAYS
@pytest.mark.parametrize("form", ["d4rl", "columns", "d3rlpy", "padded"])
def test_columns_that_lead_elsewhere_are_refused(tmp_path: Path, way: Way, form: str) -> None:
    key = "episode_terminals" if form == "d3rlpy" else "timeouts"
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w") as file:
        all_but(file, key, form)
        way(file, key, tmp_path)
    assert f"'{key}' " in (text := refused(path)) or "'beside' " in text
    assert "link to '/nowhere'" in text or "out of the file" in text


@WAYS
def test_episodes_of_minari_that_lead_elsewhere_are_refused(tmp_path: Path, way: Way) -> None:
    folder = minari(tmp_path)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1/truncations"]
        way(file, "episode_1/truncations", tmp_path)
    assert "truncations' " in (text := refused(folder)) or "'beside' " in text


def test_links_within_the_file_are_followed(tmp_path: Path) -> None:
    before = load_dataset(str(write(tmp_path / "x.hdf5"))).fingerprint
    with h5py.File(tmp_path / "x.hdf5", "a") as file:
        file.move("timeouts", "there")
        file["timeouts"] = h5py.SoftLink("/there")
        layout = h5py.VirtualLayout((N,), "f4")
        layout[:] = h5py.VirtualSource(".", "stored", shape=(N,), dtype="f4")
        file.move("rewards", "stored")
        file.create_virtual_dataset("rewards", layout)
    assert load_dataset(str(tmp_path / "x.hdf5")).fingerprint == before
    write(tmp_path / "y.hdf5", left_out="timeouts")
    with h5py.File(tmp_path / "y.hdf5", "a") as file:
        file["timeouts"] = file["terminals"]  # a second name
    assert int(read_raw(str(tmp_path / "y.hdf5")).columns["truncations"].sum()) == 1


# ----------------------------------------------------------------------------------------------------- more than the
# file holds


def test_rows_that_were_never_written_are_refused(tmp_path: Path) -> None:
    for number, options in enumerate(({}, {"chunks": (16,)}, {"chunks": (16,), "compression": "gzip"})):
        path = write(tmp_path / f"{number}.hdf5", left_out="rewards")
        with h5py.File(path, "a") as file:
            file.create_dataset("rewards", (10**11 if number else N,), "f4", **options)
        assert "'rewards' declares more than the file holds" in refused(path)
    with h5py.File(path, "a") as file:
        del file["rewards"]
        file.create_dataset("rewards", (10**11,), "f4", chunks=(16,), fillvalue=1.0)
    assert "'rewards' would take 400 GB of memory" in refused(path)


def test_zeros_are_no_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(path := write(tmp_path / "x.hdf5", left_out="rewards"), "a") as file:
        file.create_dataset("rewards", data=np.zeros(N), compression="gzip", chunks=True)
    assert float(load_dataset(str(path)).columns["rewards"].abs().sum()) == 0.0
    monkeypatch.setattr(guard, "FREE", 100)
    monkeypatch.setattr(guard, "GROWTH", 2)
    assert "'rewards'" in (text := refused(path)) and "more than 2 times as much is refused above 100 bytes" in text


def test_npz_that_declare_what_they_do_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**12,)})
    np.savez_compressed(path := tmp_path / "x.npz", **{k: v for k, v in columns().items() if k != "rewards"})

    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("rewards.npy", header.getvalue() + bytes(4 * N))
    assert "'rewards' declares 4,000,000,000,000 bytes, shape [1000000000000], and the file holds 240" in refused(path)
    np.savez_compressed(path, **columns() | {"rewards": np.zeros(N)})
    assert len(load_dataset(str(path))) == N
    monkeypatch.setattr(guard, "FREE", 100)
    monkeypatch.setattr(guard, "GROWTH", 2)
    assert "'rewards' would take 480 bytes of memory" in refused(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("rewards.npy", b"")
    assert "by a method that NumPy does not write" in refused(path)


def test_json_lines_that_grow_without_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl.gz"
    episode = {
        "turns": [{"obs": "a", "action": "b", "reward": 1.0}],
        "final_obs": None,
        "terminated": True,
        "truncated": False,
    }
    path.write_bytes(gzip.compress((json.dumps(episode) + "\n").encode() * 100))
    assert len(load_dataset(str(path))) == 100
    monkeypatch.setattr("offrl.data.text.files.FREE", 1000)
    monkeypatch.setattr("offrl.data.text.files.GROWTH", 2)
    monkeypatch.setattr(guard, "FREE", 1000)
    monkeypatch.setattr(guard, "GROWTH", 2)
    assert "unpacked, would take" in refused(path)


def test_parquet_that_declares_more_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({k: list(v.tolist()) for k, v in columns().items()})
    pq.write_table(table, path := tmp_path / "x.parquet")
    assert len(load_dataset(str(path))) == N
    monkeypatch.setattr(guard, "FREE", 100)
    monkeypatch.setattr(guard, "GROWTH", 0)
    assert "of memory, of which the file holds" in refused(path)


def test_a_heap_without_an_end(tmp_path: Path) -> None:
    """HDF5 itself does not come back from such a file."""
    with h5py.File(path := write(tmp_path / "x.hdf5"), "a") as file:
        file.attrs["env_id"] = "Hopper-v4"
    data = bytearray(path.read_bytes())
    heap = data.index(b"GCOL")
    at = heap + 16
    while number := int.from_bytes(data[at : at + 2], "little"):
        at += 16 + -(-int.from_bytes(data[at + 8 : at + 16], "little") // 8) * 8
    assert number == 0
    data[at + 8 : at + 16] = bytes(8)
    path.write_bytes(data)
    assert "heap of texts" in refused(path)


@pytest.mark.parametrize("chunks", [None, True])
def test_texts_that_declare_more_than_the_file_holds(tmp_path: Path, chunks: bool | None) -> None:
    folder = minari(tmp_path)
    path, text = folder / "data" / "metadata.json", '{"type": "Text", "max_length": 9}'
    path.write_text(json.dumps(json.loads(path.read_text()) | {"action_space": text, "observation_space": text}))
    path = folder / "data" / "main_data.hdf5"
    with h5py.File(path, "a") as file:
        for name, rows in [
            (f"episode_{k}/{c}", 10 + (c == "observations")) for k in range(3) for c in ("observations", "actions")
        ]:
            del file[name]
            file.create_dataset(name, data=["a"] * rows, dtype=h5py.string_dtype(), chunks=chunks)
        item = file["episode_1/actions"].id
        place = item.get_chunk_info(0).byte_offset if chunks else item.get_offset()
    assert len(load_dataset(str(folder))) == 30
    data = bytearray(path.read_bytes())
    data[place : place + 4] = (3 * 10**9).to_bytes(4, "little")
    path.write_bytes(data)
    assert "episode_1: 'actions' declares a text of 3,000,000,000 bytes" in refused(folder)


def test_flags_of_more_dimensions(tmp_path: Path) -> None:
    with h5py.File(path := tmp_path / "x.h5", "w") as file:
        for key, value in columns().items():
            file[key] = value
        file["version"], file["episode_terminals"] = "1.0", np.zeros((N, 2, 2))
    assert "'episode_ends' has shape [60, 2, 2]" in refused(path)


# ------------------------------------------------------------------------------------------------------- no library has
# its say


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"chunks": (16,), "maxshape": (None,)}])
def test_hdf5_of_the_latest_format(tmp_path: Path, options: dict[str, Any]) -> None:
    path = tmp_path / "x.hdf5"
    with h5py.File(path, "w", libver="latest") as file:
        for key, value in columns().items():
            wide = {k: (*v, *value.shape[1:]) for k, v in options.items() if k in ("chunks", "maxshape")}
            file.create_dataset(key, data=value, **options | wide)
    assert load_dataset(str(path)).fingerprint == load_dataset(str(write(tmp_path / "y.hdf5"))).fingerprint
    data = path.read_bytes()
    rng = np.random.default_rng(1)
    for at in rng.integers(8, len(data), 12).tolist():
        path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            load_dataset(str(path))
        except UserError as error:
            assert "\n" not in str(error)


def test_a_damaged_member_of_an_npz(tmp_path: Path) -> None:
    np.savez_compressed(path := tmp_path / "x.npz", **columns())
    data = bytearray(path.read_bytes())
    at = data.index(b"actions.npy") + 200
    data[at : at + 40] = bytes(40)
    path.write_bytes(data)
    assert "'actions' cannot be read" in refused(path)


STRANGE: dict[str, Any] = {
    "scalar": 3.5,
    "empty": h5py.Empty("f4"),
    "compound": np.zeros(10, [("a", "f4"), ("b", "i4")]),
    "text": np.array(["a"] * 10, "S1"),
    "complex": np.zeros(10, complex),
    "long": np.zeros((10, 2, 3)),
}


@pytest.mark.parametrize("strange", [*STRANGE, "group", "lists"])
def test_strange_columns_are_named_with_their_episode(tmp_path: Path, strange: str) -> None:
    def put(file: Any, key: str) -> None:
        del file[key]
        if strange == "group":
            file.create_group(key)
        elif strange == "lists":
            file.create_dataset(key, (10,), h5py.vlen_dtype("f4"))
        else:
            file[key] = STRANGE[strange]

    folder = minari(tmp_path)
    for column in ("observations", "actions", "rewards", "terminations"):
        file = h5py.File(folder / "data" / "main_data.hdf5", "a")
        kept = file[f"episode_1/{column}"][()]
        put(file, f"episode_1/{column}")
        file.close()
        with pytest.raises(
            UserError, match=rf"episode_1.*{column}|{column}.*episode_1|episode_1' |episode_1 has no"
        ) as caught:
            load_dataset(str(folder))
        assert "\n" not in str(caught.value)
        with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
            del file[f"episode_1/{column}"]
            file[f"episode_1/{column}"] = kept
    with h5py.File(path := tmp_path / "d3.h5", "w") as file:
        for episode in range(3):
            for name, value in (
                ("observations", np.zeros((10, 4))),
                ("actions", np.zeros((10, 2))),
                ("rewards", np.zeros((10, 1))),
            ):
                file[f"{name}_{episode}"] = value
            file[f"terminated_{episode}"] = True
        put(file, "rewards_1")
    assert "rewards_1" in refused(path)


@pytest.mark.parametrize(
    "change",
    [
        {"action_space": "[]"},
        {"action_space": 3},
        {"observation_space": '{"type": "Box", "shape": [1e9]}'},
        {"observation_space": '{"type": "Box", "shape": [-1], "dtype": "float32"}'},
        {"observation_space": '{"type": "Dict", "subspaces": [1]}'},
        {"observation_space": '{"type": "Discrete", "n": 1000000000}'},
        {"action_space": '{"type": "Discrete", "n": "4"}'},
        {"action_space": '{"type": "Box", "shape": [2], "dtype": "float32", "low": ["a"], "high": [1, 1]}'},
        {"total_steps": "many"},
        {"total_steps": -1},
        {"total_steps": 10**15},
        {"total_steps": None},
        {"data_format": ["hdf5"]},
        {"env_spec": "3"},
        {"env_spec": '{"id": 3}'},
        {"env_spec": '{"id": "Hopper-v4", "kwargs": [1]}'},
        {"ref_min_score": "low", "ref_max_score": 1},
        {"ref_min_score": {}, "ref_max_score": 1},
    ],
)
def test_metadata_of_wrong_types(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = minari(tmp_path)
    path = folder / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    key = next(iter(change))
    with pytest.raises(
        UserError, match="steps, as its metadata declare" if change.get(key) == 10**15 else rf"metadata.json.*{key}"
    ):
        load_dataset(str(folder))


def test_faults_of_our_own_are_not_taken_for_the_files(tmp_path: Path) -> None:
    with pytest.raises(AttributeError), open_hdf5(write(tmp_path / "x.hdf5")) as file:
        file.no_such_thing()
    with pytest.raises(UserError, match="KeyError") as caught, guard.reading("x"):
        raise KeyError("a")
    assert isinstance(caught.value.__cause__, KeyError)


# ------------------------------------------------------------------------------------------------------------------
# what is meant


@pytest.mark.parametrize(
    ("ends", "what"),
    [
        ([10, 20, 30, 40, 50], "first episode has 11 rows .* so that it has 10 "),
        ([10, 20, 30, 40, 50, 60], "exclusive, or counted from 1. Subtract 1"),
        ([0, 10, 20, 30, 40, 50], "either the first rows of episodes"),
        ([0, 10, 20, 30, 40, 50, 60], "bounds of episodes"),
        ([10] * 6, "lengths of episodes. Give numpy.cumsum"),
        ([19, 9, 59], "do not ascend"),
        ([9, 61], "from 0 to 59"),
        (np.full(N, 0.5), "must be flags"),
        (["a"], "holds 'a' in row 0, which is no flag"),
        (3, "is a single value; it needs one for each row"),
    ],
)
def test_ends_that_may_mean_two_things(ends: Any, what: str) -> None:
    values = columns()
    with pytest.raises(UserError, match=what):
        from_arrays(values["observations"], values["actions"], values["rewards"], episode_ends=ends)


def test_ends_that_mean_one_thing() -> None:
    values = columns()
    for ends in (
        [19, 39, 59],
        np.arange(N) % 20 == 19,
        (np.arange(N) % 20 == 19).astype(np.int64),
        np.float64([19, 39, 59]),
    ):
        data = from_arrays(values["observations"], values["actions"], values["rewards"], episode_ends=ends)
        assert data.episode_end.tolist() == [20, 40, 60]
    with pytest.raises(UserError, match=r"flags \(one episode\), or row numbers \(two\)"):
        from_arrays(values["observations"][:2], values["actions"][:2], values["rewards"][:2], episode_ends=[0, 1])


def test_ids_that_come_again_are_noted(tmp_path: Path) -> None:
    values = {k: v for k, v in columns().items() if k not in ("terminals", "timeouts")}
    np.savez(tmp_path / "x.npz", **values, episode_ids=np.arange(N) % 6)
    notes = " ".join(load_dataset(str(tmp_path / "x.npz")).notes)
    assert (
        "6 ids stand in 60 runs" in notes
        and "the first that comes again does so at row 6" in notes
        and "or sort the rows" in notes
    )
    np.savez(tmp_path / "y.npz", **values, episode_ids=np.repeat([5, 2, 9], 20))
    assert "ids" not in " ".join(load_dataset(str(tmp_path / "y.npz")).notes)


def test_flags_and_actions_that_are_none(tmp_path: Path) -> None:
    values = columns()
    np.savez(tmp_path / "x.npz", **values | {"terminals": values["terminals"] * 0.5})
    assert "'terminations' holds 0.5 in row 59, which is no flag" in refused(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", **values | {"terminals": values["terminals"].astype(np.uint8) * 255})
    assert bool(load_dataset(str(tmp_path / "x.npz")).columns["terminations"][59])
    for value in (10**9, -1):
        actions = np.zeros(N, np.int64)
        actions[7] = value
        np.savez(tmp_path / "x.npz", **values | {"actions": actions})
        text = refused(tmp_path / "x.npz")
        assert f"holds {value}, which is no number from 0 to 65535" in text and "numpy.unique" in text


# --------------------------------------------------------------------------------------------------------------- Minari


@pytest.mark.parametrize("encode", [False, True])
def test_images_are_read_as_they_are_stored_whatever_the_metadata_say(tmp_path: Path, encode: bool) -> None:
    """Minari 0.5 encodes images of 32 x 32 and more; smaller ones, and those of older versions, lie there as they
    are.
    """
    data = load_dataset(str(minari(tmp_path, (32, 32, 3) if encode else (8, 8, 3), "uint8", encode)))
    assert data.spec.streams[0].shape == ((32, 32, 3) if encode else (8, 8, 3))
    images = data.stores["pixels"].frames(data.episode_start, 1)
    assert images.float().mean((1, 2, 3)).tolist() == [0.0, 20.0, 40.0]


# ---------------------------------------------------------------------------------------- what the fuzzer has come upon


@pytest.mark.parametrize("key", ["rewards", "terminations"])
def test_columns_of_minari_have_one_number_for_each_step(tmp_path: Path, key: str) -> None:
    folder = minari(tmp_path)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        values = file[f"episode_1/{key}"][()]
        del file[f"episode_1/{key}"]
        file[f"episode_1/{key}"] = values.reshape(10, 1, 1)
    assert f"episode_1: '{key}' has shape [10, 1, 1]" in refused(folder)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file[f"episode_1/{key}"]
        file[f"episode_1/{key}"] = values.reshape(10, 1)
    assert len(load_dataset(str(folder))) == 30


def test_an_episode_of_minari_without_rewards_is_not_dropped(tmp_path: Path) -> None:
    folder = minari(tmp_path)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = np.zeros(0)
    assert "episode_1: 'actions' has shape [10, 2], expected [0, 2]" in refused(folder)
    with h5py.File(folder / "data" / "main_data.hdf5", "a") as file:  # reset twice: no steps at all
        del file["episode_1"]
        for key, shape in {
            "observations": (1, 4),
            "actions": (0, 2),
            "rewards": (0,),
            "terminations": (0,),
            "truncations": (0,),
        }.items():
            file[f"episode_1/{key}"] = np.zeros(shape)
    assert len(load_dataset(str(folder))) == 20


def test_arrow_of_other_kinds(tmp_path: Path) -> None:
    sound = [{"x": [0.0, 1.0]}] * 3
    assert len(load_dataset(str(minari_arrow(tmp_path / "a", sound, [1.0] * 3)))) == 2
    assert "'rewards' has shape [2, 1, 1]" in refused(minari_arrow(tmp_path / "b", sound, [[[1.0]]] * 3))
    folder = minari_arrow(tmp_path / "d", sound, [1.0] * 3)
    pa = pytest.importorskip("pyarrow")
    (folder / "1").mkdir()
    table = pa.ipc.open_file(folder / "0" / "0.arrow").read_all().slice(2)
    for rest in (table, table.drop_columns("rewards")):  # no steps at all, and rewards that are lost
        with pa.OSFile(str(folder / "1" / "0.arrow"), "wb") as file, pa.ipc.new_file(file, rest.schema) as writer:
            writer.write_table(rest)
        if rest is table:
            assert len(load_dataset(str(folder))) == 2
    assert "'rewards' is missing" in refused(folder)
    assert "'observations/x' is missing: null stands" in refused(minari_arrow(tmp_path / "c", [None] * 3, [1.0] * 3))


@pytest.mark.parametrize(
    ("form", "key"),
    [
        ("columns", "timeouts"),
        ("columns", "episode_ids"),
        ("d4rl", "timeouts"),
        ("padded", "terminals"),
        ("d3rlpy", "episode_terminals"),
    ],
)
def test_a_group_where_a_column_is_due(tmp_path: Path, form: str, key: str) -> None:
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        all_but(file, key, form)
        file.create_group(key)
    assert f"'{key}' is a group, where a column is due" in refused(tmp_path / "x.hdf5")


def test_a_group_of_a_columns_name_may_hold_the_chosen_column(tmp_path: Path) -> None:
    write(path := tmp_path / "x.hdf5", left_out="observations")
    with h5py.File(path, "a") as file:
        file["observations/state"] = columns()["observations"]
    assert len(load_dataset(DatasetConfig(name=str(path), fields={"observations": "observations/state"}))) == N


def test_d3rlpys_ends_that_are_a_single_value(tmp_path: Path) -> None:
    write(path := tmp_path / "x.hdf5", left_out="timeouts")
    with h5py.File(path, "a") as file:
        file["version"], file["episode_terminals"] = "1.0", 1.0
    assert "'episode_terminals' is a single value" in refused(path)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"final_observations": np.zeros((3, 2))}, "'final_observations' has shape [3, 2], 'observations' [60, 4]"),
        (
            {"final_observations": np.full((3, 4), [[0.0], [-np.inf], [0.0]])},
            "'final_observations' has infinite values in 1 row (first",
        ),
        ({"actions": np.zeros((N, 0))}, "'actions' has shape [60, 0]; it holds no numbers"),
        ({"episode_ends": np.zeros((N, 1, 1), bool)}, "episode_ends have shape [60, 1, 1]"),
        ({"episode_ids": np.zeros(0, int)}, "'episode_ids' has shape [0]; one value for each of 60 rows"),
        ({"episode_ids": np.zeros(N + 1, int)}, "'episode_ids' has shape [61]; one value for each of 60 rows"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_columns_of_other_shapes(tmp_path: Path, change: dict[str, np.ndarray], what: str) -> None:
    np.savez(tmp_path / "x.npz", **(columns() | change))
    assert what in refused(tmp_path / "x.npz")


@pytest.mark.parametrize(
    "change",
    [
        {"terminations": np.ones(1, np.complex64)},
        {"terminations": np.array([b"a\n"])},
        {"rewards": np.array(1.0)},
        {"actions": np.zeros(1, "V4")},
    ],
    ids=["complex", "text", "single", "opaque"],
)
def test_texts_of_minari_of_other_kinds(tmp_path: Path, change: dict[str, np.ndarray]) -> None:
    assert len(load_dataset(str(text_minari(tmp_path / "sound")))) == 1
    key = next(iter(change))
    due = "texts" if key == "actions" else "numbers"
    assert (
        f"episode_0: '{key}' holds" in (text := refused(text_minari(tmp_path, **change)))
        and f"a column of {due} is due" in text
    )


def test_flags_of_text_minari_are_quoted(tmp_path: Path) -> None:
    assert "'terminations' holds '7.0'; flags are 0 or 1" in refused(
        text_minari(tmp_path, terminations=np.full(1, 7.0))
    )


@pytest.mark.parametrize(
    "change",
    [
        {"columns": ["observations", {}]},
        {"infos": None},
        {"about": False},
        {"unknown": [0.5]},
        {"spec": {"name": 1, "x": 2}},
    ],
)
def test_records_of_other_types(change: dict[str, Any]) -> None:
    """The checksum is right: `ValueError` is what readers take for a record to be left aside."""
    raw = RawData({k: v for k, v in columns().items() if k in ("observations", "actions", "rewards")}, discrete=False)
    value = provenance.describe(raw, np.arange(N) == N - 1, None, {}).to_json()
    assert provenance.Record.from_json(value).rows == N
    value = {k: v for k, v in (value | change).items() if k != "sha256"}
    with pytest.raises(ValueError, match="of another kind than offrl writes"):
        provenance.Record.from_json(value | {"sha256": provenance._digest(value)})


def test_terminations_that_the_record_does_not_know_stay() -> None:
    raw = RawData({k: v for k, v in columns().items() if k in ("observations", "actions", "rewards")}, discrete=False)
    ends = np.arange(N) == N - 1
    record = provenance.describe(raw, ends, None, {})
    for terminations in (ends.copy(), np.zeros(N, bool)):
        raw.columns["terminations"] = terminations
        provenance.restore(raw, record, ends)
        assert ("terminations" in raw.columns) == terminations.any()


def test_parquet_with_damaged_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pyarrow ends the process where it is asked for a column's metadata whose statistics are damaged."""
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    values = {k: v.tolist() for k, v in columns().items()}
    pq.write_table(pa.table(values), tmp_path / "x.parquet")

    class Metadata:
        def __init__(self, meta: Any) -> None:
            self.meta = meta

        def __getattr__(self, name: str) -> Any:
            assert name != "column"
            value = getattr(self.meta, name)
            return (lambda number: Metadata(value(number))) if name == "row_group" else value

    sound = pq.ParquetFile.metadata.fget
    monkeypatch.setattr(pq.ParquetFile, "metadata", property(lambda file: Metadata(sound(file))))
    assert len(load_dataset(str(tmp_path / "x.parquet"))) == N


def test_parquet_whose_row_groups_unpack_to_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    options = {"compression": "gzip", "use_dictionary": False, "row_group_size": 50_000}
    pq.write_table(pa.table({"rewards": np.zeros(200_000)}), tmp_path / "x.parquet", **options)
    monkeypatch.setattr(guard, "FREE", 1000)
    assert "x.parquet would take 1.6 MB of memory" in refused(tmp_path / "x.parquet")
