"""Sequence models that learn from trained values: which run they come from, and what it says of every row of the data."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Algorithm
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.pretrained import Pretrained, Requirement
from offrl.settings.field import setting

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

CHUNK = 16_384  # rows whose values are computed at once
MOST_STEPS = 1_000_000  # of values that are trained first: what is published, however long the run that takes them


@dataclass
class ValuedSettings:
    """Where values come from."""

    values: str = setting("", "a trained run whose values are used; empty: one is trained first", place=True)
    values_id: str = setting("", "which one that is", filled=True)
    values_settings: dict[str, Any] = setting({}, "its algorithm's settings", filled=True)
    values_steps: int | None = setting(
        None,
        "updates of the run that is trained first; null: in the published proportion to this run's (vadt: 10 times as many, qdt: 5, "
        "gadt: 1), but more than 1,000,000 only where this run has more",
        low=1,
        place=True,
    )


class Valued(Algorithm):
    """Base of what takes the values of another run, trained with the same data and normalisation. One such run serves all seeds."""

    teacher: ClassVar[str] = ""  # the algorithm that is trained where no run is named
    values_ratio: ClassVar[int] = 1  # updates of the values for each of this algorithm's, as published

    @classmethod
    @abstractmethod
    def teacher_settings(cls, config: Any) -> dict[str, Any]:
        """The settings of `teacher`."""

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        steps = c.values_steps or max(config.steps, min(cls.values_ratio * config.steps, MOST_STEPS))
        values = Requirement(
            cls.teacher, cls.teacher_settings(c), steps=steps, label=f"values-{cls.teacher}", check=cls.check_values, of_rewards=True
        )
        return {"values": values}

    @classmethod
    def check_values(cls, run: Pretrained) -> None:
        """Raises UserError for a run that has not what is needed."""
        if not run.algorithm.traits.critic_modules:
            raise UserError(f"algo.values: {run.algorithm.config.name} has no values; use a run of {cls.suitable}")

    suitable = "an algorithm with critics"


@torch.no_grad()
def q_of_data(run: Pretrained, dataset: Dataset) -> Tensor:
    """Q(s, a) of every row, [R] float32 on the CPU, in training units."""
    observations, actions = _rows(dataset, "observations"), dataset.columns["actions"].cpu()
    return torch.cat([_value(run, o, a) for o, a in zip(observations.split(CHUNK), actions.split(CHUNK), strict=True)])


@torch.no_grad()
def v_of_policy(run: Pretrained, observations: Tensor, samples: int) -> Tensor:
    """The mean Q(s, a) of `samples` actions of the run's policy at observations [R, O], [R] float32."""
    values, actor = [], run.algorithm.actor(run.state)
    for i, some in enumerate(observations.split(CHUNK)):
        keys = rng.split(rng.fold_in(run.state.key, i), samples)
        acts = [actor.act(None, some, key, explore=True)[0] for key in keys]
        values.append(torch.stack([_value(run, some, a) for a in acts]).mean(0))
    return torch.cat(values)


def _value(run: Pretrained, observations: Tensor, actions: Tensor) -> Tensor:
    value = run.algorithm.q_value(run.state, observations, actions)
    assert value is not None
    return value.float()


def _rows(dataset: Dataset, column: str) -> Tensor:
    return dataset.columns[column].cpu().reshape(len(dataset), -1).float()
