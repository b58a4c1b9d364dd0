"""The replay buffers of a run, and the batches that are drawn of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from offrl.data.samplers.transitions import Batch
from offrl.finetuning.replay.balanced import BalancedBatches
from offrl.finetuning.replay.batches import MixedBatches
from offrl.finetuning.replay.ring import INTERVENTIONS, Column, Replay, Ring
from offrl.finetuning.replay.sources import is_chain
from offrl.finetuning.start import Start


def make_replays(
    start: Start, columns: Mapping[str, Column], steps: int, run_dir: Path, device: torch.device
) -> list[Replay]:
    """The replay buffer of all rows that are played and, where interventions count as the data's, one of those. steps:
    of the run, in whole rounds.
    """
    config, many = start.config, len(start.replicas)
    capacity, rings = min(config.capacity or steps, steps), many
    # states, those of each environment for themselves; an episode has one more than steps
    if is_chain(start.algorithm.sampler()):
        environments = config.envs or 1
        capacity = min(config.capacity or 2 * steps, 2 * steps)
        capacity, rings = math.ceil(capacity / environments), many * environments
    replays = [Replay(run_dir, Ring(columns, rings, capacity, device))]
    if config.interventions is not None and config.mixing:
        replays.append(Replay(run_dir, Ring(columns, many, capacity, device), INTERVENTIONS))
    return replays


def make_batches(
    start: Start, replays: Sequence[Replay], keys: Tensor, change: Callable[[Batch], Batch]
) -> MixedBatches:
    """What draws from these buffers and the data. keys [N]: of the replicas. change: see `MixedBatches`."""
    config, algorithm, dataset = start.config, start.algorithm, start.dataset
    sampler, (ring, *corrected) = algorithm.sampler(), [replay.ring for replay in replays]
    source = None if dataset is None else sampler.prepare(dataset if dataset.mapped else dataset.to(ring.device))
    parts = ring, sampler, source, keys, algorithm.config.batch_size
    if config.replay == "balanced":
        return BalancedBatches(*parts, start.spec, config.replay_temperature, config.replay_fresh, change)
    return MixedBatches(*parts, config.mixing, corrected[0] if corrected else None, change)
