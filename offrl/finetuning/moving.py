"""What moves with what is played: statistics of observations, where there are no data to give any, and the largest
returns, by which some algorithms scale rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.algorithm import Algorithm, TrainState
from offrl.data.dataset import DataSpec
from offrl.data.samplers.transitions import FOLLOWING, Batch
from offrl.data.value_range import LARGEST_RETURN, largest_return
from offrl.encoding import with_spec
from offrl.evaluation.policy import TrainedPolicy
from offrl.families.on_policy.ppo import Moments
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.start import Start
from offrl.settings.replicas import Replica
from offrl.training.engine import policies_of
from offrl.training.run.checkpoints import part

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


class MovingReturns:
    """For each of N replicas the largest size of a return, from any step of the episodes that it has ended; 0 before
    the first. Of several tasks for each by itself. See `largest_return`.
    """

    def __init__(
        self, replicas: Sequence[Replica], discount: float, envs: int, device: torch.device, tasks: int = 0
    ) -> None:
        """discount: where no grid varies it. envs: of each replica. device: of the batches. tasks: of multi-task data,
        whose observations end with the task's number.
        """
        self.tasks = tasks
        self.discounts = [dict(replica.values).get("discount", discount) for replica in replicas]
        self.envs, self.device = envs, device
        self.rewards: list[list[float]] = [[] for _ in range(len(replicas) * envs)]  # of each running episode
        # [N], of several tasks [N, T]
        self.largest = torch.zeros((len(replicas), tasks) if tasks else len(replicas), dtype=torch.float64)

    def add(self, turn: Turn, rewards: np.ndarray) -> None:
        """A step of every environment, with the rewards [K] that are learnt from."""
        for k, episode in enumerate(self.rewards):
            if turn.valid[k]:
                episode.append(float(rewards[k]))
            if turn.over[k] and episode:
                n, start, end = k // self.envs, np.zeros(1, np.int64), np.array([len(episode)])
                cut = ~turn.terminated[k : k + 1]
                value = largest_return(np.array(episode), start, end, cut, self.discounts[n])
                at = (n, int(turn.observations[k, -1])) if self.tasks else n
                self.largest[at] = max(float(self.largest[at]), value)
                episode.clear()

    def of_batch(self, batch: Batch) -> Batch:
        """A batch [N, B, ...] with the column `LARGEST_RETURN` [N, B], of several tasks that of each row's."""
        column = self.largest.float().to(self.device)
        if self.tasks:
            return batch | {LARGEST_RETURN: column.gather(1, batch["observations"][..., -1].long())}
        column = column.unsqueeze(-1)
        return batch | {LARGEST_RETURN: column.expand(batch["rewards"].shape)}


class Moving:
    """What moves with play in a run, as far as its settings ask for it."""

    def __init__(self, start: Start, envs: int, device: torch.device) -> None:
        """envs: of each replica. device: of the batches."""
        algorithm, replicas = start.algorithm, start.replicas
        running = start.config.normalize == "running"
        self.statistics = MovingStatistics(start.spec, len(replicas), device) if running else None
        self.returns = None
        if algorithm.traits.scales_by_returns:
            tasks = len(start.spec.task.parts) if start.spec.task else 0
            self.returns = MovingReturns(replicas, float(algorithm.config.discount), envs, device, tasks)

    def add(self, turn: Turn) -> None:
        """The observations in which all have acted."""
        if self.statistics is not None:
            self.statistics.add(turn.observations)

    def of_batch(self, batch: Batch) -> Batch:
        """A batch [N, B, ...] as it was played, as it is learnt from."""
        for moving in (self.statistics, self.returns):
            batch = batch if moving is None else moving.of_batch(batch)
        return batch

    def state(self) -> dict[str, Any]:
        """The state that `load` takes, for a checkpoint: a tree of tensors."""
        state: dict[str, Any] = {} if self.statistics is None else {"statistics": self.statistics.state()}
        return state if self.returns is None else state | {"returns": {"largest": self.returns.largest.clone()}}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's tensors. Those of running episodes come when these are played again."""
        if self.statistics is not None:
            self.statistics.load(part(tensors, "statistics"))
        if self.returns is not None:
            self.returns.largest = part(tensors, "returns")["largest"]
