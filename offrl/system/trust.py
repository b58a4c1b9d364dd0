"""The rule for files of strangers, in one place: what comes from a file is data. It is never code, never a path out of its folder, never an
interpolation. What a person types, in a command or in Python, may be code.

Data, run directories and policies are files; so is what they name. `trust=true` on a command (OFFRL_TRUST=1 in its environment and in its
child processes') says that a person has read them. docs/security.md is the table for users.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Any

from offrl.errors import UserError

SWITCH = "OFFRL_TRUST"  # "1", or the environment ids that were typed, divided by spaces: child processes inherit it
# packages whose environments a file may name as package.module:Name-v0; they are what offrl's own extras install
ENVIRONMENTS = frozenset({"offrl", "gymnasium", "gymnasium_robotics", "minigrid", "ogbench", "mo_gymnasium", "textworld", "gem"})


def granted() -> bool:
    """Whether a person said, by `trust=true`, that the files of this command may run code."""
    return os.environ.get(SWITCH) == "1"


@contextlib.contextmanager
def trusted(yes: bool = True) -> Iterator[None]:
    """Within it, files may name code: `with offrl.trusted(): offrl.load("runs/NAME").evaluate()`."""
    before = os.environ.get(SWITCH)
    if yes:
        os.environ[SWITCH] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before


def typed(env_id: str | None) -> None:
    """Note that a person, not a file, named the environment `env_id`, whose module this process and its children may thus import."""
    if env_id and ":" in env_id and not granted() and env_id not in (known := os.environ.get(SWITCH, "").split()):
        os.environ[SWITCH] = " ".join([*known, env_id])


def importable(env_id: str) -> bool:
    """Whether to make the environment `env_id` would import only what is known: no module, one of `ENVIRONMENTS`, of a plugin of offrl or
    Gymnasium that is installed, or one that a person typed."""
    module, colon, _ = env_id.rpartition(":")
    return not colon or module.partition(".")[0] in _known() or granted() or env_id in os.environ.get(SWITCH, "").split()


def check_environment(env_id: str) -> None:
    """Raises UserError for an id whose module would be imported though only a file names it."""
    if not importable(env_id):
        raise UserError(
            f"environment '{env_id}' is named by a file, and to make it would run the Python module {env_id.rpartition(':')[0]}: if you "
            f"know that module, name the environment yourself (env={env_id}; with `offrl train` eval.env={env_id}), or say trust=true"
        )


@functools.cache
def _known() -> frozenset[str]:
    plugins = (
        p.value.partition(":")[0].partition(".")[0] for group in ("offrl.plugins", "gymnasium.envs") for p in entry_points(group=group)
    )
    return ENVIRONMENTS | frozenset(plugins)


def check_folder(folder: Path, skip: str = "") -> None:
    """Raises UserError, naming it, for a link anywhere in a run's `folder` that leads out of it, and for what is neither file nor folder.

    The folder itself may be a link: a person typed its name. skip: the name of folders that are not looked into.
    """
    root = os.path.realpath(folder)
    pending = [root]
    while pending:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if os.path.commonpath([root, target]) != root:
                        raise UserError(
                            f"{entry.path} is a link that leads out of the run, to {target}: what is written there would change files that "
                            "are not the run's; put the file or folder itself in its place"
                        )
                elif entry.is_dir(follow_symlinks=False):
                    pending += [entry.path] * (entry.name != skip)
                elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):  # not removed meanwhile
                    raise UserError(f"{entry.path} is neither a file nor a folder, and no part of a run; remove it")


def open_to_write(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """`open` for the modes w, a and r+ (with b or not) that refuses a link in place of the file, and what is no plain file.

    For files under fixed names; whole files are written by `offrl.system.files.replacing`, and those that grow are
    opened by its `open_to_append`. "w" empties the file only after that check.
    Raises OSError, and UserError for a link.
    """
    flags = {"w": os.O_WRONLY | os.O_CREAT, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "r": os.O_RDWR}[mode[0]]
    if os.path.islink(path):
        raise UserError(f"{path} is a link, to {os.path.realpath(path)}, and nothing is written through links; remove it")
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UserError(f"{path} is no plain file, and nothing is written to it; remove it")
        if mode[0] == "w":
            os.ftruncate(handle, 0)
        return os.fdopen(handle, mode, **options)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(handle)
        raise


def open_part(path: Path) -> tuple[IO[bytes], Path]:
    """A new file `.NAME.part` beside `path`, open for writing and reading, to be renamed to it. What lies there under that name is removed,
    not opened: it may be a link. `offrl.system.files.replacing` is for users. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    with contextlib.suppress(FileNotFoundError):
        part.unlink()
    return open(part, "x+b"), part


def cell(value: Any) -> Any:
    """A value for a CSV file: spreadsheets take a text that begins with = + - @ (or a tab) for a formula, so it gets an apostrophe."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") and not _number(value):
        return f"'{value}"
    return value


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
