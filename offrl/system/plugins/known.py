"""The plugins that a person has named on this machine: file and content. A run that names one of them again may have
it; another one's file, or the same one with other content, is a stranger's until a person names it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path

from offrl.errors import UserError
from offrl.system.trust import open_to_write, read_text

NAME = "plugins.txt"  # in the cache, a line each: checksum of the content, path


def checksum(path: Path) -> str:
    """64 letters of a file's content. Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def remember(path: Path) -> None:
    """Note that a person named this file as it is now. Where nothing can be kept, a person has to name it again."""
    with contextlib.suppress(OSError, UserError):
        line = f"{checksum(path)} {path}"
        list_file = _place()
        if line in _lines(list_file):
            return
        list_file.parent.mkdir(0o700, parents=True, exist_ok=True)
        with open_to_write(list_file, "a", encoding="utf-8") as file:
            if hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), 0o600)
            file.write(line + "\n")


def remembered(path: Path) -> bool:
    """Whether a person has named this file, with the content that it has now."""
    try:
        return f"{checksum(path)} {path}" in _lines(_place())
    except OSError:
        return False


def _place() -> Path:
    return Path(os.environ.get("OFFRL_CACHE") or "~/.cache/offrl").expanduser() / NAME


def _lines(file: Path) -> list[str]:
    """The lines of the file; none where others than its owner, who must be this user, could have written there."""
    try:
        if hasattr(os, "getuid"):
            for part in (file, file.parent):
                info = os.stat(part)
                if info.st_uid != os.getuid() or info.st_mode & stat.S_IWOTH:
                    return []
        return read_text(file).splitlines()
    except (OSError, UnicodeDecodeError, UserError):
        return []
