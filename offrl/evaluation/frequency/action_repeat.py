"""A policy that decides once in several steps of the environment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy


@dataclass(frozen=True)
class Holding:
    """The memory of E episodes that began together."""

    inner: Any  # the policy's own
    observations: np.ndarray | None = None  # [E, ...] of the last decision
    actions: np.ndarray | None = None  # [E, A] or [E], as they were last played
    earned: np.ndarray | None = None  # [E] float64 since the last decision; None: none yet


class HeldPolicy:
    """`policy`, asked at the steps 0, D, 2 D, ... of an episode alone, as the evaluator plays policies.

    What it plays in between follows from what it saw at the decision: the rest of its queue, where it draws several
    actions at a time (its setting `action_steps` is then D, or all that it can draw where D is more, see
    `Actor.actions_per_decision`), and after that the last action again.

    To a policy with a memory a decision is a step: its clock counts decisions, its context holds the observations and
    actions of decisions, and as the reward of a decision it is handed the sum of the rewards since, so that a return to
    go stays right.
    """

    def __init__(self, policy: TrainedPolicy, every: int) -> None:
        """every: D. Raises UserError for a policy of texts, and one of whose queue the caller has decided."""
        name = policy.algorithm.config.name
        if policy.algorithm.traits.text:
            raise UserError(
                f"a policy of {name} answers texts, one decision each: frequency= is for actions that an environment "
                "can repeat"
            )
        self.every, self.planned = every, policy.actor.actions_per_decision(every)
        queues = policy.actor.actions_per_decision(2) > 1
        self.policy = policy.with_settings({"action_steps": self.planned}) if queues else policy

    @property
    def seed(self) -> int:
        """The policy's seed."""
        return self.policy.seed

    @property
    def discount(self) -> float:
        """The policy's discount factor, of a step."""
        return self.policy.discount

    def start(self, episodes: int) -> Holding:
        return Holding(self.policy.start(episodes))

    def set_goal(self, carry: Holding, goals: np.ndarray | None) -> Holding:
        return replace(carry, inner=self.policy.set_goal(carry.inner, goals))

    def step(self, carry: Holding, observations: np.ndarray, t: int) -> tuple[np.ndarray, Holding]:
        position = t % self.every
        if position == 0:
            inner = carry.inner if carry.earned is None else self.policy.observe_reward(carry.inner, carry.earned)
            carry = Holding(inner, observations.copy(), carry.actions)
        assert carry.observations is not None
        if position < self.planned:
            actions, inner = self.policy.step(carry.inner, carry.observations, t)
            carry = replace(carry, inner=inner, actions=actions)
        assert carry.actions is not None
        return carry.actions, carry

    def observe_reward(self, carry: Holding, rewards: np.ndarray) -> Holding:
        return replace(carry, earned=rewards if carry.earned is None else carry.earned + rewards)
