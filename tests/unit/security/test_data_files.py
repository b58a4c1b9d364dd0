"""Data of strangers: bytes from outside the file, images of other kinds, files that grow without measure, and values of
other types.

tests/unit/test_untrusted_files.py holds the same for what was mended with the readers.
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
from offrl.data.containers import guard, images
from offrl.data.containers.parquet import open_parquet, read_columns
from offrl.data.tools.convert import convert
from offrl.data.tools.inspect import inspect_dataset
from offrl.errors import UserError
from tests.support import robomimic
from tests.support.data_files import (
    N,
    columns,
    external,
    external_storage,
    minari,
    minari_arrow,
    text_minari,
    through,
    virtual,
)

Way = Callable[[Any, str, Path], None]
WAYS = pytest.mark.parametrize("way", [external, through, external_storage, virtual])


def refused(path: Path, **settings: Any) -> str:
    """What loading says; inspecting says it too, in one line."""
    for read in (inspect_dataset, load_dataset):
        with pytest.raises(UserError) as caught:
            read(DatasetConfig(name=str(path), cache="never", **settings))
        assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------- row 12: bytes from outside
# the file


def d3rlpy(folder: Path) -> Path:
    """Two episodes, with a group of names each."""
    with h5py.File(path := folder / "d3.h5", "w") as file:
        for episode in range(2):
            for name, value in (
                ("observations", np.zeros((N, 4))),
                ("actions", np.zeros((N, 2))),
                ("rewards", np.zeros((N, 1))),
            ):
                file[f"{name}_{episode}"] = value
            file[f"terminated_{episode}"] = True
    return path


def minari_of_entries(folder: Path) -> Path:
    """Observations that are a Dict of x, in a group, and the info y."""
    path = minari(folder)
    meta = path / "data" / "metadata.json"
    about = json.loads(meta.read_text())
    about["observation_space"] = json.dumps(
        {"type": "Dict", "subspaces": {"x": json.loads(about["observation_space"])}}
    )
    meta.write_text(json.dumps(about))
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        for number in range(3):
            file.move(f"episode_{number}/observations", f"episode_{number}/x")
            file.move(f"episode_{number}/x", f"episode_{number}/observations/x")
            file[f"episode_{number}/infos/y"] = np.zeros((11, 1))
    return path


def d4rl(folder: Path) -> Path:
    with h5py.File(path := folder / "x.hdf5", "w") as file:
        for key, value in columns().items():
            file[key] = value
        file["metadata/policy/weight"] = np.zeros(N)
        file["metadata/algorithm"] = "SAC"
        file["metadata/env_id"] = "Hopper-v4"
    return path


PLACES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "d3rlpy": (d3rlpy, "rewards_1"),
    "minari-observations": (minari_of_entries, "episode_1/observations/x"),
    "minari-infos": (minari_of_entries, "episode_1/infos/y"),
    "minari-episode": (minari, "episode_1"),
    "text-observations": (text_minari, "episode_0/observations"),
    "text-rewards": (text_minari, "episode_0/rewards"),
    "d4rl-policy": (d4rl, "metadata/policy/weight"),
    "d4rl-text": (d4rl, "metadata/algorithm"),
    "d4rl-environment": (d4rl, "metadata/env_id"),
}


@WAYS
@pytest.mark.parametrize("place", PLACES)
def test_nothing_outside_the_file_is_read(tmp_path: Path, way: Way, place: str) -> None:
    """Row 12: external storage, virtual datasets and external links, in each part of each layout that is read."""
    make, key = PLACES[place]
    path = make(tmp_path)
    with h5py.File(
        path if path.is_file() else path / ("data/main_data.hdf5" if (path / "data").is_dir() else "main_data.hdf5"),
        "a",
    ) as file:
        del file[key]
        way(file, key, tmp_path)
    fields = {"infos/y": "infos/y"} if place == "minari-infos" else {}
    if place == "minari-episode" and way in (external_storage, virtual):
        assert "episode_1" in refused(path)  # a dataset where a group is due
        return
    assert (
        "out of the file" in (text := refused(path, fields=fields))
        or "lies in another file" in text
        or "holds bool" in text
    )
    if place == "minari-infos" and way in (external_storage, virtual):
        return  # `convert` leaves infos of another length out
    with pytest.raises(UserError):
        convert(DatasetConfig(name=str(path), cache="never"), str(tmp_path / "out.hdf5"))
    assert not list(tmp_path.glob("out*"))


# ------------------------------------------------------------------------------------------------------------- row 13:
# images


def encoded(folder: Path, frame: bytes, shape: tuple[int, ...] = (32, 32, 3)) -> Path:
    """A Minari dataset of which each observation is the same encoded image."""
    path = minari(folder, shape, "uint8")
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        for number in range(3):
            del file[f"episode_{number}/observations"]
            file[f"episode_{number}/observations"] = np.tile(np.frombuffer(frame, np.uint8), (11, 1))
    return path


def picture(form: str, size: tuple[int, int] = (32, 32)) -> bytes:
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    image.new("RGB", size).save(stream, format=form)
    return stream.getvalue()


@pytest.mark.parametrize("form", ["EPS", "PNG", "TIFF", "GIF", "WEBP", "BMP", "PPM", "ICO"])
def test_images_are_jpeg_alone(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 13: an EPS made Pillow start Ghostscript, which runs PostScript. Minari writes JPEG."""

    def start(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("a program was started")

    frame = picture(form)
    monkeypatch.setattr("subprocess.check_call", start)
    monkeypatch.setattr("subprocess.Popen", start)
    assert "image 0 is no JPEG image" in refused(encoded(tmp_path, frame))


def test_the_sizes_of_images_are_looked_at_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 13: a few bytes that say 30,000 x 30,000 were decoded, and ended in a traceback."""
    sound = picture("JPEG")
    assert len(load_dataset(str(encoded(tmp_path / "sound", sound)))) == 30
    at = sound.index(b"\xff\xc0") + 5  # height and width in the frame's header

    def sized(rows: int, across: int) -> bytes:
        return sound[:at] + rows.to_bytes(2, "big") + across.to_bytes(2, "big") + sound[at + 4 :]

    image = pytest.importorskip("PIL.JpegImagePlugin").JpegImageFile
    monkeypatch.setattr(image, "load", lambda self: pytest.fail("it was decoded"))
    assert "image 0 has shape [33, 32, 3], expected [32, 32, 3]" in refused(encoded(tmp_path / "other", sized(33, 32)))
    assert "image 0 cannot be read (DecompressionBombError" in refused(
        encoded(tmp_path / "bomb", sized(30_000, 30_000))
    )
    monkeypatch.undo()
    assert "image 0 cannot be read" in refused(encoded(tmp_path / "cut", sound[:300]))
    with pytest.raises(UserError, match="images for 1 steps"):
        images.decode([sound], np.zeros((2, 32, 32, 3), np.uint8), "x")


# ------------------------------------------------------------------------------------------------------------- row 20:
# bombs


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that small files reach."""
    for module in ("offrl.data.containers.guard", "offrl.data.text.files"):
        monkeypatch.setattr(f"{module}.FREE", 50_000)
        monkeypatch.setattr(f"{module}.GROWTH", 10)


def test_rows_in_fortran_order_are_no_exception(tmp_path: Path, small: None) -> None:
    """Row 20: 5 MB of npz became 5 GB before anything was compared."""
    path = tmp_path / "x.npz"
    np.savez_compressed(path, **columns() | {"observations": np.zeros((20_000, 4), order="F")})
    with zipfile.ZipFile(path) as archive:
        assert b"'fortran_order': True" in archive.read("observations.npy")[:100]
    assert "'observations' would take 640 kB of memory" in refused(path)


@pytest.mark.parametrize("options", [{}, {"chunks": (1 << 16,)}, {"chunks": (1 << 16,), "compression": "gzip"}])
def test_rows_that_a_file_of_two_kilobytes_declares(tmp_path: Path, options: dict[str, Any]) -> None:
    """Row 20: 10^8 rows in 2.5 kB."""
    with h5py.File(path := tmp_path / "x.hdf5", "w") as file:
        for key, value in columns().items():
            wide = {k: (*v, *value.shape[1:]) if k == "chunks" else v for k, v in options.items()}
            file.create_dataset(key, (10**8, *value.shape[1:]), value.dtype, **wide)
    assert path.stat().st_size < 4_000
    assert "declares more than the file holds" in refused(path)


def test_parquet_whose_columns_grow_together(tmp_path: Path, small: None) -> None:
    """Row 20: 1.1 MB, 6e7 rows. Each column stayed below the limit, for each was compared with the whole file."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    zeros = np.zeros(12_000, np.float32)
    names = ("observations", "actions", "rewards")
    pq.write_table(pa.table(dict.fromkeys(names, zeros)), path := tmp_path / "x.parquet", compression="zstd")
    assert 5 * path.stat().st_size < zeros.nbytes < 50_000
    assert "of memory, of which the file holds" in refused(path)


def test_parquet_of_values_that_repeat(tmp_path: Path, small: None) -> None:
    """A value that all rows have is in the file once, and no size of its metadata counts the rows."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": np.zeros(300_000)}), path := tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"would take 5\d\d kB of memory"):  # of 2.4 MB: not all was read
        read_columns(open_parquet(path), path)


