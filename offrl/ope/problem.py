"""The input of every estimator: the data with raw rewards, and each candidate's actions at each row, computed once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.fit import check_columns, refuse_streams, seen_besides
from offrl.data.memory import free_bytes
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError
from offrl.interop.policies import reseeded
from offrl.tasks.episodes import observe_reward

ROWS = 16_384  # observations that a memoryless policy is given at once
EPISODES = 1_024  # episodes that a policy with a memory walks through side by side
FLOOR = 1e-5  # added to the observations' standard deviation (DOPE's code)
Note = Callable[[str], None]


class NotFinite(UserError):
    """A candidate's actions are NaN or infinite."""


@dataclass(frozen=True)
class Actions:
    """A policy's actions, scaled as the data's: float32 [R, A] in [-1, 1], or int64 [R]."""

    current: Tensor  # at each row's observation
    after: Tensor  # at each row's next observation; meaningless where there is none


@dataclass(frozen=True)
class Problem:
    """K candidates on one dataset. Time is rows; episodes tile them."""

    names: tuple[str, ...]
    policies: tuple[Any, ...]
    dataset: Dataset
    explore: bool
    actions: tuple[Actions, ...]  # one for each candidate

    @property
    def starts(self) -> Tensor:
        """Rows at which episodes start: [E]."""
        return self.dataset.episode_start

    @property
    def known(self) -> Tensor:
        """Rows that TD learning may use: bool [R]."""
        return self.dataset.columns["successor_known"] | self.dataset.columns["terminations"]

    @property
    def current(self) -> Tensor:
        """All candidates' actions at each row: [R, K, A] or [R, K]."""
        return torch.stack([a.current for a in self.actions], 1)

    @property
    def after(self) -> Tensor:
        """All candidates' actions at each row's next observation."""
        return torch.stack([a.after for a in self.actions], 1)


@dataclass(frozen=True)
class Estimates:
    """Values of K candidates by one method: mean discounted return from the data's initial states, in units of the
    recorded rewards.
    """

    method: str
    names: tuple[str, ...]
    value: np.ndarray  # [K] float64
    low: np.ndarray  # [K] ends of the 95% interval; NaN where there is none
    high: np.ndarray
    discount: float
    details: Mapping[str, Any]  # plain numbers about how it went, for people

    def order(self) -> np.ndarray:
        """Candidates from best to worst, int64 [K]; of equals the earlier one first, NaN last."""
        return np.argsort(-np.where(np.isnan(self.value), -np.inf, self.value), kind="stable")


def make_problem(
    dataset: Dataset,
    candidates: Mapping[str, Any],
    explore: bool = False,
    tell: Note | None = None,
    *,
    by_state: bool = True,
) -> Problem:
    """Check that the candidates fit the data and compute their actions.

    dataset: rewards as they are to be valued (raw ones: load it without reward transforms). by_state: for methods that
    look at a candidate's action in each state of the data, rather than play it. Raises UserError for candidates of
    another space, actions that are not finite, observations that are no floats, and with `by_state` for candidates that
    decide on several actions at once.
    """
    if not candidates:
        raise UserError("there is no candidate policy to evaluate")
    if dataset.columns["observations"].dtype != torch.float32:
        kind = "texts" if dataset.spec.text else str(dataset.columns["observations"].dtype).removeprefix("torch.")
        raise UserError(f"{dataset.spec.name}: off-policy evaluation needs float observations; these are {kind}")
    refuse_streams(dataset, "off-policy evaluation", "play the policies instead, offrl evaluate RUN")
    dataset = dataset.to("cpu")
    transition_rewards(dataset)
    # four bytes each, four times: as kept (here and after), side by side, and packed for sampling
    need, free = 16.0 * len(dataset) * len(candidates) * max(1, dataset.spec.action_dim), free_bytes()
    if need > free:
        raise UserError(
            f"the actions of {len(candidates)} candidates at {len(dataset):,} rows need {need / 1e9:.0f} GB and "
            f"{free / 1e9:.0f} are free: name fewer candidates, or use a share of the episodes with dataset.subsample"
        )
    for name, policy in candidates.items():
        check_fit(name, policy, dataset, explore)
        if by_state:
            check_decisions(name, policy)
    if tell is not None:
        tell(f"actions of {len(candidates)} candidates at {len(dataset):,} rows of {dataset.spec.name}")
    actions = tuple(candidate_actions(name, policy, dataset, explore) for name, policy in candidates.items())
    return Problem(tuple(candidates), tuple(candidates.values()), dataset, explore, actions)


def transition_rewards(dataset: Dataset) -> Tensor:
    """The rewards of the rows that TD learning may use. Raises UserError where there are none."""
    rewards = dataset.columns["rewards"][dataset.transition_rows()]
    if not len(rewards):
        raise UserError(
            f"{dataset.spec.name} has no transition whose successor is known, so that nothing can be evaluated on it"
        )
    return rewards


def reward_range(dataset: Dataset) -> tuple[float, float]:
    """The smallest and the largest reward of the data's transitions. Raises UserError where they are not finite."""
    rewards = transition_rewards(dataset)
    if not bool(rewards.isfinite().all()):
        raise UserError(f"{dataset.spec.name} has rewards that are not finite")
    return float(rewards.min()), float(rewards.max())


