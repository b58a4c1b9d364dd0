"""The folder that compiled code is kept in. It runs with the rights of whoever loads it, so nobody else may be able to write there."""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
from pathlib import Path

from offrl.errors import warn
from offrl.system import trust
from offrl.system.files import HOME, cache_dir
from offrl.system.locks import OWNED, TemporaryFolder

SHARED = "OFFRL_SHARED_CACHE"
_TEMPORARY = "offrl-compiled-"
_made: list[TemporaryFolder] = []  # by this process


def folder() -> Path:
    """`compiled` in $OFFRL_CACHE, or, where others could write to that, in ~/.cache/offrl; failing that a temporary one, which goes with
    this process. $OFFRL_SHARED_CACHE=1 takes the first in any case.
    """
    shared, refused = os.environ.get(SHARED) == "1", ""
    for base in _bases():
        with contextlib.suppress(OSError):  # the compiler will say what is wrong
            base.mkdir(0o777 if shared else 0o700, parents=True, exist_ok=True)
        reason = "" if shared else trust.exposed(base)
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


def is_own(place: str) -> bool:
    """True where `place` is in a folder that `folder` chose, here or in the process that started this one."""
    base = Path(place).parent
    return base in _bases() or (base.name.startswith(_TEMPORARY) and (base / OWNED).exists())


def _bases() -> list[Path]:
    return list(dict.fromkeys(kept / "compiled" for kept in (cache_dir(None), HOME.expanduser())))
