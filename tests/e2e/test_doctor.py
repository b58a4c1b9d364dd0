"""`offrl doctor`: one line for each check of the machine, whatever is wrong with it."""

from __future__ import annotations

import pytest
import torch

from offrl.cli import doctor
from offrl.training import selfcheck

from .conftest import Offrl

FAST = "doctor device=cpu algo=bc compile=eager seconds=0.02"
NAMES = ["device", "torch", "cache", "compiling", "data", "right", "speed", "memory", "verdict"]


def names(out: str) -> list[str]:
    """The first word of each line."""
    return [line.split()[0] for line in out.splitlines()]


def test_a_machine_that_is_right(offrl: Offrl) -> None:
    result = offrl(FAST)
    assert result.status == 0, result.out + result.err
    assert names(result.out) == NAMES
    lines = dict(zip(NAMES, result.out.splitlines(), strict=True))
    assert ": right; " in lines["right"] and "difference 0.0e+00" in lines["right"]
    assert "1 seed " in lines["speed"] and "8 seeds " in lines["speed"] and "MB" in lines["memory"]
    assert torch.__version__ in lines["torch"] and "not tried (compile=eager)" in lines["compiling"]
    assert lines["verdict"].split(maxsplit=1)[1].startswith("right: offrl trains on cpu")


@pytest.mark.slow
def test_what_fails_is_one_line_and_the_others_go_on(
    offrl: Offrl, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("place") / "file"
    file.write_text("")
    monkeypatch.setenv("OFFRL_CACHE", str(file / "cache"))

    def broken(*_: object) -> str:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(doctor._Doctor, "memory", broken)
    result = offrl(FAST)
    assert result.status == 1
    assert names(result.out) == NAMES
    lines = dict(zip(NAMES, result.out.splitlines(), strict=True))
    assert "FAILED: cannot write to" in lines["cache"] and "OFFRL_CACHE" in lines["cache"]
    assert lines["memory"].endswith(
        "FAILED: RuntimeError: CUDA error: out of memory; another program may hold the memory"
    )
    assert lines["verdict"].endswith("NOT RIGHT: cache, memory")
    assert "Traceback" not in result.out + result.err


@pytest.mark.slow
def test_other_numbers_are_wrong(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "difference", lambda ours, theirs: 1.0)
    monkeypatch.setattr(selfcheck.SelfCheck, "tolerance", 1e-5)
    result = offrl(FAST)
    assert result.status == 1
    assert (
        "right      FAILED: WRONG: eager against eager" in result.out
        and "1.0e+00" in result.out
        and "NOT RIGHT: right" in result.out
    )


def test_without_a_device_the_rest_is_told(offrl: Offrl) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = offrl("doctor --device cuda")
    assert result.status == 1
    assert names(result.out) == ["device", "torch", "cache", "verdict"]
    assert "finds no CUDA GPU; use device=cpu" in result.out.splitlines()[0]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("doctor devise=cpu", "offrl doctor has no setting 'devise'. Did you mean 'device'?"),
        ("doctor --devise cpu", "offrl doctor has no setting 'devise'. Did you mean 'device'?"),
        ("doctor compile=jit", "compile=jit is not allowed"),
        ("doctor --device", "'device=' has no value"),
        ("docter", "Did you mean 'doctor'?"),
    ],
)
def test_mistakes(offrl: Offrl, command: str, words: str) -> None:
    result = offrl(command)
    assert result.status == 2 and words in result.err and not result.out


def test_help(offrl: Offrl) -> None:
    result = offrl("doctor --help")
    assert result.status == 0 and "device=auto" in result.out and "offrl doctor" in offrl("--help").out