def check_fit(name: str, policy: Any, dataset: Dataset, explore: bool) -> None:
    """Raise UserError for what is no policy, cannot explore where it is to, or says that it was trained for other
    spaces.
    """
    if not callable(getattr(policy, "start", None)) or not callable(getattr(policy, "step", None)):
        raise UserError(
            f"candidate {name} is a {type(policy).__name__}; a policy has start(episodes) and step(carry, "
            "observations, t)"
        )
    if explore and "explore" not in inspect.signature(policy.step).parameters:
        raise UserError(
            f"candidate {name} cannot explore (its step has no argument of that name); leave out explore=true"
        )
    if (trained := getattr(getattr(policy, "algorithm", None), "data_spec", None)) is None:
        return
    spec = dataset.spec
    if more := seen_besides(trained):
        raise UserError(
            f"candidate {name} sees {more}, and off-policy evaluation reads the "
            "numbers of observations: play it instead, offrl evaluate RUN"
        )
    sizes = [
        f"{s.num_actions} discrete actions" if s.discrete else f"{s.action_dim} action dimensions"
        for s in (trained, spec)
    ]
    policy_inputs, data_inputs = (
        f"observations {list(s.observation_shape)} and {size}" for s, size in zip((trained, spec), sizes, strict=True)
    )
    if policy_inputs != data_inputs:
        raise UserError(
            f"candidate {name} takes {policy_inputs}; {spec.name} has {data_inputs}: name data of its own with dataset="
        )
    check_columns(trained, spec, f"candidate {name}")


def check_decisions(name: str, policy: Any) -> None:
    """Raise UserError for a policy that plays several actions, a chunk, whatever it sees meanwhile.

    Led through recorded episodes it would answer states to which its own actions never brought it with what it had
    planned elsewhere."""
    if (count := getattr(getattr(policy, "actor", None), "action_steps", 1)) > 1:
        raise UserError(
            f"candidate {name} plays {count} actions at a time, whatever it sees meanwhile, and fqe, wis and dr value "
            "a policy by its action in each state: method=model plays it out (from Python: "
            f"policy.with_settings({{'action_steps': 1}}) decides at each step)"
        )


def candidate_actions(name: str, policy: Any, dataset: Dataset, explore: bool, draw: int = 0) -> Actions:
    """One candidate's actions at every row and at every next observation; `draw` distinguishes random draws.

    A memoryless policy (`start` gives None, or a source of noise) takes rows in large batches; one with a
    memory walks through the episodes.
    """
    spec, columns = dataset.spec, dataset.columns
    observations, following = raw_observations(dataset, "observations"), raw_observations(dataset, "next_observations")
    kind = np.int64 if spec.discrete else np.float32
    shape = () if spec.discrete else (spec.action_dim,)
    current, after = (np.zeros((len(dataset), *shape), kind) for _ in range(2))
    needed = columns["successor_known"].numpy()
    # the next row of an episode mostly starts where this one led: its action is then known
    same = np.zeros(len(dataset), bool)
    last = dataset.episode_end.numpy() - 1
    same[:-1] = (observations[1:] == following[:-1]).all(axis=tuple(range(1, observations.ndim)))
    same[last] = False
    if is_memoryless(policy):
        _by_rows(name, policy, observations, current, explore, draw, dataset)
        remaining = np.flatnonzero(needed & ~same)
        if len(remaining):
            out = np.zeros((len(remaining), *shape), kind)
            _by_rows(name, policy, following[remaining], out, explore, draw + 1_000, dataset)
            after[remaining] = out
    else:
        inside = needed.copy()
        inside[last] = False
        if (inside & ~same).any():
            row = int(np.flatnonzero(inside & ~same)[0])
            raise UserError(
                f"candidate {name} has a memory, and in {spec.name} row {row} leads to another observation than the "
                "next row holds: episodes cannot be walked through"
            )
        _by_episodes(
            name, reseeded(policy, draw) if draw else policy, observations, following, current, after, explore, dataset
        )
    after[:-1][same[:-1]] = current[1:][same[:-1]]
    return Actions(torch.from_numpy(current), torch.from_numpy(after))


def is_memoryless(policy: Any) -> bool:
    """True where a policy carries nothing from step to step but, at most, its source of noise."""
    carry = policy.start(1)
    return carry is None or isinstance(carry, np.random.Generator)


def raw_observations(dataset: Dataset, column: str) -> np.ndarray:
    """Observations as the environment gives them, which is what policies take: [R, *O] float32."""
    values = dataset.columns[column].numpy()
    spec = dataset.spec
    if (moments := spec.observation_moments) is None:
        return values
    mean, std = moments
    return (values.reshape(len(values), -1) * std + mean).reshape(values.shape)


