"""Signal handlers that are put back."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def handled(handler: Callable[[int, object], None], *numbers: int) -> Iterator[None]:
    """Call `handler` at these signals, and put the old handlers back at the end. Outside the main thread, where Python handles no signals,
    nothing is changed."""
    try:
        old = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)
