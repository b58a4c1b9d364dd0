"""Extreme Q-learning: "Extreme Q-Learning: MaxEnt RL without Entropy" (Garg et al., 2023, arXiv 2301.02328)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl import losses
from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.families import in_sample
from offrl.families.critics import ConstraintSettings
from offrl.families.in_sample import SteepValue, SteepValueSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class XQLConfig(SteepValueSettings, ConstraintSettings):
    """Settings of XQL; the defaults are the authors' "consistent" ones for D4RL's locomotion tasks."""

    name: str = "xql"
    gumbel_temperature: float = setting(
        2.0,
        "beta: V is beta log E[exp(Q / beta)], nearer to the largest Q of the data the smaller it is",
        low=1e-3,
    )
    gumbel_clip: float = setting(7.0, "largest (Q - V) / gumbel_temperature in the exponent", low=0.0)
    gumbel_rescaled: bool = setting(
        True,
        "divide V's loss by its largest exponential, as the authors' code does; false: the loss as the paper writes it",
    )


@register("algo", "xql")
class XQL(SteepValue[XQLConfig]):
    """V is the soft maximum beta log E[exp(Q / beta)] over the data's actions, by Gumbel regression."""

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Tensor) -> Loss:
        """E [exp(z) - z - 1], z = (Q - V) / beta (equation 11)."""
        c, v = self.config, self.value(value, batch["observations"]).mean
        rows = losses.gumbel(q - v, c.gumbel_temperature, c.gumbel_clip, rescaled=c.gumbel_rescaled)
        return rows.mean(), in_sample.value_metrics(rows, q, v)
