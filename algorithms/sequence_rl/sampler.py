"""Transitions, each with the window of steps that begins at it. Pure, like all samplers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Transitions, TransitionSampler, places_ahead, windows
from offrl.errors import UserError

WINDOW_OBSERVATIONS, WINDOW_ACTIONS, WINDOW_VALID = (
    "window_observations",
    "window_actions",
    "window_valid",
)  # [B, J, ...]
PREVIOUS = "previous_actions"  # the action of the step before, 0 at an episode's start [B, A]


@dataclass(frozen=True)
class RecallSource:
    """The data's transitions, and the model where one recalls states: all replicas share it."""

    transitions: Transitions
    model: Any = None
    tree: Any = None  # the model's tensors


@dataclass(frozen=True)
class RecallSampler:
    """What `TransitionSampler` draws, with the same keys the same rows, and of each the window of `length` steps that
    begins with it.

    An episode's end cuts a window: the rest repeats its last step and is not valid. What is last in an episode that was
    cut off, and so is no transition, is in no window.

    pretrained: the world model, where one is needed. states: windows with the observations of every step.
    """

    length: int
    n_step: int = 1
    states: bool = True
    pretrained: Mapping[str, Any] | None = None

    def prepare(self, dataset: Dataset) -> RecallSource:
        """Raises UserError where no window has two steps, for a length beyond all episodes, and for a model that looks
        back.
        """
        source = TransitionSampler(n_step=self.n_step, ordered=True).prepare(dataset)
        assert source.last is not None
        longest = int((source.last - torch.arange(source.count, device=source.last.device)).max()) + 1
        if self.length > 1 and longest == 1:
            raise UserError(
                f"{dataset.spec.name}: no window of 2 steps to learn a sequence from: each episode of the data has one "
                "transition, and "
                "their order is not known; say where episodes end (dataset.fields.truncations or episode_ends), or "
                "take algo=td3_bc"
            )
        if self.length > longest:
            raise UserError(
                f"{dataset.spec.name}: algo.length={self.length}: no window of so many steps is in the data, whose "
                "longest episode has "
                f"{longest} transitions; take a smaller length (algo.execute may be larger)"
            )
        if not self.pretrained:
            return RecallSource(source)
        trained = self.pretrained["world_model"].to(source.last.device)
        if trained.model.history > 1:
            raise UserError(
                "algo=sequence_rl asks the model in each update and keeps no past: train one with algo.history=1 (this "
                "one has "
                f"{trained.model.history})"
            )
        return RecallSource(source, trained.model, trained.tree)

    def __call__(self, source: RecallSource, key: Tensor, batch_size: int) -> Batch:
        rows = source.transitions
        assert rows.last is not None
        pick = TransitionSampler.draw(rows, key, batch_size)
        places, valid = places_ahead(rows, pick, self.length)
        before = (pick - 1).clamp(min=0)
        follows = (pick > 0) & (rows.last[before] == rows.last[pick])
        batch = windows(rows, pick, self.n_step) if self.n_step > 1 else rows.take(pick)
        batch |= {WINDOW_ACTIONS: rows.table.column("actions", places), WINDOW_VALID: valid.float()}
        batch[PREVIOUS] = torch.where(follows.unsqueeze(-1), rows.table.column("actions", before), 0.0)
        return batch | ({WINDOW_OBSERVATIONS: rows.table.column("observations", places)} if self.states else {})
