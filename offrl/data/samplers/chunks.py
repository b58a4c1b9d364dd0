"""Windows of consecutive actions (chunks) with the transition that the whole of them makes. Pure, like all samplers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import VALID, Batch, Transitions, TransitionSampler, places_ahead, windows
from offrl.errors import UserError

WHOLE = "whole"  # 1.0 where a window has all of its steps, or ended in a terminal: nothing of it is missing [B]


@dataclass(frozen=True)
class ChunkSampler:
    """Windows of h steps of one episode, from every row: observations [B, O] of the first step, actions [B, h, A],
    rewards [B] of the first step; step_rewards [B, h], valid bool [B, h], span int64 [B] (m, how many steps there are)
    and whole [B]; next_observations [B, O] and masks [B] after the last of them.

    A window never crosses an end. One that an episode's end cuts repeats the last action to length h, as robomimic and
    Diffusion Policy do (Q-chunking's code has the next episode's there): `valid` says which steps count. The code of
    Q-chunking (arXiv 2507.07969) runs on over successes in OGBench's data, which end an episode here: such a window is
    `whole`, and there is nothing after it to be valued.

    length: h. extra: more columns of the first step. Raises UserError in `prepare` where no episode has h steps.
    """

    length: int
    extra: tuple[str, ...] = ()

    def prepare(self, dataset: Dataset) -> Transitions:
        """Raises UserError for a column that the data lack, where no row may be drawn, and for chunks longer than every
        episode.
        """
        source = TransitionSampler(self.extra, ordered=True).prepare(dataset)
        assert source.last is not None
        longest = int((source.last - torch.arange(source.count, device=source.last.device)).max()) + 1
        if self.length > longest:
            raise UserError(
                f"{dataset.spec.name}: algo.length={self.length}: no chunk of so many actions is in the data, whose "
                f"longest episode has {longest} transition{'s' if longest > 1 else ''}; take a smaller length"
            )
        return source

    def __call__(self, source: Transitions, key: Tensor, batch_size: int) -> Batch:
        indices = TransitionSampler.draw(source, key, batch_size)
        positions, _ = places_ahead(source, indices, self.length)
        batch = windows(source, indices, self.length)
        complete = batch[VALID][:, -1] | (batch["masks"] == 0.0)
        return {**batch, "actions": source.table.column("actions", positions), WHOLE: complete.float()}


def valid_mean(values: Tensor, valid: Tensor) -> Tensor:
    """[]: the mean of [B, h, A] with 0 in place of steps that are not `valid` [B, h]; they count in the denominator, as
    in Q-chunking's code."""
    return torch.where(valid.unsqueeze(-1), values, 0.0).mean()


__all__ = ["VALID", "WHOLE", "ChunkSampler", "valid_mean"]
