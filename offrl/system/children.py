"""Child processes that end with the process that started them, however it ended: by an error, by SIGKILL, while they
still start.

A child holds the reading end of a pipe whose writing end nobody but the parent has: its end of file means that the
parent is gone. A thread of the child waits for that from the first line on, before anything heavy is imported. On Linux
the kernel kills the child besides, which reaches one that is deep in a library, where no other thread of Python runs;
it does so when the parent's *thread* ends that made the child, so all children are made by a thread that lives as long
as the process. A compiler that torch starts knows none of this, and finishes its file. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PATIENCE = 1.0  # seconds between two looks for the parent, where something else holds its end of the pipe open
GRACE = 2.0  # seconds to save in, for a job that another system started
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
_START = (
    "import sys; sys.path[:] = sys.argv[4 + int(sys.argv[3]):]; from offrl.system import children; "
    "children.live_with_parent(int(sys.argv[1])); children.call(sys.argv[2], sys.argv[4 : 4 + int(sys.argv[3])])"
)


class _Parent:
    """A process's own side: the pipe whose reading end its children hold, and the thread that makes them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.read, self.write = os.pipe()  # not inherited, but for the reading end, by children of ours
        self.maker = ThreadPoolExecutor(1, "offrl-children")


_parent: _Parent | None = None
_lock = threading.Lock()
_watching = False


def start(
    target: str, arguments: Sequence[str], *, pass_fds: Sequence[int] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """A fresh interpreter with our module path that calls `target`, "module:function", with `arguments`, and ends at
    once when this process has ended. options: of `subprocess.Popen`. Raises OSError."""
    if os.name == "nt":  # which hands no open files to a child
        raise OSError(errno.ENOSYS, "Windows hands no pipes to child processes")
    parent = _own_side()
    paths = [p for p in sys.path if isinstance(p, str)]
    command = [
        sys.executable or "python3",
        "-c",
        _START,
        str(parent.read),
        target,
        str(len(arguments)),
        *arguments,
        *paths,
    ]
    # Ctrl-C in a terminal reaches a whole session
    options = {"stdin": subprocess.DEVNULL, "start_new_session": True, **options}

    def make() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, pass_fds=[parent.read, *pass_fds], **options)

    try:
        return parent.maker.submit(make).result()
    except RuntimeError as error:  # the interpreter is shutting down
        raise OSError(str(error)) from None


def call(target: str, arguments: Sequence[str]) -> None:
    """In a child: call "module:function"."""
    import importlib

    module, function = target.split(":")
    getattr(importlib.import_module(module), function)(*arguments)


def _own_side() -> _Parent:
    global _parent
    with _lock:
        if _parent is None or _parent.pid != os.getpid():  # a fork has neither the thread nor a pipe of its own
            _parent = _Parent()
        return _parent


def address() -> list[Any]:
    """This process as others of the machine know it: host, space of process numbers, number."""
    return [socket.gethostname(), _numbers(), os.getpid()]


def _numbers() -> str:
    """The space of this process's number: containers of one host have their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def live_with_parent(pipe: int | None = None, other: Sequence[Any] | None = None) -> None:
    """End this process when its parent is gone. pipe: the reading end that `start` handed over. Without one, in a job
    that another system started, the parent's number is looked at, and the process gets SIGTERM and GRACE seconds to
    save in. other: the `address` of a process to end with besides, where it is of this machine. Once is enough: later
    calls do nothing."""
    global _watching
    with _lock:
        if _watching:
            return
        _watching = True
    parent = os.getppid()
    number = int(other[2]) if other and list(other[:2]) == address()[:2] else None
    if sys.platform == "linux" and pipe is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if pipe is not None and _over(pipe, 0.0):  # before the kernel was told
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent and (number is None or _alive(number)):
            if pipe is None:
                time.sleep(PATIENCE)
            elif _over(pipe, PATIENCE):
                break
        if pipe is None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, name="offrl-parent", daemon=True).start()


def _alive(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _over(pipe: int, seconds: float) -> bool:
    """True where the pipe is at its end, or comes to it within so many seconds. Nobody writes into it."""
    look = select.poll()
    look.register(pipe, select.POLLIN)
    return bool(look.poll(1000 * seconds))
