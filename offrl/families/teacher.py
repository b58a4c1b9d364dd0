"""Sequence models that learn from trained values: which run they come from, and what it says of every row of the data."""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Algorithm
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError
from offrl.settings.field import setting
from offrl.training import stages as parts

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

CHUNK = 16_384  # rows whose values are computed at once
MOST_STEPS = 1_000_000  # of values that are trained first: what is published, however long the run that takes them


@dataclass
class ValuedSettings:
    """Where values come from."""

    values: str = setting("", "a trained run whose values are used; empty: one is trained first", place=True)
    values_id: str = setting("", "which one that is; filled in")
    values_settings: dict[str, Any] = setting({}, "its algorithm's settings; filled in")
    values_steps: int | None = setting(
        None,
        "updates of the run that is trained first; null: in the published proportion to this run's (vadt: 10 times as many, qdt: 5, "
        "gadt: 1), but more than 1,000,000 only where this run has more",
        low=1,
        place=True,
    )


class Valued(Algorithm):
    """Base of what takes the values of another run, trained with the same data and normalisation. One such run serves all seeds."""

    values_ratio: ClassVar[int] = 1  # updates of the values for each of this algorithm's, as published

    def __init__(self, config: Any, spec: DataSpec) -> None:
        self.teacher(config)  # read here, for what the one run of values is trained with cannot be in a grid (`replicas.structural`)
        super().__init__(config, spec)

    @classmethod
    @abstractmethod
    def teacher(cls, config: Any) -> Any:
        """The settings of the algorithm that is trained where no run is named."""

    @classmethod
    def prerequisites(cls, config: TrainConfig, dataset: Dataset) -> TrainConfig:
        """Train the values where no run is named, and note which ones they are."""
        c, path = config.algo, config.algo.values
        if not path:
            teacher = cls.teacher(c)
            steps = c.values_steps or max(config.steps, min(cls.values_ratio * config.steps, MOST_STEPS))
            path = str(parts.train_first(config, dataset, teacher, steps, f"values-{teacher.name}", "values"))
        part = parts.named(path, dataset, "values")
        cls.accept(part)
        algo = dataclasses.replace(c, values=path, values_id=part.identity, values_settings=part.settings)
        return dataclasses.replace(config, algo=algo)

    @classmethod
    def accept(cls, part: parts.Part) -> None:
        """Raises UserError for a run that has not what is needed."""
        if not part.algorithm.traits.critic_modules:
            raise UserError(f"algo.values: {part.algorithm.config.name} has no values; use a run of {cls.suitable}")

    suitable = "an algorithm with critics"

    @property
    def part(self) -> parts.Part:
        """The run with the values."""
        return parts.load(self.config.values, self.spec, "values")


@torch.no_grad()
def q_of_data(part: parts.Part, dataset: Dataset) -> Tensor:
    """Q(s, a) of every row, [R] float32 on the CPU, in training units."""
    observations, actions = _rows(dataset, "observations"), dataset.columns["actions"].cpu()
    return torch.cat([_value(part, o, a) for o, a in zip(observations.split(CHUNK), actions.split(CHUNK), strict=True)])


@torch.no_grad()
def v_of_policy(part: parts.Part, observations: Tensor, samples: int) -> Tensor:
    """The mean Q(s, a) of `samples` actions of the run's policy at observations [R, O], [R] float32."""
    found, actor = [], part.algorithm.actor(part.state)
    for i, some in enumerate(observations.split(CHUNK)):
        keys = rng.split(rng.fold_in(part.state.key, i), samples)
        acts = [actor.act(None, some, key, explore=True)[0] for key in keys]
        found.append(torch.stack([_value(part, some, a) for a in acts]).mean(0))
    return torch.cat(found)


def _value(part: parts.Part, observations: Tensor, actions: Tensor) -> Tensor:
    found = part.algorithm.q_value(part.state, observations, actions)
    assert found is not None
    return found.float()


def _rows(dataset: Dataset, column: str) -> Tensor:
    return dataset.columns[column].cpu().reshape(len(dataset), -1).float()
