"""Acting with the memory of the episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Actor, Carry
from offrl.world_models.recurrent.latents import Latents, LatentState

if TYPE_CHECKING:
    from offrl.world_models.recurrent.base import RecurrentModel


class LatentMemory(NamedTuple):
    """The memory of E episodes; zeros at the start."""

    state: LatentState
    action: Tensor  # [E, A]: the one that was played last


class RecurrentActor(Actor):
    """The policy's mean at the likeliest latent state, or with `explore` a sample at a sampled one."""

    algorithm: RecurrentModel[Any]
    resettable = remembers_actions = True

    def start(self, episodes: int) -> Carry:
        device = self.state.step.device
        state = Latents(self.apply, self.algorithm.config).begin(episodes, device)
        return LatentMemory(state, torch.zeros(episodes, self.algorithm.spec.action_dim, device=device))

    def look(self, carry: LatentMemory, observations: Tensor, key: Tensor, explore: bool) -> LatentState:
        """The latent states of episodes after their last action and an observation."""
        latents = Latents(self.apply, self.algorithm.config)
        noise = latents.kind.noise(key, len(carry.action)) if explore else None
        return latents.observe(carry.state, carry.action, latents.embed(observations), noise)[0]

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        draw, choice = rng.split(key)
        state = self.look(carry, observations, draw, explore)
        action = self.choose(self.apply("actor", state.features), choice, explore)
        return action, LatentMemory(state, action)
