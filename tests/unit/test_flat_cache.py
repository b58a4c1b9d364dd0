"""The flat cache gives what the first load gave, notices change and damage, keeps within its bounds, and never fails a
load.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from offrl import registry
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.loading import cache as flat
from offrl.data.memory import MANIFEST, Memory
from offrl.data.transforms.columns import normalize_observations
from offrl.tasks.task import Task

N = 600


def make(path: Path, seed: int = 0) -> Path:
    """A file of 30 episodes whose action range is unknown and whose last episode is cut: loading it has something to
    say.
    """
    rng = np.random.default_rng(seed)
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = rng.normal(size=(N, 4)), rng.uniform(-3, 3, (N, 2))
        file["rewards"], file["terminals"] = rng.normal(size=N), np.arange(N) % 20 == 19
        file["terminals"][-1] = False
        file["timeouts"] = np.zeros(N, bool)
    return path


def config(path: Path, **settings: Any) -> DatasetConfig:
    return DatasetConfig(
        **{
            "name": str(path),
            "format": "columns",
            "cache": "always",
            "cache_dir": str(path.parent / "cache"),
            **settings,
        }
    )


def entries(path: Path) -> list[Path]:
    return sorted((path.parent / "cache" / "flat").glob("*"))


def same(a: Dataset, b: Dataset) -> bool:
    columns = list(a.columns) == list(b.columns) and all(
        a.columns[k].dtype == b.columns[k].dtype and torch.equal(a.columns[k], b.columns[k]) for k in a.columns
    )
    episodes = all(
        torch.equal(getattr(a, k), getattr(b, k)) for k in ("episode_start", "episode_end", "raw_returns", "complete")
    )
    return (
        columns
        and episodes
        and all(getattr(a, k) == getattr(b, k) for k in ("fingerprint", "spec", "notes", "transforms", "mapped"))
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make(tmp_path / "x.hdf5")


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after whose call the files themselves cannot be read."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the file was read again")

    return lambda: monkeypatch.setattr("offrl.data.loading.read.read_raw", refuse)


def test_the_second_load_is_the_same_without_the_file(
    file: Path, no_reading: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = load_dataset(config(file))
    said = capsys.readouterr().err
    assert "action range is not known" in said and "no end mark" in said and first.notes
    no_reading()
    second = load_dataset(config(file))
    assert same(first, second) and not second.mapped
    assert capsys.readouterr().err == said  # warnings, too
    second.columns["rewards"][:] = 0.0  # ordinary memory: nothing done to it reaches the cache
    assert same(first, load_dataset(config(file)))


def test_what_is_kept(file: Path, monkeypatch: pytest.MonkeyPatch, no_reading: Any) -> None:
    monkeypatch.setattr(flat, "SLOW", 1e9)
    load_dataset(config(file, cache="auto"))
    assert entries(file) == []  # it did not take long
    monkeypatch.setattr(flat, "SLOW", 0.0)
    load_dataset(config(file, cache="never"))
    assert entries(file) == []
    load_dataset(config(file, cache="auto"))
    assert len(entries(file)) == 1
    no_reading()
    load_dataset(config(file, cache="auto"))
    with pytest.raises(AssertionError, match="read again"):
        load_dataset(config(file, cache="never"))


def test_one_entry_serves_all_transforms(file: Path, no_reading: Any) -> None:
    settings: list[dict] = [
        {},
        {"normalize_observations": True, "reward_scale": 2.0},
        {"top_fraction": 0.5, "discount_returns": 0.9, "action_margin": 0.1},
        {"subsample": 0.5, "concatenate": [str(file)], "memory_limit_gb": 1.0},
    ]
    plain = [load_dataset(config(file, cache="never", **s)) for s in settings]
    load_dataset(config(file, check=False))  # that one decides what is assembled: an entry of its own
    load_dataset(config(file))
    assert len(entries(file)) == 2
    no_reading()
    assert all(same(a, load_dataset(config(file, **s))) for a, s in zip(plain, settings, strict=True))


def test_a_changed_file_is_read_again(file: Path) -> None:
    first = load_dataset(config(file))
    stat = file.stat()
    with h5py.File(file, "a") as out:
        out["rewards"][7] = 1.0  # in place: the same size
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # and even the same time
    assert file.stat().st_size == stat.st_size
    second = load_dataset(config(file))
    assert second.columns["rewards"][7] == 1.0 and second.fingerprint != first.fingerprint


def test_other_code_reads_the_file_again(file: Path, monkeypatch: pytest.MonkeyPatch, no_reading: Any) -> None:
    load_dataset(config(file))
    no_reading()
    monkeypatch.setattr(flat, "code_id", lambda: "a newer version")
    with pytest.raises(AssertionError, match="read again"):
        load_dataset(config(file))


def test_a_file_that_changes_while_it_is_read_is_not_kept(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import offrl.data.loading.read as module

    read = module.read_raw

    def slowly(*args: Any, **kwargs: Any) -> Any:
        raw = read(*args, **kwargs)
        make(file, seed=1)
        return raw

    monkeypatch.setattr(module, "read_raw", slowly)
    load_dataset(config(file))
    assert entries(file) == []


def zeroed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    path.write_bytes(data)


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for at in range(200, len(data), 50):
        data[at] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [zeroed, flipped, cut, emptied, Path.unlink])
@pytest.mark.parametrize("what", ["column-0.npy", "episodes.npz", MANIFEST])
def test_damage_is_noticed_and_repaired(file: Path, what: str, damage: Any, no_reading: Any) -> None:
    if what == MANIFEST and damage in (zeroed, flipped):  # text without a checksum
        damage = cut
    first = load_dataset(config(file))
    (folder,) = entries(file)
    damage(folder / what)
    assert flat.read(folder, Memory()) is None
    assert same(first, load_dataset(config(file)))
    no_reading()
    assert entries(file) == [folder] and same(first, load_dataset(config(file)))


@pytest.mark.parametrize(
    "trouble", ["a file is in the way", "the disk is full", "the disk is nearly full", "it is too large"]
)
def test_a_cache_that_cannot_be_written_fails_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trouble: str
) -> None:
    monkeypatch.setattr(flat, "SLOW", 0.0)
    plain, settings = load_dataset(config(file, cache="never")), {}
    quiet = capsys.readouterr().err
    if trouble == "a file is in the way":
        (file.parent / "cache").write_text("")
    elif trouble == "the disk is full":

        def full(*args: Any, **kwargs: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(np, "save", full)
    elif trouble == "the disk is nearly full":
        usage = namedtuple("usage", "total used free")
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 10**4, 10**4))
    else:
        settings = {"cache_limit_gb": 1e-6}
    assert same(plain, load_dataset(config(file, cache="auto", **settings)))
    assert capsys.readouterr().err == quiet  # nobody asked for it
    assert same(plain, load_dataset(config(file, **settings)))
    assert "not kept in" in capsys.readouterr().err  # somebody did
    assert entries(file) == []


def test_the_least_recently_used_entries_go_first(file: Path) -> None:
    files = [make(file.parent / f"{k}.hdf5", k) for k in range(4)]
    size = load_dataset(config(file, cache="never")).nbytes
    kept = {}
    for age, path in enumerate(files[:3]):
        before = set(entries(file))
        load_dataset(config(path))
        (kept[path],) = set(entries(file)) - before
        os.utime(kept[path] / MANIFEST, (age, age))
    crashed = kept[files[0]].parent / "building-old"
    crashed.mkdir()
    os.utime(crashed, (1, 1))
    (crashed.parent / "building-new").mkdir()
    load_dataset(config(files[0]))  # used: now the newest
    load_dataset(config(files[3], cache_limit_gb=2.5 * size / 1e9))  # room for two
    left = set(entries(file))
    assert kept[files[0]] in left and kept[files[1]] not in left and kept[files[2]] not in left
    assert crashed not in left and crashed.parent / "building-new" in left and len(left) == 3


def test_many_at_once(file: Path) -> None:
    plain = load_dataset(config(file, cache="never"))
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: load_dataset(config(file)), range(24)))
    assert all(same(plain, r) for r in results)
    assert len(entries(file)) == 1 and flat.read(entries(file)[0], Memory()) is not None


def test_an_entry_that_another_process_finishes_meanwhile_stays_whole(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is written while the files of an older one are deleted."""
    dataset = load_dataset(config(file))
    folder, unlink, deleted = entries(file)[0], Path.unlink, []

    def delete(path: Path, missing_ok: bool = False) -> None:
        deleted.append(path)
        if len(deleted) == 2:
            assert flat.write(folder, dataset, [], 1e9) == ""
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", delete)
    assert flat.write(folder, dataset, [], 1e9) == "" and len(deleted) > 2
    assert entries(file) == [folder] and flat.read(folder, Memory()) is not None


