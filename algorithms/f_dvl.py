"""f-DVL: "Dual RL: Unification and New Methods for Reinforcement and Imitation Learning" (Sikchi et al., 2023, arXiv
2302.08560).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl import losses
from offrl.algorithm import Batch, Loss, Params, TrainState
from offrl.families import in_sample
from offrl.families.in_sample import SteepValue, SteepValueSettings
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(batch_size=1024, random_actions=1)
class FDVLConfig(SteepValueSettings):
    """Settings of f-DVL; the defaults are the authors' for D4RL's locomotion tasks, except `greediness`."""

    name: str = "f_dvl"
    divergence: str = setting(
        "chi_square",
        "of the policy's visits from the data's: chi_square, total_variation, or reverse_kl, whose loss is XQL's",
        choices=("chi_square", "total_variation", "reverse_kl"),
    )
    gumbel_temperature: float = setting(
        2.0,
        "reverse_kl: XQL's beta: V is beta log E[exp(Q / beta)], nearer to the largest Q of the data the smaller it is",
        low=1e-3,
    )
    gumbel_clip: float = setting(5.0, "largest (Q - V) / gumbel_temperature in the exponent", low=0.0)
    greediness: float = setting(
        0.8,
        "lambda of chi_square and total_variation: nearer to 1, V is nearer to the largest Q (the latter needs more "
        "than 0.5)",
        low=0.0,
        high=1.0,
    )


@register("algo", "f_dvl")
class FDVL(SteepValue[FDVLConfig]):
    """V minimises lambda f*(Q - V) + (1 - lambda) (V - Q) over the data's actions, f* the conjugate of a divergence,
    cut at 0.
    """

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Tensor) -> Loss:
        """E [lambda f*(Q - V) + (1 - lambda) (V - Q)], or for the reverse KL divergence XQL's Gumbel regression."""
        v = self.value(value, batch["observations"]).mean
        rows = self.value_error(q - v)
        return rows.mean(), in_sample.value_metrics(rows, q, v)

    def value_error(self, difference: Tensor) -> Tensor:
        """The loss of each row, [B], of Q - V [B]."""
        c = self.config
        if c.divergence == "reverse_kl":
            return losses.gumbel(difference, c.gumbel_temperature, c.gumbel_clip)
        dual = losses.chi_square_dual if c.divergence == "chi_square" else losses.total_variation_dual
        return dual(difference, c.greediness)
