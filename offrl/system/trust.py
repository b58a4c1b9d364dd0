"""The rule for files of strangers, in one place: what comes from a file is data. It is never code, never a path out of
its folder, never an interpolation. What a person types, in a command or in Python, may be code.

Data, run directories and policies are files; so is what they name. `trust=true` on a command (OFFRL_TRUST=1 in its
environment and in its child processes') says that a person has read them. docs/security.md is the table for users.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from offrl.errors import UserError, warn
from offrl.registry import entry_points

SWITCH = "OFFRL_TRUST"  # "1", or the environments that were typed, divided by spaces: child processes inherit it
# Packages whose environments a file may name as package:Name-v0 or package.envs.module:Name-v0. They are those of
# offrl's own tables and those that its extras install to be named so; no other module of theirs is imported for a file:
# some do things when they are (__main__).
ENVIRONMENTS = frozenset({"offrl", "gymnasium", "gymnasium_robotics", "minigrid", "ogbench", "neorl2"})
# Texts among an environment's arguments that name no file, module or address, wherever they end up; gem's games have a
# prefix.
_PLAIN = re.compile(r"(?:game:)?\w[\w .,+=()-]*")
# Arguments of offrl's environments that name a program to start, its options, or a run to read: no file gives them,
# plain or not.
_OPENED = frozenset({"engine", "settings", "model"})
# the last two on Windows
_OWN = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
STALE = 60.0  # seconds after which nobody writes to an unfinished file any more
_of_file: ContextVar[bool] = ContextVar("of_file", default=False)


def granted() -> bool:
    """Whether a person said, by `trust=true`, that the files of this command may run code."""
    return os.environ.get(SWITCH) == "1"


@contextlib.contextmanager
def trusted(yes: bool | None = True) -> Iterator[None]:
    """Within it, files may name code: `with offrl.trusted(): offrl.load("runs/NAME").evaluate()`.

    False: they may not, whatever $OFFRL_TRUST says; None: as it says. What was `typed` within it is forgotten after it.
    """
    before = os.environ.get(SWITCH)
    if yes is not None:
        os.environ[SWITCH] = "1" if yes else ""
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(SWITCH, None)
        else:
            os.environ[SWITCH] = before


def typed(env_id: str | None, arguments: Mapping[str, Any] | None = None) -> None:
    """Note that a person, not a file, named the environment `env_id`, whose module this process and its children may
    thus import, with these `arguments`."""
    if granted():
        return
    known = os.environ.get(SWITCH, "").split()
    tokens = [_word(env_id)] if env_id and not importable(env_id) and env_id.isprintable() else []
    tokens += filter(None, (_token(k, v) for k, v in (arguments or {}).items() if not _plain(k, v)))
    if new := [w for w in tokens if w not in known]:
        os.environ[SWITCH] = " ".join([*known, *new])


@contextlib.contextmanager
def settings_of_file(yes: bool = True) -> Iterator[None]:
    """Within it, settings are those of a run's file, not of a person: the model that they name is not downloaded."""
    token = _of_file.set(yes)
    try:
        yield
    finally:
        _of_file.reset(token)


def typed_settings() -> bool:
    """Whether settings are a person's; see `settings_of_file`."""
    return not _of_file.get()


def importable(env_id: str) -> bool:
    """Whether to make the environment `env_id` would import only what is known: no module, one of `ENVIRONMENTS`, one
    that a plugin of offrl or Gymnasium which is installed names, or one that a person typed."""
    if not isinstance(env_id, str):
        return False
    module, colon, _ = env_id.rpartition(":")
    return not colon or open_to_files(module) or granted() or _word(env_id) in os.environ.get(SWITCH, "").split()


def _word(env_id: str) -> str:
    """An environment without spaces, as the names of files may have some."""
    return quote(env_id, safe="/:.~\\+=-_") if set(env_id) & set(" %") else env_id