def _by_rows(
    name: str, policy: Any, observations: np.ndarray, out: np.ndarray, explore: bool, draw: int, dataset: Dataset
) -> None:
    policy = reseeded(policy, draw) if draw else policy
    carry = policy.start(min(ROWS, len(observations)))
    for i, first in enumerate(range(0, len(observations), ROWS)):
        part = observations[first : first + ROWS]
        # for a memoryless policy the time step only distinguishes random draws
        actions, carry = policy.step(carry, part, i if explore else 0, **({"explore": True} if explore else {}))
        out[first : first + ROWS] = scale(name, actions, len(part), dataset)


def _by_episodes(
    name: str,
    policy: Any,
    observations: np.ndarray,
    following: np.ndarray,
    current: np.ndarray,
    after: np.ndarray,
    explore: bool,
    dataset: Dataset,
) -> None:
    """Walk through whole episodes as recorded, so that the memory holds what the data's policy saw; one step past the
    end where known.
    """
    start, end = dataset.episode_start.numpy(), dataset.episode_end.numpy()
    known = dataset.columns["successor_known"].numpy()
    spec = dataset.spec
    # as recorded
    rewards = (dataset.columns["rewards"].double().numpy() - spec.reward_shift) / (spec.reward_scale or 1.0)
    costs = dataset.columns["costs"].double().numpy() if spec.costs else None
    order = np.argsort(start - end, kind="stable")
    more = {"explore": True} if explore else {}
    for first in range(0, len(order), EPISODES):
        episodes = order[first : first + EPISODES]
        starts, lengths = start[episodes], (end - start)[episodes]
        rows = np.zeros((len(episodes), *observations.shape[1:]), np.float32)
        carry = policy.start(len(episodes))
        for t in range(int(lengths[0]) + 1):
            alive, ended = lengths > t, (lengths == t) & (t > 0)
            rows[:] = 0.0
            rows[alive] = observations[starts[alive] + t]
            beyond = ended & known[starts + lengths - 1]
            rows[beyond] = following[starts[beyond] + t - 1]
            actions, carry = policy.step(carry, rows, t, **more)
            gained = np.zeros(len(episodes))
            gained[alive] = rewards[starts[alive] + t]
            spent = None if costs is None else np.where(alive, costs[np.where(alive, starts + t, 0)], 0.0)
            carry = observe_reward(policy, carry, gained, spent)
            scaled = scale(name, actions, len(rows), dataset, alive | beyond)
            current[starts[alive] + t] = scaled[alive]
            after[starts[beyond] + t - 1] = scaled[beyond]


def scale(name: str, actions: Any, count: int, dataset: Dataset, used: np.ndarray | None = None) -> np.ndarray:
    """Actions in the environment's range as the dataset holds them: [B, A] clipped to [-1, 1], or [B] int64. `used`:
    rows that matter.

    Raises UserError for another shape, or what is not finite or no choice of the data's.
    """
    spec, values = dataset.spec, np.asarray(actions)
    expected = (count,) if spec.discrete else (count, spec.action_dim)
    if values.shape != expected:
        raise UserError(
            f"candidate {name} gave actions of shape {values.shape} for {count} observations; {spec.name} takes "
            f"{expected}"
        )
    used = np.ones(count, bool) if used is None else used
    if not np.isfinite(values[used]).all():
        raise NotFinite(f"candidate {name} gave NaN or infinite actions on the observations of {spec.name}")
    if spec.discrete:
        choices = np.where(used, values, 0).astype(np.int64)
        if (choices < 0).any() or (choices >= spec.num_actions).any():
            raise UserError(
                f"candidate {name} chose {choices.min()}..{choices.max()}; the choices in {spec.name} are "
                f"0..{spec.num_actions - 1}"
            )
        return choices
    low, high = spec.action_bounds
    span = np.where(high > low, high - low, 1.0)
    scaled = np.clip(2.0 * (np.where(used[:, None], values, low) - low) / span - 1.0, -1.0, 1.0)
    return np.where(high > low, scaled, 0.0).astype(np.float32)


def in_environment(spec: DataSpec, actions: Tensor) -> np.ndarray:
    """The inverse of `scale`: actions [B, A] of [-1, 1] in the environment's range, or choices [B]."""
    if spec.discrete:
        return actions.numpy()
    low, high = spec.action_bounds
    return (low + (actions.numpy() + 1.0) * 0.5 * (high - low)).astype(np.float32)


def behavior_value(dataset: Dataset, discount: float) -> tuple[float, float, float]:
    """(mean, low, high) of the discounted returns of the data's own episodes, raw rewards: the value of the policy that
    made the data.

    Episodes that the data cut short are left out where there are others.
    """
    from offrl.statistics.intervals import mean_interval

    start, end = dataset.episode_start.numpy(), dataset.episode_end.numpy()
    columns = dataset.columns
    returns = returns_to_go(columns["rewards"].numpy(), columns["terminations"].numpy(), start, end, discount)[start]
    complete = dataset.complete.numpy() if len(dataset.complete) == len(start) else np.ones(len(start), bool)
    return mean_interval(returns[complete] if complete.any() else returns)


def unique_names(names: Sequence[str]) -> list[str]:
    """The same names; where one comes twice, `#2`, `#3` ... are added to the later ones."""
    counts: dict[str, int] = {}
    out = []
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        out.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return out
