"""What a candidate's own critic says, and whether to believe it: TD error on the data, value of the starts, size
against the rewards.

None of them ranks policies well (docs/benchmarks/ope.md: own Q correlates negatively with the truth), so they are gates
and baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from offrl.data.dataset import Dataset
from offrl.data.transforms.episodes import subsample
from offrl.errors import UserError
from offrl.ope.config import OPEConfig
from offrl.ope.importance import episode_counts
from offrl.ope.problem import (
    Actions,
    Estimates,
    NotFinite,
    Problem,
    candidate_actions,
    check_decisions,
    check_fit,
    in_environment,
    raw_observations,
    reward_range,
)

ROWS = 100_000  # of the data, at most, that a critic is asked about
BATCH = 16_384  # rows that it is given at once
LARGEST = 1.5  # times max |r| / (1 - discount), above which values have exploded


@dataclass(frozen=True)
class Gates:
    """Statistics of K candidates' own critics, by which to drop those that exploded. In recorded rewards; NaN for one
    without a critic.
    """

    names: tuple[str, ...]
    td_error: np.ndarray  # [K] mean (Q - r - discount m Q')^2 over transitions, each with its own discount
    q_start: np.ndarray  # [K] mean Q(s0, pi(s0)) over initial states
    # [K] max |Q| at the data's actions and its own in next states; a shift of the rewards it trained on stays in
    q_largest: np.ndarray
    q_bound: np.ndarray  # [K] max |r| / (1 - discount) of the rewards with that shift: what |Q| can be at most
    finite: np.ndarray  # [K] bool: actions, and values where it has any

    @property
    def ratio(self) -> np.ndarray:
        """max |Q| as a multiple of what the rewards allow: [K]; inf where all rewards are 0 and values are not."""
        with np.errstate(all="ignore"):
            return np.where(self.q_largest == 0.0, 0.0, self.q_largest / self.q_bound)

    @property
    def passed(self) -> np.ndarray:
        """Candidates that are finite and no larger than 1.5 times what the rewards allow: bool [K]. One without a
        critic passes.
        """
        return np.array([not reason for reason in self.reasons()])

    def reasons(self) -> list[str]:
        """Why each candidate is to be dropped, K texts, "" for one that is not."""
        return [
            "its actions or values are not finite"
            if not finite
            else f"max |Q| is {ratio:.3g} times what the rewards allow"
            if ratio > LARGEST
            else ""
            for finite, ratio in zip(self.finite, self.ratio, strict=True)
        ]


def gates(dataset: Dataset, candidates: Mapping[str, Any], discount: float = 0.99, seed: int = 0) -> Gates:
    """The gate statistics of policies on a dataset (spec I.4.3); a candidate whose actions are NaN is told, not
    refused.

    dataset: of any reward transform, which is undone; of more than ROWS rows a share of the episodes is taken, drawn by
    `seed`. discount: for policies that name none. Raises UserError for candidates of other spaces, and rewards that say
    nothing.
    """
    if not candidates:
        raise UserError("there is no candidate policy to look at")
    data = dataset.to("cpu")
    if len(data) > ROWS and data.num_episodes > 1:
        data = subsample(data, ROWS / len(data), seed)
    check_rewards(data)
    rows, starts = _some_rows(data, seed), raw_observations(data, "observations")[data.episode_start.numpy()]
    numbers, finite = np.full((4, len(candidates)), np.nan), np.ones(len(candidates), bool)
    for k, (name, policy) in enumerate(candidates.items()):
        check_fit(name, policy, data, False)
        check_decisions(name, policy)
        try:
            look = _look(policy, data, candidate_actions(name, policy, data, False), rows, discount)
        except NotFinite:
            finite[k] = False
            continue
        if look is not None:
            with np.errstate(all="ignore"):
                squares, largest = np.mean(look.errors**2), np.abs(look.values).max()
            numbers[:, k] = squares, start_value(policy, starts), largest, look.bound
            finite[k] = np.isfinite(numbers[:3, k]).all()
    td_error, q_start, q_largest, q_bound = numbers
    return Gates(tuple(candidates), td_error, q_start, q_largest, q_bound, finite)


def td(problem: Problem, settings: OPEConfig) -> Estimates:
    """Minus the mean squared TD error of each candidate's own critic on the data, in squared recorded rewards: larger
    is better.

    NaN for candidates without a critic. The interval is a bootstrap over episodes with Q held fixed. A critic trained
    on other terms than r + discount Q' (an entropy bonus, pessimism) is charged for them. Raises UserError where no
    candidate has a critic, and for rewards that say nothing.
    """
    check_rewards(problem.dataset)
    dataset, rows = problem.dataset, _some_rows(problem.dataset, settings.seed)
    episode = torch.bucketize(torch.from_numpy(rows), dataset.episode_start, right=True).numpy() - 1
    counts = episode_counts(dataset.num_episodes, settings.bootstrap, settings.seed).numpy()
    number = counts @ np.bincount(episode, minlength=dataset.num_episodes)
    value, low, high = (np.full(len(problem.names), np.nan) for _ in range(3))
    for k, policy in enumerate(problem.policies):
        look = _look(policy, dataset, problem.actions[k], rows, settings.discount)
        if look is None or not np.isfinite(squares := look.errors**2).all():
            continue
        value[k] = -squares.mean()
        sums = counts @ np.bincount(episode, weights=squares, minlength=dataset.num_episodes)
        low[k], high[k] = np.percentile(-sums[number > 0] / number[number > 0], [2.5, 97.5])
    if not any(map(_has_critic, problem.policies)) or np.isnan(value).all():
        raise UserError(_without("td", problem))
    return Estimates("td", problem.names, value, low, high, settings.discount, {})


def own_q(problem: Problem, settings: OPEConfig) -> Estimates:
    """`own_values` as a ranking, without intervals: a baseline. Raises UserError where no candidate has a critic."""
    value = own_values(problem)
    if np.isnan(value).all():
        raise UserError(_without("q", problem))
    return Estimates(
        "q", problem.names, value, np.full_like(value, np.nan), np.full_like(value, np.nan), settings.discount, {}
    )


def own_values(problem: Problem) -> np.ndarray:
    """The estimate of each candidate's critic: mean Q(s0, pi(s0)) over the data's initial states, in the units of
    recorded rewards: [K].
    """
    observations = np.ascontiguousarray(raw_observations(problem.dataset, "observations")[problem.starts.numpy()])
    return np.array([start_value(policy, observations) for policy in problem.policies])


def start_value(policy: Any, observations: np.ndarray) -> float:
    """Mean Q(s0, pi(s0)) of a policy's own critic at raw initial observations [M, O], in recorded rewards; NaN where it
    has none.
    """
    if not _has_critic(policy):
        return float("nan")
    actions, _ = policy.step(policy.start(len(observations)), observations, 0)
    values = policy.own_value(observations, actions)
    if values is None:
        return float("nan")
    return float(policy.in_recorded_units(np.asarray(values), np.full(len(values), np.inf)).mean())


def _has_critic(policy: Any) -> bool:
    return callable(getattr(policy, "own_value", None))


def check_rewards(dataset: Dataset) -> None:
    """Raise UserError for rewards from which every policy earns the same, and for such that are not finite."""
    (low, high), ends = reward_range(dataset), bool(dataset.columns["terminations"].any())
    if low == high and (low == 0.0 or not ends):
        addition = "" if low == 0.0 else " and no episode ends"
        raise UserError(
            f"{dataset.spec.name}: every reward is {low:g}{addition}, so that all policies earn the same: give rewards "
            "with dataset.reward_labels=, or name other data"
        )


@dataclass(frozen=True)
class _Look:
    """A critic on M transitions, in the rewards it was trained on with their scale undone, their shift not."""

    errors: np.ndarray  # [M] TD errors, which no shift changes
    values: np.ndarray  # [2 M] Q at the data's actions, and at its own in next states
    bound: float


def _look(policy: Any, dataset: Dataset, actions: Actions, rows: np.ndarray, discount: float) -> _Look | None:
    """None where the policy has no critic. discount: for a policy that names none."""
    if not _has_critic(policy):
        return None
    spec, columns, chosen = dataset.spec, dataset.columns, torch.from_numpy(rows)
    discount = float(getattr(policy, "discount", discount))

    def scored(column: str, scaled: torch.Tensor) -> np.ndarray | None:
        observations, taken, parts = raw_observations(dataset, column), in_environment(spec, scaled), []
        for first in range(0, len(rows), BATCH):
            values = policy.own_value(observations[rows[first : first + BATCH]], taken[first : first + BATCH])
            if values is None:
                return None
            parts.append(np.asarray(values, np.float64))
        q = np.concatenate(parts)
        # of no step: the shift of rewards stays in
        return np.asarray(policy.in_recorded_units(q, np.zeros(len(q))), np.float64)

    current, after = (
        scored("observations", columns["actions"][chosen]),
        scored("next_observations", actions.after[chosen]),
    )
    if current is None or after is None:
        return None
    with np.errstate(all="ignore"):
        shift = -float(policy.in_recorded_units(np.zeros(1), np.ones(1))[0])  # what training added to each reward
        recorded = (columns["rewards"][chosen].double().numpy() - spec.reward_shift) / (spec.reward_scale or 1.0)
        rewards, going = recorded + shift, ~columns["terminations"][chosen].numpy()
        after = np.where(going, after, 0.0)
        errors = current - rewards - discount * after
        bound = float(np.abs(rewards).max()) / (1.0 - discount) if discount < 1.0 else float("inf")
    return _Look(errors, np.concatenate([current, after]), bound)


def _some_rows(dataset: Dataset, seed: int) -> np.ndarray:
    """Rows that hold whole transitions, int64 in order: all, or ROWS of them drawn by `seed`."""
    rows = dataset.transition_rows().numpy()
    if len(rows) <= ROWS:
        return rows
    return np.sort(np.random.Generator(np.random.PCG64(seed)).choice(rows, ROWS, replace=False))


def _without(method: str, problem: Problem) -> str:
    names: Sequence[str] = problem.names
    return (
        f"method={method} asks each candidate's own critic, and none of {len(names)} has one that is finite (policy "
        "files and algorithms such as bc have none): name runs with checkpoints of an algorithm with critics, or use "
        "method=fqe"
    )
