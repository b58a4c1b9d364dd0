"""Goals in hindsight of what was played: the ring as a source of the sampler of goal-conditioned algorithms, the same
that draws from the data (HER, arXiv 1707.01495).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.func import vmap

from offrl.data.samplers.goals import GoalRows, GoalSampler
from offrl.data.samplers.tables import Packed
from offrl.data.samplers.transitions import Batch

if TYPE_CHECKING:
    from offrl.finetuning.replay_buffer import Ring

# Of a row: how many rows of its episode follow. An episode's rows come together, when it has ended, and none is ever
# overwritten, so that the ring can hold the slot of its last row instead.
LAST = "last_rows"


def draw(ring: Ring, sampler: GoalSampler, keys: Tensor, count: int) -> Batch:
    """Batches [N, count, ...] of each replica's rows with goals of its own rows, by its key of `keys`."""
    first, end, shape, _ = ring.packed.layout["observations"]

    def one(key: Tensor, rows: Tensor, table: Tensor, last: Tensor) -> Batch:
        observations = table[:, first:end].unflatten(-1, shape)
        source = GoalRows(cast(Any, rows), last, observations, observations, None, Packed(table, ring.packed.layout))
        return sampler(source, key, count)

    size = ring.replicas, ring.capacity
    return vmap(one)(keys, ring.counts, ring.packed.table.unflatten(0, size), ring.apart[LAST].unflatten(0, size))
