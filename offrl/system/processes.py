"""Worker processes of our own: fresh interpreters at the other end of a pipe, and large tensors that they share.

Nothing of the caller's script is run again in them, so scripts need no `if __name__ == "__main__"`; they take no Ctrl-C
from the terminal; and they end with their parent (`offrl.system.children`) or when their pipe closes. What goes through
the pipe is pickled: it comes from ourselves, never from a file.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import queue
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.system import children
from offrl.system.locks import TemporaryFolder
from offrl.system.plugins.loading import load_named

SHARED_FROM = 1 << 16  # bytes; smaller tensors go through the pipe


def launch(target: str) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that calls `target`, "module:function", with the number of its end of the pipe; returns our end.
    Raises OSError.
    """
    parent, child = get_context("spawn").Pipe()
    number = child.fileno()
    try:
        process = children.start(
            target, [str(number)], pass_fds=[number], env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        )
    except OSError:
        parent.close()
        raise
    finally:
        child.close()
    return process, parent


def send(link: Connection, message: Any) -> None:
    """Send any picklable object. Raises OSError where nobody listens any more. (`Connection.send` would put tensors
    into shared memory.)
    """
    link.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(link: Connection) -> Any:
    """The next message. Raises EOFError or OSError when the other end is gone."""
    return pickle.loads(link.recv_bytes())


def attend(link: Connection, urgent: Callable[[Any], bool] = lambda message: False) -> queue.SimpleQueue[Any]:
    """In a worker: the messages that arrive, read by a thread that ends the process when the pipe closes. `urgent`
    messages, for which it returns True, are dealt with at once and not queued."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    load_named()  # what is unpickled, and environments, may be of plugins
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = receive(link)
                if not urgent(message):
                    inbox.put(message)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    return inbox


def ending(process: subprocess.Popen[bytes]) -> str:
    """The end of a process whose pipe closed, in words: "ended with status 3", "was killed by SIGKILL (...)"."""
    try:
        status = process.wait(2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}" + (" (the system does that when memory runs out)" if name == "SIGKILL" else "")


Blob = tuple[str, bytes]  # the folder of `Shared`, and the pickle of all but its large tensors


class Shared:
    """An object whose large tensors lie in files in memory, so that all processes of the machine read the same copy."""

    def __init__(self, thing: Any) -> None:
        """Raises OSError where there is no room, and whatever pickling raises."""
        buffer = io.BytesIO()
        pickler = _Pickler(buffer, pickle.HIGHEST_PROTOCOL)
        pickler.tensors = []
        pickler.dump(thing)
        memory = Path("/dev/shm")
        nbytes = sum(t.nbytes for t in pickler.tensors)
        parent = memory if memory.is_dir() and shutil.disk_usage(memory).free > 2 * nbytes else None
        self._folder = TemporaryFolder("offrl-", parent or Path(tempfile.gettempdir()))
        self.folder = self._folder.path
        self.blob = (str(self.folder), buffer.getvalue())
        try:
            for number, tensor in enumerate(pickler.tensors):
                content = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
                content.numpy().tofile(self.folder / f"tensor-{number}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the files. Processes that mapped them keep what they mapped."""
        self._folder.close()


class _Pickler(pickle.Pickler):
    """Leaves large tensors out, which are the files `tensor-0`, `tensor-1`, ... then."""

    tensors: list[torch.Tensor]

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype, tuple[int, ...]] | None:
        if type(obj) is not torch.Tensor or obj.nbytes < SHARED_FROM:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1, obj.dtype, tuple(obj.shape)


def attach(blob: Blob) -> Any:
    """The object behind `Shared.blob`, in any process. Its large tensors must only be read."""
    folder, content = blob

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> torch.Tensor:
            number, dtype, shape = pid
            path = f"{folder}/tensor-{number}"
            return torch.from_file(path, shared=False, size=int(np.prod(shape)), dtype=dtype).reshape(shape)

    return Unpickler(io.BytesIO(content)).load()
