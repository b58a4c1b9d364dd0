"""Policies that are scored, the tally of their episodes, and the scores that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from offrl.statistics.intervals import mean_interval
from offrl.tasks.provenance import Provenance
from offrl.tasks.task import Task


class Policy(Protocol):
    """The policy that is scored. Row e of every array belongs to episode e; a row whose episode does not run holds
    zeros (of texts: None), and its action is ignored. Where it has a `perturbation`, the environment is so perturbed.
    """

    def start(self, episodes: int) -> Any:
        """A fresh carry for that many episodes."""

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        """Actions at step t, [E, A] in the environment's range or [E] integers, from raw observations [E, ...], and the
        new carry. Texts are arrays [E] of objects."""


@runtime_checkable
class OwnValues(Protocol):
    """A policy that has an estimate of its own of what it will earn."""

    def own_value(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray | None:
        """Q(s, a) [E], or None."""

    def in_recorded_units(self, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Values in the units of the environment's rewards, for episodes of these lengths."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of N policies over E episodes each."""

    returns: np.ndarray  # [N, E] float64, undiscounted, of the environment's own rewards
    lengths: np.ndarray  # [N, E] int64 steps
    successes: np.ndarray | None  # [N, E] float64 in [0, 1]; None where the environment does not say
    scores: np.ndarray | None  # [N, E] float64 normalised; None without reference scores
    task: str  # the dataset's or task's name
    provenance: Provenance
    seeds: tuple[int, ...] = ()
    discounted: np.ndarray | None = None  # [N, E] float64, returns discounted with each policy's own discount
    estimates: np.ndarray | None = (
        None  # [N, E] float64, Q(s_0, a_0) as each policy's critic has it, in the same units; NaN: it has none
    )
    faults: int = 0  # episodes stopped early by a NaN action or by physics that blew up
    costs: np.ndarray | None = None  # [N, E] float64, undiscounted; None where the environment does not say
    limits: np.ndarray | None = None  # [N, E] float64, of the costs of each policy's episodes; NaN: it has none
    # [N, E, 3] float64, sums over steps of what shields did (see `shield.Guarded.changes`); None: there are none
    shielded: np.ndarray | None = None
    tasks: int = 1  # episode e is of task e % tasks, of those that `Task.starts` names
    # of multi-task data: the numbers of the tasks that are played, each in an environment of its own
    numbers: list[int] | None = None

    @property
    def label(self) -> str:
        """The task and the provenance, as the title of a table."""
        return f"{self.task} in {self.provenance}"

    @property
    def values(self) -> np.ndarray:
        """[N, E]: normalised scores where there are reference scores, else returns."""
        return self.returns if self.scores is None else self.scores

    def per_seed(self) -> np.ndarray:
        """[N]: each policy's mean of `values` over its episodes."""
        return self.values.mean(axis=1)

    def interval(self) -> tuple[float, float, float]:
        """(mean, low, high) of `per_seed`: the 95% Student-t interval over seeds, NaN for a single one."""
        return mean_interval(self.per_seed())

    def rows(self) -> list[dict[str, Any]]:
        """One dict of plain numbers per policy, for tables and files."""
        return [
            {
                "seed": self.seeds[n] if self.seeds else n,
                "episodes": int(self.returns.shape[1]),
                "score": None if self.scores is None else float(self.scores[n].mean()),
                "return_mean": float(self.returns[n].mean()),
                "return_std": float(self.returns[n].std()),
                "length_mean": float(self.lengths[n].mean()),
                "success": None if self.successes is None else float(self.successes[n].mean()),
                "discounted_mean": None if self.discounted is None else float(self.discounted[n].mean()),
                "q_overestimation": self._overestimation(n),
                "success_by_task": None
                if self.tasks == 1 or self.successes is None
                else " ".join(f"{s:.4g}" for s in self.by_task(n)),
                **({} if self.numbers is None else {"score_by_task": self._numbered(n, self.numbers)}),
                **self._costs(n),
                **self._shield(n),
            }
            for n in range(len(self.returns))
        ]

    def _costs(self, n: int) -> dict[str, Any]:
        """The mean cost of policy n, as DSRL's normalised cost, and the share of episodes that keep its limit; {} where
        the environment says no costs.
        """
        if self.costs is None or self.limits is None:
            return {}
        costs, limit = self.costs[n], float(self.limits[n, 0])
        mean, known = float(costs.mean()), not np.isnan(limit)
        return {
            "cost": mean,
            "cost_normalized": normalized_cost(mean, limit) if known else None,
            "safe": float((costs <= limit).mean()) if known else None,
        }

    def _shield(self, n: int) -> dict[str, Any]:
        """The shares of policy n's steps that its shield changed and had no solution for, and the mean change of a
        step; {} without one."""
        if self.shielded is None:
            return {}
        names = ("shielded", "unsolved", "shield_change")
        return dict(zip(names, (self.shielded[n].sum(0) / self.lengths[n].sum()).tolist(), strict=True))

    def split(self, count: int) -> tuple[Evaluation, ...]:
        """Evaluations of `count` policies each, in order."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        columns = {name: column for name, column in columns.items() if isinstance(column, np.ndarray | tuple)}
        rows = [slice(first, first + count) for first in range(0, len(self.returns), count)]
        return tuple(replace(self, **{name: column[part] for name, column in columns.items()}) for part in rows)

    def by_task(self, n: int, values: np.ndarray | None = None) -> list[float]:
        """The share of policy n's episodes of each task that succeed, or the mean of other `values` [N, E]; NaN for a
        task that was not played.
        """
        values = self.successes if values is None else values
        assert values is not None
        parts = [values[n, k :: self.tasks] for k in range(self.tasks)]
        return [float(p.mean()) if len(p) else float("nan") for p in parts]

    def _numbered(self, n: int, numbers: list[int]) -> str:
        """The mean of policy n's `values` in each task, behind its number."""
        means = zip(numbers, self.by_task(n, self.values), strict=True)
        return " ".join(f"{number}:{mean:.4g}" for number, mean in means)

    def _overestimation(self, n: int) -> float | None:
        """The overestimation of policy n by its own critic: the mean of Q(s_0, a_0) less the discounted return; None of
        multi-task data, whose tasks have discounts of their own.
        """
        if (
            self.numbers is not None
            or self.discounted is None
            or self.estimates is None
            or np.isnan(self.estimates[n]).any()
        ):
            return None
        return float((self.estimates[n] - self.discounted[n]).mean())


