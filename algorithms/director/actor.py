"""Acting with the memory of the episode and the goal of the moment."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from offrl import rng
from offrl.actor import Carry
from offrl.algorithms.director.hierarchy import proposed
from offrl.world_models.recurrent.actor import LatentMemory, RecurrentActor


class GoalMemory(NamedTuple):
    """The memory of E episodes; zeros at the start."""

    latent: LatentMemory
    goal: Tensor  # [E, D]
    step: Tensor  # [E] int64: steps since it was chosen, of `goal_steps`


class DirectorActor(RecurrentActor):
    """The worker's mean towards the goal of the manager's likeliest code, which is renewed every `goal_steps`; with
    `explore` samples of both.
    """

    def start(self, episodes: int) -> Carry:
        latent = super().start(episodes)
        goal = torch.zeros_like(latent.state.recurrent)
        return GoalMemory(latent, goal, torch.zeros(episodes, dtype=torch.int64, device=goal.device))

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        c, (draw, pick, choice) = self.algorithm.config, rng.split(key, 3)
        state = self.look(carry.latent, observations, draw, explore)
        noise = rng.gumbel(pick, (len(carry.step), c.goal_groups, c.goal_classes)) if explore else None
        _, goal = proposed(self.apply, c, state.features, noise)
        goal = torch.where((carry.step == 0).unsqueeze(-1), goal, carry.goal)
        action = self.choose(self.apply("actor", torch.cat([state.features, goal], -1)), choice, explore)
        return action, GoalMemory(LatentMemory(state, action), goal, (carry.step + 1) % c.goal_steps)
