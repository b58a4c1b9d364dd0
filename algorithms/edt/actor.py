"""EDT's policy, which searches for the length of history that promises most."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from offrl import rng
from offrl.actor import Carry
from offrl.data.samplers.sequences import RETURNS, STEPS
from offrl.data.samplers.transitions import Batch
from offrl.families.sequence import TargetReturnActor

if TYPE_CHECKING:
    from offrl.algorithms.edt.algorithm import EDT

DRAW = 223  # folded into the key of the state: of the returns that are asked for


class EDTActor(TargetReturnActor):
    """Policy on the length of history that promises the largest return, which asks for a return that good histories
    have.

    The search is the authors' `_return_search`. For each length the network is asked twice. At first its history begins
    with what is left of the target return, and a return is drawn (or estimated) at each step; then those returns stand
    in the history, and it gives the promise and the action. Draws depend on the seed and the step of the episode alone,
    as the Trajectory Transformer's.
    """

    algorithm: EDT

    def start(self, episodes: int) -> Carry:
        if self.algorithm.config.target_return is not None:
            return super().start(episodes)
        best = torch.full((episodes,), float(self.algorithm.config.return_range[1]))  # return_units=range
        return dataclasses.replace(super(TargetReturnActor, self).start(episodes), remaining=best)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window = self.enter(carry, observations)
        draw = rng.fold_in(rng.fold_in(self.state.key, DRAW), carry.t)
        actions = self.choose(self.search(window, draw)[0], key, explore)
        return actions, self.with_actions(carry, window, actions)

    def search(self, window: Batch, key: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The distribution of the action [E, ...], and the steps of the window in the best of all lengths of history,
        bool [E, n].
        """
        algorithm, (episodes, steps) = self.algorithm, window[STEPS].shape
        device = window[STEPS].device
        lengths = torch.arange(steps, 0, -algorithm.config.stride, device=device)
        masks = torch.arange(steps, device=device) >= steps - lengths.unsqueeze(-1)  # [W, n]
        windows = {name: column.repeat_interleave(len(lengths), 0) for name, column in window.items()}  # [E W, n, ...]
        valid = masks.repeat(episodes, 1)
        _, best, bins, _ = self.apply("actor", algorithm.tokens(windows), windows[STEPS], valid, None)
        requested = self.requested_returns(best.unflatten(0, (episodes, -1)), bins.unflatten(0, (episodes, -1)), key)
        windows = {**windows, RETURNS: requested.flatten(0, 1)}
        dist, best, *_ = self.apply("actor", algorithm.tokens(windows), windows[STEPS], valid, None)
        longest = best[:, -1].unflatten(0, (episodes, -1)).argmax(-1)  # of equal promises that of the longest
        rows = torch.arange(episodes, device=device)
        return tuple(x[:, -1].unflatten(0, (episodes, -1))[rows, longest] for x in dist), masks[longest]

    def requested_returns(self, best: Tensor, bins: Tensor, key: Tensor) -> Tensor:
        """The return to ask for at each step [E, W, n], as recorded, of its estimates [E, W, n] and the logits of its
        bins [E, W, n, bins]. The noise is the same for all episodes."""
        c = self.algorithm.config
        if not c.expert_temperature:
            return self.algorithm.from_units(best)
        logits = bins + c.expert_temperature * torch.linspace(
            0.0, 1.0, c.return_bins, dtype=bins.dtype, device=bins.device
        )
        cut = math.ceil(c.expert_cut * (c.return_bins - 1))  # what lies below that quantile, linearly interpolated
        least = logits.sort(-1).values[..., cut : cut + 1]
        noisy = torch.where(logits >= least, logits, float("-inf")) + rng.gumbel(key, tuple(logits.shape[1:]))
        return self.algorithm.in_bin(noisy.argmax(-1))
