"""The rule for strangers' files (offrl/system/trust.py), function by function; tests/unit/security holds what attackers
tried.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offrl.errors import UserError, printable
from offrl.system import trust
from offrl.system.files import write_text


def test_control_characters_are_shown_not_sent() -> None:
    assert printable("a\x1b]52;c;eA==\x07 é\u202eb\r") == "a\\x1b]52;c;eA==\\x07 é\\u202eb\\r"
    assert printable("two\nlines\tand ✓ 日本") == "two\nlines\tand ✓ 日本"


@pytest.mark.parametrize("env_id", ["Hopper-v5", "gymnasium.envs.mujoco:Hopper-v5", "offrl.envs.x:Y-v0", "ns/Name-v0"])
def test_environments_of_known_packages_may_be_named_by_files(env_id: str) -> None:
    trust.check_environment(env_id)


def test_other_modules_only_where_a_person_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.SWITCH, "")
    for env_id in ("runs.x.evil:X-v0", "this:X-v0", "offrl_evil:X-v0"):
        with pytest.raises(UserError, match="trust=true"):
            trust.check_environment(env_id)
    trust.typed("this:X-v0")
    trust.check_environment("this:X-v0")
    with pytest.raises(UserError):
        trust.check_environment("this:Y-v0")
    with trust.trusted():
        trust.check_environment("this:Y-v0")
    assert not trust.granted()
    with pytest.raises(UserError):
        trust.check_environment("this:Y-v0")


def test_links_out_of_a_run_are_refused_by_name(tmp_path: Path) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    (run / "policies").mkdir(parents=True)
    home.mkdir()
    (run / "policies" / "a").write_text("a")
    (run / "latest").symlink_to("policies/a")
    trust.check_folder(run)  # a link within the run
    (tmp_path / "scratch").symlink_to(run)
    trust.check_folder(tmp_path / "scratch")  # typed by a person
    (run / "policies" / "b").symlink_to(home / "bashrc")
    with pytest.raises(UserError, match="policies/b is a link"):
        trust.check_folder(run)
    (run / "policies" / "b").unlink()
    os.mkfifo(run / "scores.csv")
    with pytest.raises(UserError, match=r"scores\.csv is neither"):
        trust.check_folder(run)


@pytest.mark.parametrize("mode", ["w", "a", "r+"])
def test_nothing_is_opened_through_a_link(tmp_path: Path, mode: str) -> None:
    target, link = tmp_path / "bashrc", tmp_path / ".lock"
    target.write_text("mine")
    link.symlink_to(target)
    with pytest.raises(UserError, match=r"\.lock is a link"):
        trust.open_to_write(link, mode)
    assert target.read_text() == "mine"
    link.unlink()
    link.write_text("old")
    with trust.open_to_write(link, mode, encoding="utf-8") as file:
        file.write("new")
    assert link.read_text() == {"w": "new", "a": "oldnew", "r+": "new"}[mode]
    link.unlink()
    os.mkfifo(link)
    with pytest.raises((UserError, OSError)):
        trust.open_to_write(link, mode)


def test_a_part_is_a_new_file(tmp_path: Path) -> None:
    target = tmp_path / "bashrc"
    target.write_text("mine")
    (tmp_path / ".run.json.part").symlink_to(target)
    file, part = trust.open_part(tmp_path / "run.json")
    with file:
        file.write(b"new")
    assert target.read_text() == "mine" and part.read_text() == "new" and not part.is_symlink()


def test_several_processes_write_the_same_file(tmp_path: Path) -> None:
    """Such as seals of compiled code: each has a part of its own, and the file is one of theirs, whole. What a killed
    one left goes.
    """
    path, left = tmp_path / "seal", tmp_path / ".seal.99999999.part"
    left.write_text("half")
    os.utime(left, (0, 0))
    children = []
    for letter in "abc":
        if not (child := os.fork()):
            try:
                for _ in range(60):
                    write_text(path, letter * 5000)
                    text = path.read_text()
                    assert len(text) == 5000 and len(set(text)) == 1
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["seal"]


@pytest.mark.parametrize(
    ("text", "written"),
    [
        *((x, f"'{x}") for x in ("=1+1", "+a", "-cmd", "@x", "\tx", "\uff1dx", "'=x", "''-x", "-", "--1")),
        ("a;=x", "a;'=x"),  # German Excel parts cells at semicolons
        ("a;'=x", "a;''=x"),
        *(
            (x, x)
            for x in ("-1.5", "+3", "-inf", "-1e-05", "hopper-medium-v2", "", "'x", "it's", "a;b", "a; -b", "a'=b")
        ),
    ],
)
def test_formulas_are_text_in_tables_and_read_back_as_they_were(text: str, written: str) -> None:
    assert trust.cell(text) == written
    assert trust.cell_text(written) == text
