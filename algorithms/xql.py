"""Extreme Q-learning: "Extreme Q-Learning: MaxEnt RL without Entropy" (Garg et al., 2023, arXiv 2301.02328)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl import losses
from offrl.families.dual import DualQ, DualSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class XQLConfig(DualSettings):
    """Settings of XQL; the defaults are the authors' "consistent" ones for D4RL's locomotion tasks."""

    name: str = "xql"
    gumbel_rescaled: bool = setting(
        True, "divide V's loss by its largest exponential, as the authors' code does; false: the loss as the paper writes it"
    )


@register("algo", "xql")
class XQL(DualQ):
    """V is the soft maximum beta log E[exp(Q / beta)] over the data's actions, by Gumbel regression."""

    Config = XQLConfig

    def value_error(self, difference: Tensor) -> Tensor:
        c = self.config
        return losses.gumbel(difference, c.gumbel_temperature, c.gumbel_clip, rescaled=c.gumbel_rescaled)
