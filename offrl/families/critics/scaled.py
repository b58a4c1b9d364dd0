"""Rewards that are scaled to the range of the critics' bins, and networks of blocks of one width: what soft
actor-critics of large networks have in common (SimbaV2, BRC).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from offrl.algorithm import Batch, Dataset, Grid, TrainState
from offrl.errors import UserError
from offrl.families.critics.with_critic import WithCritic

LAYERS = ("layer_norm", "residual", "critic_dropout", "spectral_norm")  # settings of layers that blocks do not have


def check_layers(config: Any) -> None:
    """Raise UserError for settings of layers that networks of blocks do not have."""
    if changed := [name for name in LAYERS if getattr(config, name) != getattr(type(config), name)]:
        names = ", ".join(f"algo.{n}" for n in changed)
        raise UserError(f"{config.name} has layers of its own: leave {names} as it is")


def blocks(widths: list[int]) -> tuple[int, int]:
    """The width of the blocks and their number. Raises UserError for widths that differ, and for none."""
    if len(set(widths)) != 1:
        raise UserError(f"algo.hidden and algo.critic_hidden are blocks of one width, such as [512,512], not {widths}")
    return widths[0], len(widths)


def largest(limits: Iterable[float]) -> float:
    """The largest size of a range's two ends."""
    return max(abs(edge) for edge in limits)


class ScaledRewards(WithCritic):
    """Mixin of algorithms that divide rewards, so that values fit into `value_range`."""

    fitted: ClassVar[str]  # the setting that decides by what, and that `fit` finds where it is null
    reduction: ClassVar[str] = "min"  # of the critics' values to one: see `Critic.reduce_ensemble`

    @classmethod
    @abstractmethod
    def fit(cls, config: Any, dataset: Dataset, discount: float) -> float:
        """The setting's value for the data, above or at 0."""

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        """`config` with the setting `fitted` from the data, where it is null: to four digits, and the largest of a
        grid's discounts. Raises UserError without a range.
        """
        if not config.value_range:
            raise UserError(
                f"algo.value_range=[]: {config.name} scales rewards to a range; leave it as it is, or give another"
            )
        if getattr(config, cls.fitted) is not None:
            return config
        discounts = (grid or {}).get("discount", [config.discount])
        return replace(
            config, **{cls.fitted: max(float(f"{cls.fit(config, dataset, float(x)):.4g}") for x in discounts)}
        )

    @abstractmethod
    def divisor(self, state: TrainState, observations: Any) -> float | Tensor:
        """What rewards are divided by, above 0: a number, or that of each of these observations, [B]."""

    @staticmethod
    def divided(batch: Batch, divisor: float | Tensor) -> Batch:
        """The batch with its rewards, those of each step of a window too, divided by a number or by those of its rows,
        [B].
        """
        # rows last, where the divisors are
        return batch | {
            name: (batch[name].transpose(0, -1) / divisor).transpose(0, -1)
            for name in ("rewards", "step_rewards")
            if name in batch
        }

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor | None:
        """The critics' value [B], in the rewards' own units."""
        values = self.critic.q(state.params["critic"], observations, actions)
        return self.critic.reduce_ensemble(values, self.reduction) * self.divisor(state, observations)
