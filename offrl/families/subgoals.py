"""Subgoals from a trained goal-conditioned run, as vectors or as words: states to reach next on the way to a goal.

    provider = Subgoals.of_run(run)  # a `Pretrained`
    wanted = provider.choose(run.state, observations, goals)            # [B, D]

Of a hierarchical algorithm (hiql, ota) a subgoal is the latent phi(s, w) that the high level chooses. An algorithm with
V(s, g) alone (gcivl, gciql) has no high level: there a subgoal is a state itself, given as a goal, and is chosen among
states of the data by the values. The algorithm's `subgoal_kind` says which; all have the method `v`, and those of
latents `represent` and `subgoals` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.families.goal_conditioned import GoalConditioned
from offrl.pretrained import Pretrained


@dataclass(frozen=True)
class Candidates:
    """N states of the data that may be chosen: [N, O] as observations, [N, G] as goals."""

    states: Tensor
    goals: Tensor


@dataclass(frozen=True)
class Subgoals:
    """The choice of subgoals to reach within `steps` steps.

    Methods are pure: `state` is the run's, of which only the `params` of `modules` are read.

    Observations [B, O] are normalised, goals [B, G] as the algorithm takes them (`DataSpec.goal_dim`).
    """

    algorithm: GoalConditioned
    steps: int

    @classmethod
    def of_run(cls, run: Pretrained, steps: int = 25) -> Subgoals:
        """The subgoals of a trained run; of a hierarchical one the steps are the run's own. Raises UserError for a run
        that has none.
        """
        return cls.from_algorithm(run.algorithm, steps)

    @classmethod
    def from_algorithm(cls, algorithm: Any, steps: int = 25) -> Subgoals:
        """The subgoals of a goal-conditioned algorithm; see `of_run`."""
        kind = getattr(algorithm, "subgoal_kind", "")
        if not kind:
            raise UserError(
                f"{algorithm.config.name} has no V(s, g), of which subgoals are made; use a run of hiql, ota, gcivl or "
                "gciql"
            )
        return cls(algorithm, int(algorithm.config.subgoal_steps) if kind == "latent" else steps)

    @property
    def latent(self) -> bool:
        """True where subgoals are latents of a high level; else they are states of the data, among which `choose` needs
        candidates.
        """
        return self.algorithm.subgoal_kind == "latent"

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules whose parameters are read."""
        return ("value", "high") if self.latent else ("value",)

    @property
    def width(self) -> int:
        """D: the dimension of a subgoal."""
        algorithm: Any = self.algorithm
        return int(algorithm.config.representation) if self.latent else int(algorithm.goal_dim)

    def value(self, state: Any, observations: Tensor, goals: Tensor) -> Tensor:
        """V(s, g) [B], the mean of twins."""
        algorithm: Any = self.algorithm
        v = algorithm.v(state.params["value"], observations, goals)
        return v.mean(0) if v.ndim == 2 else v

    def describe(self, state: Any, observations: Tensor, goals: Tensor) -> Tensor:
        """The subgoals [B, D] that stand for being at `goals` [B, G], seen from `observations`."""
        algorithm: Any = self.algorithm
        return algorithm.represent(state.params["value"], observations, goals) if self.latent else goals

    def choose(self, state: Any, observations: Tensor, goals: Tensor, candidates: Candidates | None = None) -> Tensor:
        """The next subgoals [B, D].

        Without a high level: of the candidates, and the goal itself, the one with the largest V of the goal, among
        those at most `steps` steps away by V; the nearest where there is none. Raises ValueError without candidates.
        """
        algorithm: Any = self.algorithm
        if self.latent:
            return algorithm.subgoals(state, observations, goals)
        if candidates is None:
            raise ValueError("without a high level, subgoals are chosen among candidates")
        value_to_subgoal = self._pairs(state, observations.unsqueeze(1), candidates.goals.unsqueeze(0))
        value_to_goal = self._pairs(state, candidates.states.unsqueeze(0), goals.unsqueeze(1))
        # [B, N + 1]
        value_to_subgoal = torch.cat([value_to_subgoal, self.value(state, observations, goals).unsqueeze(1)], 1)
        value_to_goal = torch.cat([value_to_goal, torch.zeros_like(value_to_goal[:, :1])], 1)
        discount = float(algorithm.config.discount)
        # V of a goal so far away
        reach = -float(self.steps) if discount == 1.0 else -(1.0 - discount**self.steps) / (1.0 - discount)
        reachable = value_to_subgoal >= reach
        score = torch.where(
            reachable.any(1, keepdim=True), torch.where(reachable, value_to_goal, -torch.inf), value_to_subgoal
        )
        best = score.argmax(1, keepdim=True)
        options = torch.cat([candidates.goals.expand(len(goals), -1, -1), goals.unsqueeze(1)], 1)
        return options.gather(1, best.unsqueeze(-1).expand(-1, 1, options.shape[-1])).squeeze(1)

    def _pairs(self, state: Any, observations: Tensor, goals: Tensor) -> Tensor:
        """V [B, N] of observations [B or 1, 1 or N, O] and goals [1 or B, N or 1, G]."""
        shape = torch.broadcast_shapes(observations.shape[:2], goals.shape[:2])
        pairs = (x.expand(*shape, x.shape[-1]).flatten(0, 1) for x in (observations, goals))
        return self.value(state, *pairs).unflatten(0, shape)


def nearest(provider: Subgoals, state: Any, observations: Tensor, subgoals: Tensor, candidates: Candidates) -> Tensor:
    """Number of the candidate that each subgoal [B, D] stands for, seen from observations [B, O]: int64 [B]."""
    numbers = []
    for observation, subgoal in zip(observations, subgoals, strict=True):
        vectors = provider.describe(state, observation.expand(len(candidates.goals), -1), candidates.goals)
        numbers.append((vectors - subgoal).square().sum(-1).argmin())
    return torch.stack(numbers)


def words(goals: Tensor, spec: DataSpec, names: Sequence[str] = (), digits: int = 2) -> list[str]:
    """Goals [B, G] as text for a language model, such as "x 3.2, y 0.96", in the environment's units; the first
    entries, as many as `names` has (none: all, numbered from 0)."""
    values = goals.double()
    if not spec.goal_dim and (moments := spec.observation_moments) is not None:
        mean, std = (torch.from_numpy(x).double() for x in moments)
        values = values * std + mean
    labels = list(names) or [str(i) for i in range(values.shape[1])]
    return [
        ", ".join(f"{name} {round(x, digits) + 0.0:g}" for name, x in zip(labels, row, strict=False))
        for row in values.tolist()
    ]
