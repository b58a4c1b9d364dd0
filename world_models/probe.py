"""What a latent state tells of the true one: linear regressions of columns that the model does not see.

Shapes: R states, in any axes; F features of a latent state; K dimensions of a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Batch, Params
from offrl.data.dataset import Dataset
from offrl.data.samplers.states import IS_LAST
from offrl.errors import UserError
from offrl.world_models.open_loop import CONTEXT, ProbedModel, numbers_of, windows_of

WINDOWS = 128  # of each half of the episodes
RIDGE = 10.0
Pairs = tuple[Tensor, Tensor]  # features [R, F] and targets [R, K]


def explained(known: Pairs, unseen: Pairs) -> Tensor:
    """R^2 of each target of the pairs `unseen` by a ridge regression on features that is fitted on `known`: [K]
    float64; NaN where a target is constant.
    """
    (x, y), (features, due) = (tuple(side.double().flatten(0, -2) for side in pair) for pair in (known, unseen))
    mean, centre = x.mean(0), y.mean(0)
    x = x - mean
    weights = torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1]).double(), x.T @ (y - centre))
    variance = due.var(0)
    error = (due - centre - (features - mean) @ weights).square().mean(0)
    return torch.where(variance > 1e-12 * (1.0 + due.square().mean(0)), 1.0 - error / variance, torch.nan)


def halves_of(dataset: Dataset, column: str) -> list[Batch]:
    """Windows of every other episode, and of those between, with a column that is probed. Raises UserError where there
    are none.
    """
    parts = []
    for part in (0, 1):
        shares = dataset.row_weights() * dataset.per_row(torch.arange(dataset.num_episodes) % 2 == part)
        batch = windows_of(replace(dataset, weights=shares), (column,), WINDOWS) if bool(shares.any()) else None
        if batch is None:
            raise UserError(
                f"{dataset.spec.name}: a probe needs two episodes of more than {CONTEXT} states, one to fit it on and "
                "one to test it on"
            )
        parts.append(batch)
    return parts


def probe(algorithm: ProbedModel, params: dict[str, Params], halves: list[Batch], column: str) -> list[float]:
    """R^2 of each dimension of a column by the latent state, of one half of the episodes, fitted on the other.

    Raises UserError for a column of no numbers.
    """
    pairs = []
    for batch in halves:
        features = algorithm.latent_states(params, batch, rng.make_key(0))[CONTEXT - 1 :]
        rows = ~batch[IS_LAST][CONTEXT - 1 :]  # of an episode's last state a column has no value
        pairs.append((features[rows], _targets(batch, column)[CONTEXT - 1 :][rows]))
    unit = pairs[0][0].double().var(0).mean().sqrt().clamp(min=1e-12)  # in which the ridge is as large for any model
    return explained(*((features / unit, targets) for features, targets in pairs)).tolist()


def _targets(batch: Batch, column: str) -> Tensor:
    values: Any = batch[column]
    if isinstance(values, Mapping):
        values = numbers_of(values, {name: x for name, x in values.items() if x.dtype == torch.uint8})
    return values.float().flatten(2) if values.ndim > 2 else values.float().unsqueeze(-1)
