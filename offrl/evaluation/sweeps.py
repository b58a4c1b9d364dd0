"""Scores of trained policies under several conditions: target returns, or decisions that come rarely. No training, only
more replicas to score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.result import Evaluation
from offrl.settings.replicas import Replica, Values, by_cell
from offrl.statistics.intervals import mean_interval, share_interval
from offrl.system.csv_text import text_of
from offrl.system.files import write_text

BEYOND = 0.2  # from the data's best return to the highest target, as a share of the range of the data's
LEVELS = 6


@dataclass(frozen=True)
class Sweep:
    """Scores of R replicas under each of M conditions."""

    replicas: tuple[Replica, ...]
    evaluations: tuple[Evaluation, ...]  # one for each condition

    @property
    def unit(self) -> str:
        """What `values` are: "score" where there are reference scores, else "return"."""
        return "return" if any(e.scores is None for e in self.evaluations) else "score"

    @property
    def cells(self) -> dict[Values, list[int]]:
        """Replicas that differ in nothing but the seed."""
        return by_cell(self.replicas)

    def returns(self, replicas: Sequence[int]) -> list[tuple[float, float, float]]:
        """For each condition the mean undiscounted return over the seeds of these replicas, with its interval."""
        return [mean_interval(e.returns.mean(axis=1)[list(replicas)]) for e in self.evaluations]

    def scores(self, replicas: Sequence[int]) -> list[tuple[float, float, float]] | None:
        """The same as `returns`, of normalised scores; None without reference scores."""
        if any(e.scores is None for e in self.evaluations):
            return None
        return [mean_interval(e.per_seed()[list(replicas)]) for e in self.evaluations]

    def costs(self, replicas: Sequence[int]) -> list[tuple[float, float, float]] | None:
        """The same as `returns`, of what an episode costs; None where the environment does not say."""
        known = [e.costs.mean(axis=1) for e in self.evaluations if e.costs is not None]
        return [mean_interval(costs[list(replicas)]) for costs in known] or None

    def safe(self, replicas: Sequence[int]) -> list[tuple[float, float, float]] | None:
        """For each condition the share of these replicas whose mean cost keeps their limit, with Wilson's interval;
        None where there are no costs, or no limits.
        """
        rows = [[e.rows()[n] for n in replicas] for e in self.evaluations]
        if any(row.get("cost_normalized") is None for condition in rows for row in condition):
            return None
        return [
            share_interval(sum(r["cost_normalized"] <= 1.0 for r in condition), len(condition)) for condition in rows
        ]

    def write_table(self, path: Path, conditions: Mapping[str, Sequence[Sequence[Any]]], names: Sequence[str]) -> None:
        """Write a CSV line for each condition and replica. conditions: columns [M, R] by name. names: the entries of
        `Evaluation.rows` after them. Raises UserError."""
        fields = [name for name, _ in self.replicas[0].values]
        lines: list[list[Any]] = [[*fields, "seed", *conditions, *names]]
        for m, evaluation in enumerate(self.evaluations):
            for n, (replica, row) in enumerate(zip(self.replicas, evaluation.rows(), strict=True)):
                condition = [column[m][n] for column in conditions.values()]
                values = [value for _, value in replica.values]
                lines.append([*values, replica.seed, *condition, *(row[name] for name in names)])
        write_text(path, text_of(lines))


@dataclass(frozen=True)
class AchievedReturns(Sweep):
    """Scores of R replicas for each of M target returns."""

    targets: tuple[float, ...]  # in the units of the recorded rewards
    limits: tuple[float, ...] = ()  # of an episode's cost, one for each target; (): the policies' own, if any
    # targets are discounted returns of the rest of an episode (`TargetReturnSettings.targets_ahead`)
    ahead: bool = False

    def write(self, path: Path) -> None:
        """Write the table as CSV. Raises UserError."""
        count, row = len(self.replicas), self.evaluations[0].rows()[0]
        columns = {"target_return": [[target] * count for target in self.targets]}
        if self.limits:
            columns["cost_limit"] = [[limit] * count for limit in self.limits]
        costs = [name for name in ("cost", "cost_normalized", "safe") if name in row]
        self.write_table(path, columns, ("return_mean", "return_std", "score", "length_mean", *costs))


def spread_targets(low: float, high: float) -> list[float]:
    """Target returns for data whose returns lie between `low` and `high`: evenly spaced over these, and one beyond."""
    values = [*np.linspace(low, high, LEVELS).tolist(), high + BEYOND * (high - low)]
    return list(dict.fromkeys(float(f"{v:.4g}") for v in values))


def as_prompts(targets: Sequence[Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(target returns, limits of the costs) of pairs of both; of numbers, (target returns, ()). Raises UserError for
    anything else.
    """
    pairs = [t if isinstance(t, list | tuple) else [t] for t in targets]
    numbers = all(isinstance(x, int | float) for pair in pairs for x in pair)
    if not numbers or {len(pair) for pair in pairs} not in ({1}, {2}):
        raise UserError(
            "target_returns is auto, or a list of numbers, target_returns=1000,2000,3000, or of pairs of a return and "
            "a limit of the costs, target_returns=[[1000,20],[1000,40]]"
        )
    return tuple(float(pair[0]) for pair in pairs), tuple(float(pair[1]) for pair in pairs if len(pair) == 2)


