"""Goals, and pairs of states with whether they are adjacent: whether the data get from one to the other within k steps
(HRAC).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.samplers.goals import GoalRows, GoalSampler
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError

# columns of a batch: states [B, O] that are near, and any, the same as goals [B, G]; [B] 1.0 where the latter are near
# as well
NEAR_STATES, NEAR_GOALS, ANY_STATES, ANY_GOALS, ADJACENT = (
    "near_states",
    "near_goals",
    "any_states",
    "any_goals",
    "adjacent",
)
CELLS = 4_096  # that a table of adjacent ones may have, at most
PAIRS = -(1 << 43)  # folded into the key of a batch


@dataclass(frozen=True)
class AdjacentRows(GoalRows):
    """The source of AdjacentSampler."""

    cells: Tensor | None = None  # [R] int64: where each row is
    near: Tensor | None = None  # [C, C] bool: which cells are adjacent


@dataclass(frozen=True)
class AdjacentSampler(GoalSampler):
    """GoalSampler's batches, the same for the same key, and pairs of states: each row's own, with one that is 1, ...,
    near_steps steps later in its trajectory, all alike, and with any of the data.

    Of the latter some are near too. Those of the same trajectory within near_steps are known; with `cell` > 0 so are
    others: the first `dims` entries of an observation are cut into cells of that width, and cells between which any
    trajectory goes within near_steps, one way or the other, are adjacent, as in HRAC (arXiv 2006.11485). Without cells
    a pair of different trajectories counts as far."""

    near_steps: int = 1
    dims: int = 0
    cell: float = 0.0

    def prepare(self, dataset: Dataset) -> AdjacentRows:
        """Prepare as GoalSampler does; raises UserError for more cells than a table can hold."""
        source = super().prepare(dataset)
        if not (self.dims and self.cell):
            return AdjacentRows(**vars(source))
        at = torch.arange(source.count, device=source.last.device)
        coordinates = (source.state(at).flatten(1)[:, : self.dims].double() / self.cell).round().long()
        distinct, cells = coordinates.unique(dim=0, return_inverse=True)
        if len(distinct) > CELLS:
            raise UserError(
                f"algo.adjacency_cell={self.cell:g} cuts the places of {dataset.spec.name} into {len(distinct):,} "
                f"cells, of at most {CELLS:,}; take larger cells, or algo.adjacency_cell=0 for none"
            )
        table = torch.eye(len(distinct), dtype=torch.bool, device=cells.device)
        for step in range(1, self.near_steps + 1):
            rows = at[at + step <= source.last]
            table[cells[rows], cells[rows + step]] = True
        return AdjacentRows(**vars(source), cells=cells, near=table | table.T)

    def __call__(self, source: GoalRows, key: Tensor, batch_size: int) -> Batch:
        batch = super().__call__(source, key, batch_size)
        assert isinstance(source, AdjacentRows)
        rows = source.draw(rng.split(key, 5)[0], batch_size)  # as GoalSampler drew them
        first, second = rng.split(rng.fold_in(key, PAIRS))
        near = torch.minimum(rows + 1 + rng.randint(first, (batch_size,), self.near_steps), source.last[rows])
        other = source.draw(second, batch_size)
        adjacent = ((other - rows).abs() <= self.near_steps) & (source.last[other] == source.last[rows])
        if source.cells is not None and source.near is not None:
            adjacent = adjacent | source.near[source.cells[rows], source.cells[other]]
        states = {NEAR_STATES: source.state(near), ANY_STATES: source.state(other)}
        return {
            **batch,
            **states,
            NEAR_GOALS: source.goal(near),
            ANY_GOALS: source.goal(other),
            ADJACENT: adjacent.float(),
        }
