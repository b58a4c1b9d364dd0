"""MOPO: "MOPO: Model-based Offline Policy Optimization" (Yu et al., 2020, arXiv 2005.13239)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl.families.sac import SoftActorCritic
from offrl.registry import register
from offrl.settings.field import defaults
from offrl.world_models.model import Outcome
from offrl.world_models.model_rollouts import (
    LearnsInModel,
    ModelBasedSettings,
    ModelSource,
)


@dataclass
@defaults(max_entropy_weight=1.0, penalty=0.5)
class MOPOConfig(ModelBasedSettings):
    """Settings of MOPO; the defaults are OfflineRL-Kit's for D4RL's HalfCheetah."""

    name: str = "mopo"


@register("algo", "mopo")
class MOPO(LearnsInModel[MOPOConfig], SoftActorCritic[MOPOConfig]):
    """SAC on the data's transitions and on rollouts in a model, whose rewards are penalised where the model is
    uncertain (algorithm 1).

    The losses are SAC's; rewards stay as they were when they were imagined.
    """

    def judged(self, source: ModelSource, outcome: Outcome, uncertainty: Tensor) -> tuple[Tensor, Tensor]:
        """r - lambda u(s, a), the uncertainty-penalised reward of section 4.2, and the model's own terminations."""
        return outcome.rewards - self.config.penalty * uncertainty, outcome.terminations
