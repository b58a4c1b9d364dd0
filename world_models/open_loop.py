"""Open-loop predictions of latent world models: some states of an episode are seen, and what follows is predicted from
the recorded actions alone.

Shapes: K states of a window, H of them predicted; B windows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Batch, Params
from offrl.data.dataset import Dataset
from offrl.data.samplers.states import ARRIVAL_REWARDS, VALID, StateSampler, in_time
from offrl.world_models.quality import bands

CONTEXT, HORIZON = 5, 45  # states that are seen, and that are predicted, as DreamerV3 (arXiv 2301.04104) shows them
WINDOWS = 64


class Expected(NamedTuple):
    """What a model expects of H states."""

    rewards: Tensor  # [H, B], of the steps that lead to them
    numbers: Tensor | None = None  # [H, B, L]: the observations; of several streams those of numbers, one by one
    images: Mapping[str, Tensor] = {}  # [H, B, height, width, channels] in 0..1, by stream


class Decoded(NamedTuple):
    """Observations that a model makes of latent states, as those of `Expected`."""

    numbers: Tensor | None
    images: Mapping[str, Tensor]


class Goals(NamedTuple):
    """The goals that a hierarchy chooses at S states of windows, and what it imagines to come of them in the steps for
    which each is pursued.
    """

    states: Sequence[int]  # numbers of those states
    goals: Decoded  # [S, B, ...]
    imagined: Decoded  # [S, steps, B, ...]
    nearness: Tensor  # [S, steps + 1, B]: of the states from where each is chosen on, 1 in the goal


@runtime_checkable
class OpenLoopModel(Protocol):
    """An algorithm with a model of latent states."""

    def open_loop(self, params: dict[str, Params], batch: Batch, context: int, key: Tensor) -> Expected:
        """What the model expects of the states from `context` on of windows [K, B, ...] (`StateSampler`'s, the steps
        first), of whose observations it sees those before.
        """


@runtime_checkable
class ProbedModel(Protocol):
    """An algorithm whose latent states can be read."""

    def latent_states(self, params: dict[str, Params], batch: Batch, key: Tensor) -> Tensor:
        """The latent state [K, B, F] of each state of windows [K, B, ...], which holds what was observed up to it."""


@runtime_checkable
class GoalModel(Protocol):
    """An algorithm that chooses goals in its latent states."""

    def goals(self, params: dict[str, Params], batch: Batch, context: int, key: Tensor) -> Goals | None:
        """Its goals in windows [K, B, ...], of which it has seen `context` states before the first; None where no
        window is long enough, or nothing decodes them.
        """


def windows_of(dataset: Dataset, extra: tuple[str, ...] = (), count: int = WINDOWS) -> Batch | None:
    """Windows [K, B, ...] of all of whose states the observations are known, K no longer than half of the episodes;
    None where these are too short. extra: see `StateSampler`.
    """
    lengths = dataset.episode_lengths()[dataset.episode_shares() > 0.0]
    length = min(CONTEXT + HORIZON, int(lengths.median()))
    if length <= CONTEXT:
        return None
    sampler = StateSampler(length, extra=extra)
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), count)
    known = batch[VALID].all(1)
    return in_time(pytree.tree_map(lambda x: x[known], batch)) if known.any() else None


def numbers_of(observations: Tensor | Mapping[str, Tensor], images: Mapping[str, Tensor]) -> Tensor:
    """The vectors of observations, those of several streams one beside the other: [..., L]."""
    if isinstance(observations, Tensor):
        return observations.flatten(2)
    return torch.cat([x for name, x in observations.items() if name not in images], -1)


def errors(batch: Batch, expected: Expected) -> dict[str, dict[str, Any]]:
    """Of rewards, and of observations where the model predicts them: the model's errors and a guess's, each with its
    median over windows and the band that holds 80% of them, for each of H states.

    Numbers are in their standard deviations in these windows, the root of the mean square over all of them; images in
    shares of the range of a pixel, likewise. The guess: "nothing changes", of rewards their mean.
    """
    rewards = batch[ARRIVAL_REWARDS][CONTEXT:]
    unit = _unit(rewards.flatten())
    result = {
        "rewards": {
            "model": bands(((expected.rewards - rewards) / unit).unsqueeze(-1)),
            "guess": bands(((rewards.mean() - rewards) / unit).unsqueeze(-1)),
        }
    }
    if expected.numbers is not None:
        numbers = numbers_of(batch["observations"], expected.images)
        unit = _unit(numbers.flatten(0, 1))
        result["numbers"] = _beside(numbers / unit, expected.numbers / unit)
    for name, image in expected.images.items():
        column: Tensor = batch["observations"][name]  # type: ignore[index]
        result[name] = _beside(column.float().flatten(2) / 255.0, image.flatten(2))
    return result


def _beside(recorded: Tensor, expected: Tensor) -> dict[str, Any]:
    """The errors of what is expected [H, B, L], and of the last state that the model sees, against [K, B, L]."""
    return {"model": bands(expected - recorded[CONTEXT:]), "guess": bands(recorded[CONTEXT - 1] - recorded[CONTEXT:])}


def _unit(values: Tensor) -> Tensor:
    """The standard deviation of values [R, ...]; 1 where they are all the same."""
    deviation = values.float().std(0, unbiased=False)
    return torch.where(deviation < 1e-12, torch.ones_like(deviation), deviation)
