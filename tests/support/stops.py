"""Play that is stopped, as by Ctrl-C."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.turns import Turn


def play_stops(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which play is about to be stopped, once at each; none at first."""
    step, moments = Play.step, list[int]()

    def stopping(self: Play, actions: np.ndarray) -> Turn:
        if self.t in moments:
            moments.remove(self.t)
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, actions)

    monkeypatch.setattr(Play, "step", stopping)
    return moments
