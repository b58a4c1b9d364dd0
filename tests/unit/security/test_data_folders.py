"""Data of strangers, once more: links in folders, pipes and devices under any name, and files that take for ever or end
the process.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import offrl
from offrl.data import DatasetConfig, load_dataset
from offrl.data.containers import guard, plain_files
from offrl.data.containers.file_type import file_type
from offrl.data.containers.hdf5 import checked_links, open_hdf5
from offrl.data.containers.npz import Npz
from offrl.data.containers.parquet import open_parquet, read_table
from offrl.data.formats.minari_infos import info_leaves
from offrl.data.loading.resolve import resolve
from offrl.data.tools.convert import convert
from offrl.data.tools.inspect import inspect_dataset
from offrl.errors import UserError
from offrl.system import trust
from tests.support.data_files import columns, minari, minari_arrow, text_minari


def refused(path: Path | str) -> str:
    """What loading says; inspecting says it too, in one line."""
    for read in (inspect_dataset, load_dataset):
        with pytest.raises(UserError) as caught:
            read(DatasetConfig(name=str(path), cache="never"))
        assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("part", ["data", "data/main_data.hdf5", "data/metadata.json", "data/notes"])
@pytest.mark.parametrize("form", ["set", "set/data/main_data.hdf5"])
def test_no_link_leads_out_of_a_minari_dataset(
    part: str, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stranger's folder leads to private data, and `convert` would write them into the copy that is handed back."""
    monkeypatch.delenv(trust.SWITCH, raising=False)
    private = shutil.copytree(minari(tmp_path), tmp_path / "private")
    (private / "data" / "notes").mkdir()
    target = tmp_path / "set" / part
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    target.symlink_to(private / part)
    if form != "set" and part == "data":
        return  # what a person types may be a link
    assert f"{part} is a link that leads out of the data" in refused(tmp_path / form)
    with pytest.raises(UserError, match="is a link that leads out"):
        convert(DatasetConfig(name=str(tmp_path / form)), str(tmp_path / "copy.hdf5"))
    assert not (tmp_path / "copy.hdf5").exists()
    with offrl.trusted():
        assert len(load_dataset(DatasetConfig(name=str(tmp_path / form), cache="never"))) == 30


def test_no_link_leads_out_of_arrow_texts_and_folders_of_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(trust.SWITCH, raising=False)
    folder = minari_arrow(tmp_path / "arrow", [{"x": [0.0, 0.0]}] * 3, [0.0] * 3)
    (folder / "0").rename(tmp_path / "elsewhere")
    (folder / "0").symlink_to(tmp_path / "elsewhere")
    assert "0 is a link that leads out of the data" in refused(folder)
    texts = text_minari(tmp_path / "texts")
    (texts / "data" / "main_data.hdf5").rename(tmp_path / "private.hdf5")
    (texts / "data" / "main_data.hdf5").symlink_to(tmp_path / "private.hdf5")
    with pytest.raises(UserError, match=r"main_data\.hdf5 is a link that leads out of the data"):
        resolve(str(texts), DatasetConfig())
    (tmp_path / "private.csv").write_text("observations,actions,rewards,done\n1,1,1,1\n")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").symlink_to(tmp_path / "private.csv")
    for name in ("tables", "tables/*.csv"):
        assert "a.csv is a link that leads out of the data" in refused(tmp_path / name)
    for name in ("tables/a.csv", f"[{tmp_path}/tables/a.csv]"):  # which a person typed
        resolve(name if name.startswith("[") else str(tmp_path / name), DatasetConfig())


def test_links_within_a_dataset_and_to_it(tmp_path: Path) -> None:
    place = minari(tmp_path)
    (place / "data" / "main_data.hdf5").rename(place / "data" / "real.hdf5")
    (place / "data" / "main_data.hdf5").symlink_to("real.hdf5")
    (tmp_path / "typed").symlink_to(place)
    assert len(load_dataset(DatasetConfig(name=str(tmp_path / "typed"), cache="never"))) == 30


# ---------------------------------------------------------------------------------------------------------------- pipes


@pytest.mark.parametrize(
    "name", ["x.hdf5", "x.csv", "x.csv.gz", "x.npz", "x.parquet", "x.jsonl", "x.jsonl.gz", "x", "[x.csv,x.csv]"]
)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("x.csv" if name.startswith("[") else name)
    assert "is no plain file but a pipe, a socket or a device" in refused(name)
    if not name.startswith("["):
        for form in ("d4rl", "ogbench", "d3rlpy", "minari", "text"):
            with pytest.raises(UserError, match="is no plain file"):
                resolve(name, DatasetConfig(format=form))


def test_every_container_refuses_a_pipe(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "0").mkdir()
    for name in ("pipe", "0/0.arrow", "0/0.parquet"):
        os.mkfifo(tmp_path / name)
    pipe = tmp_path / "pipe"
    for read in (Npz, open_parquet, file_type, lambda p: open_hdf5(p).__enter__()):
        for path in (pipe, Path("/dev/zero")):
            with pytest.raises(UserError, match="is no plain file"):
                read(path)
    for kind in ("arrow", "parquet"):
        with pytest.raises(UserError, match="is no plain file"):
            read_table(tmp_path / "0", kind)
    place = minari(tmp_path)
    os.mkfifo(place / "data" / "notes")
    assert "notes is neither a file nor a folder" in refused(place)


# ------------------------------------------------------------------------------------------------- for ever, or the end


