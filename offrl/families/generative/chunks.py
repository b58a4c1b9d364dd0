"""Policies that draw a chunk of actions and play it open-loop from a queue."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offrl.actor import Actor, BoundParams, Carry
from offrl.settings.field import setting


def length_field(default: int, help: str = "actions in a chunk (h); 1: single actions") -> Any:
    """The setting `length`."""
    return setting(default, help, low=1, high=1000)


def action_steps_field(default: int = 0) -> Any:
    """The setting `action_steps`, which only acting reads."""
    return setting(
        default, "actions of a chunk that are played before the next is drawn; 0: all of them", low=0, acting=True
    )


class Queue(NamedTuple):
    """The carry of E episodes."""

    actions: Tensor  # [E, h, A]: those to come, the next one first
    remaining: Tensor  # [E] int64: how many of them are still played


class ChunkActor(Actor):
    """A policy that draws `length` actions at a time and plays `action_steps` of them; a subclass draws them. `length`
    1 has no memory.

    Episodes that begin anew at different times draw anew at different times: what is left of a chunk never reaches
    another episode. Where one action of each chunk is played there is nothing to remember.
    """

    resettable = True

    @property
    def length(self) -> int:
        """h: actions in a chunk."""
        return int(getattr(self.algorithm.config, "length", 1))

    @property
    def action_steps(self) -> int:
        """Actions played of each chunk."""
        count = int(getattr(self.algorithm.config, "action_steps", 0))
        return min(count, self.length) if count else self.length

    def actions_per_decision(self, steps: int) -> int:
        return min(steps, self.length)

    @abstractmethod
    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        """Chunks [E, h, A] in [-1, 1] for normalised observations [E, O]."""

    def start(self, episodes: int) -> Carry:
        if self.action_steps == 1:
            return None
        device = self.state.step.device
        actions = torch.zeros(episodes, self.length, self.algorithm.spec.action_dim, device=device)
        return Queue(actions, torch.zeros(episodes, dtype=torch.int64, device=device))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        if carry is None:
            return self.chunk(observations, key, explore)[:, 0], None
        queue, remaining = carry
        fresh = remaining == 0
        if traced(fresh) or bool(fresh.any()):
            chunk = self.chunk(observations, key, explore)
            queue = torch.where(fresh.reshape(-1, 1, 1), chunk, queue)
            remaining = torch.where(fresh, self.action_steps, remaining)
        return queue[:, 0], Queue(torch.cat([queue[:, 1:], queue[:, -1:]], 1), remaining - 1)

    def graph(self, explore: bool) -> nn.Module | None:
        """For an exported file: observations [E, O] -> the chunk [E, h, A], whose queue is the caller's; None for
        single actions.
        """
        return None if self.length == 1 else ChunkGraph(self, explore)


def traced(x: Tensor) -> bool:
    """True where no branch of Python may look at x: under `vmap`, in a graph that is traced, and in one that a GPU
    records.
    """
    recorded = x.is_cuda and torch.cuda.is_current_stream_capturing()
    return recorded or torch.compiler.is_compiling() or torch._C._functorch.is_batchedtensor(x)


class ChunkGraph(nn.Module):
    """One function from observations [E, O] to the chunk [E, h, A]."""

    def __init__(self, actor: ChunkActor, explore: bool) -> None:
        super().__init__()
        self.actor, self.explore = actor, explore
        self.nets = nn.ModuleDict({n: p.module for n, p in actor.state.params.items() if isinstance(p, BoundParams)})

    def forward(self, observations: Tensor, *noise: Tensor) -> Tensor:
        return self.actor.chunk(observations, self.actor.state.key, self.explore)