def test_memory_mapping_and_the_cache(file: Path, no_reading: Any) -> None:
    mapped = load_dataset(config(file, memory="mmap"))
    assert mapped.mapped and entries(file) == []  # the mapped files are cache enough
    shutil.rmtree(file.parent / "cache")
    load_dataset(config(file))
    no_reading()
    again = load_dataset(config(file, memory="mmap", normalize_observations=True))
    plain = load_dataset(config(file, normalize_observations=True))
    assert again.mapped and all(torch.equal(again.columns[k], plain.columns[k]) for k in plain.columns)


def test_a_task_with_a_function_is_not_kept(tmp_path: Path) -> None:
    task = Task(name="mine", env_factory=lambda: None)
    data = from_arrays(np.zeros((4, 2)), np.zeros((4, 1)), np.zeros(4), np.array([0, 0, 0, 1]), task=task)
    assert "function" in flat.write(tmp_path / "cache" / "flat" / "x", data, [], 1e9)
    assert not (tmp_path / "cache").exists()


def test_minari_arrow_files_are_watched(tmp_path: Path) -> None:
    from offrl.data.loading.resolve import Source

    (tmp_path / "data" / "0").mkdir(parents=True)
    (tmp_path / "data" / "metadata.json").write_text('{"action_space": ""}')
    (tmp_path / "data" / "0" / "a.arrow").write_text("x")
    before = Source("minari", "", tmp_path).identity()
    assert Source("minari", "", tmp_path).identity() == before
    (tmp_path / "data" / "0" / "a.arrow").write_text("yy")
    assert Source("minari", "", tmp_path).identity() != before


def test_normalising_in_place_touches_nobody_elses_data(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_dataset(config(file, cache="never"))
    before = data.columns["observations"].clone()
    made = normalize_observations(data)
    assert torch.equal(data.columns["observations"], before)
    monkeypatch.setitem(registry._table.setdefault("dataset", {}), "mine", lambda config: data)
    assert same(made, load_dataset(DatasetConfig(name="mine", normalize_observations=True)))
    assert torch.equal(data.columns["observations"], before)
    # this one is done in place
    assert same(made, load_dataset(config(file, cache="never", normalize_observations=True)))
    inside = normalize_observations(data, in_place=True)
    assert same(made, inside) and inside.columns["observations"].data_ptr() == data.columns["observations"].data_ptr()