def npz(path: Path, headers: dict[str, str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, header in headers.items():
            file = io.BytesIO()
            np.lib.format.write_array(file, np.zeros(0, np.float32))
            raw = file.getvalue().replace(b"(0,)", header.encode().ljust(4))
            start = raw.index(b"{")
            archive.writestr(f"{name}.npy", raw[:start] + raw[start:].rstrip(b" \n").ljust(128 - start - 1) + b"\n")
    return path


@pytest.mark.parametrize("shape", [f"({2**60}, 0)", f"(0, {2**60})", f"({2**40}, 0, 3)"])
def test_an_array_of_rows_without_numbers(shape: str, tmp_path: Path) -> None:
    path = npz(tmp_path / "x.npz", dict.fromkeys(("observations", "actions", "rewards", "terminals"), shape))
    begin = time.monotonic()
    assert "'observations' declares the shape" in refused(path) and "which holds no number" in refused(path)
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for name in ("observations", "actions", "rewards", "terminals"):
            file.create_dataset(name, json.loads(shape.replace("(", "[").replace(")", "]")), "f4", chunks=None)
    assert "which holds no number" in refused(tmp_path / "x.hdf5")
    assert time.monotonic() - begin < 5


def test_an_npz_of_many_arrays(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        for number in range(guard.COLUMNS + 1):
            archive.writestr(f"{number}.npy", b"")
    with pytest.raises(UserError, match=r"x\.npz holds 10,001 arrays, and 10,000 at most are read: write a column"):
        Npz(tmp_path / "x.npz")


def test_groups_of_hdf5_in_one_another(tmp_path: Path) -> None:
    """20,000 of them: HDF5 visits them by recursion, and the process ended."""
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        for name, value in columns().items():
            file[f"deep/{name}" if name == "rewards" else name] = value
        group = file.create_group("infos")
        for _ in range(1_000):
            group = group.create_group("a")
    assert "more than 64 groups lie in one another ('infos/a/a" in refused(tmp_path / "x.hdf5")
    place = minari(tmp_path)
    with h5py.File(place / "data" / "main_data.hdf5", "a") as file:
        group = file.create_group("episode_0/infos")
        for _ in range(1_000):
            group = group.create_group("a")
    with pytest.raises(UserError, match="more than 64 groups"):
        info_leaves(place / "data", "hdf5")


def test_all_links_are_found(tmp_path: Path) -> None:
    """Also in groups with several names, and in those that lie in themselves; as HDF5's own visit finds them."""
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["a/b/c"] = np.zeros(3)
        file["a/again"] = file["a"]
        file["other"] = file["a/b"]
        file["a/b/soft"] = h5py.SoftLink("/a/b/c")
        links: dict[str, int] = {}
        file.id.links.visit(lambda name, info: links.update({name.decode(): info.type}), info=True)
        own = checked_links(file)
        assert {n.rpartition("/")[2] for n in own} == {n.rpartition("/")[2] for n in links} and len(own) <= len(
            links
        ) + 4
        assert own["a/b/soft"] == 1 and own["other"] == 0


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_a_csv_of_many_columns_is_refused_before_it_is_parsed(mark: str, tmp_path: Path) -> None:
    """200,000 took more than 80 s."""
    text = "\n" + mark.join(f"x{i}" for i in range(200_000)) + "\n" + mark.join(["1"] * 200_000) + "\n"
    (tmp_path / "x.csv").write_text(text)
    (tmp_path / "y.csv.gz").write_bytes(gzip.compress(text.encode()))
    begin = time.monotonic()
    for name in ("x.csv", "y.csv.gz", "*.csv", f"[{tmp_path}/x.csv,{tmp_path}/y.csv.gz]"):
        text = refused(name if name.startswith("[") else tmp_path / name)
        assert "has 200,000 columns, and 10,000 at most are read: leave out those that are not needed" in text
    assert time.monotonic() - begin < 3


def test_a_csv_that_begins_with_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.csv.gz").write_bytes(gzip.compress(b"\n" * (plain_files.BLANK + 1)))
    assert "begins with 65,536 blank lines" in refused(tmp_path / "x.csv.gz")


def test_parquet_of_many_columns(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({f"x{i}": [1.0] for i in range(guard.COLUMNS + 1)}), tmp_path / "x.parquet")
    assert "has 10,001 columns" in refused(tmp_path / "x.parquet")


# ------------------------------------------------------------------------------------------------- other data than said


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_minari_of_another_format_than_it_says(form: str, tmp_path: Path) -> None:
    """`data_format: parquet` over an HDF5 file gave no rows, without a word."""
    place = minari(tmp_path)
    path = place / "data" / "metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "data_format": form}))
    assert f"'data_format' is {form}, and the episodes are in main_data.hdf5, which is hdf5" in refused(place)
    (place / "data" / "main_data.hdf5").unlink()
    assert f"has no episode of format {form}, and its metadata declare 30 steps" in refused(place)


@pytest.mark.parametrize(
    "names",
    [{"FALSE": 2, "TRUE": 1}, {"FALSE": 1, "TRUE": 0}, {"GALSE": 0, "TRUE": 1}, {"FALSE": 0, "TRUE": 3}],
    ids=str,
)
def test_flags_of_an_enumeration_of_other_numbers(names: dict[str, int], tmp_path: Path) -> None:
    """A flipped bit in the enumeration turned every stored 0 into true."""
    place = minari(tmp_path)
    with h5py.File(place / "data" / "main_data.hdf5", "a") as file:
        del file["episode_1/terminations"]
        kind: Any = h5py.enum_dtype(names, basetype="i1")
        file.create_dataset("episode_1/terminations", data=np.zeros(10, "i1"), dtype=kind)
    assert "'terminations' holds true and false under other names or numbers than FALSE=0 and TRUE=1" in refused(place)
