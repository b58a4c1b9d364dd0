"""Rollouts in a model: a few steps from states of the data, or whole episodes, many at once and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Metrics
from offrl.world_models.model import Outcome, Prediction, Tree

# rollouts at once: the members' activations of more do not fit a CPU's memory; fixed, for the random numbers depend on
# it
CHUNK = 8192

Act = Callable[[Tensor, Tensor, Tensor], Tensor]  # observations [B, O], past, key -> actions [B, A] in [-1, 1], or [B]
Measure = Callable[[Any, Tree, Prediction, Tensor, Tensor], Tensor]  # see `offrl.world_models.uncertainty`


class Imagined(NamedTuple):
    """H steps of B rollouts, [H, B, ...]. A row is `valid` while its rollout has not ended before it."""

    observations: Tensor
    actions: Tensor
    past: Tensor
    next_observations: Tensor
    rewards: Tensor
    terminations: Tensor  # bool
    uncertainty: Tensor
    clipped: Tensor  # bool
    valid: Tensor  # bool


# (outcome, uncertainty [B]) -> rewards and terminations that are told
Judge = Callable[[Outcome, Tensor], tuple[Tensor, Tensor]]


def branched(
    model: Any,
    tree: Tree,
    act: Act,
    observations: Tensor,
    past: Tensor,
    horizon: int,
    key: Tensor,
    *,
    measure: Measure | None = None,
    judge: Judge | None = None,
    chunk: int = CHUNK,
) -> Imagined:
    """Roll `horizon` steps from observations [B, O] with what came before them (MBPO, arXiv 1906.08253).

    measure: the uncertainty of each step; without one only one member is asked for each row. judge: what to make of an
    outcome; by default its own rewards and terminations.
    """
    starts = zip(observations.split(chunk), past.split(chunk), strict=True)
    parts = [
        _branch(model, tree, act, o, p, horizon, rng.fold_in(key, i), measure, judge) for i, (o, p) in enumerate(starts)
    ]
    return parts[0] if len(parts) == 1 else Imagined(*(torch.cat(columns, 1) for columns in zip(*parts, strict=True)))


def _branch(
    model: Any,
    tree: Tree,
    act: Act,
    observations: Tensor,
    past: Tensor,
    horizon: int,
    key: Tensor,
    measure: Measure | None,
    judge: Judge | None,
) -> Imagined:
    valid = torch.ones(observations.shape[0], dtype=torch.bool, device=observations.device)
    steps: list[Imagined] = []
    for t in range(horizon):
        choose, draw = rng.split(rng.fold_in(key, t))
        actions = act(observations, past, choose)
        uncertainty = observations.new_zeros(observations.shape[0])
        if measure is None:
            outcome = model.sample(tree, observations, actions, past, draw)
        else:
            prediction = model.predict(tree, observations, actions, past)
            outcome = model.outcome(tree, prediction, observations, actions, draw)
            uncertainty = measure(model, tree, prediction, observations, actions).nan_to_num(1e6, 1e6)
        rewards, terminations = (
            (outcome.rewards, outcome.terminations) if judge is None else judge(outcome, uncertainty)
        )
        following = outcome.next_observations
        steps.append(
            Imagined(observations, actions, past, following, rewards, terminations, uncertainty, outcome.clipped, valid)
        )
        valid = valid & ~terminations
        observations, past = following, model.later_past(past, observations, actions)
    return Imagined(*(torch.stack(columns) for columns in zip(*steps, strict=True)))


def careful(
    model: Any,
    tree: Tree,
    act: Act,
    observations: Tensor,
    past: Tensor,
    horizon: int,
    key: Tensor,
    *,
    candidates: int,
    measure: Measure,
    penalty: float | Tensor,
    discount: float | Tensor,
) -> Tensor:
    """The action with the best imagined future among `candidates` that `act` gives at each of observations [B, O]:
    actions [B, A].

    Each is followed for `horizon` steps, acting by `act` after the first, and worth the sum of discount^i (r_i -
    penalty u_i) until its end (UP-MPC, arXiv 2310.07220, with the sign of its rollouts in a model). All futures are one
    batch of candidates * B.
    """
    rows = observations.shape[0]
    start, before = (x.expand(candidates, *x.shape).flatten(0, 1) for x in (observations, past))
    future = _branch(model, tree, act, start, before, horizon, key, measure, None)
    weights = torch.stack([torch.as_tensor(discount**i, device=observations.device) for i in range(horizon)]).unsqueeze(
        -1
    )
    worth = (weights * future.valid * (future.rewards - penalty * future.uncertainty)).sum(0).reshape(candidates, rows)
    first = future.actions[0].reshape(candidates, rows, -1)
    return first.gather(0, worth.argmax(0).view(1, rows, 1).expand(1, rows, first.shape[-1])).squeeze(0)


def describe(imagined: Imagined) -> Metrics:
    """Metrics of rollouts: means over their valid rows."""
    valid = imagined.valid.float()
    count = valid.sum().clamp(min=1.0)

    def mean(x: Tensor) -> Tensor:
        return (x.float() * valid).sum() / count

    return {
        "rollout/reward": mean(imagined.rewards),
        "rollout/uncertainty": mean(imagined.uncertainty),
        "rollout/ended": mean(imagined.terminations),
        "rollout/clipped": mean(imagined.clipped),
        "rollout/steps": valid.sum(0).mean(),
    }
