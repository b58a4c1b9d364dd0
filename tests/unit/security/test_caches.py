"""Caches, suites and collections of strangers: only offrl's own files are deleted or replaced, and names stay in their
folder.
"""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.benchmark import suites
from offrl.collect.config import CollectConfig
from offrl.collect.publish import Collection
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.formats import download
from offrl.data.loading import cache as flat
from offrl.data.memory import MANIFEST, OURS, Memory, open_mapped
from offrl.errors import UserError
from offrl.system.files import discard

ENTRY, OLDER = "0123456789abcdef01234567", "f" * 24


def data() -> Dataset:
    return from_arrays(np.zeros((9, 2)), np.zeros((9, 1)), np.zeros(9), np.arange(9) % 3 == 2)


def kept(folder: Path) -> Path:
    assert flat.write(folder, data(), [], 1e9) == ""
    return folder


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_cache_deletes_its_own_entries_only(tmp_path: Path) -> None:
    """Row 2: folders that are not offrl's, entries without a manifest, files in an entry that are not offrl's,
    links.
    """
    place, home = tmp_path / "flat", tmp_path / "home"
    kept(place / OLDER)
    for name in (
        "thesis/a",
        f"{ENTRY}/no-manifest",
        "0123/x",
        f"{OLDER}/notes.txt",
        "building-plans/house",
        f"{OLDER}/photos/1.npy",
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("mine")
    kept(home / ENTRY[::-1])
    (place / ENTRY[::-1]).symlink_to(home / ENTRY[::-1])
    (place / "building-abcdefgh").symlink_to(home / ENTRY[::-1])
    before, at_home = files(place), files(home)
    for path in place.iterdir():
        os.utime(path, (1, 1))
    kept_name = "a" * 24
    size = data().nbytes
    assert flat.write(place / kept_name, data(), [], 1.5 * size) == ""
    gone = before - files(place)
    # the one entry, whose other files stay
    assert gone and all(re.fullmatch(rf"{OLDER}/({OURS})", name) for name in gone)
    assert files(home) == at_home


def test_a_linked_cache_is_not_written(tmp_path: Path) -> None:
    """Row 2: `flat` leads to a folder of folders; its contents are neither deleted nor added to."""
    home = tmp_path / "home"
    for name in ("thesis", "photos", OLDER):
        (home / name).mkdir(parents=True)
        (home / name / "a").write_text("mine")
    kept(home / ENTRY)
    (tmp_path / "flat").symlink_to(home)
    before = files(home)
    assert "is a link" in flat.write(tmp_path / "flat" / ("b" * 24), data(), [], 1.5 * data().nbytes)
    assert files(home) == before


def test_a_dataset_is_kept_in_place_of_an_older_one(tmp_path: Path) -> None:
    """Row 2: what stands under the entry's own name is replaced where it is offrl's, and left alone where it is not."""
    kept(kept(tmp_path / ENTRY))
    (tmp_path / OLDER).mkdir()
    (tmp_path / OLDER / "thesis").write_text("mine")
    assert flat.write(tmp_path / OLDER, data(), [], 1e9) == os.strerror(errno.ENOTEMPTY)
    assert files(tmp_path / OLDER) == {"thesis"} and not [
        p for p in tmp_path.iterdir() if p.name.startswith("building")
    ]


def test_discard_follows_no_link(tmp_path: Path) -> None:
    """Row 2: the files of a linked folder stay, and so does what a linked file leads to."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "a.npy").write_text("mine")
    (tmp_path / "folder").symlink_to(home)
    discard(tmp_path / "folder", ".*")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.npy").symlink_to(home / "a.npy")
    discard(tmp_path / "other", ".*")
    assert (home / "a.npy").read_text() == "mine" and not (tmp_path / "other").exists()


@pytest.mark.parametrize("name", ["../secret.npy", "/etc/secret.npy", "sub/0-a.npy"])
def test_a_manifest_names_files_of_its_own_folder(tmp_path: Path, name: str) -> None:
    """Row 15, for the columns of an entry."""
    folder = kept(tmp_path / ENTRY)
    manifest = json.loads((folder / MANIFEST).read_text())
    next(iter(manifest["columns"].values()))["file"] = name
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert flat.read(folder, Memory()) is None
    with pytest.raises(ValueError, match="is no file of"):
        open_mapped(folder)


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "..", "a/b", "a\\b", "a\0b"])
def test_a_suite_is_called_by_a_plain_name(tmp_path: Path, name: str) -> None:
    """Row 15."""
    (tmp_path / "s.yaml").write_text(json.dumps({"name": name, "datasets": ["builtin"]}))
    with pytest.raises(UserError, match="must be a plain name"):
        suites.load(str(tmp_path / "s.yaml"))


def test_a_download_follows_no_link(tmp_path: Path) -> None:
    """Rows 3 and 4, in a cache: the part, the notes beside it and the lock of a download."""
    home, cache, mirror = tmp_path / "home", tmp_path / "cache", tmp_path / "mirror"
    for folder in (home, cache, mirror):
        folder.mkdir()
    (mirror / "x.hdf5").write_text("data")
    for name in ("x.hdf5.part", "x.hdf5.json", "x.hdf5.part.json", ".x.hdf5.part.part", ".x.hdf5.json.part"):
        (home / name).write_text("mine")
        (cache / name).symlink_to(home / name)
    assert download.fetch("https://h/sets/x.hdf5", cache, lambda path: None, str(mirror)).read_text() == "data"
    (cache / "x.hdf5").unlink()
    (cache / "x.hdf5.lock").unlink()
    (cache / "x.hdf5.lock").symlink_to(home / "x.hdf5.json")
    with pytest.raises(UserError, match="is a link"):
        download.fetch("https://h/sets/x.hdf5", cache, lambda path: None, str(mirror))
    assert all(path.read_text() == "mine" for path in home.iterdir())


@pytest.mark.parametrize("ours", [True, False])
def test_a_collection_replaces_its_own_minari_datasets_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """Row 3 ("not tried: collect's resume from a prepared folder"): collect.json says that a dataset of the user was
    being written.
    """
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    place = tmp_path / "minari" / "offrl" / "hopper-v5" / "medium-v0" / "data"
    place.mkdir(parents=True)
    identity: dict[str, Any] = {"env": "Hopper-v5", "seed": 0}
    card = {"settings": identity if ours else {**identity, "seed": 1}}
    (place / "metadata.json").write_text(json.dumps({"card": json.dumps(card)}))
    record = {"identity": identity, "written": {}, "writing": "offrl/hopper-v5/medium-v0"}
    collection = Collection(tmp_path / "out", CollectConfig(env="Hopper-v5", format="minari"), None, record)  # type: ignore[arg-type]
    if ours:
        collection.check_free(["medium"])
    else:
        with pytest.raises(UserError, match="is not of this collection"):
            collection.check_free(["medium"])
