"""Extreme Q-learning: "Extreme Q-Learning: MaxEnt RL without Entropy" (Garg et al., 2023, arXiv 2301.02328)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl import losses
from offrl.backbones import DualQ, DualSettings
from offrl.registry import register


@dataclass
class XQLConfig(DualSettings):
    """Settings of XQL; the defaults are the authors' "consistent" ones for D4RL's locomotion tasks."""

    name: str = "xql"


@register("algo", "xql")
class XQL(DualQ):
    """V is the soft maximum beta log E[exp(Q / beta)] over the data's actions, by Gumbel regression."""

    Config = XQLConfig

    def value_error(self, difference: Tensor) -> Tensor:
        return losses.gumbel(difference, self.config.gumbel_temperature, self.config.gumbel_clip)
