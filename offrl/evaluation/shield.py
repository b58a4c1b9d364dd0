"""Shields: what stands between a policy's actions and the environment, and corrects those that may do harm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from offrl.algorithm import TrainState
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy

OFTEN = 0.2  # share of changed steps from which on a shield is warned of


class Correction(NamedTuple):
    """Corrected actions of E episodes."""

    actions: Tensor  # [E, A]
    unsolved: Tensor  # [E] bool: no action is allowed, and these are the shield's last resort
    faulty: Tensor  # [E] bool: the shield itself is at fault


class Shield(Protocol):
    """Maps observations [E, O], actions and the actions before them [E, A] (at an episode's first step the actions
    themselves), all in the environment's units, to an `Correction`: tensors alone, so that a graph can hold it.
    """

    name: str
    fault: str  # what is wrong with it where it is faulty
    remembers: bool  # whether it looks at the actions before

    def __call__(self, observations: Tensor, actions: Tensor, previous: Tensor) -> Correction: ...

    def bound(self, state: TrainState, dtype: torch.dtype) -> Shield:
        """The same with the policy's parameters of `state`, for inputs of `dtype`."""


@dataclass(frozen=True)
class Guarded:
    """The memory of E episodes that began together."""

    inner: Any  # the policy's own
    previous: Tensor | None = None  # [E, A] as they were played
    # [E, 3] of the last step: whether the action was changed, whether there was no solution, and by how much it was
    # changed, the mean over its dimensions in halves of their ranges
    changes: np.ndarray | None = None
    faulty: np.ndarray | None = None  # [E] bool
    t: int = 0  # which that is


class ShieldedPolicy(TrainedPolicy):
    """A policy behind a shield: it acts as the policy does, but for the actions that the shield corrects. What it saves
    is the policy alone.
    """

    def __init__(self, policy: TrainedPolicy, shield: Shield) -> None:
        self.__dict__.update(policy.__dict__)
        self.shield = shield

    def start(self, episodes: int) -> Guarded:
        return Guarded(super().start(episodes))

    def set_goal(self, carry: Guarded, goals: np.ndarray | None) -> Guarded:
        return replace(carry, inner=super().set_goal(carry.inner, goals))

    def observe_reward(self, carry: Guarded, rewards: np.ndarray) -> Guarded:
        return replace(carry, inner=super().observe_reward(carry.inner, rewards))

    def observe_cost(self, carry: Guarded, costs: np.ndarray) -> Guarded:
        return replace(carry, inner=super().observe_cost(carry.inner, costs))

    @torch.no_grad()
    def step(
        self, carry: Guarded, observations: np.ndarray, t: int, explore: bool = False
    ) -> tuple[np.ndarray, Guarded]:
        raw, inner = super().step(carry.inner, observations, t, explore)
        actions = torch.from_numpy(raw)
        x = torch.as_tensor(np.asarray(observations, np.float32)).reshape(len(raw), -1)
        answer = self.guard(x, actions, carry.previous)
        half = torch.from_numpy(0.5 * (self.high - self.low)).clamp(min=1e-12)
        change = ((answer.actions - actions).abs() / half).mean(-1)
        changes = torch.stack([(change > 0).float(), answer.unsolved.float(), change], -1).double().numpy()
        return answer.actions.numpy(), Guarded(inner, answer.actions, changes, answer.faulty.numpy(), t)

    def guard(self, observations: Tensor, actions: Tensor, previous: Tensor | None) -> Correction:
        """The shield's answer, within the environment's range. previous: None, or NaN, where episodes begin."""
        before = actions if previous is None else torch.where(previous.isnan(), actions, previous)
        answer = self.shield(observations, actions, before)
        low, high = (torch.from_numpy(x).to(actions.dtype) for x in (self.low, self.high))
        return answer._replace(actions=torch.minimum(torch.maximum(answer.actions, low), high))

    def interventions(self, carry: Guarded, episodes: list[int]) -> np.ndarray:
        """What the shield did to the actions of these episodes in the last step, [episodes, 3]; see `Guarded.changes`.
        Raises UserError where the shield itself is at fault."""
        assert carry.changes is not None and carry.faulty is not None
        for e in episodes:
            if carry.faulty[e]:
                raise UserError(
                    f"shield={self.shield.name}: {self.shield.fault} (seed {self.seed}, episode {e}, step {carry.t})"
                )
        return carry.changes[episodes]
