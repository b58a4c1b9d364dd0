"""The parts of a plain PyTorch loop, as most papers' code has them; no part of offrl."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from peers import common
from peers.common import Arrays, transitions
from torch import nn


def mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(i, o), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Twin(nn.Module):
    """Two critics Q(s, a)."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.q1, self.q2 = mlp(*sizes), mlp(*sizes)

    def forward(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sa = torch.cat([state, action], 1)
        return self.q1(sa).squeeze(-1), self.q2(sa).squeeze(-1)


class Actor(nn.Module):
    """A deterministic policy with actions in [-1, 1]."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.net = mlp(*sizes)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.net(state))


class TD3:
    """An actor and two critics with their targets and optimisers: what TD3+BC and ReBRAC begin with."""

    def __init__(self, actor: Actor, critic: Twin, rate: float) -> None:
        self.actor, self.critic = actor, critic
        self.actor_target, self.critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
        self.actor_optimizer = torch.optim.Adam(actor.parameters(), lr=rate)
        self.critic_optimizer = torch.optim.Adam(critic.parameters(), lr=rate)
        self.done = 0

    def load(self, weights: Arrays) -> None:
        for name, net in (("critic0", self.critic.q1), ("critic1", self.critic.q2), ("actor", self.actor.net)):
            load(net, weights, name)
        self.actor_target.load_state_dict(self.actor.state_dict())
        self.critic_target.load_state_dict(self.critic.state_dict())

    def descend(self, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
        """One step; the loss."""
        value = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return value

    def follow(self, tau: float) -> None:
        soft_update(self.critic_target, self.critic, tau)
        soft_update(self.actor_target, self.actor, tau)


class Buffer:
    """The dataset as one tensor for each column."""

    def __init__(self, rows: int, columns: Callable[[int], Arrays] = transitions) -> None:
        self.rows = rows
        self.columns = {k: torch.tensor(v) for k, v in columns(rows).items()}

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        indices = np.random.randint(0, self.rows, size=batch_size)
        return {k: v[indices] for k, v in self.columns.items()}


def soft_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    for target_param, param in zip(target.parameters(), source.parameters(), strict=True):
        target_param.data.copy_((1 - tau) * target_param.data + tau * param.data)


def load(net: nn.Sequential, weights: Arrays, name: str) -> None:
    """Put the initial weights of a check into a network."""
    with torch.no_grad():
        for i, layer in enumerate(m for m in net if isinstance(m, nn.Linear)):
            layer.weight.copy_(torch.from_numpy(weights[f"{name}/w{i}"].T))
            layer.bias.copy_(torch.from_numpy(weights[f"{name}/b{i}"]))


def tensors(batch: Arrays) -> dict[str, torch.Tensor]:
    """A batch of a check as tensors."""
    return {k: torch.from_numpy(v) for k, v in batch.items()}


Draw = Callable[..., torch.Tensor]  # numbers of a shape


def zeros(shape: Sequence[int]) -> torch.Tensor:
    """Zeros, which a check has in the place of normal noise, here and in offrl_speed.py."""
    return torch.zeros(tuple(shape))


def spread(shape: Sequence[int]) -> torch.Tensor:
    """And in the place of uniform numbers in [-1, 1]."""
    count = math.prod(shape)
    return torch.sin(torch.arange(count, dtype=torch.float32)).reshape(tuple(shape))


ONEDNN = (
    "--onednn",
    {"action": "store_true", "help": "route float32 products to oneDNN, as offrl does where it is exact"},
)


def arithmetic(onednn: bool) -> str:
    """One thread; with `onednn` the back end that offrl would pick. Returns what is used."""
    torch.set_num_threads(1)
    if not onednn:
        return "torch's default library"
    from offrl.system import backend

    return backend.configure(torch.device("cpu"), 1)


def main(
    make: Callable[[bool], Any], data: Callable[[int], Any] = Buffer, batch_size: int = common.BATCH, chunk: int = 20
) -> None:
    """Be a contestant. `make(check)` gives a trainer with `load` and `update`; `check`: for comparing its losses with
    offrl's. `data(rows)` gives something to `sample` from."""
    options = common.options(ONEDNN)
    note = arithmetic(options.onednn)
    trainer = make(bool(options.check))
    if options.check:
        weights, batches = common.load_check(options.check)
        trainer.load(weights)
        common.report(losses=[trainer.update(tensors(b)) for b in batches])
        return
    buffer = data(options.rows)

    def updates(count: int) -> dict[str, float]:
        for _ in range(count):
            log = trainer.update(buffer.sample(batch_size))
        return log

    common.serve(updates, chunk, note=note)
