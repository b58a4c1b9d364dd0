"""Known terminations and rewards beside the data that record them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.world_models.known.terminations import Termination


def raw_transitions(dataset: Dataset, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(observations [N, *O], actions [N, A] or int64 [N], next observations [N, *O]) of `rows`, int64 [N], in the
    environment's units.
    """
    spec, columns = dataset.spec, dataset.columns
    states, after, actions = (columns[k][rows] for k in ("observations", "next_observations", "actions"))
    if spec.observation_mean is not None and spec.observation_std is not None:
        mean, std = (
            torch.tensor(v, device=states.device).reshape(spec.observation_shape)
            for v in (spec.observation_mean, spec.observation_std)
        )
        states, after = states * std + mean, after * std + mean
    if not spec.discrete and spec.action_low:
        low, high = (torch.tensor(v, device=states.device) for v in (spec.action_low, spec.action_high))
        actions = low + (actions + 1.0) * 0.5 * (high - low)
    return states, actions, after


class Disagreement(NamedTuple):
    """A function beside what data record."""

    rows: int  # compared
    ends: int  # recorded in them
    missed: int  # recorded ends that the function does not see
    invented: int  # ends that it sees and the data do not record


def disagreement(dataset: Dataset, name: str, limit: int = 100_000) -> Disagreement:
    """Compare the function `name` with the recorded ends, in at most `limit` rows, evenly spread, whose next
    observation is known.

    Raises UserError for an unknown name.
    """
    function: Termination = registry.get("termination", name)
    rows = torch.nonzero(dataset.columns["successor_known"]).squeeze(-1)
    rows = rows[:: max(1, -(-len(rows) // limit))]
    ended, recorded = function(*raw_transitions(dataset, rows)), dataset.columns["terminations"][rows]
    return Disagreement(len(rows), int(recorded.sum()), int((recorded & ~ended).sum()), int((ended & ~recorded).sum()))
