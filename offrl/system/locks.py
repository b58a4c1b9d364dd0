"""Locks between processes, which the system drops with them: what is slow is computed once, and a run directory has one
trainer.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torch import Tensor

from offrl.errors import UserError, say, warn
from offrl.system import files as checkpoint
from offrl.system import trust

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
try:
    import msvcrt
except ImportError:  # everywhere else
    msvcrt = None  # type: ignore[assignment]

FAR = 0x7FFFFFFE  # the byte that Windows locks: one that nobody reads, for there a locked byte cannot be read
ATTEMPTS = 10  # to make a folder that other processes remove
PATIENCE = 0.05  # seconds between two tries, where the system cannot wait for a lock
NOTHING_YET = {".lock", "run.json", "config.yaml"}  # all that a run directory holds before its first line
OWNED = ".owned"  # in a temporary folder: the process that made it holds it
Kept = tuple[dict[str, Tensor], dict[str, Any]]


def lock(file: IO[Any], wait: bool = True) -> None:
    """Hold `file` alone until it is closed. wait: until another process lets it go. Raises OSError where another holds
    it (`wait` False), and where there are no locks."""
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    elif msvcrt is not None:
        while True:
            try:
                file.seek(FAR)
                msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait or error.errno not in (
                    errno.EACCES,
                    errno.EDEADLK,
                    getattr(errno, "EDEADLOCK", errno.EDEADLK),
                ):
                    raise
                time.sleep(PATIENCE)
    else:
        raise OSError(errno.ENOSYS, "this system has no file locks")


def once(
    path: Path | None, make: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]], label: str, quiet: bool
) -> Kept:
    """Tensors and plain values from the file `path`, or made and put there; None: made and not kept.

    Of several processes that ask at a time one makes it, and the others wait. A damaged file is made anew; one that
    cannot be written is a warning. `label`: for messages.
    """
    if path is None:
        tensors, meta = make()
        return dict(tensors), dict(meta)
    with alone(path, label, quiet):
        if path.is_file():
            try:
                return checkpoint.read(path)
            except UserError as error:
                warn(f"{error}; {label} are made anew")
        tensors, meta = make()
        try:
            checkpoint.write(path, tensors, meta)
        except UserError as error:
            warn(f"{label} are not kept, and made again the next time: {error}")
    return dict(tensors), dict(meta)


@contextlib.contextmanager
def alone(path: Path, label: str, quiet: bool) -> Iterator[None]:
    """Holds a lock beside `path`; the system drops it with the process. Where none can be had the work is done
    without.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = trust.open_to_write(path.with_suffix(".lock"), "a")
    except OSError:
        yield
        return
    with file:
        try:
            lock(file, wait=False)
        except OSError:
            if not quiet:
                say(f"waiting for another process, which makes {label}")
            with contextlib.suppress(OSError):  # a file system without locks
                lock(file)
        yield


@contextlib.contextmanager
def exclusive(run_dir: Path) -> Iterator[None]:
    """Only one process may train in a run directory. The system drops the lock with the process, however it ends. A
    directory that is made here goes again where what follows fails before it holds more than settings.

    Raises UserError where another one does, where it cannot be written to, or holds a link that leads out of it.
    """
    trust.check_folder(run_dir)
    new_folders = [folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]
    with _locked(run_dir):
        try:
            yield
        except BaseException:
            with contextlib.suppress(OSError):
                if new_folders and NOTHING_YET.issuperset(os.listdir(run_dir)):
                    checkpoint.discard(run_dir, "|".join(map(re.escape, NOTHING_YET)))
                    for folder in new_folders[1:]:
                        folder.rmdir()  # where it is empty
            raise


def _locked(run_dir: Path) -> IO[Any]:
    """The lock of a run directory, held until it is closed."""
    path = run_dir / ".lock"
    attempts = 0
    while True:
        attempts += 1
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = trust.open_to_write(path, "a")
        except OSError as error:
            if isinstance(error, FileNotFoundError) and attempts < ATTEMPTS:
                continue  # another process has just been refused, and removed the folder
            raise UserError(
                f"cannot write to the run directory {run_dir}: {error.strerror}; choose another with runs_dir="
            ) from None
        try:
            lock(file, wait=False)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                file.close()
                raise UserError(
                    f"another process is training in {run_dir}; wait for it, or choose another name="
                ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # the same


class TemporaryFolder:
    """A new folder PREFIX... in `parent`, which belongs to this process. What a killed process left under that prefix
    is removed first: nobody else would, and in memory it would stay until the machine is started anew."""

    def __init__(self, prefix: str, parent: Path) -> None:
        """Raises OSError."""
        user = os.getuid() if hasattr(os, "getuid") else 0  # on Windows all files are user 0's
        for owned_file in glob.glob(f"{glob.escape(str(parent / prefix))}*/{OWNED}"):
            folder = os.path.dirname(owned_file)
            with contextlib.suppress(OSError, UserError):
                info = os.lstat(folder)
                if not stat.S_ISDIR(info.st_mode) or info.st_uid != user:  # a link, or another user's in /tmp
                    continue
                with trust.open_to_write(owned_file, "a") as file:
                    lock(file, wait=False)
                    shutil.rmtree(folder, ignore_errors=True)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            self._lock = trust.open_to_write(self.path / OWNED, "a")  # held until `close`, or the end of this process
            with contextlib.suppress(OSError):  # a file system without locks: nobody removes it there
                lock(self._lock)
            if os.path.exists(self.path / OWNED):  # not taken for an abandoned one before it was locked
                return
            self._lock.close()

    def close(self) -> None:
        """Remove it with what it holds."""
        if os.name == "nt":  # where an open file stays
            self._lock.close()
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
