"""Windows: what networks see of the steps before, where observations alone do not tell the state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.data.store import window


@dataclass(frozen=True)
class PastRows:
    """The observations and actions of all rows of a dataset, and the r rows that a table holds."""

    observations: Tensor  # [R, O]
    actions: Tensor  # [R, A] as networks take them
    rows: Tensor  # [r] int64
    first: Tensor  # [r] int64: the first rows of their episodes
    count: int  # observations of a window, `stride` steps apart
    stride: int
    past_actions: int

    def windows(self, newest: Tensor, rows: Tensor, following: bool = False) -> Tensor:
        """[..., W]: observations, oldest first, of which `newest` [..., O] is the last, and then the actions between
        them and before, oldest first. rows [...]: places in the table; newest is their observation or, with
        `following`, their successor's. Before an episode's start its first observation is repeated, and actions are 0.
        """
        at, first = self.rows[rows] + following, self.first[rows]
        earlier = window(at, first, self.count, self.stride)[..., :-1]
        before = at.unsqueeze(-1) - torch.arange(self.past_actions, 0, -1, device=at.device)
        started = before >= first.unsqueeze(-1)
        actions = self.actions[torch.where(started, before, first.unsqueeze(-1))]
        actions = torch.where(started.unsqueeze(-1), actions, 0.0)
        return torch.cat([self.observations[earlier].flatten(-2), newest, actions.flatten(-2)], -1)


def history_of(dataset: Dataset, rows: Tensor | None) -> PastRows | None:
    """The windows of the rows `rows` (None: all) of a dataset; None where networks see single observations."""
    spec, columns = dataset.spec, dataset.columns
    if not spec.windowed:
        return None
    first = dataset.per_row(dataset.episode_start)
    rows = torch.arange(len(dataset), device=first.device) if rows is None else rows
    actions = spec.encode(columns["actions"]) if spec.history_actions else columns["actions"].reshape(len(dataset), -1)
    return PastRows(
        columns["observations"], actions, rows, first[rows], spec.history, spec.history_stride, spec.history_actions
    )
