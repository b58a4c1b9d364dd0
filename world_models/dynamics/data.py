"""The data of an ensemble of dynamics models: for training, early stopping and the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from offrl.algorithm import Dataset, Tree
from offrl.data.samplers.tables import Batch, Packed, table_of
from offrl.data.samplers.transitions import episode_of
from offrl.errors import UserError
from offrl.world_models.dynamics.settings import DynamicsSettings, HeldOutSettings

FEW_EPISODES = 10  # of fewer none are kept apart for the report


@dataclass(frozen=True)
class Split:
    """The division of the rows by use; the same for all seeds."""

    train: Tensor  # [n] rows
    held_out: Tensor  # [h] rows for early stopping
    test: Tensor  # [T] episodes for the report
    # [e] rows of terminals whose next observation the data lack: of their rewards, and that they end, is learnt
    ends: Tensor


def split(dataset: Dataset, config: HeldOutSettings) -> Split:
    """Whole episodes for the report, random rows for early stopping, and the rest. Raises UserError where too little is
    left.
    """
    rows = dataset.transition_rows()
    known = dataset.columns["successor_known"][rows]
    rows, ends = rows[known], rows[~known]
    draw = np.random.Generator(np.random.PCG64(0))
    test = torch.zeros(0, dtype=torch.int64)
    if config.test_share > 0.0 and dataset.num_episodes >= FEW_EPISODES:
        count = max(1, int(config.test_share * dataset.num_episodes))
        test = torch.from_numpy(np.sort(draw.permutation(dataset.num_episodes)[:count]))
        rows, ends = (x[~torch.isin(episode_of(dataset, x), test)] for x in (rows, ends))
    if len(rows) < 2:
        raise UserError(
            f"{dataset.spec.name} has {len(rows)} transition(s) whose next observation is known: too few to learn its "
            "dynamics from"
        )
    held_out = max(1, min(len(rows) // 5, config.held_out))
    shuffled = rows[torch.from_numpy(draw.permutation(len(rows)))]
    return Split(shuffled[held_out:].sort().values, shuffled[:held_out].sort().values, test, ends)


@dataclass(frozen=True)
class DynamicsSource:
    """The training and held-out rows of all replicas, on the device."""

    table: Packed  # of the training rows: inputs [I], targets [D], ending, and where needed scale [D] and known
    count: int
    held_out: dict[str, Tensor]  # the same columns of the held-out rows
    mean: Tensor  # [I] of the inputs
    std: Tensor  # [I]


def targets(dataset: Dataset, rows: Tensor, delta: bool) -> Tensor:
    """[R, D]: the change of the observation (or the next one), then the reward."""
    flat = {n: dataset.flat(n)[rows].float() for n in ("observations", "next_observations")}
    following = flat["next_observations"] - flat["observations"] if delta else flat["next_observations"]
    return torch.cat([following, dataset.columns["rewards"][rows].unsqueeze(-1)], -1)


@dataclass(frozen=True)
class DynamicsSampler:
    """Prepares `DynamicsSource`; batches are drawn in the update, where the number of the epoch is known."""

    config: DynamicsSettings
    columns: Callable[[Dataset, Tensor], dict[str, Tensor]]  # of rows of a dataset: see `Dynamics.columns`

    def prepare(self, dataset: Dataset) -> DynamicsSource:
        if dataset.mapped:
            raise UserError(
                f"{dataset.spec.name}: a model's data must fit in memory; raise dataset.memory_limit, or take "
                "dataset.max_episodes"
            )
        parts = split(dataset.to("cpu"), self.config)
        device = dataset.columns["rewards"].device
        rows = torch.cat([parts.train, parts.ends])
        train, held_out = (self.columns(dataset, x.to(device)) for x in (rows, parts.held_out))
        if len(rows) > len(parts.train):
            train["known"] = dataset.columns["successor_known"][rows.to(device)].float()
        table = table_of(dataset, train)
        assert isinstance(table, Packed)
        wide = train["inputs"].double()
        mean, std = wide.mean(0).float(), wide.std(0, unbiased=False).float()
        return DynamicsSource(table, len(rows), held_out, mean, torch.where(std < 1e-12, torch.ones_like(std), std))

    def __call__(self, source: DynamicsSource, key: Tensor, batch_size: int) -> Batch:
        return {}


def data_range(dataset: Dataset) -> Tree:
    """The smallest and the largest value of every entry of the observations: "low" and "high" [O]."""
    known = dataset.columns["successor_known"]
    both = [
        dataset.flat("observations"),
        dataset.flat("next_observations")[known],
    ]
    return {
        "low": torch.stack([x.float().amin(0) for x in both]).amin(0),
        "high": torch.stack([x.float().amax(0) for x in both]).amax(0),
    }
