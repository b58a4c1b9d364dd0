"""The updates of a run: how many are done, at which steps something is due, and where it ends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from offrl.settings.train import TrainConfig


@dataclass
class RunClock:
    """Counts in updates. `end` is `steps`, or less where a stopping rule or a callback ended the run."""

    step: int
    end: int
    steps: int
    log_every: int
    eval_every: int
    save_every: int

    @classmethod
    def of(cls, config: TrainConfig, step: int) -> RunClock:
        """The clock of a run with these settings that goes on from `step`."""
        eval_interval = config.eval.every
        eval_every = math.ceil(config.steps / 10) if eval_interval is None else eval_interval or config.steps
        save_every = config.checkpoint.every or min(eval_every, math.ceil(config.steps / 20))
        return cls(step, config.steps, config.steps, config.log_every, eval_every, save_every)

    @property
    def running(self) -> bool:
        """True while there are updates to make."""
        return self.step < self.end

    def next_stop(self) -> int:
        """The next step at which metrics, scores or a checkpoint are due."""
        intervals = (self.log_every, self.eval_every, self.save_every)
        return min(self.steps, *((self.step // interval + 1) * interval for interval in intervals))

    def due(self, interval: int) -> bool:
        """True at a multiple of `interval` updates, and at the end."""
        return self.step % interval == 0 or self.step == self.end
