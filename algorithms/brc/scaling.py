"""Settings of BRC, and how it scales rewards by the largest return so far, of several tasks by that of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.algorithm import Batch, Dataset, Grid, Params, TrainState, Tree
from offrl.data.value_range import LARGEST_RETURN, largest_return
from offrl.errors import UserError
from offrl.families.critics import ScaledRewards, largest
from offrl.families.multitask.numbers import of_numbers, one_hot, parts_of
from offrl.families.sac import SoftSettings
from offrl.settings.field import defaults, setting
from offrl.tasks.task import TaskPart

MASKS = "masks"  # of several tasks, [T, A]: the policy's parameter that says which actions each has


@dataclass
@defaults(
    hidden=[256],
    critic_hidden=[4096, 4096],
    entropy_weight=0.1,
    target_entropy_scale=0.5,
    value_range=[-10.0, 10.0],
    layer_norm_epsilon=1e-6,
    actor_value="mean",
)
class BRCConfig(SoftSettings):
    """Settings of BRC; the defaults are the authors' for one task. Each entry of `hidden` and `critic_hidden` is a
    block.
    """

    name: str = "brc"
    value_head: str = setting("c51", "critics of a distribution over value_bins", choices=("c51",))
    init: str = setting("orthogonal", "initial weights: orthogonal, with gain sqrt(2)", choices=("orthogonal",))
    weight_decay: float = setting(1e-4, "AdamW's, of the policy and the critics", low=0.0, structural=True)
    largest_return: float | None = setting(
        None,
        "the largest size of a return, by which rewards are scaled, until an episode in play has a larger one; null: "
        "found from the data",
        low=0.0,
    )
    largest_returns: list[float] = setting([], "that of each of several tasks", filled=True)


def check_discount(discount: float) -> None:
    """Raise UserError for a discount of 1."""
    if discount == 1.0:
        raise UserError(
            "algo.discount=1 leaves the entropy of an episode without a bound, by which brc scales rewards: take a "
            "smaller one"
        )


class ScaledByReturns(ScaledRewards):
    """Mixin of BRC: rewards are divided by what follows from the largest return so far."""

    fitted = "largest_return"

    @property
    def parts(self: Any) -> tuple[TaskPart, ...]:
        """The T tasks; () for data of one."""
        return parts_of(self.spec)

    @classmethod
    def fit_config(cls, config: BRCConfig, dataset: Dataset, grid: Grid = None) -> BRCConfig:
        """`config` with the largest return of the data, or of each task's."""
        parts, fitted, rewards = parts_of(dataset.spec), super().fit_config, dataset.columns["rewards"]
        if not parts or config.largest_return is not None:
            return fitted(config, dataset, grid)
        if config.largest_returns:
            return config
        chosen = one_hot(dataset.columns["observations"][:, -1], len(parts)).T
        each = [replace(dataset, columns={**dataset.columns, "rewards": torch.where(k, rewards, 0.0)}) for k in chosen]
        return replace(config, largest_returns=[fitted(config, data, grid).largest_return for data in each])

    @classmethod
    def fit(cls, config: BRCConfig, dataset: Dataset, discount: float) -> float:
        check_discount(discount)
        start, end = dataset.bounds()
        rewards, ends = (dataset.columns[name].cpu().numpy() for name in ("rewards", "terminations"))
        return largest_return(rewards, start, end, ~ends[end - 1].astype(bool), discount)

    def extra(self: Any, params: dict[str, Params]) -> Tree:
        """The largest size of a return so far, 0 where none is known; what rewards were last divided by: [] each, of
        several tasks [T].
        """
        c = self.config
        if self.parts and c.largest_return is None and c.largest_returns:
            size = torch.tensor(c.largest_returns)
        else:
            size = torch.full((len(self.parts),) if self.parts else (), float(c.largest_return or 0.0))
        return {LARGEST_RETURN: size, "divisor": self.divisor_for(size, c.entropy_weight, params["actor"])}

    def target_entropies(self: Any, actor: Params) -> float | Tensor:
        """The entropy that the policy is held at; of several tasks [T], each by the actions that it has."""
        c = self.config
        if not self.parts or c.target_entropy is not None:
            return self.target_entropy
        return -c.target_entropy_scale * actor[MASKS].sum(-1)

    def divisor_for(self: Any, size: Tensor, weight: float | Tensor, actor: Params) -> Tensor:
        """(max |G| + alpha |target entropy| / (1 - discount) / 2) / the end of `value_range`, like max |G|, `size`."""
        c, target = self.config, self.target_entropies(actor)
        return (size + weight * abs(target) / (1.0 - c.discount) / 2.0) / largest(c.value_range)

    def of_task(self: Any, values: Tensor, observations: Tensor) -> Tensor:
        """Those of values [T] of several tasks that belong to observations [B, O]: [B]; of one task [] as they are."""
        return of_numbers(values.unsqueeze(-1), observations[..., -1]).squeeze(-1) if self.parts else values

    def divisor(self: Any, state: TrainState, observations: Tensor) -> Tensor:
        return self.of_task(state.extra["divisor"], observations)

    def scaled(self: Any, state: TrainState, batch: Batch) -> tuple[TrainState, Batch]:
        """The state with the largest return that the batch tells of, and the batch with its rewards divided; as long as
        no return is known they are 0. Of several tasks each by itself, without the actions that they lack.
        """
        size, sizes = state.extra[LARGEST_RETURN], batch.get(LARGEST_RETURN)
        actor, observations = state.params["actor"], batch["observations"]
        if self.parts:
            numbers = observations[..., -1]
            batch = batch | {"actions": batch["actions"] * of_numbers(actor[MASKS], numbers)}
            if sizes is not None:
                sizes = torch.where(one_hot(numbers, len(size)), sizes.unsqueeze(-1), 0.0)
        if sizes is not None:
            size = torch.maximum(size, sizes.amax(0))
        divisor = self.divisor_for(size, self.weight(state), actor)
        state = state.with_extra(**{LARGEST_RETURN: size, "divisor": divisor})
        counted = self.of_task(size, observations) > 0.0
        return state, self.divided(batch, torch.where(counted, self.divisor(state, observations), np.inf))
