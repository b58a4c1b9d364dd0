"""The way from a command to a loss is short: project frames are counted where a loss raises."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

import offrl
from offrl import registry
from offrl.cli.main import main

ROOTS = [
    Path(offrl.__file__).parent,
    *(path.resolve() for path in Path(offrl.__file__).parent.iterdir() if path.is_symlink()),
]


class Reached(Exception):
    """The loss was called."""


def own_frames(error: BaseException) -> list[str]:
    """ "module:function" of each frame of an exception whose file lies in offrl, the outermost first; torch's own do
    not count.
    """
    frames = [(Path(frame.filename).resolve(), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    return [f"{path.stem}:{name}" for path, name in frames if any(root in path.parents for root in ROOTS)]


@pytest.mark.parametrize("seeds", [1, 2])
def test_frames_from_the_command_to_the_loss(seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten from the command line, of which the loop and the loss have five between them: seen in any traceback of a
    training run.
    """

    def actor_loss(*arguments: Any) -> Any:
        raise Reached

    monkeypatch.setattr(registry.get("algo", "iql"), "actor_loss", actor_loss)
    settings = (
        f"seeds={seeds} steps=2 compile=eager workers=1 eval.env=none compare=[] algo.hidden=[8] runs_dir={tmp_path} "
        "quiet=true"
    )
    with pytest.raises(Reached) as raised:
        main(["train", "algo=iql", *settings.split()])
    frames = own_frames(raised.value)
    loop = frames.index("loop:train")
    # the loss itself is this file's, which is no frame of offrl
    assert len(frames) + 1 <= 10, frames
    assert len(frames) - 1 - loop <= 5, frames