def check_environment(env_id: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Raises UserError for an id whose module would be imported though only a file names it, and for `arguments` from a
    file that may name other files, modules or programs."""
    if not importable(env_id):
        raise UserError(
            f"environment '{env_id}' is named by a file, and to make it would run the Python code of "
            f"{str(env_id).rpartition(':')[0]}: if you know it, name the environment yourself (env={env_id}; with "
            f"`offrl train` eval.env={env_id}), or say trust=true"
        )
    for name, value in (arguments or {}).items():
        if (
            _plain(name, value)
            or granted()
            or (token := _token(name, value)) is None
            or token in os.environ.get(SWITCH, "").split()
        ):
            continue
        raise UserError(
            f"environment '{env_id}' is named by a file with {name}={str(value)[:80]!r}, which may open or start what "
            "the file chooses: if you know it, name the environment yourself in Python, with its arguments, or say "
            "trust=true"
        )


def check_code(path: Path, name: str, text: str, typed: bool) -> None:
    """Raises UserError where the file `path` of a run says `name`=`text`, which is Python code, and neither is that
    `typed` by a person nor are files trusted. Otherwise a line says, once, that the code runs."""
    if not typed and not granted():
        raise UserError(
            f"{path}: {name}={text} is Python code that a file names, and it is not run unasked; if you know it, say "
            f"{name}={text} yourself (offrl train, offrl finetune), or trust=true"
        )
    _tell(f"{path} names Python code, which is run: {name}={text}")


@functools.cache
def _tell(message: str) -> None:
    warn(message)


def read_text(path: Path, most: int = 1 << 26) -> str:
    """The text of a plain file. Raises OSError, UnicodeDecodeError, and UserError for a pipe or the like and for more
    than `most` bytes.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _OWN)
    with os.fdopen(handle, "rb") as file:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise UserError(f"{path} is no plain file")
        if info.st_size > most:
            raise UserError(f"{path} has {info.st_size:,} bytes, and such a file has {most:,} at most")
        return file.read(most).decode()


def refuse_sparse(path: Path) -> None:
    """Raises UserError for a file that seems huge and of which the disk holds almost nothing: it costs its maker
    nothing, and its reader all memory. For logs and tables, which may honestly be large. Raises OSError."""
    info = os.stat(path)
    if info.st_size > 1 << 28 and getattr(info, "st_blocks", info.st_size) * 512 < info.st_size // 64:
        raise UserError(
            f"{path} has {info.st_size:,} bytes, of which the disk holds {info.st_blocks * 512:,}: it is damaged; "
            "remove it"
        )


