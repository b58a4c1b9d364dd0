"""Batches of steps of imagined episodes, and of the data's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import Sequences, SequenceSampler
from offrl.data.samplers.transitions import Batch
from offrl.world_models import imagined

if TYPE_CHECKING:
    from offrl.algorithms.mbrcsl.algorithm import MBRCSL


@dataclass(frozen=True)
class RolloutSource:
    """Imagined episodes, and the data where they are drawn from too."""

    imagined: Sequences
    real: Sequences | None


@dataclass(frozen=True)
class RolloutSampler:
    """Steps of imagined episodes, and `real_share` of the data's."""

    algorithm: MBRCSL
    inner: SequenceSampler = SequenceSampler(1)  # noqa: RUF009 - frozen

    def prepare(self, dataset: Dataset) -> RolloutSource:
        c = self.algorithm.config
        episodes = imagined.read(c.imagined, dataset.spec)[0].to(dataset.device)
        return RolloutSource(self.inner.prepare(episodes), self.inner.prepare(dataset) if c.real_share else None)

    def __call__(self, source: RolloutSource, key: Tensor, batch_size: int) -> Batch:
        if source.real is None:
            return self.inner(source.imagined, key, batch_size)
        real_key, imagined_key = rng.split(key)
        count = int(batch_size * self.algorithm.config.real_share)
        batches = (
            self.inner(source.real, real_key, count),
            self.inner(source.imagined, imagined_key, batch_size - count),
        )
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
