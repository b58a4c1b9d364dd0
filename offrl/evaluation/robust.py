"""Scores of trained policies in perturbed environments."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool.host import evaluate_parallel
from offrl.evaluation.result import Evaluation
from offrl.evaluation.studies import Study
from offrl.evaluation.sweeps import Sweep
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica
from offrl.statistics.intervals import mean_interval
from offrl.system.files import finite, write_text
from offrl.tasks.perturbed import Perturbation
from offrl.tasks.task import Task

TAIL = 0.1  # share of the points whose mean is the CVaR
NEAR = 0.8  # of the nominal score
AT_ONCE = 200  # policies that are handed to evaluation processes together, copies all of them
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class RobustSummary:
    """What came of the replicas of one cell, each with its 95% interval: over seeds, or over the episodes of a single
    seed."""

    cell: str
    nominal: Interval
    mean: Interval  # over all points
    cvar: Interval  # over the worst tenth of the points, played again
    worst: Interval  # of the worst point, played again
    point: int  # which that is
    # of the points that score NEAR of the nominal score or more; None where that is not above 0
    share: Interval | None


@dataclass(frozen=True)
class RobustScores(Sweep):
    """Scores of R replicas in the environment as it is (the first evaluation), at each of M points, and at the worst of
    these again, in episodes with other start states.
    """

    study: Study
    points: tuple[Mapping[str, float], ...]
    again: tuple[int, ...]  # the points of the last evaluations
    seeds: tuple[int, int]  # `eval.seed` of the evaluations, and of those again

    @property
    def values(self) -> np.ndarray:
        """[1 + M + again, R, E]: scores, or returns, of episodes; see `unit`."""
        return np.stack([e.values for e in self.evaluations])

    def means(self, where: Sequence[int]) -> np.ndarray:
        """[M]: the mean at each point over these replicas and their episodes."""
        return self.values[1 : 1 + len(self.points), list(where)].mean((1, 2))

    def summaries(self) -> list[RobustSummary]:
        """One for each cell."""
        return [self._summary(where) for where in self.cells.values()]

    def _summary(self, where: Sequence[int]) -> RobustSummary:
        values, count = self.values[:, list(where)], len(self.points)
        nominal, points = values[0], values[1 : 1 + count]
        replays = {index: values[1 + count + k] for k, index in enumerate(self.again)}
        order = worst_points(self.means(where))
        weights = np.ones(len(order))
        weights[-1] = max(TAIL * count, 1.0) - (len(order) - 1)
        tail = np.average(np.stack([replays[index] for index in order]), axis=0, weights=weights)
        usual, share = nominal.mean(1), None
        if (usual > 0.0).all():
            mean, low, high = np.clip(mean_interval((points.mean(2) >= NEAR * usual).mean(0)), 0.0, 1.0).tolist()
            share = mean, low, high
        return RobustSummary(
            self.replicas[where[0]].cell,
            seed_interval(nominal),
            seed_interval(points.mean(0)),
            seed_interval(tail),
            seed_interval(replays[order[0]]),
            order[0],
            share,
        )

    def unchanged(self) -> dict[str, list[list[float]]]:
        """For each parameter its successive values that change nothing: with all else equal, every episode of every
        policy has the very same return and length.
        """
        played = [e.returns.tobytes() + e.lengths.tobytes() for e in self.evaluations[1 : 1 + len(self.points)]]
        result: dict[str, list[list[float]]] = {}
        for name in self.study.ranges:
            lines: dict[tuple[Any, ...], dict[float, bytes]] = {}
            for point, bits in zip(self.points, played, strict=True):
                if name in point:
                    remaining = tuple((k, v) for k, v in point.items() if k != name)
                    lines.setdefault(remaining, {})[point[name]] = bits
            runs: list[list[float]] = []
            levels = sorted({value for line in lines.values() for value in line})
            for low, high in itertools.pairwise(levels):
                both = [line[low] == line[high] for line in lines.values() if low in line and high in line]
                if both and all(both):
                    runs = [*runs[:-1], [*runs[-1], high]] if runs and runs[-1][-1] == low else [*runs, [low, high]]
            if runs:
                result[name] = runs
        return result

    def write(self, path: Path) -> None:
        """Write all points of all replicas as CSV. Raises UserError."""
        points = [{}, *self.points, *(self.points[i] for i in self.again)]
        numbers = [0, *range(1, 1 + len(self.points)), *(1 + i for i in self.again)]
        seeds = [self.seeds[n >= 1 + len(self.points)] for n in range(len(points))]
        columns = {"point": numbers, "eval_seed": seeds} | {
            name: [point.get(name, self.study.nominal[name]) for point in points] for name in self.study.ranges
        }
        names = ["return_mean", "return_std", "score", "success", "length_mean"]
        some = self.evaluations[0].rows()[0]
        names += [name for name in ("cost", "cost_normalized", "safe", "shielded", "unsolved") if name in some]
        count = len(self.replicas)
        self.write_table(path, {name: [[v] * count for v in column] for name, column in columns.items()}, names)

    def record(self) -> dict[str, Any]:
        """All of it as plain values."""
        means, count = self.values.mean(2).tolist(), len(self.points)
        return {
            "study": self.study.name,
            "environment": self.evaluations[0].label,
            "unit": self.unit,
            "episodes": self.evaluations[0].returns.shape[1],
            "eval_seeds": self.seeds,
            "parameters": {
                name: {"low": low, "high": high, "nominal": self.study.nominal[name]}
                for name, (low, high) in self.study.ranges.items()
            },
            "cells": [asdict(one) for one in self.summaries()],
            "unchanged": self.unchanged(),
            "replicas": [replica.name for replica in self.replicas],
            "nominal": means[0],
            "points": [{"values": dict(p), "means": m} for p, m in zip(self.points, means[1:], strict=False)],
            "played_again": [{"point": k, "means": m} for k, m in zip(self.again, means[1 + count :], strict=True)],
        }

    def write_record(self, path: Path) -> None:
        """Write `record` as JSON, without the numbers that are not finite. Raises UserError."""
        write_text(path, json.dumps(finite(self.record()), indent=1, allow_nan=False) + "\n")


def worst_points(means: np.ndarray) -> list[int]:
    """The worst tenth of the points, at least one, by their means [M], the worst first."""
    return np.argsort(means, kind="stable")[: max(1, math.ceil(TAIL * len(means) - 1e-9))].tolist()


def seed_interval(values: np.ndarray) -> Interval:
    """Of values [S, E] the mean over S seeds, or over the episodes of a single one, with its interval."""
    return mean_interval(values.mean(1) if len(values) > 1 else values[0])


def score_robustly(
    policies: Sequence[TrainedPolicy],
    replicas: Sequence[Replica],
    task: Task,
    config: EvalConfig,
    study: Study,
    points: Sequence[Mapping[str, float]],
    deviations: np.ndarray | float = 1.0,
    progress: Callable[[int], None] = lambda _: None,
) -> RobustScores:
    """Score each policy in the task's environment, at all points, and at the worst of each cell again.

    deviations: of the observations, [O], where the study has the parameter noise. progress(done) counts episodes.
    Raises UserError as `evaluate_parallel`.
    """
    done = 0

    def play(some: Sequence[Mapping[str, float]], config: EvalConfig) -> list[Evaluation]:
        nonlocal done
        result: list[Evaluation] = []
        batch = max(1, AT_ONCE // len(policies))
        for first in range(0, len(some), batch):
            perturbations = [Perturbation(p, not study.rrls, deviations) for p in some[first : first + batch]]
            copies = [_in(p, perturbation) for perturbation in perturbations for p in policies]
            seeds = [p.seed for p in copies]
            count = functools.partial(_add, done, progress)
            evaluation = evaluate_parallel(copies, seeds, task, config, count)
            result += evaluation.split(len(policies))
            done += len(copies) * config.episodes
        return result

    evaluations = play([{}, *points], config)
    seeds = (config.seed, config.seed + 1)
    scores = RobustScores(tuple(replicas), tuple(evaluations), study, tuple(points), (), seeds)
    again = sorted({index for where in scores.cells.values() for index in worst_points(scores.means(where))})
    evaluations += play([points[index] for index in again], replace(config, seed=config.seed + 1))
    return replace(scores, evaluations=tuple(evaluations), again=tuple(again))


def _add(done: int, progress: Callable[[int], None], more: int, total: int) -> None:
    progress(done + more)


def _in(policy: TrainedPolicy, perturbation: Perturbation) -> TrainedPolicy:
    """The policy with what an `Evaluator` looks for: how the environment is perturbed where it plays."""
    other: Any = copy.copy(policy)
    other.perturbation = perturbation
    return other