def _plain(name: str, value: Any) -> bool:
    """Whether an environment's argument can name neither a file nor a module, program or address: numbers, plain texts,
    lists of them.
    """
    pending = [(name, value)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += value.items()
        elif isinstance(value, list | tuple):
            pending += [(name, item) for item in value]
        elif not (value is None or isinstance(value, str | bool | int | float)):
            return False
        if name in _OPENED and value is not None:
            return False
        if isinstance(value, str) and value and (".." in value or not _PLAIN.fullmatch(value)):
            return False
        # a window; TextWorld's file
        if (name, value) == ("render_mode", "human") or (name == "game" and not str(value).isidentifier()):
            return False
    return True


def _token(name: str, value: Any) -> str | None:
    """One word for an argument; None where no file can hold it."""
    try:
        return hashlib.sha256(json.dumps([name, value], sort_keys=True).encode()).hexdigest()
    except RecursionError:
        return ""
    except (TypeError, ValueError):
        return None


def open_to_files(module: str) -> bool:
    """Whether a file may have `module` imported, which thus nobody need have typed: a known package, its part `envs`,
    or what the entry point of a plugin names. Of such only what Gymnasium registers is made.
    """
    parts = module.split(".")
    if any(part.startswith("_") or not part.isidentifier() for part in parts):
        return False
    return module in _plugins() or (parts[0] in ENVIRONMENTS | _plugins() and parts[1:2] in ([], ["envs"]))


@functools.cache
def _plugins() -> frozenset[str]:
    """The modules that plugins name, and their packages."""
    modules = [
        p.value.partition(":")[0].strip()
        for group in ("offrl.plugins", "gymnasium.envs")
        for p in entry_points(group=group)
    ]
    return frozenset(modules) | {module.partition(".")[0] for module in modules}


def check_folder(folder: Path, skip: str = "", of: str = "run") -> None:
    """Raises UserError, naming it, for a link anywhere in a run's `folder` that leads out of it, and for what is
    neither file nor folder.

    The folder itself may be a link: a person typed its name. skip: the name of folders that are not looked into. of:
    "run", or "dataset", which is only read, so that `granted` allows links.
    """
    cure = "put the file or folder itself in its place"
    if of == "dataset":
        cure += ", or say trust=true"
    else:
        cure = f"what is written there would change files that are not the run's; {cure}"
    root = os.path.realpath(folder)
    pending = [root]
    while pending:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    target = os.path.realpath(entry.path)
                    if os.path.commonpath([root, target]) != root and not (of == "dataset" and granted()):
                        raise UserError(f"{entry.path} is a link that leads out of the {of}, to {target}: {cure}")
                elif entry.is_dir(follow_symlinks=False):
                    pending += [entry.path] * (entry.name != skip)
                elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):  # not removed meanwhile
                    raise UserError(f"{entry.path} is neither a file nor a folder, and no part of a {of}; remove it")


def open_to_write(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """`open` for the modes w, a and r+ (with b or not) that refuses a link in place of the file, and what is no plain
    file.

    For files under fixed names; whole files are written by `offrl.system.files.replacing`, and those that grow are
    opened by its `open_to_append`. "w" empties the file only after that check.
    Raises OSError, and UserError for a link.
    """
    flags = {"w": os.O_WRONLY | os.O_CREAT, "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND, "r": os.O_RDWR}[mode[0]]
    if os.path.islink(path):
        raise UserError(
            f"{path} is a link, to {os.path.realpath(path)}, and nothing is written through links; remove it"
        )
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | _OWN, 0o666)
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


def open_part(path: Path, mode: int = 0o666) -> tuple[IO[bytes], Path]:
    """A new file `.NAME.PID.part` beside `path`, this process' own, open for writing and reading, to be renamed to it.

    What lies there under that name is removed, not opened: it may be a link. So is what killed processes left.
    `offrl.system.files.replacing` is for users. mode: its permissions, less the umask. Raises OSError.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    names = re.compile(re.escape(f".{path.name}.") + r"(\d+\.)?part")
    for name in filter(names.fullmatch, os.listdir(path.parent)):
        leftover = path.with_name(name)
        with contextlib.suppress(FileNotFoundError):
            if leftover == part or leftover.is_symlink() or time.time() - leftover.stat().st_mtime > STALE:
                leftover.unlink()
    return open(part, "x+b", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_BINARY", 0), mode)), part


def cell(text: str) -> str:
    """A text for a CSV file (`offrl.system.csv_text`). Spreadsheets take one that begins with = + - @ (or a tab) for a
    formula. It gets an apostrophe, also behind a semicolon, which parts cells where the comma is decimal, and before
    apostrophes that are there already, so that `cell_text` gives the same text again. Numbers stay numbers."""
    return text if _number(text) else _FORMULA.sub(r"'\1", text)


def cell_text(text: str) -> str:
    """The text behind what `cell` wrote."""
    return _SHIELDED.sub(r"\1", text)


_SIGN = "'*[=+@\t\r\uff1d\uff0b\uff0d\uff20-]"  # also as wide letters
_FORMULA, _SHIELDED = (re.compile(f"(?:^|(?<=[;\t])){before}({_SIGN})") for before in ("", "'"))


def _number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
