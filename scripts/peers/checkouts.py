"""Other people's repositories, from checkouts: found in a folder, and imported without what they need besides."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock


def checkout_of(folder: Path, repository: str) -> Path | None:
    """The folder that holds a repository, or None."""
    owner, name = repository.split("/")
    candidates = (folder / f"{owner}+{name}", folder / owner / name, folder / name)
    return next((path for path in candidates if path.is_dir()), None)


def commit_of(checkout: Path) -> str:
    """The commit that is checked out, or "" where the folder is no repository."""
    result = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    is_root = (checkout / ".git").exists()
    return result.stdout.strip() if result.returncode == 0 and is_root else ""


@contextlib.contextmanager
def imported(checkout: Path, module: str, absent: Sequence[str] = ()) -> Iterator[Any]:
    """A module of a checkout. `absent`: packages that it imports and that an update does not use, replaced by empty
    ones.
    """
    before, path = dict(sys.modules), list(sys.path)
    for name in absent:
        sys.modules[name] = mock.MagicMock(name=name, __path__=[], __spec__=None)
    if "pyrallis" in absent:
        sys.modules["pyrallis"].wrap = lambda *_, **__: lambda function: function  # type: ignore[attr-defined]
    sys.path.insert(0, str(checkout))
    try:
        yield importlib.import_module(module)
    finally:
        sys.path[:] = path
        places = {
            n: f"{getattr(m, '__file__', '')} {list(getattr(m, '__path__', []))}"
            for n, m in sys.modules.items()
            if n not in before
        }
        for name, place in places.items():  # a folder without __init__.py has a path and no file
            if str(checkout) in place or name in absent:
                del sys.modules[name]
        sys.modules.update({name: before[name] for name in absent if name in before})


def only_checkout(folder: Path, repository: str) -> Path:
    """The folder that holds a repository. Raises SystemExit where there is none."""
    path = checkout_of(folder, repository)
    if path is None:
        raise SystemExit(f"no checkout of {repository} in {folder}")
    return path