def normalized_cost(cost: float, limit: float) -> float:
    """An episode's cost as a multiple of the limit, (C + e) / (limit + e) with e = 1 for the limit 0 and else 0 (DSRL,
    arXiv 2306.09303): up to 1 it is kept.
    """
    epsilon = float(limit == 0.0)
    return (cost + epsilon) / (limit + epsilon)


@dataclass
class Tally:
    """The returns of N policies so far, in E episodes each."""

    returns: np.ndarray  # [N, E]
    lengths: np.ndarray  # [N, E]
    successes: np.ndarray  # [N, E], NaN where the environment said nothing
    discounted: np.ndarray  # [N, E]
    estimates: np.ndarray  # [N, E], NaN where a policy has none
    costs: np.ndarray  # [N, E], NaN where the environment said nothing
    limits: np.ndarray  # [N, E], NaN where a policy has none
    shielded: np.ndarray  # [N, E, 3], NaN where a policy has no shield
    finished: int = 0  # episodes
    faults: int = 0

    @classmethod
    def of(cls, policies: Sequence[Policy], seeds: Sequence[int], episodes: int) -> Tally:
        """An empty one."""
        if len(policies) != len(seeds):
            raise ValueError(f"{len(policies)} policies but {len(seeds)} seeds")
        if not policies:
            raise ValueError("no policies to evaluate")
        shape = (len(policies), episodes)
        unknown = np.full(shape, np.nan)
        return cls(
            np.zeros(shape),
            np.zeros(shape, np.int64),
            unknown,
            np.zeros(shape),
            unknown.copy(),
            unknown.copy(),
            unknown.copy(),
            np.full((*shape, 3), np.nan),
        )

    def evaluation(self, task: Task, provenance: Provenance, seeds: Sequence[int]) -> Evaluation:
        """The scores, when all episodes are over."""
        successes = None if np.isnan(self.successes).all() else np.nan_to_num(self.successes)
        scores = task.score(self.returns, successes)
        numbers = tuple(int(s) for s in seeds)
        costs = None if np.isnan(self.costs).all() else np.nan_to_num(self.costs)
        shielded = None if np.isnan(self.shielded).all() else np.nan_to_num(self.shielded)
        statistics = (
            self.discounted,
            self.estimates,
            self.faults,
            costs,
            self.limits,
            shielded,
            max(1, len(task.starts)),
            [start["task"] for start in task.starts] if task.parts else None,
        )
        return Evaluation(self.returns, self.lengths, successes, scores, task.name, provenance, numbers, *statistics)
