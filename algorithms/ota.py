"""OTA: "Option-aware Temporally Abstracted Value for Offline Goal-Conditioned RL" (Ahn et al., 2025, arXiv 2505.12737)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offrl.algorithm import Metrics, TrainState
from offrl.data.samplers.goals import OPTION_GOALS, OPTION_STATES, OPTION_SUCCESSES
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.families.hierarchical import LevelSettings, TwoLevels
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class OTAConfig(LevelSettings):
    """Settings of OTA."""

    name: str = "ota"
    option_steps: int = setting(5, "n: the high level's values look so many steps ahead at once (longer mazes: more)", low=1)


@register("algo", "ota")
class OTA(TwoLevels):
    """HIQL whose high level has values of its own, that of options of n steps: one reward of -1 and one discount for each of them.

    A goal n times as far is then as far as before, so the order of far states is less blurred and the high level's advantage has its sign
    wrong less often.
    """

    Config = OTAConfig
    heads: ClassVar[tuple[str, ...]] = ("low", "high")

    def sampler(self) -> Sampler:
        return dataclasses.replace(super().sampler(), option_steps=self.config.option_steps)  # type: ignore[type-var]

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        loss, metrics = super().value_loss(value, state, batch)
        after, goals, successes = batch[OPTION_STATES], batch[OPTION_GOALS], batch[OPTION_SUCCESSES]
        high, v = self.objective(value, state, "high", batch["observations"], after, goals, successes)
        return loss + high, {**metrics, "value/high_loss": high, "value/high_v": v.mean()}
