"""One replica's batch spread over processes started by torchrun, for models too large to train otherwise.

Each process holds the whole model and computes the gradient of its share of every batch; gradients are averaged before
each optimiser step, by the collectives that torch's DistributedDataParallel uses. That class itself averages what
`backward` leaves in `.grad`, and our gradients are values of a function, so `Algorithm.descend` does it, a module at a
time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from offrl.errors import UserError
from offrl.optim import Params

TIMEOUT = timedelta(hours=12)  # the others wait while the first one evaluates


@dataclass(frozen=True)
class World:
    """This process among those of a torchrun."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """True for the process that writes files and evaluates."""
        return self.rank == 0


def world() -> World:
    """This process's place among torchrun's; one of one without torchrun."""
    return World(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))


def own_device(device: torch.device) -> torch.device:
    """`device`, or under torchrun on GPUs this process's own. Raises UserError where there are not as many."""
    if device.type != "cuda" or world().size == 1:
        return device
    local, per_node, gpus = (
        int(os.environ.get("LOCAL_RANK", 0)),
        int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        torch.cuda.device_count(),
    )
    if device.index is not None and per_node > 1:
        raise UserError(
            f"device={device} names one GPU, and torchrun started {per_node} processes on this machine: use device=cuda"
        )
    if local >= gpus:
        raise UserError(
            f"torchrun started {per_node} processes on this machine, which has {gpus} GPUs: use --nproc_per_node={gpus}"
        )
    return device if device.index is not None else torch.device("cuda", local)


def join(device: torch.device, replicas: int, batch_size: int) -> World:
    """Meet the other processes, on `own_device`. Raises UserError where a batch cannot be shared between them."""
    process = world()
    if process.size == 1:
        return process
    if replicas > 1:
        raise UserError(
            f"torchrun spreads the batch of one seed over {process.size} processes; seeds={replicas} train without "
            "torchrun"
        )
    if batch_size % process.size:
        raise UserError(
            f"algo.batch_size={batch_size} cannot be shared by {process.size} processes; choose a multiple of "
            f"{process.size}"
        )
    if not torch.distributed.is_initialized():
        gpu = device.type == "cuda"
        torch.distributed.init_process_group(
            "nccl" if gpu else "gloo", timeout=TIMEOUT, device_id=device if gpu else None
        )
    return process


def average(grads: Params) -> Params:
    """The mean of all processes' gradients, in one message."""
    flat = torch.cat([g.reshape(-1) for g in grads.values()])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    parts = flat.split([g.numel() for g in grads.values()])
    return {name: part.view_as(g) for (name, g), part in zip(grads.items(), parts, strict=True)}


def mean(values: Tensor) -> Tensor:
    """The mean over processes."""
    total = values.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()


def agree(number: int, stop: int, device: torch.device) -> tuple[int, int]:
    """The first process's `number`, and the largest `stop` of all: where the clock decides, all have to decide
    alike.
    """
    values = torch.tensor([number, stop], device=device)
    torch.distributed.broadcast(values[:1], 0)
    torch.distributed.all_reduce(values[1:], torch.distributed.ReduceOp.MAX)
    return int(values[0]), int(values[1])


def leave() -> None:
    """Part from the other processes."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
