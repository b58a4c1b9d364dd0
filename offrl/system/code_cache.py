"""The folder that compiled code is kept in. It runs with the rights of whoever loads it, so nobody else may be able to
write there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import stat
import tempfile
from pathlib import Path

from offrl.errors import warn
from offrl.system.files import HOME, cache_dir
from offrl.system.locks import OWNED, TemporaryFolder

SHARED = "OFFRL_SHARED_CACHE"
_TEMPORARY = "offrl-compiled-"
_made: list[TemporaryFolder] = []  # by this process


def folder() -> Path:
    """`compiled` in $OFFRL_CACHE, or, where others could write to that, in ~/.cache/offrl; failing that a temporary
    one, which goes with this process. $OFFRL_SHARED_CACHE=1 takes the first in any case.
    """
    shared, refused = os.environ.get(SHARED) == "1", ""
    for base in _bases():
        with contextlib.suppress(OSError):  # the compiler will say what is wrong
            base.mkdir(0o777 if shared else 0o700, parents=True, exist_ok=True)
        reason = "" if shared else exposed(base)
        if not reason:
            break
        refused = refused or f"{base} is not used, since compiled code there could be changed by others: {reason}"
    else:
        if not _made:
            _made.append(TemporaryFolder(_TEMPORARY, Path(tempfile.gettempdir())))
            atexit.register(_made[0].close)
        base = _made[0].path
    if refused:
        cure = f"chmod go-w, a folder of your own in OFFRL_CACHE, or, if you trust all who can write there, {SHARED}=1"
        warn(f"{refused}. This run uses {base}. Cure: {cure}")
    return base


def is_own(folder: str) -> bool:
    """Whether `folder` is in one that the function `folder` chose, here or in the process that started this one."""
    base = Path(folder).parent
    return base in _bases() or (base.name.startswith(_TEMPORARY) and (base / OWNED).exists())


def _bases() -> list[Path]:
    return list(dict.fromkeys(base / "compiled" for base in (cache_dir(None), HOME.expanduser())))


def exposed(folder: Path) -> str:
    """Which other users than root could put files into `folder`, or another folder in its place, in words; "" where
    none could.

    A folder above it that only its owner may pass protects what is below, and the sticky bit (/tmp) protects what
    others own. A user's own group, of the user's name and with nobody else in it, is no other user.
    """
    if not hasattr(os, "getuid"):
        return ""
    reasons = (_exposed(Path(path)) for path in dict.fromkeys([os.path.abspath(folder), os.path.realpath(folder)]))
    return next(filter(None, reasons), "")


def _exposed(folder: Path) -> str:
    me = os.getuid()
    for part in [*reversed(folder.parents), folder]:
        try:
            info = part.lstat()
            if info.st_uid not in (0, me) and (part == folder or info.st_uid not in _unmapped()):
                return f"{part} belongs to {_name(info.st_uid)}"
            info = part.stat()
        except OSError:
            return ""  # what is not there yet will be this user's
        mode = info.st_mode & ~(stat.S_IRWXG if _of_one(info.st_gid) else 0)
        if not mode & (stat.S_IXGRP | stat.S_IXOTH):
            return ""
        if mode & (stat.S_IWGRP | stat.S_IWOTH) and (part == folder or not mode & stat.S_ISVTX):
            return (
                f"{part} can be written to by "
                f"{'everybody' if mode & stat.S_IWOTH else f'its group (number {info.st_gid})'}"
            )
    return ""


def _of_one(gid: int) -> bool:
    import grp
    import pwd

    with contextlib.suppress(KeyError):
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(gid)
        return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
    return False


def _name(uid: int) -> str:
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


@functools.cache
def _unmapped() -> tuple[int, ...]:
    """The number that stands for root, among others, in a container which knows few users of its host."""
    with contextlib.suppress(OSError, ValueError):
        if Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
            return (int(Path("/proc/sys/kernel/overflowuid").read_text()),)
    return ()
