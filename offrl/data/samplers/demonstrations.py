"""Transitions of which some count as demonstrations: those of the episodes with the best returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Transitions, TransitionSampler, by_weight, episode_of, windows
from offrl.data.transforms.episodes import best_share
from offrl.errors import UserError

DEMONSTRATION = "demonstration"  # column of a batch: 1.0 for rows of demonstrations, else 0.0 [B]


@dataclass(frozen=True)
class RankedTransitions(Transitions):
    """The source of BestEpisodeSampler."""

    flags: Tensor | None = None  # [R] float32, 1.0 for demonstrations; None: all are
    best: Tensor | None = None  # [D] int64: the places of these

    def take(self, indices: Tensor) -> Batch:
        flags = torch.ones_like(indices, dtype=torch.float32) if self.flags is None else self.flags[indices]
        return {**super().take(indices), DEMONSTRATION: flags}


@dataclass(frozen=True)
class BestEpisodeSampler(TransitionSampler):
    """TransitionSampler's batches with the column DEMONSTRATION. Half of a batch, rounded down, are demonstrations, all
    alike; the rest are any rows of the data, demonstrations too.

    share: of the episodes whose end is known, the best so many (at least one) by recorded return are demonstrations, of
    equals the earlier one. 1: all the data are, and nothing is drawn apart.
    """

    share: float = 1.0

    played: ClassVar[tuple[str, ...]] = (DEMONSTRATION,)  # online: 1 where a person acts, else 0

    def prepare(self, dataset: Dataset) -> RankedTransitions:
        """Raises UserError as TransitionSampler does, and where no return is known."""
        base = super().prepare(dataset)
        if self.share >= 1.0:
            return RankedTransitions(**vars(base))
        chosen = best_episodes(dataset, self.share)
        _, rows = by_weight(dataset, dataset.transition_rows())
        flags = chosen.to(rows.device)[episode_of(dataset, rows)]
        best = torch.nonzero(flags).squeeze(-1)
        if not len(best):
            raise UserError(
                f"{dataset.spec.name}: algo.demo_share={self.share:g} chooses episodes of which no transition is "
                "drawn, by dataset.weighting; take a larger share"
            )
        return RankedTransitions(**vars(base), flags=flags.float(), best=best)

    def __call__(self, source: Transitions, key: Tensor, batch_size: int) -> Batch:
        assert isinstance(source, RankedTransitions)
        if source.best is None:
            return super().__call__(source, key, batch_size)
        best_key, key = rng.split(key)
        best = source.best[rng.randint(best_key, (batch_size // 2,), len(source.best))]
        indices = torch.cat([best, self.draw(source, key, batch_size - batch_size // 2)])
        return source.take(indices) if source.last is None else windows(source, indices, self.n_step)


def best_episodes(dataset: Dataset, share: float) -> Tensor:
    """bool [E], on the CPU: the best max(1, floor(share E)) of the E episodes whose return is known. Raises UserError
    where none is.
    """
    known = torch.nonzero(dataset.complete.cpu()).squeeze(-1)
    if not len(known):
        raise UserError(
            f"{dataset.spec.name}: algo.demo_share={share:g} ranks episodes by return, and the data end within each of "
            "them, so that no return is known; leave it at 1"
        )
    chosen = torch.zeros(dataset.num_episodes, dtype=torch.bool)
    chosen[known[best_share(dataset.raw_returns.cpu()[known].numpy(), share)]] = True
    return chosen
