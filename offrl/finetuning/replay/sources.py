"""The ring as a source of samplers that draw more than single rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.data.samplers.goals import GoalRows, GoalSampler
from offrl.data.samplers.states import IS_FIRST, IS_LAST, StateSampler, opened
from offrl.data.samplers.tables import Packed
from offrl.data.samplers.transitions import Batch

if TYPE_CHECKING:
    from offrl.finetuning.replay.ring import Ring

# Of a row: how many rows of its episode follow. An episode's rows come together, when it has ended, and none is ever
# overwritten, so that the ring can hold the slot of its last row instead.
LAST = "last_rows"


def goals(ring: Ring, sampler: GoalSampler, keys: Tensor, count: int) -> Batch:
    """Batches [N, count, ...] of each replica's rows with goals of its own rows in hindsight (HER, arXiv 1707.01495),
    by its key of `keys`.
    """
    first, end, shape, _ = ring.packed.layout["observations"]

    def one(key: Tensor, rows: Tensor, table: Tensor, last: Tensor) -> Batch:
        observations = table[:, first:end].unflatten(-1, shape)
        source = GoalRows(cast(Any, rows), last, observations, observations, None, Packed(table, ring.packed.layout))
        return sampler(source, key, count)

    size = ring.replicas, ring.capacity
    return vmap(one)(keys, ring.counts, ring.packed.table.unflatten(0, size), ring.apart[LAST].unflatten(0, size))


def is_chain(sampler: Any) -> TypeGuard[StateSampler]:
    """Whether it draws windows of states that go on across episodes."""
    return isinstance(sampler, StateSampler) and sampler.kind == "chain"


def drawable(ring: Ring, sampler: Any, replicas: int) -> np.ndarray:
    """How many rows, or windows of them, each of N replicas can draw: int64 [N]."""
    if is_chain(sampler):
        return windows(ring, sampler, replicas).sum(1)
    return np.minimum(ring.total, ring.capacity)


def windows(ring: Ring, sampler: StateSampler, replicas: int) -> np.ndarray:
    """How many windows of K states the ring has, which holds the states of each environment for itself: int64 [N, E]
    for N replicas.
    """
    filled = np.minimum(ring.total, ring.capacity).reshape(replicas, -1)
    return np.maximum(filled - sampler.length + 1, 0)


def chains(ring: Ring, sampler: StateSampler, keys: Tensor, count: int) -> Batch:
    """Windows [N, count, K, ...] of each replica's states, by its key of `keys`: K states in a row of one environment,
    all such alike, whatever episodes end meanwhile.
    """
    replicas, device = len(keys), ring.device
    counts = torch.from_numpy(windows(ring, sampler, replicas)).to(device)
    oldest = torch.from_numpy(np.maximum(ring.total - ring.capacity, 0)).to(device).reshape(replicas, -1)
    ends = counts.cumsum(1)
    number = vmap(lambda k, n: rng.randint(k, (count,), n))(keys, ends[:, -1])  # [N, count]
    environment = (number.unsqueeze(-1) >= ends.unsqueeze(1)).sum(-1)
    begin = number - (ends - counts).gather(1, environment) + oldest.gather(1, environment)
    slots = (begin.unsqueeze(-1) + torch.arange(sampler.length, device=device)) % ring.capacity
    whose = torch.arange(replicas, device=device).unsqueeze(-1) * counts.shape[1] + environment
    batch = ring.rows(whose.unsqueeze(-1) * ring.capacity + slots)
    # an episode that was given up has no last state
    cut = torch.cat([batch[IS_FIRST][..., 1:], torch.zeros_like(batch[IS_FIRST][..., :1])], -1)
    return opened(batch | {IS_LAST: batch[IS_LAST] | cut}, chain=True)
