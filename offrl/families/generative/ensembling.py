"""Temporal ensembling: a new chunk of actions at every step, and the mean of what all chunks so far say of this one
(ACT, arXiv 2304.13705, section IV-A)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from offrl.actor import Carry
from offrl.families.generative.chunks import ChunkActor
from offrl.settings.field import setting


def ensemble_field() -> Any:
    """The setting `ensemble` of an `EnsemblingActor`."""
    return setting(
        None,
        "temporal ensembling: a chunk is drawn at every step, and actions are means of all chunks with weights exp(-m "
        "i), i = 0 the oldest (m; published: 0.01); null: `action_steps` actions of each chunk are played as they are",
        acting=True,
    )


class Votes(NamedTuple):
    """The carry of E episodes: what the chunks so far say of the steps to come, the next one first."""

    mean: Tensor  # [E, h, A]: weighted means
    counts: Tensor  # [E, h] int64: of so many chunks


class EnsemblingActor(ChunkActor):
    """A `ChunkActor` that with `ensemble` plays means of chunks. The means are kept, not the chunks: O(h) numbers an
    episode.
    """

    @property
    def ensemble(self) -> float | None:
        """m: a larger one trusts old chunks more, one below 0 new ones; None: no ensembling."""
        return None if self.length == 1 else self.algorithm.config.ensemble

    @property
    def action_steps(self) -> int:
        return super().action_steps if self.ensemble is None else 1

    def actions_per_decision(self, steps: int) -> int:
        return super().actions_per_decision(steps) if self.ensemble is None else 1

    def start(self, episodes: int) -> Carry:
        if self.ensemble is None:
            return super().start(episodes)
        device, shape = self.state.step.device, (episodes, self.length)
        mean = torch.zeros(*shape, self.algorithm.spec.action_dim, device=device)
        return Votes(mean, torch.zeros(*shape, dtype=torch.int64, device=device))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        if self.ensemble is None:
            return super().act(carry, observations, key, explore=explore)
        mean, count = carry
        # of c + 1 chunks the newest has the share exp(-m c) / sum_i exp(-m i) = 1 / sum_i exp(m i), i = 0, ..., c
        shares = 1.0 / torch.exp(self.ensemble * torch.arange(self.length, device=mean.device)).cumsum(0)
        mean = torch.lerp(mean, self.chunk(observations, key, explore), shares[count].unsqueeze(-1))
        following = torch.cat([mean[:, 1:], torch.zeros_like(mean[:, :1])], 1)
        return mean[:, 0], Votes(following, torch.cat([count[:, 1:] + 1, torch.zeros_like(count[:, :1])], 1))
