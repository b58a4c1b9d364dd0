"""Signal handlers that are put back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handled(handler: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """Call `handler` at these signals, and put the old handlers back at the end. Outside the main thread, where Python
    handles no signals, nothing is changed; and a Ctrl-C that is ignored stays so, as a shell wants it of what a script
    starts in the background."""
    try:
        old = {number: signal.signal(number, handler) for number in numbers if heeded(number)}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the work inside as Ctrl-C does: by KeyboardInterrupt."""

    def handler(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handled(handler, signal.SIGTERM):
        yield


def heeded(number: int) -> bool:
    """True where a signal is to be handled: not where it is ignored, or handled by code that is not Python's."""
    return signal.getsignal(number) not in (signal.SIG_IGN, None)


class StopSignals:
    """Ctrl-C and SIGTERM since training began: the first asks to save and stop, a second ends the process at once."""

    def __init__(self) -> None:
        self.count = 0

    @contextlib.contextmanager
    def handled(self, say: Callable[[str], None]) -> Iterator[None]:
        """Count signals meanwhile. say: tells the user."""

        def handler(number: int, frame: object) -> None:
            self.count += 1
            if self.count > 1:
                os._exit(128 + number)
            say("stopping: saving a checkpoint (once more quits without)")

        with handled(handler, signal.SIGINT, signal.SIGTERM):
            yield
