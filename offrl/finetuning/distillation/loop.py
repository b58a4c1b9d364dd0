"""The loop of students: they act, their teachers say what they would have done, and that is imitated."""

from __future__ import annotations

from typing import Any

import numpy as np

from offrl.algorithm import TrainState
from offrl.data.fit import seen_besides
from offrl.finetuning.distillation.teacher import targets
from offrl.finetuning.off_policy.loop import TransitionLoop
from offrl.finetuning.play.turns import TEACHER_ACTIONS, Turn
from offrl.finetuning.replay.ring import Column


class DistillLoop(TransitionLoop):
    """Students of a run's policies. The environments are played in by the students from the first step on."""

    def _prepare(self, state: TrainState) -> None:
        assert self.start.teacher is not None
        self.teacher = self.start.teacher
        super()._prepare(state)
        self.batches.change = targets

    def _title(self) -> str:
        start, config, spec = self.start, self.config, self.start.spec
        assert start.parent is not None
        teachers = f"{self.teacher.policies[0].algorithm.config.name} of {start.parent['run']}"
        windows = f" in {more}" if (more := seen_besides(spec)) else ""
        return (
            f"{start.label} in {self.play.name} from fresh parameters, taught by policies of {teachers}, which see "
            f"{len(self.teacher.known)} numbers; students see {spec.observation_dim}{windows}: {self.many} x "
            f"{self.envs} environments, {self.steps:,} steps each, {config.utd:g} updates a step"
        )

    def _columns(self, sampler: Any) -> dict[str, Column]:
        columns = super()._columns(sampler)
        return columns | {TEACHER_ACTIONS: columns["actions"]}

    def _shown(self, observations: np.ndarray) -> np.ndarray:
        return observations[:, self.teacher.shown]

    def _told(self, turn: Turn) -> Turn:
        return self.teacher.turn(turn, self.t)
