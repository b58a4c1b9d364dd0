"""Implicit Q-learning: "Offline Reinforcement Learning with Implicit Q-Learning" (Kostrikov et al., 2021, arXiv 2110.06169)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl import losses
from offrl.families.in_sample import InSampleQ, InSampleSettings
from offrl.nn import Bootstrap
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class IQLConfig(InSampleSettings):
    """Settings of IQL; the defaults are the authors' for D4RL's locomotion tasks."""

    name: str = "iql"
    expectile: float = setting(0.7, "0.5 values the data's policy, 1.0 the best action in the data", low=0.0, high=1.0)


@register("algo", "iql")
class IQL(InSampleQ):
    """V is an expectile of Q over the data's actions (equation 5)."""

    Config = IQLConfig

    def value_objective(self, logits: Tensor, q: Tensor, bootstrap: Bootstrap | None) -> Tensor:
        weight = losses.expectile_weight(q - self.head.mean(logits), self.config.expectile)
        return weight * self.head.loss(logits, q, bootstrap)
