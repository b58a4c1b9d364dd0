"""Acting by the first action of the best plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Actor, Carry, TrainState
from offrl.world_models.planning import check_plan, check_plan_memory, first_plan, plan

if TYPE_CHECKING:
    from offrl.algorithms.pets.algorithm import PETS


class PETSCarry(NamedTuple):
    """The memory of planning in B episodes."""

    mean: Tensor  # [B, H, A] where the search begins
    past: Tensor  # [B, history - 1, O + A]
    t: int


class PETSActor(Actor):
    """The first action of the plan that the search ends with.

    Without `explore` its random numbers depend on the seed and the step of the episode alone; with it they are the
    key's, and mppi adds noise to the action.
    """

    algorithm: PETS

    def __init__(self, algorithm: PETS, state: TrainState) -> None:
        super().__init__(algorithm, state)
        self.tree = algorithm.acting_tree(state)

    def start(self, episodes: int) -> Carry:
        c, spec, (low, high) = self.algorithm.config, self.algorithm.spec, self.bounds()
        check_plan(c)  # `acting.` may have changed some settings
        check_plan_memory(c, spec.action_dim)
        past = low.new_zeros(episodes, c.history - 1, spec.observation_dim + spec.action_dim)
        return PETSCarry(first_plan(episodes, c.plan_horizon, low, high), past, 0)

    def bounds(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest action, [A]."""
        ones = torch.ones(self.algorithm.spec.action_dim, device=self.state.step.device)
        return -ones, ones

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        algorithm = self.algorithm
        past = algorithm.model.first_past(observations) if carry.t == 0 else carry.past
        if not explore:
            key = rng.fold_in(rng.fold_in(self.state.key, 211), carry.t)

        def returns(observations: Tensor, plans: Tensor, key: Tensor) -> Tensor:
            return algorithm.returns(self.tree, observations, past, plans, key)

        action, mean = plan(algorithm.config, returns, observations, carry.mean, *self.bounds(), key, explore=explore)
        return action, PETSCarry(mean, algorithm.model.later_past(past, observations, action), carry.t + 1)
