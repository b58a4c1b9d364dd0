"""`trust=true`: said in a command or in Python, by a person; never in a file, and never kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import offrl
from offrl.cli import NAMES
from offrl.cli import main as entry
from offrl.cli.main import UNTRUSTING, main
from offrl.errors import UserError
from offrl.settings.compose import compose
from offrl.system import trust


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str | None]]:
    """What commands got: their arguments, and the switch."""
    calls: list[tuple[list[str], str | None]] = []

    def command(rest: list[str]) -> int:
        calls.append((rest, os.environ.get(trust.SWITCH)))
        trust.typed("mine:X-v0")
        return 0

    monkeypatch.setattr(entry, "_command", lambda arguments: (command, arguments[1:]))
    return calls


@pytest.mark.parametrize("before", [None, "", "1", "other:X-v0"])
def test_it_reaches_the_process_and_no_setting(
    before: str | None, seen: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(trust.SWITCH, raising=False)
    if before is not None:
        monkeypatch.setenv(trust.SWITCH, before)
    for words, switch in ((["trust=true"], "1"), (["trust=false"], ""), ([], before)):
        for command in NAMES:
            seen.clear()
            assert main([command, *words, "RUN", "seed=1"]) == 0
            assert seen == [(["RUN", "seed=1"], switch)]
            assert os.environ.get(trust.SWITCH) == before


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["trust=yes"], ["trust="], ["trust=True"], ["trust=true", "trust=false"]):
        assert main(["evaluate", "RUN", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("offrl: error: trust=") and error.count("\n") == 1


def test_no_file_says_it(tmp_path: Path) -> None:
    for text in ("trust: true\n", "train:\n  trust: true\n"):
        (tmp_path / "mine.yaml").write_text(text)
        with pytest.raises(UserError, match=r"trust is no setting of a file.*offrl\.trusted"):
            compose({"config": str(tmp_path / "mine.yaml")})
    with pytest.raises(UserError, match=r"with offrl\.trusted"):
        offrl.train(trust=True)


def test_help_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    for command in NAMES:
        assert main([command, "--help"]) == 0
        assert ("  trust=false " in capsys.readouterr().out) == (command not in UNTRUSTING)
    assert main([]) == 0 and "trust=true" in capsys.readouterr().out


def test_trusted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(trust.SWITCH, "1")
    with offrl.trusted(False):
        assert not trust.granted()
        with offrl.trusted():
            assert trust.granted()
        assert not trust.granted()
    assert trust.granted()
