"""How many replicas share one program: on a GPU as many as its memory holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from offrl.settings.replicas import Replica
from offrl.training.engine import Plan, first_state
from offrl.training.step import make_step

SHARE = 0.8  # of a GPU's free memory that replicas may take
# copies of a replica's state that stay on a GPU: as it is, as it was when its losses were last looked at, and in the
# graph
STATES = 3.0
CPU_GROUP = 4  # replicas in one program on CPU: more gain nothing there, and their activations leave the cache


def default_group(replicas: int, workers: int, plan: Plan, source: Any, device: torch.device) -> int:
    """The number of replicas to train as one program: on a GPU as many as its memory holds. source: what the sampler
    prepared, there.

    Group sizes decide the last bits of a result on some machines, so a run keeps the one that it began with.
    """
    if not plan.algorithm.traits.vectorized:
        return 1
    share = -(-replicas // workers)
    if device.type in ("cpu", "mps"):
        return max(1, min(share, CPU_GROUP))
    if share == 1:
        return 1
    state, working = replica_bytes(plan, source, device)
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    # every replica's states stay there, whatever the group; what an update needs besides is needed by one group at a
    # time
    return max(1, min(share, int((SHARE * free - share * state) / working)))


def replica_bytes(plan: Plan, source: Any, device: torch.device) -> tuple[float, float]:
    """Bytes of GPU memory that one more replica takes: for good, by its states, and while its group trains, by
    activations and gradients.

    Measured: the peaks of eager updates of two replicas and of four.
    """
    seeds = [Replica(0), Replica(1), Replica(2), Replica(3)]
    algorithm = plan.algorithm
    peaks, state = [], first_state(algorithm, seeds[:1])
    for size in (2, 4):
        step = make_step(algorithm, source, batch_size=plan.batch_size, replicas=size, precision=plan.precision)
        states = pytree.tree_map(lambda x: x.to(device), first_state(algorithm, seeds[:size]))
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step.run(states, {}, 0, algorithm.traits.period)
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return STATES * float(sum(x.nbytes for x in pytree.tree_leaves(state))), max(1.0, (peaks[1] - peaks[0]) / 2)