@pytest.mark.parametrize("kind", ["npz", "hdf5", "robomimic"])
def test_images_that_grow(tmp_path: Path, small: None, kind: str) -> None:
    frames = {"observations": np.zeros((N, 64, 64, 3), np.uint8)}
    if kind == "npz":
        np.savez_compressed(path := tmp_path / "x.npz", **columns() | frames)
    elif kind == "robomimic":
        path, zeros = robomimic.write(tmp_path / "x.hdf5", following=False), np.zeros((3, 256, 256, 3), np.uint8)
        for demo in range(robomimic.DEMOS):
            robomimic.change(path, f"data/demo_{demo}/obs/{robomimic.IMAGE}", zeros, compression="gzip")
    else:
        with h5py.File(path := tmp_path / "x.hdf5", "w") as file:
            for key, value in (columns() | frames).items():
                file.create_dataset(key, data=value, compression="gzip")
    keys = [robomimic.IMAGE] if kind == "robomimic" else []
    assert "of memory, of which the file holds" in refused(path, observation_keys=keys)


def test_arrow_whose_batches_grow(tmp_path: Path, small: None) -> None:
    """Row 20 in another layout: compressed batches are compared one by one, not when all are there."""
    pa = pytest.importorskip("pyarrow")
    folder = minari_arrow(tmp_path / "m", [{"x": [0.0, 1.0]}] * 3, [1.0] * 3)
    table = pa.table(dict.fromkeys(("observations", "actions", "rewards"), np.zeros(200_000, np.float32)))
    read: list[int] = []
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with (
        pa.OSFile(str(folder / "0" / "0.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table, max_chunksize=10_000)
    opened = pa.ipc.open_file

    class Reader:
        def __init__(self, source: Any) -> None:
            self.reader = opened(source)

        def __getattr__(self, name: str) -> Any:
            return (
                (lambda k: read.append(k) or self.reader.get_batch(k))
                if name == "get_batch"
                else getattr(self.reader, name)
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pa.ipc, "open_file", Reader)
        assert "0.arrow would take" in refused(folder)
    assert max(read) < 5


def test_json_lines_are_measured_before_they_are_parsed(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 20: 3.5 MB of lines took a minute of parsing before they were refused."""
    path = tmp_path / "x.jsonl.gz"
    line = b'{"turns": [{"obs": "a", "action": "b", "reward": 1.0}], "final_obs": null, "terminated": true, "truncated": false}\n'  # noqa: E501
    path.write_bytes(gzip.compress(line * 2_000))
    monkeypatch.setattr("offrl.data.text.files._parse", lambda *_: pytest.fail("it was parsed"))
    assert "unpacked, would take" in refused(path)


def test_blank_and_faulty_lines_come_to_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 20: a megabyte of packed line breaks took four minutes; each faulty line was kept for the report."""
    path = tmp_path / "x.jsonl"
    episode = (
        '{"turns": [{"obs": "a", "action": "b", "reward": 1.0}], "final_obs": null, "terminated": true, "truncated": '
        "false}\n"
    )
    monkeypatch.setattr("offrl.data.text.files.MOST_BLANK", 10)
    path.write_text(episode + "\n" * 10 + episode)
    assert len(load_dataset(str(path))) == 2
    path.write_text(episode + "\n" * 11 + episode)
    assert "more than 10 blank lines" in refused(path)
    monkeypatch.setattr("offrl.data.text.files.MOST_FAULTS", 5)
    path.write_text(episode + "x\n" * 100)
    report = inspect_dataset(str(path))
    assert sum("is not JSON" in str(fault) for fault in report.faults) == 5 and "there are more faults" in str(report)


# ----------------------------------------------------------------------------------------- row 21: wrong types and
# damage


DEEP = '{"a":' * 500 + "1" + "}" * 500
CHANGES: dict[str, dict[str, Any]] = {
    "env_spec list": {"env_spec": "[]"},
    "env_spec no text": {"env_spec": ["a"]},
    "kwargs list": {"env_spec": '{"id": "Hopper-v4", "kwargs": [1]}'},
    "limit": {"env_spec": '{"id": "Hopper-v4", "max_episode_steps": -5}'},
    "steps": {"total_steps": -5},
    "steps beyond floats": {"total_steps": 10**400},
    "score beyond floats": {"ref_min_score": 10**400, "ref_max_score": 1},
    "sequence": {"observation_space": '{"type": "Sequence"}'},
    "tuple": {"action_space": '{"type": "Tuple", "subspaces": [{"type": "Box", "shape": [2]}]}'},
    "no entries": {"observation_space": '{"type": "Dict", "subspaces": {}}'},
    "no numbers": {"observation_space": '{"type": "Box", "shape": [0], "dtype": "float32", "low": [], "high": []}'},
    "no bounds": {"action_space": '{"type": "Box", "shape": [2], "dtype": "float32"}'},
    "type list": {"action_space": '{"type": ["Box"]}'},
    "deep space": {"observation_space": '{"type": "Dict", "subspaces": {"a": ' * 200 + "1" + "}}" * 200},
    "deep kwargs": {"env_spec": '{"id": "Hopper-v4", "kwargs": ' + DEEP + "}"},
    "deeper": {"env_spec": "[" * 100_000},
    "deep metadata": {"author": json.loads(DEEP)},
}  # fmt: skip


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("case", CHANGES)
def test_metadata_of_minari_of_other_types(tmp_path: Path, case: str) -> None:
    """Row 21: tracebacks of every kind."""
    folder = minari(tmp_path)
    path = folder / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | CHANGES[case]))
    assert "metadata" in (text := refused(folder)) or "set-v0: " in text


@pytest.mark.parametrize(
    "recorded",
    [[1], "a", {"task": [1]}, {"task": {"name": "x", "env_id": 3}}, {"unknown": 5}, {"unknown": [[1]]}, {"metas": [5]}],
    ids=str,
)
def test_what_offrl_recorded_beside_texts_of_other_types(tmp_path: Path, recorded: Any) -> None:
    """Row 21, of Minari's texts."""
    folder = text_minari(tmp_path)
    path = folder / "data" / "metadata.json"
    sizes = {"episodes": 1, "turns": 1} if isinstance(recorded, dict) else {}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"offrl": {"text": sizes | recorded if sizes else recorded}})
    )
    assert str(folder) in refused(folder)


