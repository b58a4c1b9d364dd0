"""A file that HDF5 writes to, which keeps a full disk from it.

HDF5 does not survive a write that fails: it cannot close its objects any more, prints a traceback for each, and may
crash the process at its end. So it writes through this object, which remembers the first error, takes what still comes
into memory, and lets the caller stop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_at(handle: int, data: memoryview, position: int) -> int:
    """Write to an open file at a place; how many bytes were written."""
    os.lseek(handle, position, os.SEEK_SET)
    return os.write(handle, data)


class Sink:
    """A file-like object for `h5py.File(sink, "w")`. `error` is the first OSError of a write; `check` raises it."""

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
        self.at = self.size = 0
        self.error: OSError | None = None
        self._signals: list[int] = []
        self._handlers: dict[int, Any] = {}
        self._late: list[tuple[int, bytes]] = []  # what was written after the error

    def check(self) -> None:
        """Raise the error of an earlier write, or what a signal that came meanwhile wants to raise."""
        while self._signals:
            number = self._signals.pop()
            self._handlers[number](number, None)
        if self.error is not None:
            raise self.error

    @contextlib.contextmanager
    def signals_later(self) -> Iterator[None]:
        """Hold signals back until `check`; one that is left at the end is handled then. Only the main thread gets
        any.
        """
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(old := signal.getsignal(number)):
                    self._handlers[number] = old
                    signal.signal(number, lambda n, frame: self._signals.append(n))
        except ValueError:
            self._handlers.clear()
        try:
            yield
        finally:
            for signum, old in self._handlers.items():
                signal.signal(signum, old)
            for signum in self._signals:
                signal.raise_signal(signum)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        position, length, offset = self.at, len(view), 0
        while self.error is None and offset < length:
            try:
                offset += write_at(self.handle, view[offset:], position + offset)
            except OSError as error:
                self.error = error
        if self.error is not None:
            self._late.append((position, bytes(view)))
        self.at += length
        self.size = max(self.size, self.at)
        return length

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = bytes(len(view))
        filled, length = 0, min(len(view), max(0, self.size - self.at))
        os.lseek(self.handle, self.at, os.SEEK_SET)
        while filled < length and (stored := os.read(self.handle, length - filled)):
            view[filled : filled + len(stored)] = stored
            filled += len(stored)
        for position, data in self._late:
            first, last = max(position, self.at), min(position + len(data), self.at + len(view))
            if first < last:
                view[first - self.at : last - self.at] = data[first - position : last - position]
        self.at += length
        return length

    def read(self, size: int = -1) -> bytes:
        buffer = bytearray(max(0, self.size - self.at) if size < 0 else size)
        return bytes(buffer[: self.readinto(buffer)])

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def truncate(self, size: int | None = None) -> int:
        self.size = self.at if size is None else size
        if self.error is None:
            try:
                os.ftruncate(self.handle, self.size)
            except OSError as error:
                self.error = error
        return self.size

    def flush(self) -> None: ...

    def close(self) -> None:
        os.close(self.handle)


@contextlib.contextmanager
def new_hdf5(path: Path) -> Iterator[tuple[Any, Sink]]:
    """A new HDF5 file and its sink: call `sink.check` after each larger write.

    Raises OSError when the file could not be written whole. Ctrl-C and SIGTERM wait for the next `check`, or for the
    end: an exception that a signal raised inside `Sink.write` would come up in the middle of HDF5.
    """
    import h5py

    sink = Sink(path)
    try:
        with sink.signals_later():
            with h5py.File(sink, "w") as file:
                yield file, sink
            sink.check()
    finally:
        sink.close()