def data_range(config: Any, data: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the largest target that the data may have an answer to. data: the record of a run's."""
    if getattr(config, "targets_ahead", False):
        return (0.0, config.return_scale) if config.target_return > 0.0 else (-config.return_scale, 0.0)
    return data["return_min"], data["return_max"]


@dataclass(frozen=True)
class Holding:
    """The memory of E episodes that began together."""

    inner: Any  # the policy's own
    observations: np.ndarray | None = None  # [E, ...] of the last decision
    actions: np.ndarray | None = None  # [E, A] or [E], as they were last played
    earned: np.ndarray | None = None  # [E] float64 since the last decision; None: none yet
    spent: np.ndarray | None = None  # likewise, of costs


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

    @property
    def cost_limit(self) -> float | None:
        """The policy's limit of an episode's costs."""
        return self.policy.cost_limit

    def start(self, episodes: int) -> Holding:
        return Holding(self.policy.start(episodes))

    def set_goal(self, carry: Holding, goals: np.ndarray | None) -> Holding:
        return replace(carry, inner=self.policy.set_goal(carry.inner, goals))

    def step(self, carry: Holding, observations: np.ndarray, t: int) -> tuple[np.ndarray, Holding]:
        position = t % self.every
        if position == 0:
            inner = carry.inner if carry.earned is None else self.policy.observe_reward(carry.inner, carry.earned)
            inner = inner if carry.spent is None else self.policy.observe_cost(inner, carry.spent)
            carry = Holding(inner, observations.copy(), carry.actions)
        assert carry.observations is not None
        if position < self.planned:
            actions, inner = self.policy.step(carry.inner, carry.observations, t)
            carry = replace(carry, inner=inner, actions=actions)
        assert carry.actions is not None
        return carry.actions, carry

    def observe_reward(self, carry: Holding, rewards: np.ndarray) -> Holding:
        return replace(carry, earned=rewards if carry.earned is None else carry.earned + rewards)

    def observe_cost(self, carry: Holding, costs: np.ndarray) -> Holding:
        return replace(carry, spent=costs if carry.spent is None else carry.spent + costs)


@dataclass(frozen=True)
class FrequencyScores(Sweep):
    """Scores of R replicas that decide once in D steps, for each of several D."""

    steps: tuple[int, ...]  # D, ascending

    @property
    def values(self) -> np.ndarray:
        """[D, R]: each replica's mean over episodes."""
        return np.stack([e.returns.mean(axis=1) if self.unit == "return" else e.per_seed() for e in self.evaluations])

    @property
    def decisions(self) -> np.ndarray:
        """[D, R]: decisions in an episode, the mean over episodes."""
        return np.stack(
            [np.ceil(e.lengths / d).mean(axis=1) for d, e in zip(self.steps, self.evaluations, strict=True)]
        )

    @property
    def frequency_score(self) -> np.ndarray | None:
        """[R]: the mean of `values` over D from the first to the last, by the trapezoid rule; None for a single D.

        The frequency-averaged score of Sequence RL (arXiv 2410.08979), whose code divides by the last D alone: a
        perfect policy does not reach 1 there.
        """
        return None if len(self.steps) == 1 else trapezoid(self.steps, self.values) / (self.steps[-1] - self.steps[0])

    def write(self, path: Path) -> None:
        """Write the table as CSV. Raises UserError."""
        columns = {
            "steps_per_decision": [[d] * len(self.replicas) for d in self.steps],
            "decisions_mean": self.decisions.tolist(),
        }
        self.write_table(path, columns, ("return_mean", "return_std", "score", "success", "length_mean"))


def trapezoid(x: Sequence[float], y: np.ndarray) -> np.ndarray:
    """The integral over x [X] of the lines between y [X, ...]: [...]."""
    width = np.diff(np.asarray(x, np.float64)).reshape(-1, *[1] * (np.ndim(y) - 1))
    return (0.5 * width * (np.asarray(y)[1:] + np.asarray(y)[:-1])).sum(axis=0)
