"""Compiled code is kept where no other user can write: whoever changes it runs code as its owner (issue 37)."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offrl.system import backend, code_cache
from offrl.system.locks import TemporaryFolder

ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home of this test's. The folders above it count as this user's, open to be passed: pytest's own are closed to
    others.
    """
    above, real = {tmp_path, *tmp_path.parents}, Path.stat

    def as_elsewhere(self: Path, **options: Any) -> os.stat_result:
        info = real(self, **options)
        return os.stat_result((0o40755, *info[1:4], os.getuid(), *info[5:10])) if self in above else info

    monkeypatch.setattr(Path, "stat", as_elsewhere)
    monkeypatch.setattr(code_cache, "_of_one", lambda gid: False)
    monkeypatch.setattr(code_cache, "_made", [])
    monkeypatch.setattr(backend, "_machine", list)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "OFFRL_CACHE", "OFFRL_SHARED_CACHE"):
        monkeypatch.setenv(name, "")  # so that what the test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield folder(tmp_path / "home", 0o755)
    for made in code_cache._made:
        made.close()


def folder(path: Path, mode: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("mode", "writer"), [(0o755, ""), (0o700, ""), (0o775, "its group"), (0o777, "everybody"), (0o1777, "")]
)
def test_who_could_put_another_folder_in_its_place(tmp_path: Path, mode: int, writer: str) -> None:
    """A folder above that others can write to lets them rename what is in it; the sticky bit (/tmp) does not."""
    below = folder(folder(tmp_path / "above", mode) / "compiled", 0o755)
    assert (writer in code_cache.exposed(below)) and bool(code_cache.exposed(below)) == bool(writer)
    assert bool(code_cache.exposed(below / "not" / "there")) == bool(writer)


@pytest.mark.parametrize(
    ("mode", "writer"),
    [(0o755, ""), (0o775, "its group"), (0o777, "everybody"), (0o1777, "everybody"), (0o770, "its group")],
)
def test_who_could_put_files_into_it(tmp_path: Path, mode: int, writer: str) -> None:
    """In a folder with the sticky bit others cannot rename, but add files, such as code under the name that will be
    looked for.
    """
    place = folder(tmp_path / "compiled", mode)
    assert writer in code_cache.exposed(place) and bool(code_cache.exposed(place)) == bool(writer)


def test_what_nobody_else_can_reach_is_private(tmp_path: Path) -> None:
    """Where a folder above may be passed by its owner alone, as most homes, modes below it mean nothing."""
    closed = folder(tmp_path / "closed", 0o700)
    assert code_cache.exposed(folder(folder(closed / "cache", 0o777) / "compiled", 0o777)) == ""
    closed.chmod(0o711)
    assert "everybody" in code_cache.exposed(closed / "cache" / "compiled")


def test_a_user_s_own_group_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group and make folders that it can write to: their caches go on being used."""
    place = folder(folder(tmp_path / "cache", 0o775) / "compiled", 0o775)
    assert code_cache.exposed(place)
    monkeypatch.setattr(code_cache, "_of_one", lambda gid: gid == place.stat().st_gid)
    assert code_cache.exposed(place) == ""
    place.chmod(0o777)
    assert "everybody" in code_cache.exposed(place)


def test_a_link_that_others_may_turn(tmp_path: Path) -> None:
    """The folder is private, and the link that leads there lies where others can put another."""
    target, shared = folder(tmp_path / "private", 0o700), folder(tmp_path / "shared", 0o777)
    (shared / "cache").symlink_to(target)
    assert str(shared) in code_cache.exposed(shared / "cache")


@ROOT
@pytest.mark.parametrize("which", ["folder", "above", "link"])
def test_what_belongs_to_another_user(tmp_path: Path, which: str) -> None:
    """Root in a container with a cache of the host's user, say: that user can write there."""
    above = folder(tmp_path / "above", 0o755)
    place = folder(above / "compiled", 0o755)
    os.chown({"folder": place, "above": above, "link": place}[which], 12345, -1)
    if which == "link":
        os.chown(place, 0, -1)
        place.rmdir()
        place.symlink_to(folder(tmp_path / "other", 0o755))
        os.chown(place, 12345, -1, follow_symlinks=False)
    assert "belongs to user 12345" in code_cache.exposed(place)


def test_its_folder_is_made_for_this_user_alone(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder is new: mode 700, and no warning."""
    assert code_cache.folder() == home / ".cache/offrl/compiled"
    assert stat.S_IMODE((home / ".cache/offrl/compiled").stat().st_mode) == 0o700 and capsys.readouterr().err == ""


def test_a_shared_cache_keeps_no_code_unless_asked_for(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever could write to $OFFRL_CACHE ran code as its other users. Now one line, and the home's cache instead."""
    shared = folder(tmp_path / "shared", 0o777)
    monkeypatch.setenv("OFFRL_CACHE", str(shared))
    folder(shared / "compiled", 0o755)
    backend.cache_compiled()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == home / ".cache/offrl/compiled"
    line = capsys.readouterr().err
    assert (
        line.count("\n") == 1
        and str(shared / "compiled") in line
        and "everybody" in line
        and "OFFRL_SHARED_CACHE=1" in line
    )
    backend.cache_compiled()  # a worker process inherits the choice, and says nothing
    assert (
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == home / ".cache/offrl/compiled"
        and capsys.readouterr().err == ""
    )
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("OFFRL_SHARED_CACHE", "1")
    backend.cache_compiled()
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == shared / "compiled" and capsys.readouterr().err == ""


def test_without_a_private_home_there_is_a_temporary_folder(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A container whose home others can write to still trains; workers share the folder of the process that began."""
    folder(home, 0o777)
    backend.cache_compiled()
    base = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert base.parent == tmp_path and stat.S_IMODE(base.stat().st_mode) == 0o700
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setattr(code_cache, "_made", made := [*code_cache._made])  # a child has made none
    code_cache._made.clear()
    backend.cache_compiled()
    assert (
        Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent == base
        and not code_cache._made
        and capsys.readouterr().err == ""
    )
    code_cache._made.extend(made)


@ROOT
def test_temporary_folders_are_private_and_those_of_others_are_left_alone(tmp_path: Path) -> None:
    """/dev/shm and /tmp hold what workers share: mode 700, and no folder that another user left there is opened, let
    alone removed.
    """
    other = folder(tmp_path / "offrl-other", 0o755)
    os.mkfifo(other / ".owned")  # to open it would wait for ever
    os.chown(other, 12345, -1)
    made = TemporaryFolder("offrl-", tmp_path)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700 and other.exists()
    made.close()
