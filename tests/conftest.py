"""Nothing that a test loads or compiles is left in the user's cache; a process takes one thread, for several of them run at a time; and
`heeds_signals`, for tests that send some."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; more would fight over the cores
os.environ["OFFRL_CACHE"] = tempfile.mkdtemp(prefix="offrl-tests-")


@pytest.fixture
def heeds_signals() -> Iterator[None]:
    """This process, and those it starts meanwhile, take Ctrl-C and SIGTERM as they would in a terminal. A shell without job control starts
    what it runs in the background (`pytest &` in a script, `nohup`) with SIGINT ignored, and children inherit that."""
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    old = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
