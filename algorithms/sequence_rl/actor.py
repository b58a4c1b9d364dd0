"""The recurrent network that unrolls actions, and acting by it: D actions from one observation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.actor import Actor, Carry
from offrl.families.generative.chunks import traced
from offrl.nn import Linear
from offrl.nn.recurrent import GRU

if TYPE_CHECKING:
    from offrl.algorithms.sequence_rl.algorithm import SequenceRL

NOISE = 0.1  # standard deviation of exploration, as TD3's


class SequenceNet(nn.Module):
    """h = W2 relu(W1 s), and then for each action h <- GRU(h, the action before), a = tanh(W3 h): any number of
    actions.
    """

    def __init__(self, observation_dim: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.first, self.second = Linear(observation_dim, width, "xavier"), Linear(width, width, "xavier")
        self.gru, self.head = GRU(action_dim, width), Linear(width, action_dim, "xavier")

    def forward(self, observations: Tensor, before: Tensor, steps: int, noise: Tensor | None = None) -> Tensor:
        """Actions [B, steps, A] from observations [B, O] and what came before the first K of them, [B, K, A]; before
        the others comes the network's own last action. noise [B, steps, A] is added to each action, which is then
        clipped."""
        h = self.second(F.relu(self.first(observations)))
        actions: list[Tensor] = []
        for i in range(steps):
            h = self.gru.step(h, before[..., i, :] if i < before.shape[-2] else actions[-1])
            action = self.head(h).tanh()
            actions.append(action if noise is None else (action + noise[..., i, :]).clamp(-1.0, 1.0))
        return torch.stack(actions, -2)


class OpenLoop(NamedTuple):
    """The memory of E episodes."""

    actions: Tensor  # [E, D, A]: those to come, the next one first
    left: Tensor  # [E] int64: how many of them are still played
    previous: Tensor  # [E, A]: the one that was played last; 0 at the start


class RolledOutActor(Actor):
    """Policy that plays D actions from one observation, whatever happens meanwhile."""

    algorithm: SequenceRL
    resets = True

    @property
    def execute(self) -> int:
        """D: actions from one observation."""
        c = self.algorithm.config
        return int(c.length if c.execute is None else c.execute)

    def planned(self, steps: int) -> int:
        return steps

    def start(self, episodes: int) -> Carry:
        device, width = self.state.step.device, self.algorithm.spec.action_dim
        actions = torch.zeros(episodes, self.execute, width, device=device)
        return OpenLoop(actions, torch.zeros(episodes, dtype=torch.int64, device=device), actions[:, 0])

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        queue, left, previous = carry
        fresh = left == 0
        if traced(fresh) or bool(fresh.any()):
            noise = NOISE * rng.normal(key, tuple(queue.shape)) if explore else None
            drawn = self.apply("sequence", observations, previous.unsqueeze(-2), self.execute, noise)
            queue = torch.where(fresh.reshape(-1, 1, 1), drawn, queue)
            left = torch.where(fresh, self.execute, left)
        return queue[:, 0], OpenLoop(torch.cat([queue[:, 1:], queue[:, -1:]], 1), left - 1, queue[:, 0])