def test_an_encrypted_npz_is_one_line(tmp_path: Path) -> None:
    """Row 21."""
    np.savez(path := tmp_path / "x.npz", **columns())
    data = bytearray(path.read_bytes())
    for mark, flags in ((b"PK\x01\x02", 8), (b"PK\x03\x04", 6)):
        at = -1
        while (at := data.find(mark, at + 1)) >= 0:
            data[at + flags] |= 1
    path.write_bytes(data)
    assert "is encrypted" in refused(path)


@pytest.mark.parametrize("value", ["a", b"a", {"a": 1.0}, None, [[1.0], [1.0, 2.0]]], ids=str)
def test_parquet_of_other_types(tmp_path: Path, value: Any) -> None:
    """Row 21: Parquet with texts."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    values = {k: v.tolist() for k, v in columns().items()} | {"rewards": [value] * N}
    pq.write_table(pa.table(values), path := tmp_path / "x.parquet")
    assert "'rewards' h" in refused(path)


@pytest.mark.usefixtures("no_collection")
def test_json_that_is_nested_without_end(tmp_path: Path) -> None:
    """Row 21: what walks through it later has no end of it, though Python's own reader has."""
    for text in (DEEP, "[" * 100_000, "[" * 65 + "]" * 65):
        with pytest.raises((ValueError, RecursionError)):
            guard.from_json(text)
    assert guard.from_json("[" * 64 + "]" * 64) and guard.from_json(json.dumps([[1]] * 1_000)) == [[1]] * 1_000
    path = tmp_path / "x.jsonl"
    turns = (
        '"turns": [{"obs": "a", "action": "b", "reward": 1.0}], "final_obs": null, "terminated": true, "truncated": '
        "false"
    )
    path.write_text("{" + turns + ', "meta": ' + DEEP + "}\n")
    assert "line 1 cannot be read as JSON (more than 64 lists" in refused(path)


def test_columns_without_numbers_are_shown(tmp_path: Path) -> None:
    """Row 21: `inspect` ended in a traceback."""
    np.savez(tmp_path / "x.npz", **columns() | {"actions": np.zeros((N, 0))})
    assert "it holds no numbers" in str(inspect_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), cache="never")))
