"""Handlers are put back, and what is ignored stays so."""

from __future__ import annotations

import signal

import pytest

from offrl.system.signals import handled


@pytest.mark.usefixtures("heeds_signals")
def test_a_handler_is_put_back() -> None:
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    with handled(lambda number, frame: seen.append(number), signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGINT, signal.SIGTERM] and signal.getsignal(signal.SIGINT) is before


@pytest.mark.usefixtures("heeds_signals")
def test_an_ignored_ctrl_c_stays_ignored() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a script's background
    with handled(lambda number, frame: seen.append(number), signal.SIGINT, signal.SIGTERM):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGTERM] and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
