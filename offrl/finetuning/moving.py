"""Statistics of observations that move with what is played, where there are no data to give any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.algorithm import Algorithm, TrainState
from offrl.data.dataset import DataSpec
from offrl.data.samplers.transitions import FOLLOWING, Batch
from offrl.encoding import with_spec
from offrl.evaluation.policy import TrainedPolicy
from offrl.families.on_policy.ppo import Moments
from offrl.settings.replicas import Replica
from offrl.training.engine import policies_of

# added to the deviation, as in the code of FastTD3 and rsl_rl: an observation that hardly moves is not blown up
EPSILON = 1e-2
SEEN = ("observations", "next_observations", FOLLOWING)  # the columns that are normalised


class MovingStatistics:
    """Mean and deviation of all observations in which N replicas have acted so far, for each of their O numbers."""

    def __init__(self, spec: DataSpec, replicas: int, device: torch.device) -> None:
        """spec: of the observations, without statistics. device: of the batches."""
        self.spec, self.replicas, self.device = spec, replicas, device
        self.moments = Moments.begin(replicas * spec.observation_dim, 0.0)
        self._renew()

    def add(self, observations: np.ndarray) -> None:
        """Observations in which all have acted: [N * E, *O] of one step, or [N, R, *O] of several."""
        rows = torch.from_numpy(observations.astype(np.float64)).reshape(self.replicas, -1, self.spec.observation_dim)
        self.moments = self.moments.add(rows.transpose(1, 2).flatten(0, 1))
        self._renew()

    def _renew(self) -> None:
        shape = self.replicas, *self.spec.observation_shape
        self.mean = self.moments.mean.float().reshape(shape).to(self.device)
        self.std = (self.moments.variance.sqrt() + EPSILON).float().reshape(shape).to(self.device)

    def normalised(self, observations: Tensor) -> Tensor:
        """Observations [N, ..., *O], each replica's with its own statistics as they are now."""
        shape = self.replicas, *[1] * (observations.ndim - self.mean.ndim), *self.spec.observation_shape
        return (observations - self.mean.reshape(shape)) / self.std.reshape(shape)

    def of_batch(self, batch: Batch) -> Batch:
        """A batch [N, B, ...] of raw observations, normalised."""
        return batch | {name: self.normalised(batch[name]) for name in SEEN if name in batch}

    def spec_of(self, replica: int) -> DataSpec:
        """The specification with a replica's statistics as they are now, for its policy."""
        mean, std = (tuple(x[replica].flatten().tolist()) for x in (self.mean, self.std))
        return replace(self.spec, observation_mean=mean, observation_std=std)

    def policies(self, algorithm: Algorithm, state: TrainState, replicas: Sequence[Replica]) -> list[TrainedPolicy]:
        """One TrainedPolicy for each replica, which keeps its statistics as they are now."""
        return [
            policies_of(
                with_spec(algorithm, self.spec_of(n)), pytree.tree_map(lambda x, n=n: x[n : n + 1], state), [r]
            )[0]
            for n, r in enumerate(replicas)
        ]

    def state(self) -> dict[str, Tensor]:
        """The state that `load` takes, for a checkpoint."""
        return dict(self.moments._asdict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from `state`."""
        self.moments = Moments(**state)
        self._renew()
