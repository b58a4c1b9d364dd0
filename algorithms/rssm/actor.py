"""Acting with the memory of the episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Actor, Carry
from offrl.algorithms.rssm.latents import Latents, LatentState

if TYPE_CHECKING:
    from offrl.algorithms.rssm.algorithm import RSSM


class LatentMemory(NamedTuple):
    """The memory of E episodes; zeros at the start."""

    state: LatentState
    action: Tensor  # [E, A]: the one that was played last


class RecurrentActor(Actor):
    """The policy's mean at the likeliest latent state, or with `explore` a sample at a sampled one."""

    algorithm: RSSM
    resettable = remembers_actions = True

    def start(self, episodes: int) -> Carry:
        device = self.state.step.device
        state = Latents(self.apply, self.algorithm.config).begin(episodes, device)
        return LatentMemory(state, torch.zeros(episodes, self.algorithm.spec.action_dim, device=device))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        c, latents = self.algorithm.config, Latents(self.apply, self.algorithm.config)
        draw, choice = rng.split(key)
        noise = rng.gumbel(draw, (len(carry.action), c.groups, c.classes)) if explore else None
        state, _ = latents.observe(carry.state, carry.action, latents.embed(observations), noise)
        action = self.choose(self.apply("actor", state.features), choice, explore)
        return action, LatentMemory(state, action)
