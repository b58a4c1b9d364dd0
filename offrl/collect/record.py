"""The folder of a collection: the record of its purpose, so that the same command continues it and another one does not
spoil it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offrl.collect.config import FREE, CollectConfig
from offrl.errors import UserError
from offrl.system import files as checkpoint
from offrl.system import trust
from offrl.system.signals import handled

RECORD = "collect.json"
KEPT = " What was recorded before is kept: free some space, then run the same command again."


class Stopped(Exception):
    """Ctrl-C or SIGTERM; everything recorded so far is on the disk."""


def claim(folder: Path, config: CollectConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """Make `folder` this collection's, or find that it is already; returns its record.

    `facts`: what else decides the data (the policy's file, say). Raises UserError where the folder holds anything else.
    """
    values = {k: v for k, v in dataclasses.asdict(config).items() if k not in (*FREE, "out")}
    identity = json.loads(json.dumps({**values, **facts}))
    trust.check_folder(folder)
    path = folder / RECORD
    if path.exists():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            old = record["identity"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} cannot be read ({error}); choose another out=, or remove that folder") from None
        for key in [*("recipe", "env", "policy"), *identity]:
            if key in old and old[key] != identity[key]:
                raise UserError(
                    f"{folder} holds another collection ({key}: {old[key]} there, {identity[key]} here); choose "
                    "another out=, or the settings that it began with"
                )
        return record
    if folder.exists() and not folder.is_dir():
        raise UserError(f"out={folder} is a file; give a folder")
    if folder.exists() and (files := sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))):
        raise UserError(
            f"out={folder} is not empty and no collection (it has {', '.join(files[:3])}); choose another out="
        )
    record = {"identity": identity, "written": {}}
    save_record(folder, record)
    return record


def save_record(folder: Path, record: dict[str, Any]) -> None:
    checkpoint.write_text(folder / RECORD, json.dumps(record, indent=1) + "\n", KEPT)


class Stop:
    """A request to stop, by Ctrl-C or SIGTERM: a stage checks for it where it can save its state."""

    def __init__(self) -> None:
        self.asked = False

    def check(self) -> None:
        """Raises Stopped once Ctrl-C or SIGTERM has come."""
        if self.asked:
            raise Stopped


@contextlib.contextmanager
def stoppable() -> Iterator[Stop]:
    """The first Ctrl-C or SIGTERM asks to stop; the second Ctrl-C stops at once."""
    stop = Stop()

    def handler(number: int, frame: object) -> None:
        if stop.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.asked = True

    with handled(handler, signal.SIGINT, signal.SIGTERM):
        yield stop
